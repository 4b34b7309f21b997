"""Describes what a job does, as it is stored with the job: the base of each kind's record, with
what the ledger and the workers ask of it.
"""

from functools import cached_property
from typing import NamedTuple

import msgspec

from ..base.errors import MidstreamError, Translated
from ..base.records import Record, from_msgpack, to_msgpack
from .kinds import installed

#: In place of a record: the job answers its prompts.
NOTHING_MORE = msgspec.Raw(b"")


class SideOf(NamedTuple):
    """What only a few jobs may read at a time, and not once it is deleted; of these side jobs a
    worker computes one at a time.
    """

    record: str  # key of its record
    kept: str  # of what such jobs have found: id → result
    open: str  # of the ids of those that have not ended
    limit: str  # name of the limit on both together


class WorkFacts(NamedTuple):
    """Answers what every job is asked. The defaults are those of a job that answers its prompts."""

    title: str = ""  # the text by which people recognise it; empty: its first prompt
    tokens: int = 0  # an estimate of what it costs, beside its prompts
    requests: int = 0  # how many there may be, beside one for each prompt
    cells: int = 0  # the most that are computed exactly
    tags: tuple[str, ...] = ()  # of captures that become files, beside those of its prompts
    # field of the request → tokens that the model must have room for, beside its prompts
    lengths: tuple[tuple[str, int], ...] = ()
    writes_files: bool = False  # beside those of captures
    wants_receipts: bool = False  # ranks report on its requests, whatever the job asks of them
    side: SideOf | None = None  # what it reads, if that may be deleted


class Work(Record, tag="prompts", dict=True):
    """Answering the job's prompts, and no more."""

    @property
    def packed(self) -> msgspec.Raw:
        """The record as a job has it."""
        return msgspec.Raw(to_msgpack(self))

    @cached_property
    def facts(self) -> WorkFacts:
        return WorkFacts()

    def continues(self, request: int) -> bool:
        """Return whether a prompt of the job is continued; otherwise its own tokens count."""
        return True


def opened(kind: str, packed: msgspec.Raw) -> Work:
    """Return the work of a job. Raises MidstreamError: `not_installed` for a kind whose package is
    not installed here, `version_mismatch` for the work of another version.
    """
    row = installed(kind)
    if packed == NOTHING_MORE:
        return Work()
    with Translated(
        msgspec.ValidationError,
        lambda error: MidstreamError(
            "version_mismatch", f"another version accepted a job of kind {kind!r}: {error}"
        ),
    ):
        work: Work = from_msgpack(packed, row.load("work"))
        return work
