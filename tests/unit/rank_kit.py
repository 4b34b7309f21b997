"""A rank without a model: sites, buffers and planner as in an engine, and a forward that only
visits the sites.

The stream that reaches hook h of layer l for token position p of request r is a function of (r, p,
h, l) alone, so that every captured row says where it comes from.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from midstream import __version__
from midstream.broker.receipts.outbox import Outbox
from midstream.kernels import STREAM, WHOLE, pair_site, single_site
from midstream.kernels.plan import COLUMNS, COUNTS, NO_SLOT, ROWS_PER_TOKEN, Buffers
from midstream.schemas.base.tensors import content_hash, from_numpy
from midstream.schemas.jobs.receipts import Receipt
from midstream.schemas.prompts.selectors import HOOKS
from midstream.schemas.requests.interventions import FAMILIES, SCALARS
from midstream.schemas.requests.specs import (
    RankSpec,
    SteeringRow,
    StoredCapture,
    StoredSteering,
    steering_rows,
    with_columns,
)
from midstream.schemas.requests.steering import GlobalSteering
from midstream.storage.store import open_store
from midstream.workers.runner.base.backlog import Backlog
from midstream.workers.runner.base.config import PlaneConfig
from midstream.workers.runner.base.engine_step import StepView
from midstream.workers.runner.edits.source_runs import RunStore
from midstream.workers.runner.edits.steering_tables import RowTable, VectorStore
from midstream.workers.runner.files.desk import Desk, EndedRequest
from midstream.workers.runner.files.finished_rows import FinishedCapture, Origin
from midstream.workers.runner.hooks.sites import RankSite
from midstream.workers.runner.rows.arena import Arena, BankRows
from midstream.workers.runner.rows.capture import Ports, Recording
from midstream.workers.runner.rows.delivery import Near, RowDelivery
from midstream.workers.runner.rows.overload import overloads
from midstream.workers.runner.rows.planner import Planner, Tracked
from midstream.workers.runner.rows.slot_table import Slots, StepTokens

HIDDEN = 5


def plane_config(folder: Path, **changed: Any) -> PlaneConfig:
    """The configuration of a small rank whose files lie in `folder`."""
    usual: dict[str, Any] = {
        "version": __version__,
        "worker": "w",
        "boot": "b",
        "relay_url": "tcp://127.0.0.1:9",
        "outbox_dir": str(folder / "outbox"),
        "capture_root": str(folder / "captures"),
        "hooks": [],
        "step_rows": 0,
        "capture_queue_mib": 1,
        "capture_window_mib": 64,
        "capture_overload": "block",
        "spill_dir": str(folder / "spill"),
        "row_store_mib": 1,
        "sweep_entry": False,
        "writer_threads": 1,
        "segment_limit_kib": 64,
        "segment_mib": 1,
        "memory_limit_kib": 64,
        "capture_quota_mib": 0,
        "cores": [0],
    }
    return PlaneConfig(**(usual | changed))


def nearby(
    arena: Arena, config: PlaneConfig, rank: int, *, gives_way: bool, **options: Any
) -> RowDelivery:
    """See `DataPlane`'s `connect`: threads of this process write the files."""
    outbox = Outbox(Path(config.outbox_dir), config.worker, rank, config.relay_url)
    backlog = Backlog()
    near = Near(arena, Desk(arena.memory, config, outbox, backlog, **options))
    return RowDelivery(near, near, backlog)


def make_buffers(
    sites: int, *, capacity: int, ring_rows: int = 0, configurations: int = 8, entries: int = 64
) -> Buffers:
    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    return Buffers(
        ring=zeros(ring_rows, HIDDEN, dtype=torch.float32),
        plan=zeros(sites, COLUMNS),
        lists=zeros((4 * sites + 1) * capacity, dtype=torch.int64),
        token_rows=zeros(capacity, ROWS_PER_TOKEN),
        capture_slots=torch.full((1, capacity), NO_SLOT, dtype=torch.int32),
        site_rows=zeros(sites, len(FAMILIES), 1 + configurations),
        pool=zeros(1 + entries, HIDDEN, dtype=torch.float32),
        scalars=zeros(1 + entries, SCALARS, dtype=torch.float32),
        counts=zeros(sites, COUNTS),
        sizes=zeros(sites, capacity, dtype=torch.float32),
    )


def view_of(*windows: tuple[str, int, int], inputs: torch.Tensor | None = None) -> StepView:
    """A step of these requests, each with its first position and its number of rows."""
    ids, firsts, counts = zip(*windows, strict=True) if windows else ((), (), ())
    return StepView(ids, counts, firsts, [1] * len(ids), inputs)


@dataclass
class Request:
    """`number` makes its rows its own."""

    number: int
    prompt_tokens: int
    total: int  # prompt and generated
    captures: Sequence[StoredCapture] = ()
    steering: Sequence[StoredSteering] = ()
    everyone: GlobalSteering = field(default_factory=GlobalSteering)
    max_tokens: int = 0  # as its sampling says; 0: unknown
    tracked: Tracked = field(init=False)
    asks: bool = field(init=False)  # whether it is captured or steered

    def __post_init__(self) -> None:
        spec = RankSpec(
            version="v",
            job=f"j{self.number}",
            request=0,
            attempt=1,
            prompt_tokens=self.prompt_tokens,
        )
        spec.captures.extend(self.captures)
        self.tracked = Tracked(spec)
        self.steer(*self.everyone.at(self.prompt_tokens), *self.steering)
        self.asks = bool(spec.captures or spec.rows)

    def steer(self, *entries: StoredSteering) -> None:
        """Steer it also with these."""
        rows = self.tracked.spec.rows
        rows[:] = with_columns(steering_rows([*self.tracked.spec.steering, *entries]))


class Rank:
    """Layers `0 … layers − 1` with all six hooks; even hooks are pairs, odd ones single tensors."""

    def __init__(
        self,
        layers: int = 2,
        *,
        capacity: int = 64,
        traced: bool = False,
        policy: str = "block",
        spill_dir: Path | None = None,
        runs_root: Path | None = None,
    ) -> None:
        """`runs_root`: the capture root that source runs are read from."""
        self.sites = [
            RankSite(
                hook,
                layer,
                "pair" if HOOKS.index(hook) % 2 == 0 else "single",
                group=STREAM if hook == "post_block" else WHOLE,
            )
            for layer in range(layers)
            for hook in HOOKS
        ]
        self.buffers = make_buffers(len(self.sites), capacity=capacity)
        self.vectors = VectorStore()
        self.runs = RunStore(open_store(runs_root or "/nowhere"), self.sites, HIDDEN)
        self.table = RowTable(self.sites, self.buffers, self.vectors, self.runs)
        self.arena = Arena(1 << 24, spill_dir, rest_s=0)
        self.backlog = Backlog()  # which may have 100 bytes
        made = overloads(policy, 100, self.backlog)
        memory = BankRows(self.arena, HIDDEN, torch.float32, made["writer"].spills)
        self.planner = Planner(self.sites, self.buffers, self.table, memory, made)
        self.slots = Slots()
        self.tokens = None
        self.ports = Ports(self.sites, HIDDEN, "float32")
        self._traced = traced
        # what the last forward's streams were after the sites
        self.left: dict[tuple[str, int], np.ndarray] = {}

    def vector(self, values: np.ndarray) -> str:
        tensor = from_numpy(values.astype(np.float32))
        self.vectors.put({content_hash(tensor): tensor})
        return content_hash(tensor)

    def admit(self, request: Request) -> Request:
        self.tokens = None  # as a data plane does
        found = enumerate(
            Recording.of(capture, self.ports, request.prompt_tokens) for capture in request.captures
        )
        request.tracked.recordings = {
            number: recording for number, recording in found if recording is not None
        }
        request.tracked.rows = [(self.table.acquire(row)[0], row) for row in self.rows(request)]
        request.tracked.slot = self.slots.take((0, 0), WHOLE)
        self.planner.write(request.tracked)
        return request

    def rows(self, request: Request) -> list[SteeringRow]:
        return request.tracked.spec.rows

    def plan(self, *windows: tuple[Request, int, int], again: bool = True) -> bool:
        """(request, first position, how many) in batch order. Of a request that asks for nothing
        the planner does not hear, as in a data plane; its rows move those of the others. Returns
        whether the step repeats the one before, which it may do if `again`.
        """
        view = view_of(*((str(request.number), first, count) for request, first, count in windows))
        if not (again and self.tokens and self.tokens.move_to(view)):
            slots = [request.tracked.slot for request, _, _ in windows]
            self.tokens = StepTokens(view, np.array(slots, dtype=np.int64))
        self.planner.plan_capture(self.tokens)
        self.planner.plan_steering(self.tokens, self.slots)
        mine = self.tokens.of_requests
        stops = self.tokens.stops
        self.slots.reached[mine] = np.maximum(self.slots.reached[mine], stops)
        self.planner.commit()
        for request, _, _ in windows:
            request.tracked.count(self.slots)
        return self.planner.repeats

    def step(self, *windows: tuple[Request, int, int]) -> None:
        self.plan(*windows)
        self.forward(*windows)
        due = (
            np.zeros_like(self.buffers.counts.numpy())
            if self.planner.due is None
            else self.planner.due.counts
        )
        assert self.buffers.counts.tolist() == due.tolist(), (
            "what the sites did is not what was planned"
        )
        self.buffers.counts.zero_()
        if self.planner.due is not None:
            self.planner.drain()
        self.planner.leave()

    def forward(self, *windows: tuple[Request, int, int]) -> None:
        for index, site in enumerate(self.sites):
            stream = torch.tensor(
                np.concatenate(
                    [
                        stream_of(request.number, site.hook, site.layer, first, count)
                        for request, first, count in windows
                    ]
                )
            )
            arguments = [
                getattr(self.buffers, name)[index : index + 1]
                if name in ("plan", "site_rows")
                else getattr(self.buffers, name)
                for name in (each.name for each in fields(self.buffers))
            ]
            if site.busy or self._traced:
                if site.kind == "pair":
                    residual = torch.full_like(stream, 0.5)
                    hidden = stream - residual
                    pair_site(hidden, residual, *arguments, group=site.group)
                    stream = hidden + residual
                else:
                    single_site(stream, *arguments, group=site.group)
            self.left[site.hook, site.layer] = stream.numpy()

    def finish(self, request: Request, capture: int = 0) -> FinishedCapture:
        recording = request.tracked.recordings[capture]
        receipt = Receipt(
            version="v",
            worker="w",
            boot="b",
            job="j",
            request=0,
            attempt=1,
            rank=0,
            world=1,
            tp=0,
            pp=0,
            step=0,
            actions=0,
            checksum="",
            status="ok",
        )
        ended = EndedRequest(
            receipt=receipt,
            spec=request.tracked.spec,
            captures=[recording.ended(capture, [])],
            token_ids=list(range(1000, 1000 + request.total)),
            rows=request.total - 1,
        )
        memory = self.arena.memory
        origin = Origin("w", 0, 0, 1)
        (build,) = ended.job(memory.bytes, memory.wait, origin, {}, {}).builds
        return build()


def stream_of(number: int, hook: str, layer: int, first: int, count: int) -> np.ndarray:
    """float32 `[count, HIDDEN]`; small integers and halves: every sum is exact."""
    positions = np.arange(first, first + count, dtype=np.float32)
    place = (number * len(HOOKS) + HOOKS.index(hook)) * 4 + layer  # type: ignore[arg-type]
    return np.repeat((place * 64 + positions)[:, None], HIDDEN, axis=1)


def rows_of(finished: FinishedCapture, hook: str, layer: int) -> np.ndarray:
    """float32 `[positions, HIDDEN]`."""
    return np.concatenate(
        [
            np.frombuffer(part, dtype="<f4").reshape(-1, HIDDEN)
            for part in finished.rows(hook, layer)
        ]
    )


def wanted_rows(request: Request, finished: FinishedCapture, hook: str, layer: int) -> np.ndarray:
    """What the rows must be when nothing was edited."""
    return np.concatenate(
        [stream_of(request.number, hook, layer, position, 1) for position in finished.positions]
    )


def assert_whole(rank: Rank, request: Request, number: int = 0) -> FinishedCapture:
    """The capture of this number has every row that its request asked for, unedited."""
    finished = rank.finish(request, number)
    spec = request.captures[number]
    assert finished.positions == list(spec.select(0, request.total - 1, request.prompt_tokens))
    assert finished.token_ids == [1000 + position for position in finished.positions]
    for hook, layers in spec.sites.items():
        for layer in layers:
            assert (
                rows_of(finished, hook, layer) == wanted_rows(request, finished, hook, layer)
            ).all(), (hook, layer)
    return finished


def capture(
    positions: Any = "all", at: str = "before", every_n: int = 1, **sites: list[int]
) -> StoredCapture:
    return StoredCapture(
        sites=sites or {"post_block": [0, 1]},  # type: ignore[arg-type]
        positions=positions,
        tag="t",
        at=at,  # type: ignore[arg-type]
        every_n=every_n,
    )


def steering(
    vectors: str | list[str],
    layers: list[int],
    hook: str = "post_block",
    positions: Any = "all",
    family: str = "add",
    numbers: Sequence[float] = (),
    *,
    scale: float = 1.0,
    rank: int = 0,
) -> StoredSteering:
    """One entry of a request's steering; what has a strength has it in full if `numbers` does not
    say how much.
    """
    tensors = [vectors] if isinstance(vectors, str) else vectors
    given = list(numbers) or ([] if family == "add" else [1.0])
    return StoredSteering(
        layers=layers,
        hook=hook,
        positions=positions,
        family=family,
        tensors=tensors,
        scale=scale,
        numbers=given,
        rank=rank,  # type: ignore[arg-type]
    )
