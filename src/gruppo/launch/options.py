"""Options of ``gruppo launch``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from gruppo.config.options import Count, Positive, Range


@dataclass(frozen=True)
class LaunchConfig:
    """Options of ``gruppo launch`` beside those of the run."""

    trainers: Positive = 1
    """Ranks of the trainer."""
    servers: Count = 1
    """vLLM servers; with 0, the policy itself samples."""
    on: Literal["local", "slurm", "ray"] = "local"
    """Where: processes of this machine, a Slurm job, or a placement group of Ray."""
    dry_run: bool = False
    """Print the commands, or the script of the Slurm job, and start nothing."""
    port: Annotated[int, Range(ge=0, le=65000)] = 0
    """Port of the first server, which the others follow; 0 for free ones."""
    max_restarts: Count = 3
    """Restarts of the trainers, and of each server, within an hour."""
    server_python: str = ""
    """Python with vLLM; default: that of gruppo serve."""
    server_command: str = ""
    """Command of a server, with {model}, {host} and {port}; default: gruppo serve."""
    template: str = ""
    """--on slurm: a shell script with the #SBATCH lines and the set-up of the cluster."""
