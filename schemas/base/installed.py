"""Finds what installed packages add to this one: objects that their entry points name."""

from importlib.metadata import EntryPoint, entry_points
from typing import Any


def everything(group: str) -> list[Any]:
    """Load what all installed packages offer in a group, by the names that they give it."""
    return [offer.load() for offer in sorted(entry_points(group=group), key=lambda at: at.name)]


def part(path: str) -> Any:
    """Load what a path such as `package.module:name` names."""
    return EntryPoint(name="", value=path, group="").load()
