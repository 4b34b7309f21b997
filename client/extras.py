"""Optional parts of the package: a missing one is named with the command that installs it."""

import sys
from importlib.util import find_spec

#: Extra → the modules that it brings, as they are imported; of several extras with a module the
#: first is named.
MODULES: dict[str, tuple[str, ...]] = {
    "client": ("httpx", "rich", "tqdm", "typer"),
    "plots": ("matplotlib", "pandas"),
    "notebook": ("xarray", "plotly"),
    "probes": ("sklearn",),
    "harvest": ("pyarrow",),
    "up": (
        "celery",
        "kombu",
        "redis",
        "hiredis",
        "zmq",
        "prometheus_client",
        "httpcore",
        "litestar",
        "uvicorn",
        "tokenizers",
        "jinja2",
    ),
    "flower": ("flower",),
    "model": ("accelerate", "gguf"),
    "cpu": ("vllm", "torch", "transformers"),
}
#: Command, and the extra of that name → the extras that it contains, of those above.
CONTAINED = {"up": ("client", "up"), "demo": ("client", "up", "plots", "model")}


class MissingExtraError(ModuleNotFoundError):
    """A module is not there; the message names the extra that brings it."""


def need(extra: str, what: str) -> None:
    """Raises MissingExtraError when a module of `extra` is missing; `what` needs it."""
    missing = [
        name
        for part in CONTAINED.get(extra, (extra,))
        for name in MODULES[part]
        if not _found(name)
    ]
    if missing:
        raise MissingExtraError(
            _message(f"{what} needs {', '.join(missing)}", extra), name=missing[0]
        )


def explained(error: ModuleNotFoundError) -> ModuleNotFoundError:
    """The error with its extra named; the same error for a module that no extra brings."""
    name = (error.name or "").partition(".")[0]
    extra = next((extra for extra, names in MODULES.items() if name in names), "")
    if isinstance(error, MissingExtraError) or not extra:
        return error
    return MissingExtraError(_message(f"this needs {name}", extra), name=name)


def _message(needed: str, extra: str) -> str:
    engine = ", or with the extra `gpu`" if extra == "cpu" else ""
    return f"{needed}, not installed here: pip install 'midstream[{extra}]'{engine}"


def _found(name: str) -> bool:
    if name in sys.modules:
        # find_spec fails on a module without a spec, such as kombu once it is imported
        return True
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False
