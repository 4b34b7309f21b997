"""Optional dependencies of the package: errors for missing ones, with the command that installs
them.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from ..schemas.packages import facade, installing

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
#: Command of a package beside this one → that package, and the extra that installs it with all that
#: the command needs.
PACKAGED = {
    **dict.fromkeys(("up", "serve", "demo"), ("midstream-ops", "cpu")),
    **dict.fromkeys(
        (
            *("status", "logs", "down", "fetch", "doctor"),
            *("drain", "backup", "restore", "rollback"),
        ),
        ("midstream-ops", "ops"),
    ),
    "convert": ("midstream-bridges", "bridges"),
    **dict.fromkeys(("sweep", "attribute", "dose", "fit"), ("midstream-lab", "lab")),
    **dict.fromkeys(("harvest", "survey", "pause", "resume"), ("midstream-harvest", "harvest")),
    **dict.fromkeys(("mark", "replay"), ("midstream-review", "review")),
}
#: Name of the client that a package beside this one offers → the extra that installs it.
FACADES = dict.fromkeys(("AsyncPatchStudy", "Mapped", "PatchStudy"), "lab")
#: Attribute of a client that a package beside this one adds → the extra that installs it.
CALLS = {
    **dict.fromkeys(("attribute", "attributions", "dose", "doses"), "lab"),
    **dict.fromkeys(("fit_lens", "fit_module", "fits", "map", "sweep", "sweeps"), "lab"),
    "harvests": "harvest",
    **dict.fromkeys(("hits", "replays"), "review"),
}
#: Extras that name packages beside this one.
WITH_PACKAGES = (
    "ops",
    "up",
    "cpu",
    "bridges",
    "client",
    "lab",
    "harvest",
    "review",
    "probes",
    "flower",
)
#: Missing modules that an error names; more are counted.
NAMED = 5


class MissingExtraError(ModuleNotFoundError):
    """A module is not installed; the message names the extra that installs it."""


def need(extra: str, what: str, *parts: str) -> None:
    """Check that all modules of `extra`, or of its `parts`, are installed.

    Raises MissingExtraError, which says that `what` needs them.
    """
    missing = [name for part in parts or (extra,) for name in MODULES[part] if not _found(name)]
    if missing:
        more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
        raise MissingExtraError(
            _message(f"{what} needs {', '.join(missing[:NAMED])}{more}", extra), name=missing[0]
        )


def explained(error: ModuleNotFoundError, command: str = "") -> ModuleNotFoundError:
    """Return an error that names the missing module's extra, or that of the `command` if a package
    beside this one has it; the error itself if no extra installs the module.
    """
    name = (error.name or "").partition(".")[0]
    extra = next((extra for extra, names in MODULES.items() if name in names), "")
    if isinstance(error, MissingExtraError) or not extra:
        return error
    if command not in PACKAGED:
        return MissingExtraError(_message(f"this needs {name}", extra), name=name)
    _, extra = PACKAGED[command]
    return MissingExtraError(_message(f"`midstream {command}` needs {name}", extra), name=name)


def absent(command: str) -> MissingExtraError:
    """Return an error that names the package of a command in `PACKAGED`, and its extra."""
    package, extra = PACKAGED[command]
    return MissingExtraError(_message(f"`midstream {command}` needs {package}", extra))


def own(module: str, name: str) -> Any:
    """Return a name of a module of this package, such as `.texts`. Raises what `explained` returns
    if something that it imports is absent.
    """
    try:
        return getattr(import_module(module, __package__), name)
    except ModuleNotFoundError as error:
        raise explained(error) from None


def added(name: str) -> Any:
    """Return what is behind a name in `FACADES`. Raises AttributeError for others, and ImportError
    where its package is absent.
    """
    if name not in FACADES:
        raise AttributeError(f"module 'midstream.client' has no attribute {name!r}")
    return facade(name, FACADES[name])


def _message(needed: str, extra: str) -> str:
    command = installing(extra) if extra in WITH_PACKAGES else f"pip install 'midstream[{extra}]'"
    engine = "; on a GPU, with the extra `gpu`" if extra == "cpu" else ""
    return f"{needed}, not installed here: {command}{engine}"


def _found(name: str) -> bool:
    if name in sys.modules:
        # find_spec raises for an imported module without a spec, such as kombu
        return True
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False
