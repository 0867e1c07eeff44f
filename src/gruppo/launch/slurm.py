"""A launch as a Slurm job."""

from __future__ import annotations

import re
import secrets
import shlex
import subprocess
import sys
from pathlib import Path

from gruppo.launch.commands import Launch
from gruppo.types import GruppoError

_JOB = r"""
trap 'is_canceled=1' TERM
trap 'is_late=1; scancel --signal=USR1 "$SLURM_JOB_ID"' USR1  # goes to all steps
export GRUPPO_ENGINE_KEY=${GRUPPO_ENGINE_KEY:-$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')}
# --export: the template may have NONE. --gpu-bind: NCCL needs to see the GPUs of all ranks
step() {
    srun --ntasks="$1" --exact --export=ALL --open-mode=append --output="$LOGS/$3" \
        ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} \
        ${SLURM_GPUS_ON_NODE:+--gpus="$2" --gpu-bind=none} "${@:4}"
}
for n in "${!SERVERS[@]}"; do
    rm -f "$LOGS/server$n.url"
    step 1 "$SERVER_GPUS" "server$n.log" bash -c \
        'trap "" USR1; echo "http://$SLURMD_NODENAME:$1" > "$0"; eval "exec $2"' \
        "$LOGS/server$n.url" "$((PORT + n))" "${SERVERS[n]}" &
    pids[n]=$!
done
for n in "${!SERVERS[@]}"; do
    url=
    until [ -n "$url" ] && "$PYTHON" -c "$ANSWERS" "$url"; do
        kill -0 "${pids[n]}" || { echo "server $n has ended: see server$n.log"; exit 2; }
        sleep 1
        [ -s "$LOGS/server$n.url" ] && read -r url < "$LOGS/server$n.url"
    done
    TRAIN+=("$url")
    GRUPPO_ENGINE_URLS+=${GRUPPO_ENGINE_URLS:+,}$url
done
export GRUPPO_ENGINE_URLS MASTER_PORT=$((PORT + ${#SERVERS[@]}))
[ -f "$FOLDER/config.json" ] && TRAIN=("${RESUME[@]}")
rm -f "$LOGS"/trainer*.code
# a rank that ends leaves the others time to save
step "$TRAINERS" "$TRAINERS" trainer%t.log --kill-on-bad-exit=0 --wait=600 bash -c '
    trap : TERM USR1
    export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_STEP_NUM_TASKS
    export LOCAL_WORLD_SIZE=${SLURM_STEP_TASKS_PER_NODE%%[!0-9]*}
    export MASTER_ADDR=$(scontrol show hostnames "$SLURM_STEP_NODELIST" | head -n 1)
    "$@"
    echo $? > "$0/trainer$RANK.code"' "$LOGS" "${TRAIN[@]}" &
wait $!
while kill -0 $! 2> /dev/null; do wait $!; done  # a signal ends a wait
# a cause comes before what the other ranks made of it
code=$(cat "$LOGS"/trainer*.code | sort -n | awk '$1 > 0 && $1 < 128 { print; exit }')
[ "$(cat "$LOGS"/trainer*.code | grep -c '^0$')" = "$TRAINERS" ] && code=0
if [ "${code:=75}" = 75 ] && [ -z "$is_canceled" ]; then
    if [ -n "$is_late" ] || [ "${SLURM_RESTART_COUNT:-0}" -lt "$MAX_RESTARTS" ]; then
        scontrol requeue "$SLURM_JOB_ID"
    fi
fi
exit "$code"
"""
_ANSWERS = "import sys; from gruppo.cli.serve import answers; sys.exit(not answers(sys.argv[1]))"


def slurm_script(launch: Launch) -> str:
    """The script of a job: the lines of the user's template, the commands of servers and trainers,
    and what starts them as steps and puts the job back into the queue."""
    options = launch.options
    port = 20000 + secrets.randbelow(10000)  # jobs may share a machine
    servers = [
        shlex.join(launch.server_command("0.0.0.0", port + n)) for n in range(options.servers)
    ]
    output = launch.log("slurm").absolute()
    variables = {
        "FOLDER": shlex.quote(str(launch.folder)),
        "LOGS": shlex.quote(str(output.parent)),
        "PYTHON": shlex.quote(sys.executable),
        "PORT": port,
        "TRAINERS": options.trainers,
        "SERVER_GPUS": launch.gpus_per_server,
        "MAX_RESTARTS": options.max_restarts,
        "ANSWERS": shlex.quote(_ANSWERS),
        "SERVERS": f"({shlex.join(servers)})",
        "TRAIN": f"({shlex.join(launch.train_command([]))})",
        "RESUME": f"({shlex.join(launch.resume_command())})",
    }
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name={shlex.quote(launch.config.name)}",
        f"#SBATCH --ntasks={options.trainers + options.servers}",
        "#SBATCH --signal=B:USR1@600",  # seconds before the time limit
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        f"#SBATCH --output={shlex.quote(str(output))}",
        _template(options.slurm),
        *(f"{name}={value}" for name, value in variables.items()),
        _JOB,
    ]
    return "\n".join(lines)


def _template(path: str) -> str:
    """The user's template."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise GruppoError(
            f"--slurm {path} cannot be read ({error}). Give a shell script."
        ) from None
    if not re.search(r"(?m)^#SBATCH\s+([^#\n]*\s)?(--partition[=\s]\s*|-p\s*)\w", text):
        raise GruppoError(f"""{path} names no partition. Add the line #SBATCH --partition=NAME;
            sinfo lists their names.""")
    return text


def submit(launch: Launch) -> int:
    """Submit the job, or print its script; return the exit code."""
    script = slurm_script(launch)
    if launch.options.dry_run:
        print(script)
        return 0
    file = launch.folder / "logs" / "launch.sbatch"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(script, encoding="utf-8")
    try:
        return subprocess.run(["sbatch", str(file)]).returncode
    except OSError as error:
        raise GruppoError(
            f"sbatch cannot be run ({error.strerror})", advice="Submit it on a machine with Slurm"
        ) from None
