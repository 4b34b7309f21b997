"""What does this rank do in each engine step? It keeps the requests, plans the rows, and accounts for both.

The adapters call `begin` (who came, who ended), `plan` (which rows are whose), let the forward run, then `drain`.
Nothing that goes wrong in here may take the engine down: it fails the requests concerned, through their receipts.
"""

import itertools
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from ... import __version__
from ...broker.outbox import Outbox
from ...kernels.pair_site import CAPTURE, CAPTURE_START, SCATTERED, STEER
from ...schemas.receipts import Receipt
from ...schemas.selectors import PositionSelector, select
from ...schemas.specs import RankSpec, SteeringRow, StoredCapture, steering_rows
from ...schemas.tensors import Tensor
from ..storage import PendingFile
from .actions import ActionLedger
from .capture import Recording, Run, SlabBudget
from .config import PlaneConfig
from .faults import Faults
from .sites import SharedBuffers, Site, Switch
from .steering import RowTable, VectorStore
from .step import Finish, NewRequest, StepView
from .writer import WriteJob, Writer

logger = logging.getLogger(__name__)

_DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


@dataclass(frozen=True)
class Place:
    """Where this rank stands: global rank, number of ranks, place in its stage, stage."""

    rank: int
    world: int
    tp: int
    pp: int


@dataclass
class Tracked:
    """A live request that asked for something."""

    spec: RankSpec
    rows: list[tuple[int, SteeringRow]] = field(default_factory=list)
    recording: Recording | None = None
    applied: int = 0
    failure: str = ""
    reported: bool = False


class DataPlane:
    """One per rank."""

    def __init__(
        self,
        config: PlaneConfig,
        place: Place,
        sites: Sequence[Site],
        shared: SharedBuffers,
        switch: Switch,
        *,
        traced: bool,
    ) -> None:
        """`traced`: the forward is compiled or graph-captured, so the sites' buffers may not be replaced."""
        self._config, self._place, self._sites, self._shared, self._switch = config, place, list(sites), shared, switch
        self._traced = traced
        self.faults = Faults(config.fault, place.rank)
        reference = self._sites[0].captured
        self._device, self._hidden_size, self._dtype = reference.device, reference.shape[1], reference.dtype
        self.actions = ActionLedger()
        self.vectors = VectorStore(self._hidden_size)
        self._table = RowTable(self._sites, config.steering_rows, self.vectors)
        self._budget = SlabBudget(config.capture_queue_mib << 20)
        self._outbox = Outbox(Path(config.outbox_dir), config.worker, place.rank, config.relay_url)
        self._writer = Writer(Path(config.capture_root), self._outbox, config.writer_threads, fail_writes=lambda: "write" in self.faults)
        self._tracked: dict[str, Tracked] = {}
        self._step = 0
        self._preemptions = 0
        self._counts = np.zeros((len(self._sites), 4), dtype=np.int32)
        self._runs: list[tuple[Tracked, int, int, int]] = []  # (request, slab row, first position, rows)
        self._slab: torch.Tensor | None = None
        self._slab_layers: dict[int, int] = {}

    # -- what the worker asks for (each answer is (ok, message)) ---------------------------------------------------

    def put_vectors(self, vectors: dict[str, Tensor]) -> tuple[bool, str]:
        """Keep vectors by content hash; all or none."""
        added = []
        try:
            if "put_vectors" in self.faults:
                raise RuntimeError("fault injected: put_vectors")
            for name, tensor in sorted(vectors.items()):
                if name not in self.vectors:
                    self.vectors.put(name, tensor)
                    added.append(name)
        except (ValueError, RuntimeError) as error:
            for name in added:
                self.vectors.drop(name)
            return False, str(error)
        for name in added:
            self.actions.fold(self._step, "vector_put", name)
        return True, ""

    def drop_vectors(self, names: list[str]) -> tuple[bool, str]:
        """Forget vectors, also as the rollback of a `put_vectors` that failed elsewhere."""
        for name in sorted(names):
            if name in self.vectors:
                self.vectors.drop(name)
                self.actions.fold(self._step, "vector_drop", name)
        return True, ""

    def status(self) -> dict[str, Any]:
        """For inspection: checksum, count, occupancy."""
        return {
            "rank": self._place.rank,
            "tp": self._place.tp,
            "pp": self._place.pp,
            "step": self._step,
            "checksum": self.actions.checksum,
            "actions": self.actions.count,
            "rows_used": self._table.used,
            "rows": self._config.steering_rows,
            "vectors": len(self.vectors),
            "requests": len(self._tracked),
            "preemptions": self._preemptions,
            "outbox": self._outbox.depth(),
        }

    def close(self) -> None:
        """Write and send what is pending, then stop."""
        self._writer.close()
        self._outbox.flush(5.0)
        self._outbox.close()

    # -- the step ---------------------------------------------------------------------------------------------------

    def begin(self, new: Sequence[NewRequest], finished: dict[str, Finish], preempted: int) -> None:
        """Who ended before this step, then who came: rows are given back before they are asked for.

        `preempted`: requests that lost their KV cache before this step; their rows stay recorded.
        """
        self._step += 1
        self._preemptions += preempted
        for request_id in sorted(finished):
            tracked = self._tracked.pop(request_id, None)
            if tracked is not None:
                with self._guard([tracked]):
                    self._finish(tracked, finished[request_id])
        for request in new:
            if request.id not in self._tracked:  # a resumed request arrives as new in the v2 runner
                with self._guard([]):
                    self._admit(request)
        if self._tracked:
            self._budget.wait(self._writer.busy)

    def plan(self, view: StepView) -> None:
        """Fill the buffers for the forward pass that follows."""
        if not self._tracked:
            return
        mine = [(self._tracked[rows.id], rows) for rows in view.requests if rows.id in self._tracked]
        with self._guard([tracked for tracked, _ in mine]):
            if "plan" in self.faults:
                raise RuntimeError("fault injected: plan")
            self._counts[:] = 0
            self._plan_steering(mine)
            self._plan_capture(mine)
            busy = bool(self._counts.any())
            if busy or self._switch.active:
                self._stage_counts()
            self._switch.active = busy

    def drain(self) -> None:
        """Take the captured rows of the forward pass that ran."""
        if not self._switch.active:
            return
        tracked = [run[0] for run in self._runs]
        with self._guard(tracked):
            if self._slab is not None:
                if self._traced:
                    for index, site in enumerate(self._sites):
                        count = int(self._counts[index, CAPTURE])
                        if count:
                            self._slab[self._slab_layers[site.layer], :count] = site.captured[:count]
                for request, row, position, count in self._runs:
                    assert request.recording is not None
                    request.recording.runs.append(Run(self._slab, self._slab_layers, row, position, count))
        self._idle()

    def _idle(self) -> None:
        self._runs, self._slab = [], None
        self._counts[:] = 0
        self._stage_counts()
        self._switch.active = False

    @contextmanager
    def _guard(self, tracked: Sequence[Tracked]) -> Iterator[None]:
        """An error in here fails these requests and nothing else."""
        try:
            yield
        except Exception as error:
            logger.exception("the data plane failed in step %d", self._step)
            for request in tracked:
                self._fail(request, f"internal error on rank {self._place.rank}: {error!r}")
            self._idle()

    # -- requests ---------------------------------------------------------------------------------------------------

    def _admit(self, request: NewRequest) -> None:
        spec = msgspec.convert(request.spec, RankSpec)
        tracked = self._tracked[request.id] = Tracked(spec)
        if spec.version != __version__:
            self._fail(tracked, f"the worker runs Midstream {spec.version}, rank {self._place.rank} runs {__version__}")
            return
        if spec.capture is not None:
            held = {site.layer for site in self._sites}
            tracked.recording = Recording(spec.capture, [layer for layer in spec.capture.layers if layer in held])
        try:
            if spec.steering and "admit" in self.faults:
                raise RuntimeError("fault injected: admit")
            for row_spec in steering_rows(spec.steering):
                row, written = self._table.acquire(row_spec)
                tracked.rows.append((row, row_spec))
                if written and "skip_action" not in self.faults:
                    self.actions.fold(self._step, "row_admit", row_spec.key)
            if spec.steering:
                self.actions.fold(self._step, "steer", spec.job, spec.request, spec.attempt, spec.digest)
        except (LookupError, RuntimeError) as error:
            self._release_rows(tracked)
            self._fail(tracked, str(error))

    def _release_rows(self, tracked: Tracked) -> None:
        for _, row_spec in tracked.rows:
            if self._table.release(row_spec.key):
                self.actions.fold(self._step, "row_release", row_spec.key)
        tracked.rows = []

    def _finish(self, tracked: Tracked, finish: Finish) -> None:
        self._release_rows(tracked)
        if tracked.reported or finish.aborted:
            return
        receipt = self._receipt(tracked)
        recording = tracked.recording
        if recording is None or not recording.layers or self._place.tp != 0:
            self._writer.submit(WriteJob(receipt))
            return
        size = sum(run.count for run in recording.runs) * len(recording.layers) * self._hidden_size * self._dtype.itemsize
        spec, token_ids = tracked.spec, finish.token_ids
        expected = _expected_rows(recording.spec, spec.prompt_tokens, len(token_ids))
        self._writer.submit(WriteJob(receipt, lambda: self._pending_file(spec, recording, token_ids, expected), size, hold=recording))

    def _fail(self, tracked: Tracked, message: str) -> None:
        """Report the failure now: nobody has to wait for the request to end."""
        if not tracked.reported:
            tracked.failure, tracked.reported = message, True
            self._writer.submit(WriteJob(self._receipt(tracked)))

    def _receipt(self, tracked: Tracked) -> Receipt:
        spec, place = tracked.spec, self._place
        return Receipt(
            version=__version__,
            worker=self._config.worker,
            boot=self._config.boot,
            job=spec.job,
            request=spec.request,
            attempt=spec.attempt,
            rank=place.rank,
            world=place.world,
            tp=place.tp,
            pp=place.pp,
            step=self._step,
            actions=self.actions.count,
            checksum=self.actions.checksum,
            status="error" if tracked.failure else "ok",
            message=tracked.failure,
            applied=tracked.applied,
        )

    def _pending_file(self, spec: RankSpec, recording: Recording, token_ids: list[int], expected: list[int]) -> PendingFile:
        """The packed file of one request and stage; raises RuntimeError when a row that should be there is not."""
        capture = recording.spec
        positions, rows = recording.finish(before=len(token_ids) - 1)
        if positions != expected:
            missing = sorted(set(expected) - set(positions))
            raise RuntimeError(f"positions {missing[:8]} were not recorded ({len(missing)} of {len(expected)})")
        shape, count = [len(positions), self._hidden_size], len(positions)
        dtype = _DTYPE_NAMES[self._dtype]
        chosen = [token_ids[position] for position in positions]
        tensors: list[tuple[str, str, Sequence[int], Sequence[Any]]] = [
            (f"{capture.hook}.{layer}", dtype, shape, rows[layer]) for layer in recording.layers
        ]
        tensors += [
            (name, "int64", [count], [np.array(values, dtype="<i8").tobytes()])
            for name, values in (("positions", positions), ("token_ids", chosen))
        ]
        name = f"p{spec.request:04d}.a{spec.attempt}.pp{self._place.pp}.safetensors"
        manifest = {
            "format": "midstream.packed.1",
            "version": __version__,
            "job": spec.job,
            "request": spec.request,
            "attempt": spec.attempt,
            "worker": self._config.worker,
            "rank": self._place.rank,
            "pp": self._place.pp,
            "hook": capture.hook,
            "layers": recording.layers,
            "dtype": dtype,
            "hidden_size": self._hidden_size,
            "prompt_tokens": spec.prompt_tokens,
            "positions": positions,
            "token_ids": chosen,
        }
        return PendingFile(
            f"{capture.tag}/{spec.job}/{name}",
            tensors,
            manifest,
            rows=count * len(recording.layers),
            layers=recording.layers,
            positions=count,
        )

    # -- planning ---------------------------------------------------------------------------------------------------

    def _plan_steering(self, mine: Sequence[tuple[Tracked, Any]]) -> None:
        tokens: list[np.ndarray] = []
        rows: list[np.ndarray] = []
        touched: set[int] = set()
        free = len(self._shared.steer_tokens)
        for tracked, place in mine:
            chosen = [(row, _window(spec.positions, place, tracked.spec.prompt_tokens)) for row, spec in tracked.rows]
            free -= (needed := sum(len(positions) for _, positions in chosen))
            if free < 0:
                free += needed
                self._fail(tracked, f"steering names {needed} (token, row) pairs in one step, {free} are free")
                continue
            for row, positions in chosen:
                if len(positions):
                    tokens.append(positions - place.first_position + place.first_row)
                    rows.append(np.full(len(positions), row, dtype=np.int64))
                    tracked.applied += len(positions) * len(self._table.layers(row))
                    touched |= self._table.layers(row)
        if not tokens:
            return
        self._stage(self._shared.steer_tokens, np.concatenate(tokens))
        self._stage(self._shared.steer_rows, np.concatenate(rows))
        for index, site in enumerate(self._sites):
            if site.layer in touched:
                self._counts[index, STEER] = sum(map(len, tokens))

    def _plan_capture(self, mine: Sequence[tuple[Tracked, Any]]) -> None:
        """Slots go to the requests with the most layers first, so that a layer gathers a prefix and little besides."""
        wanted: list[tuple[Tracked, Any, np.ndarray]] = []
        for tracked, place in mine:
            if tracked.recording is not None and tracked.recording.layers and not tracked.reported:
                chosen = _window(tracked.recording.spec.positions, place, tracked.spec.prompt_tokens)
                if len(chosen):
                    wanted.append((tracked, place, chosen))
        if not wanted:
            return
        wanted.sort(key=lambda item: -len(item[0].recording.layers))  # type: ignore[union-attr]
        tokens: list[np.ndarray] = []
        slot = 0
        last_slot: dict[int, int] = {}
        for tracked, place, chosen in wanted:
            tokens.append(chosen - place.first_position + place.first_row)
            for first, count in _contiguous(chosen):
                self._runs.append((tracked, slot + first, int(chosen[first]), count))
            slot += len(chosen)
            for layer in tracked.recording.layers:  # type: ignore[union-attr]
                last_slot[layer] = slot
        index = np.concatenate(tokens)
        contiguous = int(index[0]) if bool((np.diff(index) == 1).all()) else SCATTERED
        self._stage(self._shared.capture_tokens, index)
        layers = sorted(last_slot)
        self._slab_layers = {layer: place for place, layer in enumerate(layers)}
        self._slab = self._budget.new_slab(len(layers), slot, self._hidden_size, self._dtype)
        for place, site in enumerate(self._sites):
            if site.layer in last_slot:
                self._counts[place, CAPTURE] = last_slot[site.layer]
                self._counts[place, CAPTURE_START] = contiguous
                if not self._traced:
                    site.captured = self._slab[self._slab_layers[site.layer]]

    def _stage(self, buffer: torch.Tensor, values: np.ndarray) -> None:
        """Copy to a persistent int64 buffer; what lies behind is zeroed on accelerators, where sizes are fixed."""
        if self._device.type == "cpu":
            buffer.numpy()[: len(values)] = values
            return
        staged = torch.zeros(len(buffer), dtype=torch.int64, pin_memory=True)
        staged[: len(values)] = torch.from_numpy(values)
        buffer.copy_(staged, non_blocking=True)

    def _stage_counts(self) -> None:
        for index, site in enumerate(self._sites):
            if self._device.type == "cpu":
                site.counts.numpy()[:] = self._counts[index]
            else:
                site.counts.copy_(torch.from_numpy(self._counts[index].copy()), non_blocking=True)


def _window(selector: PositionSelector, place: Any, prompt_tokens: int) -> np.ndarray:
    """Positions of this step's rows that `selector` names, int64 ascending."""
    chosen = select(selector, place.first_position, place.first_position + place.num_rows, prompt_tokens)
    return np.arange(chosen.start, chosen.stop, dtype=np.int64) if isinstance(chosen, range) else np.array(chosen, dtype=np.int64)


def _contiguous(values: np.ndarray) -> list[tuple[int, int]]:
    """(first index, length) of each run of consecutive values."""
    breaks = np.flatnonzero(np.diff(values) != 1) + 1
    edges = [0, *breaks.tolist(), len(values)]
    return [(a, b - a) for a, b in itertools.pairwise(edges)]


def _expected_rows(capture: StoredCapture, prompt_tokens: int, num_tokens: int) -> list[int]:
    """The positions that must be there when a request of `num_tokens` ended: its last token was never fed back."""
    return list(select(capture.positions, 0, num_tokens - 1, prompt_tokens)) if num_tokens > prompt_tokens else []
