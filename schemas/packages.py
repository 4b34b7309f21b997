"""Loads what packages add to the core: each offers it by an entry point, and the core loads it when
it needs it.
"""

from collections.abc import Iterator
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from typing import Any


class MissingPackageError(ModuleNotFoundError):
    """An entry point names something that cannot be loaded; the message says what is missing."""


def entries(group: str) -> EntryPoints:
    """Return a group's entry points, of which several may have one name."""
    return entry_points(group=group)


def offered(group: str) -> list[str]:
    """Return the names of a group's entry points, sorted."""
    return sorted(entries(group).names)


def load(group: str, name: str, extra: str = "") -> Any:
    """Return what an installed package offers under a name.

    `extra`: of ours, that installs the package. Raises MissingPackageError.
    """
    missing = f"midstream-{extra or name}"
    try:
        for offer in entry_points(group=group, name=name):
            return offer.load()
    except ModuleNotFoundError as error:
        missing = error.name or missing
    remedy = f": {installing(extra)}" if extra else ""
    raise MissingPackageError(f"needs the package {missing}{remedy}")


def facade(name: str, extra: str) -> Any:
    """Return what is behind `midstream.NAME`. Raises ImportError, which says what installs it."""
    try:
        return load("midstream.facades", name, extra)
    except MissingPackageError as error:
        raise ImportError(f"midstream.{name} {error}") from error


def load_all(group: str) -> Iterator[Any]:
    """Yield all that installed packages offer in a group. Raises MissingPackageError."""
    for name in offered(group):
        yield load(group, name)


def part(path: str) -> Any:
    """Return what a path such as `package.module:name` names."""
    return EntryPoint(name="", value=path, group="").load()


def installing(extra: str) -> str:
    """Return the commands that install an extra of ours which names packages.

    In a clone, pip is told where these are, because no index has them.
    """
    return f"pip install 'midstream[{extra}]'; in a clone: pip install '.[{extra}]' packages/*/"
