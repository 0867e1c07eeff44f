#!/bin/bash
# What a cluster needs beside the command, for gruppo launch ... --slurm cluster.sh: change it for yours.
#SBATCH --partition=gpu
#SBATCH --nodes=2
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
export HF_HUB_OFFLINE=1
