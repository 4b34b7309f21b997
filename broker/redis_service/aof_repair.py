"""Repairs an append-only file whose end is zeros or half a command, as a file system leaves it
after a power failure.

ext4 leaves zeros in blocks that were allocated and never written, which Redis refuses to load.
Redis drops an incomplete command itself, but 6.2 keeps the commands before it in its transaction,
and applies that half at the next start. Both kinds of end are cut off here, with the whole
transaction, and a copy of them is kept. `redis-check-aof` finds the end of the valid commands; it
is the `redis-server` binary under another name.
"""

import mmap
import os
import re
import shutil
import subprocess
import time
from pathlib import Path

from ...schemas.base.errors import MidstreamError

#: Redis' log line about a file that it refuses.
REFUSED = re.compile(rb"(Bad file format|Unexpected end of file) reading the append only file")
_ANALYZED = re.compile(r"AOF analyzed:.*?size=(\d+), ok_up_to=(\d+)")
#: A line of a manifest (Redis 7): the last file of type `i` is the one that is written to.
_INCREMENT = re.compile(r"^file (\S+) seq \d+ type i", re.MULTILINE)
_COUNT, _LENGTH = re.compile(rb"\*(\d{1,10})\r\n"), re.compile(rb"\$(\d{1,10})\r\n")
#: Longer than the longest header, `*1000000000\r\n`.
_HEADER_BYTES = 16
#: A complete command inside what should be one value: the value's length is wrong, and valid data
#: follows.
_COMMAND = re.compile(rb"\r\n\*\d{1,10}\r\n\$\d{1,10}\r\n[A-Za-z]+\r\n")


def repair(directory: Path, server: str) -> str:
    """Cut off the damaged end of the append-only file in `directory`; returns a message that
    describes it. `server`: the redis-server binary.

    Raises MidstreamError("unavailable"), with a command to run, for any other damage; nothing is
    changed then.
    """
    path = _written_file(directory)
    check = _checker(directory, server)
    size, good = _analyze(path, check)
    if good is None or good >= size:
        raise _refusal(path, check, "it is damaged, and not only at its end")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if not _is_cut_off(data, good):
            raise _refusal(
                path,
                check,
                (
                    f"it is damaged at byte {good} of {size}; what follows is neither zeros nor a "
                    "truncated command"
                ),
            )
        copy = path.with_name(f"{path.name}.cut-at-{good}.{time.strftime('%Y%m%dT%H%M%S')}")
        _copy(data, good, copy)
    with path.open("rb+") as whole:
        whole.truncate(good)
        os.fsync(whole.fileno())
    return (
        f"{path} had a damaged end, as after a power failure: {size - good} bytes from "
        f"byte {good} were cut off and saved in {copy}"
    )


def _written_file(directory: Path) -> Path:
    """Return the file that Redis appends to: the only one in 6.2, since 7 the last that the
    manifest names.
    """
    for manifest in directory.glob("*/*.manifest"):
        if matches := _INCREMENT.findall(manifest.read_text()):
            return manifest.parent / str(matches[-1])
    return directory / "appendonly.aof"


def _checker(directory: Path, server: str) -> str:
    """Return the path of a `redis-check-aof` on this machine."""
    if installed := shutil.which("redis-check-aof"):
        return installed
    link = directory / "redis-check-aof"
    link.unlink(missing_ok=True)
    link.symlink_to(server)
    return str(link)


def _analyze(path: Path, check: str) -> tuple[int, int | None]:
    """Return (size, length of the valid part without an unfinished transaction); None for a length
    that the check does not report.
    """
    done = subprocess.run(
        [check, str(path)], stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
    match = _ANALYZED.search(done.stdout.decode(errors="replace"))
    return (int(match[1]), int(match[2])) if match else (path.stat().st_size, None)


def _is_cut_off(data: mmap.mmap, start: int) -> bool:
    """Return whether the data from `start` on are valid commands, the last one incomplete or not,
    and then only zeros.
    """
    end = len(data)
    while end > start and data[end - 1] == 0:
        block = max(start, end - (1 << 20))
        end = block + len(data[block:end].rstrip(b"\0"))
    at = start
    while at < end:
        for pattern in _of_command(data, at, end):
            match = pattern.match(data, at, end)
            if match is None:
                # whether a header may begin like the rest
                return end - at < _HEADER_BYTES and bool(
                    re.fullmatch(rb"([*$]\d{0,10}\r?)?", bytes(data[at:end]))
                )
            at = match.end()
            if pattern is _LENGTH:
                value_end = at + int(match[1])
                if value_end + 2 > end:  # the data end within the value or its CRLF
                    return _COMMAND.search(data, at, end) is None
                if data[value_end : value_end + 2] != b"\r\n":
                    return False
                at = value_end + 2
    return True


def _of_command(data: mmap.mmap, at: int, end: int) -> "list[re.Pattern[bytes]]":
    """Return the patterns of the headers of the command at `at`."""
    match = _COUNT.match(data, at, end)
    return [_COUNT, *[_LENGTH] * (int(match[1]) if match and int(match[1]) < 1 << 20 else 0)]


def _copy(data: mmap.mmap, start: int, target: Path) -> None:
    """Copy `data` from `start` on to `target`; it is on disk when this returns."""
    try:
        with target.open("xb") as copy:
            os.fchmod(copy.fileno(), 0o600)
            for at in range(start, len(data), 1 << 20):
                copy.write(data[at : at + (1 << 20)])
            copy.flush()
            os.fsync(copy.fileno())
    except OSError:
        target.unlink(missing_ok=True)
        raise


def _refusal(path: Path, check: str, why: str) -> MidstreamError:
    return MidstreamError(
        "unavailable",
        f"Redis cannot load {path}: {why}. Nothing was changed. Restore it from a "
        "backup; or discard everything after the damage: "
        f"`cp {path} {path}.backup && {check} --fix {path}`, then start again",
    )
