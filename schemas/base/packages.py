"""Packages beside the core, which it finds by their entry points and imports by no name."""

from importlib.metadata import entry_points
from typing import Any


def offered(group: str, *names: str) -> dict[str, Any]:
    """Return what installed packages offer in a group of entry points, by its name; with `names`,
    only these.

    Raises ModuleNotFoundError if what a package needs is not installed.
    """
    offers = entry_points(group=group)
    return {offer.name: offer.load() for offer in offers if offer.name in names or not names}


def remedy(extra: str) -> str:
    """Return the commands that install an extra which names packages beside the core; in a clone,
    pip is told where these are, because no index has them.
    """
    return f"pip install 'midstream[{extra}]'; in a clone: pip install '.[{extra}]' packages/*/"
