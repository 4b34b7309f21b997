"""Optional dependencies of the package: errors for missing ones, with the command that installs
them.
"""

import sys
from importlib.util import find_spec

#: Extra → the modules that it installs, by import name. For a module of several extras, an error
#: names the first.
MODULES: dict[str, tuple[str, ...]] = {
    "client": ("httpx2", "rich", "tqdm", "typer"),
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
#: Command → the extras whose modules it and its processes import. The extra `cpu` includes all.
COMMANDS = {
    "up": ("client", "up", "model", "cpu"),
    "serve": ("client", "up", "cpu"),
    "demo": ("client", "up", "plots", "model", "cpu"),
    "verify": ("client", "up", "model", "cpu"),
}
#: Missing modules that an error names; more are counted.
NAMED = 5


class MissingExtraError(ModuleNotFoundError):
    """A module is not installed; the message names the extra that installs it."""


def need(extra: str, what: str, *parts: str) -> None:
    """Check that all modules of `extra`, or of its `parts`, are installed. Raises
    MissingExtraError, which says that `what` needs them.
    """
    missing = [name for part in parts or (extra,) for name in MODULES[part] if not _found(name)]
    if missing:
        more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
        raise MissingExtraError(
            _message(f"{what} needs {', '.join(missing[:NAMED])}{more}", extra), name=missing[0]
        )


def explained(error: ModuleNotFoundError) -> ModuleNotFoundError:
    """Return an error that names the missing module's extra; the error itself if no extra installs
    the module.
    """
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
        # find_spec raises for an imported module without a spec, such as kombu
        return True
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False
