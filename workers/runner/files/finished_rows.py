"""Rows that a finished request recorded on this stage, ready for consumers, and the consumers'
results.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ....schemas.base.dtypes import ITEM_BYTES
from ....schemas.base.version import __version__
from ....schemas.jobs.captures import FORMAT, Manifest
from ....schemas.jobs.receipts import CapturedFile
from ....schemas.model.attention import ATTENDING, AttentionKind
from ....schemas.model.banks import RowShape
from ....schemas.model.layer_kinds import of_layers
from ....schemas.model.routing import RoutingKind
from ....schemas.requests.specs import RankSpec, StoredCapture
from ....storage.blobs import Blob


@dataclass(frozen=True)
class Columns:
    """Columns of a bank's rows that this rank holds. See `schemas.model.banks`."""

    row: RowShape  # the whole row
    start: int
    stop: int
    records: bool = True  # it is the first of the ranks that hold the same ones

    @property
    def size(self) -> int:
        return self.stop - self.start

    def stored(self, heads: Sequence[int]) -> "range | None":
        """Return what this rank stores, as columns of all that is stored; None: it stores all of
        it.
        """
        width = self.row.width
        if not heads:
            return range(self.start, self.stop) if self.sharded else None
        places = [
            place for place, head in enumerate(heads) if self.start <= head * width < self.stop
        ]
        return (
            range(places[0] * width, (places[-1] + 1) * width)
            if self.sharded and places
            else range(0)
            if not places
            else None
        )

    def chosen(self, heads: Sequence[int]) -> list[slice]:
        """The columns of this rank's rows that are stored."""
        width = self.row.width
        local = [
            head * width - self.start for head in heads if self.start <= head * width < self.stop
        ]
        return [slice(first, first + width) for first in local] if heads else [slice(None)]

    @property
    def sharded(self) -> bool:
        """Return whether other ranks hold others."""
        return self.size < self.row.size


@dataclass(frozen=True)
class FinishedCapture:
    """One capture of one request.

    Made and used in a writer thread; keeps the rows' memory alive.
    """

    spec: RankSpec
    capture: StoredCapture
    sites: dict[str, list[int]]  # hook → ascending layers that this stage holds, at least one
    hidden_size: int  # elements of a row
    dtype: str  # of the rows as they come: float32 | bfloat16 | float16
    positions: list[int]  # ascending
    token_ids: list[int]  # the token at each of `positions`
    worker: str
    rank: int
    pp: int
    stages: int
    # (hook, layer) → `[len(positions), hidden_size]`, as buffers in order
    rows: Callable[[str, int], Sequence[memoryview]]
    reused: int = 0  # rows that came from the row store
    dropped: tuple[int, ...] = ()  # positions dropped under overload, not in `positions`
    num_layers: int = 0  # of the whole model; 0: not known
    caveats: tuple[str, ...] = ()  # of the model: see `Manifest`
    identity: str = ""  # likewise
    attention: tuple[AttentionKind, ...] = ()  # of the stage's layers
    routing: tuple[RoutingKind, ...] = ()  # likewise
    # (hook, layer) → rows that are not finite as stored
    non_finite: dict[tuple[str, int], int] = field(default_factory=dict)
    # (hook, layer, position) of the first row that the model computed so
    unsound: tuple[str, int, int] | None = None
    # of a capture that is read: what its reader made of the reading when the request began
    prepared: Any = None
    columns: Columns | None = None  # of the rows; None: those of the residual bank
    # its blob, where the rows are in a file that the store can take
    whole: "Callable[[FinishedCapture], Blob | None]" = lambda _: None

    @property
    def num_rows(self) -> int:
        return len(self.positions) * sum(len(layers) for layers in self.sites.values())

    @property
    def size(self) -> int:
        """Bytes of all rows."""
        return self.num_rows * self.hidden_size * ITEM_BYTES[self.dtype]

    def count_non_finite(self, sites: dict[str, list[int]]) -> int:
        """Return how many of the rows of `sites` are not finite, as they are stored."""
        return sum(
            self.non_finite.get((hook, layer), 0)
            for hook, layers in sites.items()
            for layer in layers
        )

    def manifest(self, sites: dict[str, list[int]]) -> Manifest:
        """For a blob that holds `sites` of this capture."""
        stored = None if self.columns is None else self.columns.stored(self.capture.heads)
        return Manifest(
            format=FORMAT,
            version=__version__,
            job=self.spec.job,
            request=self.spec.request,
            attempt=self.spec.attempt,
            worker=self.worker,
            rank=self.rank,
            pp=self.pp,
            stages=self.stages,
            sites=sites,
            stage_sites=self.sites,
            at=self.capture.at,
            dtype=self.dtype,
            hidden_size=self.hidden_size,
            prompt_tokens=self.spec.prompt_tokens,
            positions=self.positions,
            token_ids=self.token_ids,
            reused=self.reused
            * sum(map(len, sites.values()))
            // sum(map(len, self.sites.values())),
            dropped=list(self.dropped),
            tag=self.capture.tag,
            all_sites={
                str(hook): layers
                for hook, layers in (self.capture.sites | self.capture.beside).items()
            },
            requests=self.spec.requests.get(self.capture.tag, 0),
            num_layers=self.num_layers,
            caveats=list(self.caveats),
            attention=of_layers(
                self.attention,
                {layer for hook in ATTENDING & sites.keys() for layer in sites[hook]},
            ),
            routing=of_layers(self.routing, sites.get("router", [])),
            images=self.spec.images,
            non_finite=self.count_non_finite(sites),
            lora=self.spec.lora,
            row=self.columns.row if self.columns is not None else None,
            columns=[] if stored is None else [stored.start, stored.stop],
            heads=self.capture.heads,
            identity=self.identity,
        )

    @property
    def part(self) -> str:
        """Return which part of the capture it is, for the names of files; empty: the only one of
        its stage.
        """
        if self.columns is None:
            return ""
        return f".{self.capture.bank}" + (f".c{self.columns.start}" if self.columns.sharded else "")

    def __str__(self) -> str:
        return f"capture {self.capture.tag} of job {self.spec.job} request {self.spec.request}"


class ReadingError(Exception):
    """A reading that this rank cannot give, with the reason."""


@dataclass(frozen=True)
class Outcome:
    """A consumer's result for one capture."""

    error: str = ""  # why it failed; empty: it did not
    away: bool = False  # with `error`: the store takes nothing now, and would take this later
    files: tuple[CapturedFile, ...] = ()  # durable when this is returned
    rows: bytes = b""  # to come back in the receipt


class Consumer(Protocol):
    """Gets the captures that name it.

    Called from writer threads, for one consumer one call at a time.
    """

    def consume(self, captures: Sequence[FinishedCapture]) -> Sequence[Outcome]:
        """One outcome per capture, in order.

        What it keeps beyond this call it must copy: the rows' memory is used again.

        If it raises, nothing of the group counts, and each capture is offered again alone.
        """
