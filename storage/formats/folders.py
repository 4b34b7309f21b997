"""Finds folders that requests name, which must be below the operator's root, and reads their
files.
"""

import json
from collections.abc import Sequence
from os.path import isdir
from pathlib import Path

from ...schemas.base.errors import MidstreamError, Translated, invalid
from ...schemas.base.records import JsonObject


def folder_below(root: str, path: str, setting: str, kinds: Sequence[Sequence[str]]) -> Path:
    """Returns the folder at `path` below `root`, which errors call `setting`; it must have all
    files of one of `kinds`.

    Raises a 400 naming `path` if the folder is missing or outside `root`, also through a symbolic
    link.
    """
    files = ", or ".join(" and ".join(names) for names in kinds)
    allowed = f"the path of a folder below {setting} that contains {files}"
    top = Path(root).expanduser().resolve()
    if "\0" in path or Path(path).is_absolute() or ".." in Path(path).parts:
        raise invalid("path", f"{path!r} is not a path below {setting}", allowed=allowed)
    last = Path(path).name
    with Translated(
        (OSError, RuntimeError),
        lambda error: invalid(
            "path",
            f"there is no folder {path!r} in {setting}",
            allowed=allowed,
            hint=f"write {last!r}"
            if path != last and isdir(top / last)
            else f"`midstream doctor` on the server prints the folder of {setting}",
        ),
    ):
        folder = (top / path).resolve(strict=True)
    if not folder.is_dir() or not folder.is_relative_to(top) or folder == top:
        raise invalid("path", f"{path!r} is not a folder below {setting}", allowed=allowed)
    missing = [
        next((name for name in names if not _inside(folder / name, top)), "") for names in kinds
    ]
    if all(missing):
        raise invalid("path", f"{path!r} has no {' and no '.join(missing)}", allowed=allowed)
    return folder


def new_folder(root: str, path: str, setting: str) -> Path:
    """Returns the folder `path` below `root`, which errors call `setting`, to be written.

    Raises a 400 naming `folder` if a symbolic link leads outside `root`.
    """
    top = Path(root).expanduser().resolve()
    folder = (top / path).resolve()
    if not folder.is_relative_to(top) or folder == top:
        raise invalid("folder", f"{path!r} is not below {setting}")
    return folder


def bounded_file(path: Path, most: int, fault: type[ValueError]) -> bytes:
    """Returns the bytes of a file. Raises `fault` if it is missing, or larger than `most` bytes."""
    with Translated(OSError, lambda error: fault(f"{path.name} cannot be read: {error.strerror}")):
        if (size := path.stat().st_size) > most:
            raise fault(f"{path.name} has {size} bytes; the limit is {most}")
        return path.read_bytes()


def json_object(raw: bytes, name: str, fault: type[ValueError]) -> JsonObject:
    """Returns the JSON object in the file `name`. Raises `fault`."""
    with Translated(
        (ValueError, RecursionError), lambda error: fault(f"{name} is not JSON: {error}")
    ):
        members = json.loads(raw)
    if not isinstance(members, dict):
        raise fault(f"{name} is not a JSON object")
    return members


def refused_path(*faults: type[ValueError]) -> Translated[ValueError]:
    """Returns a context in which these faults of a file become a 400 naming `path`."""
    return Translated(
        faults, lambda error: MidstreamError("invalid_request", str(error), field="path")
    )


def _inside(file: Path, top: Path) -> bool:
    return file.is_file() and file.resolve().is_relative_to(top)
