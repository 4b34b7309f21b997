"""Removes captures: a reader gets everything that a job captured, or learns that it is gone.

Deleting a job's captures: the ledger is updated first (`forget_captures`); then the store marks the
job, and from then on readers of files report `gone`; then the job's folders are removed, and its
blobs in segments are erased. A reader holds the segments that it reads; those are erased in a later
sweep. The mark stays, and the removal is repeated, for as long as a worker may still be writing for
the job: see `captures`. Several processes may delete concurrently.
"""

import logging
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager

from ...schemas.base.errors import MidstreamError
from ...schemas.jobs.captures import SEGMENT_SUFFIX, SEGMENTS, BlobEntry, index_of
from ...storage.blobs import read_entries
from ...storage.formats.capture_blobs import DamagedBlob
from ...storage.store import ArtifactStore, Referring, Rewriting

log = logging.getLogger(__name__)

_logged: set[tuple[ArtifactStore, str]] = set()  # segments whose damage was logged


def gone(job: str) -> MidstreamError:
    return MidstreamError("gone", f"the captures of job {job} were deleted")


class RemovalError(OSError):
    """Some captures could not be removed; all others were.

    `done`: the jobs of which nothing is left.
    """

    def __init__(self, message: str, done: list[str]) -> None:
        super().__init__(message)
        self.done = done


def delete(store: ArtifactStore, jobs: Collection[str], keep: Collection[str] = ()) -> list[str]:
    """Remove everything that `jobs` captured in the store; may be repeated.

    Returns the jobs of which nothing is left; captures of the others are being read: call again
    later. The jobs in `keep` stay marked, so that captures still to be written for them are never
    shown. Raises RemovalError after removing all that it can.
    """
    failed: dict[str, OSError] = {}
    for job in jobs:
        with _collected(failed, [job]):
            store.mark(job)
    marked = [job for job in jobs if job not in failed]
    tags = [key for key in store.children() if key.endswith("/")] if marked else []
    for job in marked:
        with _collected(failed, [job]):
            for tag in tags:
                store.delete(f"{tag}{job}/")
    busy: set[str] = set()
    for segment in _segments(store, tags, marked, failed):
        with _collected(failed, marked):
            busy |= _empty(store, segment, frozenset(marked))
    for job in marked:
        if job not in failed and job not in busy and job not in keep:
            with _collected(failed, [job]):
                store.unmark(job)
    done = [job for job in jobs if job not in failed and job not in busy]
    if failed:
        job, first = next(iter(failed.items()))
        raise RemovalError(
            f"{len(failed)} of {len(jobs)} jobs, the first of them {job}: {first}", done
        )
    return done


def _segments(
    store: ArtifactStore, tags: Sequence[str], jobs: Sequence[str], failed: dict[str, OSError]
) -> Iterator[str]:
    """Yield the segments that may hold blobs of the jobs: all, if the store does not know."""
    if isinstance(store, Referring):
        segments: set[str] = set()
        for job in jobs:
            with _collected(failed, [job]):
                segments.update(store.segments(job))
        yield from sorted(segments)
        return
    for tag in tags:
        yield from (
            key for key in store.children(f"{tag}{SEGMENTS}/") if key.endswith(SEGMENT_SUFFIX)
        )


@contextmanager
def _collected(failed: dict[str, OSError], jobs: Iterable[str]) -> Iterator[None]:
    """Record an error for `jobs` instead of raising it: the removal continues with the others."""
    try:
        yield
    except OSError as error:
        for job in jobs:
            failed.setdefault(job, error)


def _empty(store: ArtifactStore, segment: str, jobs: frozenset[str]) -> set[str]:
    """Erase the jobs' blobs in a segment, and delete the segment once it has no blobs.

    Returns the jobs whose blobs are still being read.
    """
    try:
        entries = _entries(store, segment, jobs)
        if entries and isinstance(store, Rewriting) and len(entries) == _count(store, segment):
            store.delete(segment)  # nothing of other jobs is in it
            store.delete(index_of(segment))
        elif entries and not store.erase(
            segment, [(entry.offset, entry.bytes) for entry in entries]
        ):
            return {entry.manifest.job for entry in entries}
        elif store.sealed(segment) and _is_dead(store, segment):
            store.delete(segment)
            store.delete(index_of(segment))
    except FileNotFoundError:  # another process has removed it
        pass
    return set()


def _entries(store: ArtifactStore, segment: str, jobs: frozenset[str]) -> list[BlobEntry]:
    """Return the jobs' entries in a segment's index.

    A damaged line hides the entries after it only for the job that the line names.
    """
    entries = []
    try:
        for entry in read_entries(store, index_of(segment), jobs):
            entries.append(entry)
    except DamagedBlob as error:
        if len(jobs) > 1:
            return [entry for job in jobs for entry in _entries(store, segment, frozenset([job]))]
        _log_damage(store, segment, error)
    return entries


def _count(store: ArtifactStore, segment: str) -> int:
    """Return how many blobs the segment has had; 0 if a line of its index is damaged."""
    try:
        return sum(1 for _ in read_entries(store, index_of(segment)))
    except DamagedBlob:
        return 0


def _is_dead(store: ArtifactStore, segment: str) -> bool:
    """Return whether a segment had blobs and all of them were deleted; False if a line of its index
    is damaged.
    """
    empty = True
    try:
        with store.open(segment, hold=False) as blobs:
            for entry in read_entries(store, index_of(segment)):
                empty = False
                if blobs.read(entry.offset, 8) != bytes(8):
                    return False
    except DamagedBlob as error:
        _log_damage(store, segment, error)
        return False
    return not empty


def _log_damage(store: ArtifactStore, segment: str, error: DamagedBlob) -> None:
    """Log once per process: every deletion examines the segment again."""
    if (store, segment) not in _logged:
        _logged.add((store, segment))
        log.error(
            "%s is damaged; blobs it does not list stay in the store: %s", index_of(segment), error
        )
