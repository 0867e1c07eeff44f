"""``gruppo launch``: trainers and vLLM servers as processes of this machine, steps of a Slurm job, or actors of Ray."""
