#!/bin/sh
# Train on several machines that share a file system. Give the same command on each of them:
#   MAIN=host1 MACHINES=2 examples/launch/several_machines.sh my-run my_config.toml --distributed.shard hybrid
# MAIN is one of the machines; the others reach its port 29400. GPUS as in one_machine.sh.
set -eu
name=$1 recipe=$2
shift 2
runs=${RUNS:-runs}
if [ -f "$runs/$name/config.json" ]; then
    set -- resume "$runs/$name"
else
    set -- train "$recipe" --name "$name" --runs-dir "$runs" "$@"
fi
exec torchrun --nnodes "$MACHINES" --nproc-per-node "${GPUS:-gpu}" --max-restarts "${RESTARTS:-3}" \
    --rdzv-backend c10d --rdzv-endpoint "$MAIN:${PORT:-29400}" --rdzv-id "$name" -m gruppo "$@"
