"""Folders and buckets that a setting names, and those below them."""

from collections.abc import Sequence


def named_roots(setting: str) -> list[str]:
    """Return the roots that a setting lists: folders or URIs, separated by commas."""
    return [part.strip().rstrip("/") for part in setting.split(",") if part.strip()]


def allowed_roots(setting: str, wanted: Sequence[str] | None = None) -> list[str]:
    """Return those of `wanted` that equal a root of the setting or lie below one; all of the
    setting's without `wanted`.
    """
    configured = named_roots(setting)
    if wanted is None:
        return configured
    return [
        root
        for root in (item.rstrip("/") for item in wanted)
        if any(_inside(root, outer) for outer in configured)
    ]


def _inside(root: str, outer: str) -> bool:
    path, _, options = root.partition("?")
    known, _, known_options = outer.partition("?")
    return (
        options == known_options
        and ".." not in path.split("/")
        and (path == known or path.startswith(known + "/"))
    )
