"""``gruppo launch``: trainers and vLLM servers on this machine, in a Slurm job or as a job of
Ray."""
