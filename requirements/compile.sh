#!/usr/bin/env bash
# Resolves pyproject.toml into the lock files. Pins that still fit are kept; `--upgrade` takes the newest of everything.
# usage: requirements/compile.sh [--upgrade]      (from the repository root; takes about five minutes)
#
#   cpu.lock        all of the demo and the tests on CPU, with hashes; install with --no-deps --require-hashes
#   torch-cpu.lock  torch alone, without hashes: the CPU build is one version built differently by different indexes
#   api.lock        the HTTP edge alone      client.lock  the Python client and the CLI alone
set -euo pipefail
python=${PYTHON:-python3.11}
here=$(cd "$(dirname "$0")" && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
upgrade=("$@")

"$python" -m venv "$scratch/env"
"$scratch/env/bin/python" -m pip install --quiet --disable-pip-version-check pip-tools==7.6.2

# compile NAME OPTION…: resolves in the scratch folder, starting from the present lock.
compile() {
    local name=$1; shift
    echo "== $name"
    if [ -f "$here/$name" ]; then cp "$here/$name" "$scratch/$name"; fi
    if ! "$scratch/env/bin/pip-compile" --quiet --resolver=backtracking --generate-hashes --allow-unsafe --strip-extras --no-annotate --no-header \
        --no-emit-index-url --no-emit-find-links --no-emit-trusted-host "${upgrade[@]}" "$@" --output-file "$scratch/$name" \
        "$here/../pyproject.toml" >"$scratch/log" 2>&1; then
        grep -v '^WARNING: Location' "$scratch/log" | tail -n 30 >&2
        exit 1
    fi
}

# torch-cpu.lock is part of what cpu.lock was resolved with: put it back as a starting point.
if [ -f "$here/torch-cpu.lock" ]; then grep -v '^#' "$here/torch-cpu.lock" >"$scratch/torch"; else : >"$scratch/torch"; fi
compile cpu.lock --extra cpu --extra demo --extra dev --extra plots -c "$scratch/torch"
"$python" "$here/split_lock.py" "$scratch/cpu.lock" "$here/cpu.lock" "$here/torch-cpu.lock"
# The lighter ones agree with it.
grep -oE '^[A-Za-z0-9][A-Za-z0-9._-]*==[^ ]+' "$here/cpu.lock" >"$scratch/agreed"
for name in client api; do
    compile "$name.lock" --extra "$name" -c "$scratch/agreed"
    "$python" "$here/split_lock.py" "$scratch/$name.lock" "$here/$name.lock"
done
wc -l "$here"/*.lock
