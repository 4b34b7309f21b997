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
from ....storage.blobs import FileBytes


@dataclass(frozen=True)
class BankColumns:
    """Columns of a bank's rows that this rank holds. See `schemas.model.banks`."""

    row: RowShape  # shape of the whole row
    start: int
    stop: int
    records: bool = True  # this rank is the first of those that hold these columns

    @property
    def size(self) -> int:
        return self.stop - self.start

    def stored(self, heads: Sequence[int]) -> "range | None":
        """Return the columns of the stored row that this rank stores; None if it stores all of
        them. `heads`: the requested heads; empty: all.
        """
        width = self.row.width
        if not heads:
            return range(self.start, self.stop) if self.sharded else None
        places = [
            place for place, head in enumerate(heads) if self.start <= head * width < self.stop
        ]
        if not places:
            return range(0)
        return range(places[0] * width, (places[-1] + 1) * width) if self.sharded else None

    def chosen(self, heads: Sequence[int]) -> list[slice]:
        """Return the columns of this rank's rows that are stored, for the requested `heads`."""
        width = self.row.width
        local = [
            head * width - self.start for head in heads if self.start <= head * width < self.stop
        ]
        return [slice(first, first + width) for first in local] if heads else [slice(None)]

    @property
    def sharded(self) -> bool:
        """Return whether other ranks hold other columns."""
        return self.size < self.row.size


@dataclass(frozen=True)
class Origin:
    """Says where rows come from: the same for all captures of a rank."""

    worker: str
    rank: int
    pp: int
    stages: int
    num_layers: int = 0  # of the whole model; 0: not known
    caveats: tuple[str, ...] = ()  # of the model, see `Manifest`
    identity: str = ""  # of the model, see `Manifest`
    attention: tuple[AttentionKind, ...] = ()  # of the stage's layers
    routing: tuple[RoutingKind, ...] = ()  # of the stage's layers


@dataclass(frozen=True, kw_only=True)
class FinishedCapture(Origin):
    """One capture of a request, built and used in a writer thread. Keeps its rows' memory alive."""

    spec: RankSpec
    capture: StoredCapture
    sites: dict[str, list[int]]  # hook → ascending layers that this stage holds, at least one
    hidden_size: int  # elements of a row
    dtype: str  # of the rows: float32 | bfloat16 | float16
    positions: list[int]  # ascending
    token_ids: list[int]  # the token at each of `positions`
    # (hook, layer) → `[len(positions), hidden_size]`, as buffers in order
    rows: Callable[[str, int], Sequence[memoryview]]
    reused: int = 0  # rows that came from the row store
    dropped: tuple[int, ...] = ()  # positions dropped under overload, not in `positions`
    # (hook, layer) → number of rows that are not finite as stored
    non_finite: dict[tuple[str, int], int] = field(default_factory=dict)
    # (hook, layer, position) of the first row that is not finite in the model's dtype
    unsound: tuple[str, int, int] | None = None
    # result of the reader's `prepare` when the request began, for a capture that is read
    prepared: Any = None
    columns: BankColumns | None = None  # of the rows; None: those of the residual bank
    # returns the blob if the rows are in a file that the store can adopt, else None
    whole: "Callable[[FinishedCapture], FileBytes | None]" = lambda _: None

    @property
    def num_rows(self) -> int:
        return len(self.positions) * sum(len(layers) for layers in self.sites.values())

    @property
    def size(self) -> int:
        """Return the bytes of all rows."""
        return self.num_rows * self.hidden_size * ITEM_BYTES[self.dtype]

    def manifest(self, sites: dict[str, list[int]]) -> Manifest:
        """Return the manifest of a blob that holds `sites` of this capture."""
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
            # The number of stages would not show what is missing: a stage may hold none of the
            # layers.
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
            non_finite=sum(
                self.non_finite.get((hook, layer), 0)
                for hook, layers in sites.items()
                for layer in layers
            ),
            lora=self.spec.lora,
            row=self.columns.row if self.columns is not None else None,
            columns=[] if stored is None else [stored.start, stored.stop],
            heads=self.capture.heads,
            identity=self.identity,
        )

    @property
    def part(self) -> str:
        """Return the file name part for this rank's columns; empty for the residual bank, whose
        rows are whole.
        """
        if self.columns is None:
            return ""
        return f".{self.capture.bank}" + (f".c{self.columns.start}" if self.columns.sharded else "")

    def __str__(self) -> str:
        return f"capture {self.capture.tag} of job {self.spec.job} request {self.spec.request}"


class ReadingError(Exception):
    """A reading that this rank cannot compute, with the reason."""


@dataclass(frozen=True)
class Outcome:
    """A consumer's result for one capture."""

    error: str = ""  # why the consumer failed; empty: it succeeded
    unavailable: bool = False  # with `error`: the store accepts no writes now, but may later
    files: tuple[CapturedFile, ...] = ()  # files, already durable
    rows: bytes = b""  # rows to return in the receipt


class Consumer(Protocol):
    """Gets the captures that name it. Called from writer threads; an installed consumer gets one
    call at a time.
    """

    def consume(self, captures: Sequence[FinishedCapture]) -> Sequence[Outcome]:
        """Consume captures; return one outcome per capture, in order.

        A consumer must copy data that it needs after the call, because the rows' memory is reused.
        If it raises, the whole group has failed, and it is called again for each capture alone.
        """
