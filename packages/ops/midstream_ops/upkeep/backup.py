"""`midstream backup`: a verified copy of what an installation cannot lose, made while it runs."""

import asyncio
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import msgspec

from midstream.broker.processes.private_files import private_folder
from midstream.client.cli.terminal import say
from midstream.client.render.jobs import count, moment, size
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.base.records import now, to_json
from midstream.schemas.service.stored_schema import own
from midstream.schemas.settings.settings import (
    SECRETS as SECRET_SETTINGS,
    ArtifactFolder,
    Settings,
    to_environment,
    variable,
)

from . import redis_snapshot
from .copied_files import CopiedFile, FileList, copy_new, digest_of, files_below
from .installation import Installation, installation, opened
from .notes import (
    CAPTURES,
    CAPTURES_INDEX,
    FORMAT,
    HARVESTS,
    NOTE,
    REDIS,
    SECRETS,
    SETTINGS,
    BackupNote,
    list_of,
    read_note,
)
from .verification import captures_of, verify

#: Newest jobs before Redis was copied, which the copy must have.
JOBS = 100
#: Bytes between two lines about the progress.
PROGRESS = 1 << 30


def run(folder: Path, data_dir: Path | None, *, captures: bool, sample: int, dry_run: bool) -> None:
    """Make a backup, or go on with one, and verify it."""
    found = installation(data_dir)
    folder = folder.expanduser().resolve()
    _check(found, folder, captures)
    if dry_run:
        _describe(found, captures)
        return
    os.umask(0o077)
    private_folder(folder)
    note = _begun(found, folder, captures)
    known = list_of(folder)
    note = _with_redis(found.settings, folder, note)
    _write_settings(found.settings, folder)
    for name, source in _folders(found, captures).items():
        _copy(source, folder, name, known)
    compared = verify(folder, note, found.settings, sample)
    msgspec.structs.replace(note, complete=now()).write(folder)
    say(f"verified beside the service: {compared}")
    say(f"backup complete: {folder}, the state of {moment(note.began)}")


def _check(found: Installation, folder: Path, captures: bool) -> None:
    """Raise MidstreamError for a folder that no backup can be made in, or captures in a bucket."""
    if folder.is_relative_to(found.data) or found.data.is_relative_to(folder):
        raise MidstreamError(
            "invalid_request",
            f"{folder} and the data directory {found.data} are inside each other",
            field="folder",
            allowed="a folder elsewhere, best on another disk",
        )
    if captures and "://" in found.settings.artifacts:
        raise MidstreamError(
            "invalid_request",
            f"the captures are in {found.settings.artifacts}, which has copies of its own",
            field="captures",
            allowed="without --captures, and a copy of the bucket by its own tools",
        )
    if folder.is_dir() and any(folder.iterdir()):
        if not (folder / NOTE).exists():
            raise MidstreamError("conflict", f"{folder} has other files: name a new folder")
        _check_same(read_note(folder), found, folder, captures)


def _check_same(note: BackupNote, found: Installation, folder: Path, captures: bool) -> None:
    """Raise MidstreamError if the backup in the folder is complete, or is another one."""
    if note.complete:
        raise MidstreamError(
            "conflict", f"{folder} is a backup, complete since {moment(note.complete)}"
        )
    if (note.source, note.captures) != (str(found.data), captures):
        kind = "with" if note.captures else "without"
        raise MidstreamError(
            "conflict",
            f"{folder} is a backup of {note.source}, {kind} --captures, that was cut off: go on "
            "with it as it was begun, or name a new folder",
        )


def _begun(found: Installation, folder: Path, captures: bool) -> BackupNote:
    """Return the note of the backup that was cut off, or of a new one."""
    if (folder / NOTE).exists():
        note = read_note(folder)
        say(f"going on with the backup that was begun {moment(note.began)}")
        return note
    note = BackupNote(
        format=FORMAT,
        id=secrets.token_hex(8),
        stored=own(),
        source=str(found.data),
        model=found.settings.served_model,
        began=now(),
        captures=captures,
    )
    note.write(folder)
    return note


def _with_redis(settings: Settings, folder: Path, note: BackupNote) -> BackupNote:
    """Copy what Redis holds, before the files that it names; return the note that says so."""
    if note.redis is not None:
        return note
    jobs, index = asyncio.run(_lists(settings))
    redis_snapshot.take(settings.redis_url, folder / REDIS, _progress("redis"))
    path = folder / REDIS
    copied = CopiedFile(path=REDIS, bytes=path.stat().st_size, sha256=digest_of(path))
    (folder / CAPTURES_INDEX).write_bytes(index)
    note = msgspec.structs.replace(note, redis=copied, jobs=jobs, began=now())
    note.write(folder)
    captures = index.count(b"\n")
    say(f"redis: {size(copied.bytes)}, with {count(captures, 'capture')}")
    return note


async def _lists(settings: Settings) -> tuple[list[str], bytes]:
    """Return the newest jobs, and the captures as JSON lines."""
    async with opened(settings) as ledger:
        jobs = [name.decode() for name in await ledger.redis.zrevrange("ms:jobs", 0, JOBS - 1)]
        captures = await captures_of(ledger)
    return jobs, b"".join(to_json(each) + b"\n" for each in captures)


def _write_settings(settings: Settings, folder: Path) -> None:
    """Write the settings as variables, without secrets and without the address of Redis."""
    hidden = {variable(name) for name in (*SECRET_SETTINGS, "redis_url")}
    lines = sorted(
        f"{name}={value}\n"
        for name, value in to_environment(settings).items()
        if name not in hidden
    )
    (folder / SETTINGS).write_text("".join(lines))


def _folders(found: Installation, captures: bool) -> dict[str, Path]:
    """Return name in the backup → folder to copy, of those that exist."""
    folders = {SECRETS: found.data / SECRETS}
    folders |= {kind: Path(found.settings.artifacts_of(kind)) for kind in get_args(ArtifactFolder)}
    if captures:
        folders |= {
            CAPTURES: Path(found.settings.artifacts),
            HARVESTS: found.data / HARVESTS,
        }
    return {name: folder for name, folder in folders.items() if folder.is_dir()}


def _copy(source: Path, folder: Path, name: str, known: FileList) -> None:
    before = len(known.files)
    gone = copy_new(source, folder, name, known, _progress(name))
    removed = f"; {count(gone, 'file')} removed meanwhile" if gone else ""
    say(f"{name}: {count(len(known.files) - before, 'file')} copied{removed}")


def _progress(name: str) -> Callable[[int], None]:
    """Return what is called with the bytes of each file, and says how many there were."""
    done = [0, 0]

    def copied(more: int) -> None:
        done[0] += more
        if done[0] // PROGRESS > done[1]:
            done[1] = done[0] // PROGRESS
            say(f"{name}: {size(done[0])} so far")

    return copied


def _describe(found: Installation, captures: bool) -> None:
    """Say what a backup would copy."""
    say(f"would copy the installation on {found.data}:")

    async def memory() -> tuple[int, int]:
        async with opened(found.settings) as ledger:
            info = await ledger.redis.info("memory")
            return int(info["used_memory"]), len(await captures_of(ledger))

    used, kept = asyncio.run(memory())
    say(f"redis: {size(used)} in memory")
    for name, source in _folders(found, True).items():
        sizes = [length for _, length in files_below(source)]
        left_out = (
            "" if captures or name not in (CAPTURES, HARVESTS) else ": not without --captures"
        )
        say(f"{name}: {count(len(sizes), 'file')}, {size(sum(sizes))}{left_out}")
    say(f"the index of {count(kept, 'capture')}, and the settings without secrets")
