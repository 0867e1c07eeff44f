#!/bin/sh
# Train on all GPUs of this machine, or go on with a run that was stopped:
#   examples/launch/one_machine.sh my-run arithmetic --steps 200
# GPUS=2 takes two (or two CPU processes). A crash is restarted from the last checkpoint, up to RESTARTS times.
set -eu
name=$1 recipe=$2
shift 2
runs=${RUNS:-runs}
if [ -f "$runs/$name/config.json" ]; then
    set -- resume "$runs/$name"
else
    set -- train "$recipe" --name "$name" --runs-dir "$runs" "$@"
fi
exec torchrun --standalone --nproc-per-node "${GPUS:-gpu}" --max-restarts "${RESTARTS:-3}" -m gruppo "$@"
