#!/usr/bin/env bash
# Collect the wheels that a bare machine with torch and transformers lacks for `make gpu`: TRL and what it needs, and
# gruppo itself. Usage: tools/gpu_wheels.sh [FOLDER] [PYTHON_VERSION]; at most 64 MiB. Then, on that machine:
#   python3 -m pip install --no-index --no-deps --target build/gpu/site FOLDER/*.whl && make gpu
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

folder=${1:-build/gpu/wheels} version=${2:-3.12}
mkdir -p "$folder"
rm -f "$folder"/*.whl
pinned() { sed -n "s/^\($1==.*\)/\1/Ip" constraints.txt; }
for package in trl datasets multiprocess dill xxhash; do
  python3 -m pip download -q --no-deps --only-binary=:all: --python-version "$version" --implementation cp \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 --platform manylinux_2_17_x86_64 \
    --platform manylinux2014_x86_64 -d "$folder" "$(pinned "$package")"
done
python3 -m pip wheel -q --no-deps -w "$folder" .
bytes=$(cat "$folder"/*.whl | wc -c)
ls -l "$folder" | awk 'NR > 1 {print $5, $9}'
if [ "$bytes" -gt $((64 << 20)) ]; then
  echo "$((bytes >> 20)) MiB of wheels are more than 64 MiB; leave one out" >&2
  exit 1
fi
