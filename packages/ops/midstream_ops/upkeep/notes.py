"""What a backup says of itself, and where its parts are in its folder."""

from pathlib import Path

import msgspec

from midstream.schemas.base.errors import MidstreamError, Translated
from midstream.schemas.base.records import Record, from_json, to_json
from midstream.schemas.service.stored_schema import StoredSchema
from midstream.storage.file_store import sync

from .copied_files import CopiedFile, FileList

#: Format of a backup's folder; grows with every change that an older `restore` could misread.
FORMAT = 1
NOTE = "backup.json"
FILES = "files.jsonl"
#: What Redis held at one moment.
REDIS = "redis.rdb"
#: Job, tags, bytes and rows of every capture in files, as JSON lines.
CAPTURES_INDEX = "captures.jsonl"
#: The settings of the service as environment variables, without secrets.
SETTINGS = "settings.env"
SECRETS = "secrets"
#: Folders of captures and of harvests.
CAPTURES = "captures"
HARVESTS = "harvests"


class BackupNote(Record):
    """The file `backup.json`."""

    format: int
    id: str
    stored: StoredSchema  # the version, and what can read it
    source: str  # the data directory that it is a copy of
    model: str
    began: float  # seconds since the epoch
    captures: bool  # whether it has the files of captures and harvests
    jobs: list[str] = []  # newest jobs before Redis was copied
    redis: CopiedFile | None = None
    complete: float = 0.0  # when it was verified; 0: it is not complete

    def write(self, folder: Path) -> None:
        """Write the note, which is durable when this returns."""
        aside = folder / f".{NOTE}.part"
        aside.write_bytes(to_json(self))
        sync(aside)
        aside.rename(folder / NOTE)
        sync(folder)


def read_note(folder: Path) -> BackupNote:
    """Return a backup's note. Raises MidstreamError for a folder that is none, or one of a later
    format.
    """
    path = folder / NOTE
    with Translated(
        FileNotFoundError,
        lambda error: MidstreamError("not_found", f"{folder} is no backup: it has no {NOTE}"),
        hidden=True,
    ):
        raw = path.read_bytes()
    written = from_json(raw, dict[str, object]).get("format")
    if written != FORMAT:
        raise MidstreamError(
            "version_mismatch",
            f"{path} has format {written}; this version reads format {FORMAT}",
            hint="use the version of Midstream that wrote it",
        )
    with Translated(
        msgspec.DecodeError, lambda error: MidstreamError("invalid_request", f"{path}: {error}")
    ):
        return from_json(raw, BackupNote)


def list_of(folder: Path) -> FileList:
    """Return the list of a backup's files."""
    return FileList(folder / FILES)
