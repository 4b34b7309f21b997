"""`midstream restore`: makes a data directory of a backup."""

import os
from contextlib import ExitStack
from pathlib import Path

from midstream.broker.processes.install import close_folder
from midstream.client.cli.terminal import say
from midstream.client.render.jobs import count, moment, size
from midstream.client.sdk import discovery
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.service.stored_schema import refuse
from midstream.schemas.settings.settings import load_settings

from ..supervisor import RESTORING
from .copied_files import CopiedFile, FileList, copy
from .locks import take
from .notes import CAPTURES, HARVESTS, SETTINGS, BackupNote, list_of, read_note

#: What a data directory has of its own, and a restore must not mix with.
OWN = ("redis", CAPTURES, HARVESTS, "outbox")
#: Redis loads its log from here at the next start, and goes on in the form of its version.
LOG = "redis/appendonly.aof"


def run(backup: Path, data_dir: Path | None, *, dry_run: bool) -> None:
    """Restore a backup, or go on with that."""
    backup = backup.expanduser().resolve()
    data = discovery.data_dir(load_settings(data_dir=str(data_dir) if data_dir else None))
    note = read_note(backup)
    if not note.complete or note.redis is None:
        raise MidstreamError(
            "conflict",
            f"{backup} is not complete: `midstream backup` was cut off",
            hint=f"midstream backup {backup} goes on, while the service runs",
        )
    refuse(f"the backup {backup}", note.stored)
    files = _files(backup, note.redis)
    total = sum(each.bytes for each in files.values())
    with ExitStack() as stack:
        is_new = not data.is_dir()
        if not is_new:
            take(data, stack)
            _check(data, note)
        if dry_run:
            say(
                f"would restore the state of {moment(note.began)} to {data}: "
                f"{count(len(files), 'file')}, {size(total)}"
            )
            return
        os.umask(close_folder(data, say))
        if is_new:
            take(data, stack)
        _restore(backup, data, note, files)
    say(f"restored the state of {moment(note.began)} to {data}: {count(len(files), 'file')}")
    say(
        "an API key that was deleted since then is valid again: delete it again. The settings "
        f"were: {backup / SETTINGS}"
    )
    if not note.captures:
        say(f"the backup has no captures: put their files into {data / CAPTURES}")


def _files(backup: Path, redis: CopiedFile) -> dict[str, CopiedFile]:
    """Return path in the data directory → file of the backup, Redis' log last: without it, the
    folder is not whole.
    """
    files = dict(sorted(list_of(backup).files.items()))
    return {**files, LOG: redis}


def _check(data: Path, note: BackupNote) -> None:
    """Raise MidstreamError("conflict") for a folder that has data of its own."""
    begun = [path.name for path in data.glob(RESTORING.format("*"))]
    if begun == [RESTORING.format(note.id)]:
        say(f"going on with the restore to {data} that was cut off")
        return
    own = [name for name in OWN if (data / name).is_dir() and any((data / name).iterdir())]
    if begun or own:
        what = "a restore of another backup" if begun else f"data of its own ({', '.join(own)})"
        raise MidstreamError(
            "conflict",
            f"{data} has {what}",
            field="data_dir",
            hint=f"move {' and '.join(own or begun)} away first, or name another folder with "
            "--data-dir",
        )


def _restore(backup: Path, data: Path, note: BackupNote, files: dict[str, CopiedFile]) -> None:
    """Copy the files that are not there yet. Raises MidstreamError for one that is damaged."""
    marker = data / RESTORING.format(note.id)
    marker.touch()
    done = FileList(marker)
    for path, file in files.items():
        if path in done.files and (data / path).exists():
            continue
        copied = copy(backup / file.path, data / path, path)
        if (copied.bytes, copied.sha256) != (file.bytes, file.sha256):
            (data / path).unlink()
            raise MidstreamError(
                "capture_damaged",
                f"{backup / file.path} is not as it was written: {copied.bytes} bytes, SHA-256 "
                f"{copied.sha256[:16]}…; expected {file.bytes}, {file.sha256[:16]}…",
                hint="use another backup",
            )
        done.add(copied)
    marker.unlink()
