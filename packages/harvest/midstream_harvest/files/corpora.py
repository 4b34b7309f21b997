"""Finds the files of a harvest's source, within the folders and stores that the operator allows.

Lists names; reads no file.
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import get_args

from midstream.schemas.base.errors import MidstreamError, Translated, invalid
from midstream.schemas.settings.roots import named_roots
from midstream.schemas.settings.settings import Settings
from midstream.storage.store import ArtifactStore, below, open_store

from ..records.harvests import HarvestSource, SourceFormat

#: File suffix → format.
ENDINGS: dict[str, SourceFormat] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".csv": "csv",
    ".tsv": "csv",
}
#: Limit on a source's files plus the folders still to be listed.
MAX_FILES = 100_000


def store_of(settings: Settings, requested: str | None) -> str:
    """Return the URI of the store for a harvest; None requests the first that is allowed.

    Raises a 400 for a store that the operator does not allow.
    """
    default = (
        below(settings.artifacts, "harvests")
        if settings.artifacts.startswith("s3://")
        else str(Path(settings.data_dir).resolve() / "harvests")
    )
    stores = named_roots(settings.harvest_stores) or [default]
    if requested is None:
        return stores[0]
    if requested.rstrip("/") not in stores:
        raise invalid(
            "store",
            f"{requested!r} is not a store for harvests",
            allowed=", ".join(stores) + " (setting harvest_stores)",
        )
    return requested.rstrip("/")


def find(roots: Sequence[str], source: HarvestSource) -> tuple[str, list[str], SourceFormat]:
    """Return (root, files in order, format) of a source with a path.

    Raises a 400 that names the field.
    """
    assert source.path is not None, "lines are in the request"
    if not roots:
        raise invalid(
            "source.path",
            "no folder is allowed as the source of a harvest",
            allowed="`source.lines`, or the setting harvest_sources",
        )
    for root in roots:
        relative = (
            source.path.removeprefix(root + "/")
            if source.path.startswith(root + "/")
            else source.path
        )
        with Translated(
            (ValueError, OSError),
            lambda error: invalid(
                "source.path", f"{source.path!r} cannot be read: {error}", allowed=_below(roots)
            ),
        ):
            files = _files(open_store(root), relative.strip("/"))
        if files:
            return root, *_of_format(source, files)
    raise invalid("source.path", f"there is no {source.path!r}", allowed=_below(roots))


def _below(roots: Iterable[str]) -> str:
    return "a file or folder below " + ", ".join(roots) + " (setting harvest_sources)"


def _files(store: ArtifactStore, path: str) -> list[str]:
    """Return the file itself, or the files below the folder, sorted by name."""
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
    return sorted(
        files,
        key=lambda name: [  # `part-2` before `part-10`
            (0, int(part), "") if part.isdigit() else (1, 0, part)
            for part in re.split(r"(\d+)", name)
            if part
        ],
    )


def _of_format(source: HarvestSource, files: list[str]) -> tuple[list[str], SourceFormat]:
    formats = {file: ENDINGS.get(file[file.rfind(".") :].lower()) for file in files}
    kinds = (
        sorted({kind for kind in formats.values() if kind is not None})
        if source.format == "auto"
        else [source.format]
    )
    if len(kinds) != 1:
        text = (
            f"has files of several formats: {', '.join(kinds)}"
            if kinds
            else "has no file with a known ending"
        )
        raise invalid(
            "source.format",
            f"{source.path!r} {text}",
            allowed=f"jsonl, parquet, arrow or csv; by their endings {', '.join(ENDINGS)}",
        )
    chosen = files if len(files) == 1 else [file for file in files if formats[file] == kinds[0]]
    if not chosen:
        raise invalid(
            "source.format",
            f"{source.path!r} has no {source.format} file",
            allowed=", ".join(get_args(SourceFormat)),
        )
    return chosen, kinds[0]


def missing(error: OSError, key: str) -> MidstreamError:
    """Return the error for a source's file that can no longer be read."""
    return invalid("source.path", f"{key!r} cannot be read: {error}")
