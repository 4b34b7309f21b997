"""Verifies a backup: restores its Redis beside the service, in a folder and on a port of its own,
and compares jobs, and a sample of captures byte for byte, with those of the service.
"""

import asyncio
import os
import random
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from midstream.broker.ledger.jobs.captures import LedgerCaptures
from midstream.broker.ledger.jobs.ledger import Ledger
from midstream.client.captures.blobs import BlobLocation, find
from midstream.client.render.jobs import count, size
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.jobs.captures import CaptureEntry
from midstream.schemas.settings.settings import Settings
from midstream.storage.store import ArtifactStore, open_store

from .. import redis_server
from .installation import opened
from .notes import CAPTURES, REDIS, BackupNote

#: Most entries of a list of captures.
PAGE = 200


class Compared(NamedTuple):
    """What was compared, and found equal."""

    jobs: int
    captures: int
    blobs: int
    bytes: int
    gone: int  # captures of the sample that the service has deleted since

    def __str__(self) -> str:
        text = f"{count(self.jobs, 'job')} of the last ones found"
        if self.captures:
            text += (
                f"; {count(self.captures, 'capture')} equal byte for byte "
                f"({count(self.blobs, 'blob')}, {size(self.bytes)})"
            )
        gone = f"; {count(self.gone, 'capture')} deleted meanwhile" if self.gone else ""
        return text + gone


def verify(folder: Path, note: BackupNote, settings: Settings, sample: int) -> Compared:
    """Verify a backup of the running service. `sample`: number of captures to compare.

    Raises MidstreamError for a job or a capture that is missing or differs.
    """
    beside = folder / f".verify-{secrets.token_hex(4)}"
    try:
        (beside / "redis").mkdir(parents=True)
        os.link(folder / REDIS, beside / "redis" / "appendonly.aof")
        server = redis_server.start(beside / "redis", say=lambda line: None)
        try:
            restored = msgspec.structs.replace(settings, redis_url=server.url)
            return asyncio.run(_compare(folder, note, settings, restored, sample))
        finally:
            server.stop()
    finally:
        shutil.rmtree(beside, ignore_errors=True)


async def _compare(
    folder: Path, note: BackupNote, settings: Settings, restored: Settings, sample: int
) -> Compared:
    async with opened(restored) as copied, opened(settings) as live:
        missing = [job for job in note.jobs if not await copied.redis.exists(f"ms:job:{job}")]
        # a job's record may have expired in between, in both
        lost = [job for job in missing if await live.redis.exists(f"ms:job:{job}")]
        if lost:
            raise _refused(folder, f"the jobs {', '.join(lost)} are missing in it")
        entries = await captures_of(copied) if note.captures else []
        chosen = random.sample(entries, min(sample, len(entries)))
        gone = [each for each in chosen if await _deleted(live, each.job)]
    ours = open_store(folder / CAPTURES)
    kept = [each.job for each in chosen if each not in gone]
    blobs = [_equal(folder, ours, open_store(settings.artifacts), job) for job in kept]
    return Compared(
        len(note.jobs) - len(missing),
        len(kept),
        sum(map(len, blobs)),
        sum(blob.bytes or 0 for of in blobs for blob in of),
        len(gone),
    )


async def captures_of(ledger: Ledger) -> list[CaptureEntry]:
    """Return the captures in files whose jobs have ended, newest first."""
    captures = LedgerCaptures(ledger)
    found: list[CaptureEntry] = []
    page = await captures.list(limit=PAGE)
    found += page.captures
    while page.next:
        page = await captures.list(limit=PAGE, cursor=page.next)
        found += page.captures
    return [each for each in found if each.status != "pending"]


async def _deleted(ledger: Ledger, job: str) -> bool:
    return bool(await ledger.redis.hexists(f"ms:capture:{job}", "deleted")) or not bool(
        await ledger.redis.exists(f"ms:capture:{job}")
    )


def _equal(
    folder: Path, ours: ArtifactStore, theirs: ArtifactStore, job: str
) -> Sequence[BlobLocation]:
    """Return the blobs of a job, which are equal in both stores. Raises MidstreamError."""
    places = {(blob.key, blob.offset): blob for blob in find(theirs, job, None)}
    copied = {(blob.key, blob.offset): blob for blob in find(ours, job, None)}
    if places.keys() != copied.keys():
        lacking = sorted(key for key, _ in places.keys() ^ copied.keys())
        raise _refused(folder, f"of job {job}, {', '.join(lacking)} is in one of both alone")
    for key, place in places.items():
        if _content(place) != _content(copied[key]):
            raise _refused(folder, f"of job {job}, {place.key} at byte {place.offset} differs")
    return list(copied.values())


def _content(blob: BlobLocation) -> bytes:
    assert blob.store is not None
    with blob.store.open(blob.key) as handle:
        length = handle.size - blob.offset if blob.bytes is None else blob.bytes
        return handle.read(blob.offset, length)


def _refused(folder: Path, why: str) -> MidstreamError:
    return MidstreamError(
        "capture_damaged",
        f"the backup {folder} is not equal to the service: {why}",
        hint="remove the folder, and make the backup again",
    )
