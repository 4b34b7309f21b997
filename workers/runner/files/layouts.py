"""File layouts of captures: one file per request and stage, one per tensor, or many requests in one
segment.

The consumer `filesystem` writes captures in groups, to save disk round trips. If a group fails,
each capture is tried alone, so that a capture that cannot be written does not fail the others.
"""

import itertools
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from ....schemas.base.records import by_key
from ....schemas.jobs.captures import SEGMENT_SUFFIX, SEGMENTS
from ....schemas.jobs.receipts import CapturedFile
from ....storage.blobs import SEGMENT_ALIGNMENT, FileBytes, append, make_blob, publish
from ....storage.capture_usage import CaptureUsage
from ....storage.store import (
    TRANSIENT,
    ArtifactStore,
    NotInPlaceError,
    Rewriting,
    Segment,
)
from .finished_rows import FinishedCapture, Outcome

logger = logging.getLogger(__name__)

T = TypeVar("T")
FileSites = dict[str, list[int]]
Write = Callable[[Sequence[FinishedCapture]], Sequence[Outcome]]

#: Approximate bytes of a position in a blob, without its rows: two integers, and their text in the
#: manifest.
_POSITION_BYTES = 32
#: Captures of a group that may fail with transient errors when each is tried alone; after these,
#: the others of the group fail without being tried.
_TRANSIENT_TRIES = 2
#: Maximum number of segments that one writer keeps open, one per tag; the least recently used is
#: closed.
_OPEN_SEGMENTS = 16


@dataclass(frozen=True)
class StoreConfig:
    """Destination and layout of captures. Sizes in bytes."""

    store: ArtifactStore
    owner: str  # part of the segments' names, unique to this process
    segment_limit: int = 64 << 10  # layout `auto` writes captures up to this size to a segment
    segment_bytes: int = 256 << 20  # a segment is closed at this size
    quota: int = 0  # limit of the whole store; 0: none


def _files(capture: FinishedCapture, layout: str) -> list[tuple[str, FileSites]]:
    """Return the separate files of a capture: the suffix of its name, and the sites."""
    if layout == "packed":
        return [("", capture.sites)]
    return [
        (f".{hook}.{layer}", {hook: [layer]})
        for hook, layers in capture.sites.items()
        for layer in layers
    ]


def blob_of(capture: FinishedCapture, sites: FileSites) -> FileBytes:
    """Return a blob of the rows at `sites`: tensors `<hook>.<layer>` `[positions, hidden_size]`,
    with int64 `positions` and `token_ids`.

    The blob refers to the capture's buffers, which must outlive it. Raises what the capture's
    `rows` raises, and ValueError.
    """
    count = len(capture.positions)
    shape = [count, capture.hidden_size]
    tensors: list[tuple[str, str, Sequence[int], Sequence[Any]]] = [
        (f"{hook}.{layer}", capture.dtype, shape, [*capture.rows(hook, layer)] if count else [])
        for hook, layers in sites.items()
        for layer in layers
    ]
    tensors += [
        (name, "int64", [count], [np.array(values, dtype="<i8").tobytes()])
        for name, values in (("positions", capture.positions), ("token_ids", capture.token_ids))
    ]
    return make_blob(capture.manifest(sites), tensors)


def file_name(capture: FinishedCapture, suffix: str = "") -> str:
    """Return the key of a blob in a separate file."""
    spec = capture.spec
    request = f"p{spec.request:04d}.a{spec.attempt}.pp{capture.pp}{capture.part}"
    return f"{capture.capture.tag}/{spec.job}/{request}{suffix}.safetensors"


class Filesystem:
    """The consumer `filesystem`: writes captures into `config.store`, durably.

    Belongs to one writer thread.
    """

    def __init__(self, config: StoreConfig, usage: CaptureUsage, thread: int = 0) -> None:
        """`usage` may be shared. `thread`: number of the writer thread, part of its segments'
        names; the first prepares the store for all.
        """
        self._config = config
        self._usage = usage
        self._owner = f"{config.owner}-{thread}"
        self._numbers = itertools.count()
        # Threads share no segment, so none waits for a lock; after a restart, nothing is appended
        # to what a crash has left.
        self._segments: OrderedDict[str, Segment] = OrderedDict()  # tag → the one appended to
        #: The last write failed because the store accepts no writes.
        self.unavailable = False
        try:
            if not thread:
                config.store.prepare()
        except OSError as error:  # each write fails again, and reports to its own request
            logger.error("cannot write captures to %s: %s", config.store.uri, error)

    def consume(self, captures: Sequence[FinishedCapture]) -> list[Outcome]:
        """Write captures; a failed write does not raise, but is reported in its outcome."""
        outcomes: list[Outcome] = [Outcome()] * len(captures)
        # each group is one commit: all separate files, and the segment of each tag
        groups = by_key(
            (capture.capture.tag if self._layout(capture) == "segment" else None, number)
            for number, capture in enumerate(captures)
        )
        for tag, group in groups.items():
            write = self._publish if tag is None else self._append
            parts = self._parts(group, captures) if tag is not None else [group]
            for numbers in parts:
                for number, outcome in zip(
                    numbers, self._each(write, [captures[n] for n in numbers]), strict=True
                ):
                    outcomes[number] = outcome
        return outcomes

    def _parts(self, group: list[int], captures: Sequence[FinishedCapture]) -> list[list[int]]:
        """Split a segment's group into parts that are written together: for a store that rewrites
        segments, parts small enough to be rewritten in memory.
        """
        store = self._config.store
        if not isinstance(store, Rewriting):
            return [group]
        parts = list[list[int]]()
        size = 0
        for number in group:
            more = (
                captures[number].size
                + _POSITION_BYTES * len(captures[number].positions)
                + SEGMENT_ALIGNMENT
            )
            if not parts or size + more > store.rewritten_bytes:
                parts.append([])
                size = 0
            parts[-1].append(number)
            size += more
        return parts

    def _each(self, write: Write, captures: Sequence[FinishedCapture]) -> list[Outcome]:
        """Call `write` for the group; if that fails, for each capture alone.

        While the store accepts no writes, fail without trying, so that rows do not accumulate.
        """
        if self.unavailable and (trouble := self._config.store.trouble()):
            return [Outcome(error=f"write failed: {trouble}", unavailable=True)] * len(captures)
        try:
            outcomes = list(write(captures))
        except Exception as error:
            self.unavailable = isinstance(error, OSError) and bool(self._config.store.trouble())
            transient = isinstance(error, OSError) and error.errno in TRANSIENT
            failed = Outcome(
                error=f"write failed: {error}", unavailable=self.unavailable or transient
            )
        else:
            self.unavailable = False
            return outcomes
        if self.unavailable or len(captures) == 1:
            return [failed] * len(captures)
        outcomes = []
        for capture in captures:
            waiting = [outcome for outcome in outcomes if outcome.unavailable]
            outcomes += (
                waiting[-1:] if len(waiting) >= _TRANSIENT_TRIES else self._each(write, [capture])
            )
        return outcomes

    def close(self) -> None:
        while self._segments:
            self._segments.popitem()[1].close()

    def _layout(self, capture: FinishedCapture) -> str:
        if capture.capture.layout == "auto":
            return "segment" if capture.size <= self._config.segment_limit else "packed"
        return capture.capture.layout

    def _publish(self, captures: Sequence[FinishedCapture]) -> list[Outcome]:
        """Write captures whose blobs are separate files."""
        files = [
            [
                (file_name(capture, suffix), self._blob(capture, sites))
                for suffix, sites in _files(capture, self._layout(capture))
            ]
            for capture in captures
        ]
        self._usage.take(2 * SEGMENT_ALIGNMENT + blob.size for parts in files for _, blob in parts)
        publish(self._config.store, [file for parts in files for file in parts])
        return [
            Outcome(
                files=tuple(
                    _captured(capture, blob, key, 0, self._layout(capture)) for key, blob in parts
                )
            )
            for capture, parts in zip(captures, files, strict=True)
        ]

    def _blob(self, capture: FinishedCapture, sites: FileSites) -> FileBytes:
        whole = capture.whole(capture) if sites is capture.sites else None
        return blob_of(capture, sites) if whole is None else whole

    def _append(self, captures: Sequence[FinishedCapture]) -> list[Outcome]:
        """Append captures of one tag to the tag's segment."""
        blobs = [blob_of(capture, capture.sites) for capture in captures]
        self._usage.take(SEGMENT_ALIGNMENT + blob.size for blob in blobs)
        segment = self._segment(captures[0].capture.tag)
        try:
            offsets = append(segment, blobs)
        except NotInPlaceError as error:
            logger.warning("%s; writing its captures to another segment", error)
            segment = self._segment(captures[0].capture.tag)
            offsets = append(segment, blobs)
        return [
            Outcome(files=(_captured(capture, blob, segment.key, offset, "segment"),))
            for capture, blob, offset in zip(captures, blobs, offsets, strict=True)
        ]

    def _segment(self, tag: str) -> Segment:
        """Return the tag's open segment, or a new one if the old one is full, in doubt after an
        error, or no longer at its path.
        """
        segment = self._segments.pop(tag, None)
        if segment is not None and (
            segment.size >= self._config.segment_bytes or not segment.usable
        ):
            segment.close()
            segment = None
        if segment is None:
            segment = self._config.store.segment(
                f"{tag}/{SEGMENTS}/{self._owner}.{next(self._numbers)}{SEGMENT_SUFFIX}"
            )
        self._segments[tag] = segment  # the last one used
        while len(self._segments) > _OPEN_SEGMENTS:
            self._segments.popitem(last=False)[1].close()
        return segment


def each(
    action: Callable[[Sequence[T]], Sequence[Outcome]], items: Sequence[T]
) -> list[Outcome | Exception]:
    """Call `action` for the group; if that raises, for each item alone. Return for each item its
    outcome, or the exception that `action` raised for it alone.
    """
    try:
        return list(action(items))
    except Exception as error:
        if len(items) == 1:
            # Without the frames: they would keep the rows' memory.
            return [error.with_traceback(None)]
    return [outcome for item in items for outcome in each(action, [item])]


def _captured(
    capture: FinishedCapture, blob: FileBytes, path: str, offset: int, layout: str
) -> CapturedFile:
    sites = blob.manifest.sites
    return CapturedFile(
        path=path,
        bytes=blob.size,
        crc32=blob.crc32,
        rows=len(capture.positions) * sum(map(len, sites.values())),
        sites=sites,
        positions=len(capture.positions),
        offset=offset,
        layout=layout,
        tag=capture.capture.tag,
        reused=blob.manifest.reused,
        dropped=list(capture.dropped),
        non_finite=blob.manifest.non_finite,
    )
