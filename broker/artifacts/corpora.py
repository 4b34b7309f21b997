"""Sources of harvests: which files a request may name, and which they are.

Nothing is read here but names.
"""

import re
from collections.abc import Iterable, Sequence

from ...schemas.base.errors import MidstreamError, invalid
from ...schemas.base.settings import Settings
from ...schemas.jobs.harvests import Format, HarvestSource
from ...storage.store import ArtifactStore, below, open_store

#: Ending → format.
ENDINGS: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
#: Files of a source, and folders that are looked through.
MAX_FILES = 100_000


def allowed(text: str) -> list[str]:
    """The roots that a setting lists: folders or URIs, separated by commas."""
    return [part.strip().rstrip("/") for part in text.split(",") if part.strip()]


def store_of(settings: Settings, needed: str | None) -> str:
    """The URI under which harvests are made.

    Raises a 400 for one that the operator does not allow.
    """
    own = (
        below(settings.artifacts, "harvests")
        if settings.artifacts.startswith("s3://")
        else str(settings.harvest_root)
    )
    present = allowed(settings.harvest_stores) or [own]
    if needed is None:
        return present[0]
    if needed.rstrip("/") not in present:
        raise invalid(
            "store",
            f"{needed!r} is not a store for harvests",
            allowed=", ".join(present) + " (setting harvest_stores)",
        )
    return needed.rstrip("/")


def roots_of(settings: Settings, own: Sequence[str] | None = None) -> list[str]:
    """The folders and URIs that may be read: those of the setting, or of a tenant's `own` those
    that are one of these or below one.
    """
    everybodys = allowed(settings.harvest_sources)
    if own is None:
        return everybodys
    return [
        root
        for root in (item.rstrip("/") for item in own)
        if any(_inside(root, outer) for outer in everybodys)
    ]


def _inside(root: str, outer: str) -> bool:
    path, _, options = root.partition("?")
    known, _, known_options = outer.partition("?")
    return (
        options == known_options
        and ".." not in path.split("/")
        and (path == known or path.startswith(known + "/"))
    )


def find(roots: Sequence[str], source: HarvestSource) -> tuple[str, list[str], Format]:
    """(root, files in order, format) of a source with a path. Raises a 400 naming the field."""
    assert source.path is not None, "lines are in the request"
    if not roots:
        raise invalid(
            "source.path",
            "no folder is open to harvests",
            allowed="`source.lines`, or the setting harvest_sources",
        )
    for root in roots:
        relative = (
            source.path.removeprefix(root + "/")
            if source.path.startswith(root + "/")
            else source.path
        )
        try:
            files = _files(open_store(root), relative.strip("/"))
        except (ValueError, OSError) as error:
            raise invalid(
                "source.path", f"{source.path!r} cannot be read: {error}", allowed=_below(roots)
            ) from error
        if files:
            return root, *_of_format(source, files)
    raise invalid("source.path", f"there is no {source.path!r}", allowed=_below(roots))


def _below(roots: Iterable[str]) -> str:
    return "a file or folder below " + ", ".join(roots) + " (setting harvest_sources)"


def _files(store: ArtifactStore, path: str) -> list[str]:
    """The file itself, or those below the folder, by name."""
    store.check(path)
    try:
        if not store.children(path + "/"):
            store.stat(path)
            return [path]
    except FileNotFoundError:
        return []
    files: list[str] = []
    folders = [path + "/"]
    while folders:
        for key in store.children(folders.pop()):
            store.check(key.rstrip("/"))
            (folders if key.endswith("/") else files).append(key)
            if len(files) + len(folders) > MAX_FILES:
                raise ValueError(f"it has more than {MAX_FILES} files")
    return sorted(files, key=_natural)


def _natural(key: str) -> list[tuple[int, int, str]]:
    """`part-2` before `part-10`."""
    return [
        (0, int(part), "") if part.isdigit() else (1, 0, part)
        for part in re.split(r"(\d+)", key)
        if part
    ]


def _of_format(source: HarvestSource, files: list[str]) -> tuple[list[str], Format]:
    formats = {file: ENDINGS.get(file[file.rfind(".") :].lower()) for file in files}
    if source.format != "auto":
        chosen = (
            files if len(files) == 1 else [file for file in files if formats[file] == source.format]
        )
        kind: Format = source.format
    else:
        kinds = sorted({result for result in formats.values() if result is not None})
        if len(kinds) != 1:
            text = (
                f"has files of several formats: {', '.join(kinds)}"
                if kinds
                else "has no file with a known ending"
            )
            raise invalid(
                "source.format",
                f"{source.path!r} {text}",
                allowed=f"jsonl, parquet or arrow; by their endings {', '.join(ENDINGS)}",
            )
        (kind,) = kinds
        chosen = [file for file in files if formats[file] == kind]
    if not chosen:
        raise invalid(
            "source.format",
            f"{source.path!r} has no {source.format} file",
            allowed="auto, jsonl, parquet, arrow",
        )
    return chosen, kind


def missing(error: OSError, key: str) -> MidstreamError:
    """A source's file that cannot be read any more."""
    return MidstreamError(
        "invalid_request", f"{key!r} cannot be read: {error}", field="source.path"
    )
