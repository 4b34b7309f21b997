"""Per-rank data plane: tracks requests, and calls the parts of a step in order.

The runner adapters call `begin` (new and ended requests) and `plan` (the rows of each request), let
the forward run, then call `drain`; after it, `banks.found` and `probes.news` of the step. An error
in the data plane must not take the engine down: it fails the requests concerned, through their
receipts.
"""

import sys
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch

from ....kernels import IDLE, STREAM, WHOLE
from ....kernels.plan import Buffers
from ....schemas.base.version import __version__
from ....schemas.jobs.receipts import BY_REQUEST
from ....schemas.model.banks import RESIDUAL
from ....schemas.requests.specs import StoredSteering, steering_rows, touched, touched_hooks
from ....schemas.settings.faults import arm
from ....storage.store import open_store
from ..base.actions import ActionLedger
from ..base.config import PlaneConfig, RankPlace
from ..base.engine_step import EngineLoad, Finish, NewRequest, RequestEnd, StepView
from ..base.packed_spec import unpack
from ..base.process import begin_helper
from ..base.row_index import Keeping
from ..edits.model_state import RankState
from ..edits.source_runs import RunStore
from ..edits.steering_tables import Tables
from ..edits.taints import Taints
from ..files.writer import Diversion
from ..hooks.sites import RankSite, stream_hooks
from ..readings.readings import Reader, ReadingConsumer
from ..rows.arena import Arena
from ..rows.banks import BankPart, Banks
from ..rows.delivery import RowConnection, connected
from ..rows.overload import overloads
from ..rows.planner import Tracked
from ..rows.streams import Streams
from .grading import Grading
from .layer_gate import WHOLE_FORWARD, LayerGate
from .probe_scores import Scorer
from .reentry import Reentry
from .reports import Reports
from .requests import Requests
from .step_edits import EditsPart
from .step_loras import Adapters
from .step_parts import RanStep, StepBatch, StepPart
from .step_probes import ProbesPart
from .step_rows import RowsPart

if TYPE_CHECKING:
    from .loras import LoadedAdapters

#: A rank's answer to a call of the worker: whether it succeeded, and why not.
RankAnswer = tuple[bool, str]

_LOST = (
    "internal error: its rows are not where the scheduler announced them, and this "
    "step's forward pass runs without its hook sites"
)
_RESYNCED = (
    "the worker's ranks were resynced while the request ran: its steering cannot be verified"
)


class DataPlane:
    """The data plane of one rank."""

    def __init__(
        self,
        config: PlaneConfig,
        place: RankPlace,
        sites: Sequence[RankSite],
        buffers: Buffers,
        *,
        num_layers: int,
        traced: bool,
        gate: LayerGate | None = None,
        loras: "LoadedAdapters | None" = None,
        readers: Mapping[type, Reader] | None = None,
        inside: Sequence[BankPart] = (),
        connect: RowConnection = connected,
    ) -> None:
        """`sites`, `buffers`: of the residual bank; `inside`: the other banks. `num_layers`: of the
        whole model.

        `traced`: the forward is compiled or graph-captured. `gate`: None if forwards always compute
        all layers. `loras`: None if no adapters are served. `readers`: by the type of
        `StoredCapture.reading`. `connect`: where what is recorded goes.
        """
        self._config = config
        self._place = place
        arm(config.fault, Path(config.outbox_dir).parent)
        hidden_size = buffers.pool.shape[1]
        dtype = buffers.pool.dtype
        self.actions = ActionLedger()
        every = [*sites, *(site for part in inside for site in part.sites)]
        self.runs = RunStore(open_store(config.capture_root), every, hidden_size)
        device = buffers.ring.device
        queue_bytes = config.capture_queue_mib << 20
        # Page-locked memory is touched when a rank starts, and most of the ranks that share layers
        # record few rows.
        locked = (queue_bytes if inside or not place.tp else 0) + (config.row_store_mib << 20)
        self._arena = Arena(
            queue_bytes,
            Path(config.spill_dir) if config.capture_overload == "spill" else None,
            locked=0 if device.type == "cpu" else max(1, locked),
        )
        self.readings = ReadingConsumer(readers or {}, config.memory_limit_kib << 10)
        gives_way = device.type == "cpu" and torch.get_num_threads() >= len(config.cores)
        self._delivery = connect(
            self._arena,
            config,
            place.rank,
            gives_way=gives_way,
            begin=partial(begin_helper, device, gives_way),
            readings=self.readings,
        )
        self._reports = Reports(config, place, self._delivery, self.actions, num_layers=num_layers)
        self._requests = requests = Requests(place.rank, self._reports)
        self._tracked = requests.tracked
        streams = Streams(config.capture_window_mib << 20, self._delivery)
        # tokens in a KV block, the unit in which rows are kept; set once the KV cache is known; 1:
        # no rows are kept
        self.block_size = sys.maxsize if config.row_store_mib else 1
        self._overloads = overloads(config.capture_overload, queue_bytes, self._delivery.backlog)
        residual = BankPart(RESIDUAL, sites, buffers)
        self._table = Tables(self.actions)
        self.banks = Banks(residual, inside, self._table, self.runs, self._arena, self._overloads)
        self._table.prepared.start()
        self.rank_state = RankState(every, num_layers, self._table)
        self._grading = Grading()
        self.probes = Scorer(self._table.vectors, hidden_size, streams=place.stages == 1)
        self._view: StepView | None = None  # the planned step, until it has run
        self.entering = (
            Reentry(requests, gate, self.runs, hidden_size, dtype, device)
            if gate is not None and gate.enters
            else None
        )
        self._gate = gate
        self.loras = loras
        self._rows = RowsPart(
            requests=requests,
            place=place,
            banks=self.banks,
            state=self.rank_state,
            streams=streams,
            overloads=self._overloads,
            arena=self._arena,
            delivery=self._delivery,
            block_size=lambda: self.block_size,
        )
        # One order for all phases: a tuple for each phase would allow any, and would have to be
        # read in as many places.
        parts: list[StepPart | None] = [
            # First, because nothing of a step with a wrong adapter may be used.
            Adapters(requests, loras, self.actions) if loras is not None else None,
            # Rows begin the step's plan; Edits, which may have to wait for the last step's tokens
            # and scores, complete and commit it.
            self._rows,
            EditsPart(requests, self.banks, self.rank_state, self.runs, self.actions, self.probes),
            # After these, so that they skip requests that failed so far.
            self.entering,
            self._grading if place.grades else None,
            # Last, because probes score rows that Rows recorded.
            ProbesPart(requests, self.probes),
        ]
        #: The order within each phase of a step, see `StepPart`; a part without one is not called.
        self._parts = tuple(part for part in parts if part is not None)
        self._begins, self._prepares, self._plans, self._drains, self._settles = (
            [
                getattr(part, phase)
                for part in self._parts
                if getattr(type(part), phase) is not getattr(StepPart, phase)
            ]
            for phase in ("begin", "prepare", "plan", "drain", "settle")
        )
        self.load = EngineLoad()
        self._families = traced and config.graph_families
        self._stream_hooks = stream_hooks(every)
        self._family = WHOLE  # of the next forward
        self._least = IDLE  # of the tracked requests, the smallest family that any may need
        self._idle_steps = 0
        self._preemptions = 0
        # CRC32 of how batches were composed since this rank last had no requests, to compare runs
        self._schedule = 0
        self._token_rows = 0  # token rows computed so far, including rejected drafts

    # --- Calls of the worker

    def describe(self, **changed: Any) -> None:
        """Change fields of `Origin` for every later manifest."""
        self._reports.describe(**changed)

    def forget_failures(self, steps: list[int]) -> None:
        """Forget the failures before a reset of the prefix cache, whose blocks it no longer serves.

        `steps`: for each rank, the step at which the cache was reset.
        """
        step = steps[self._place.rank]
        self._requests.forget_failures(step)
        self._rows.forget_failures(step)

    def expect(self, users: list[Any]) -> None:
        """Lay out steering that requests will soon use, in a thread. `users`: each a
        `list[StoredSteering]` as plain containers.
        """
        for user in users:
            self._table.prepared.expect(
                lambda user=user: steering_rows(  # type: ignore[misc]
                    msgspec.convert(user, list[StoredSteering])
                )
            )

    def restart(self) -> None:
        """Reset the rank: drop all rows, tensors and source runs, and begin the ledger's next
        epoch.

        All tracked requests fail. The engine may continue some of them, without edits, until the
        worker's abort arrives. They stay tracked as failed, so that none is resumed halfway and no
        other request is served the cache blocks that they fill.
        """
        self._requests.fail_all(_RESYNCED)
        for part in self._parts:
            part.forget()
        self.actions.restart()

    def divert(self, to: Diversion | None) -> None:
        """Pass captures and receipts to `to`: see `certificate.certify`.

        None: pass them to consumers and outbox again, and reset the plane as if it were new.
        """
        self._delivery.divert(to)
        if to is None:
            self.restart()
            self.actions.epoch = 0
            self._requests.taints = Taints()
            self._rows.drop_kept()
            self._idle_steps = self._preemptions = self._schedule = self._token_rows = 0

    def fingerprint(self) -> str:
        """Return the CRC32 (8 hex digits) of the rank's state and of the table's contents on the
        device; it is equal for ranks of a stage with equal state.
        """
        loras = self.loras.names() if self.loras is not None else []
        content = (
            self.rank_state.vectors.names(),
            self.runs.names(),
            loras,
            self._table.fingerprint(),
        )
        return f"{zlib.crc32(msgspec.msgpack.encode(content)):08x}"

    def status(self) -> dict[str, Any]:
        """Return checksum, counts and occupancy, for inspection."""
        return {
            "rank": self._place.rank,
            "tp": self._place.tp,
            "pp": self._place.pp,
            "step": self._requests.step,
            "idle_steps": self._idle_steps,
            "checksum": self.actions.checksum,
            "actions": self.actions.count,
            "epoch": self.actions.epoch,
            "rows_used": self._table.used,
            "rows": self._config.steering_rows,
            "entries_used": self._table.entries_used,
            "entries": self._config.steering_entries,
            "vectors": len(self.rank_state.vectors),
            "runs": len(self.runs),
            "requests": len(self._tracked) + len(self._requests.finished),
            "preemptions": self._preemptions,
            "token_rows": self._token_rows,
            "skipped_rows": self._gate.skipped if self._gate is not None else 0,
            "schedule": f"{self._schedule:08x}",
            "tainted": len(self._requests.taints),
            "kept_row_bytes": self._rows.store.held,
            "unkept": self._rows.unkept,
            "spilled_bytes": self._arena.spilled,
            "behind": [work for work, each in self._overloads.items() if each.behind],
            **msgspec.to_builtins(self._delivery.status()),
            "running": self.load.running,
            "queued": self.load.queued,
            "kv_cache": self.load.kv_cache,
        }

    def close(self) -> None:
        """Write and send everything that is pending, then stop."""
        self._arena.landing.wait()
        for part in self._parts:
            part.close()

    # --- The step

    def begin(
        self,
        new: Sequence[NewRequest],
        finished: Mapping[str, Finish],
        preempted: int,
        keeping: Keeping | None = None,
        resumed: dict[str, int] | None = None,
        ends: Sequence[RequestEnd] = (),
        waiting: Sequence[bytes] = (),
        depth: int = 0,
    ) -> None:
        """Begin a step: finish ended requests, then admit new ones, so that table rows are released
        before they are acquired.

        `preempted`: number of requests that lost their KV cache before this step; their rows stay
        recorded. `resumed`: request that resumes now → tokens that the prefix cache serves. `ends`:
        arguments of `Requests.end`. `waiting`: packed specs of requests that will begin in a later
        step. `depth`: its forward ends after so many layers; 0: after all.
        """
        requests = self._requests
        requests.step += 1
        if depth and self._gate is not None:
            self._gate.end = depth
        if self._delivery.held:
            self._delivery.turn()
        self._preemptions += preempted
        ended = (
            {key: end.rows for key, end in finished.items() if key in self._tracked}
            if finished
            else dict[str, int]()
        )
        if ended:
            for begin in self._begins:
                begin(ended)
        for request_id in sorted(ended):
            tracked = self._tracked[request_id]
            with requests.guard([tracked], BY_REQUEST):
                for part in self._parts:
                    part.release(tracked)
                tracked.count(requests.slots)
                self.banks.erase(tracked.slot)
            requests.leave(request_id)
            with requests.guard([tracked], BY_REQUEST):
                requests.finish(tracked, finished[request_id])
        for key, num_tokens in ends:
            requests.end(key, num_tokens)
        if new and not self._tracked:
            self._schedule = 0
            self._least = IDLE
        for packed in waiting:
            self._table.prepared.expect(lambda packed=packed: unpack(packed).spec.rows)  # type: ignore[misc]
        for request in new:
            if request.id in self._tracked:  # in the v2 runner a resumed request arrives as new
                requests.resume(self._tracked[request.id], request.cached_tokens)
            else:
                self._admit(request)
        for request_id, cached_tokens in (resumed or {}).items():
            if request_id in self._tracked:
                requests.resume(self._tracked[request_id], cached_tokens)
        if late := self._arena.late:
            if self._tracked:
                late[-1].done()
            else:  # no step may follow
                late[-1].wait()
        if keeping is not None or self._delivery.held:
            for prepare in self._prepares:
                prepare(keeping)

    def choose(self, windows: Iterable[tuple[str, int, int]]) -> int:
        """Return the family of graphs (see `kernels.ops`) for the forward of these (request, first
        position, count): the smallest that has all launches which a site may need.

        Depends only on data that every rank gets: the ranks of a stage must replay the same graph,
        even if one of them records nothing or its plan fails. A forward that runs as Python, or an
        engine without the setting `graph_families`, has one family.
        """
        self._family = IDLE if self._families else WHOLE
        if self._families and self._tracked:
            for request_id, first, count in windows:
                if (tracked := self._tracked.get(request_id)) is not None:
                    # Conservative, and cheap at each step: gaps in the window, steps of `every_n`
                    # and sites of other stages count as work.
                    begin, end = tracked.touched
                    if first < end and begin < first + count:
                        self._family = min(self._family, tracked.family)
                if self._family == self._least:
                    break
        if self._family == IDLE:
            self._idle_steps += 1
        return self._family

    def plan(self, view: StepView) -> None:
        """Fill the buffers for the next forward pass."""
        self._token_rows += view.num_rows
        self._view = view
        if not self._tracked:
            self.plan_nothing()
            return
        self.banks.precede()
        requests = self._requests
        places = np.stack((view.counts, view.positions))
        # Two runs can agree bit for bit only if vLLM composed their batches identically: tests
        # compare this checksum first.
        self._schedule = zlib.crc32(places.tobytes(), self._schedule)
        batch = requests.batch
        if batch is None or not batch.tokens.move_to(view):
            batch = requests.batch = self._batch_of(view)
        # The v2 runner chooses its graph before it prepares its inputs, so that rows may need more
        # launches than the graph has: their requests fail.
        # no request needs launches that the smallest family of any request lacks
        lost = requests.slots.lost(batch.tokens, self._family) if self._family > self._least else []
        if lost:
            for request_id in lost:
                requests.fail(self._tracked[request_id], _LOST, "intervention_failed")
            batch = self._batch_of(view, lost)
        for plan in self._plans:
            plan(batch, view)
        if self._gate is not None and (self._gate.begin or self._gate.end < WHOLE_FORWARD):
            self._close_layers(self._gate, batch, view)

    def _close_layers(self, gate: LayerGate, batch: StepBatch, view: StepView) -> None:
        """Account for a step that skips layers; fail requests that need one above its end."""
        gate.count(view.num_rows)
        if gate.end == WHOLE_FORWARD:
            return
        for _, tracked in batch.members:
            if not 0 < tracked.spec.depth <= gate.end:
                self._requests.fail(
                    tracked,
                    (
                        f"internal error: its step ended after {gate.end} layers on rank "
                        f"{self._place.rank}"
                    ),
                    BY_REQUEST,
                )

    def _batch_of(self, view: StepView, without: Sequence[str] = ()) -> StepBatch:
        requests = self._requests
        for tracked in requests.stale.values():
            self.banks.write(tracked)
        requests.stale.clear()
        return StepBatch(view, self._tracked, requests.slots_of(view.ids, without), requests.slots)

    def plan_nothing(self) -> None:
        """Have the next forward pass, of no tracked request, do nothing."""
        self.banks.precede()
        if self.banks.loaded:
            with self._requests.guard((), BY_REQUEST):
                self.banks.clear()

    def grade(self, logits: torch.Tensor) -> None:
        """Grade the requests that are due with the logits of the planned step."""
        if self._grading.due:
            with self._requests.guard(self._grading.due, "intervention_failed"):
                for tracked, why in self._grading.take(logits):
                    self._requests.change(tracked)
                    tracked.count(self._requests.slots)
                    self._reports.failed(self._requests.step, tracked, why, "intervention_failed")

    def drain(self, hidden: torch.Tensor | None = None) -> None:
        """Take the captured rows of the last forward pass, and check it.

        `hidden`: output of the last layer, `[tokens, hidden_size]`; None on other stages.
        """
        step = RanStep(self._view, hidden)
        self._view = None
        if self._gate is not None:
            self._gate.end = WHOLE_FORWARD
        for drain in self._drains:
            drain(step)
        for settle in self._settles:
            settle(step)

    def _admit(self, request: NewRequest) -> None:
        requests = self._requests
        spec = request.spec
        if request.unreadable:  # most likely from another version
            requests.fail(
                Tracked(spec),
                (
                    f"rank {self._place.rank} (Midstream {__version__}) cannot read the request: "
                    f"{request.unreadable}"
                ),
                BY_REQUEST,
            )
            return
        tracked = Tracked(
            spec,
            admitted=requests.step,
            cached_tokens=request.cached_tokens,
            touched=touched(spec),
            family=STREAM if touched_hooks(spec) <= self._stream_hooks else WHOLE,
        )
        requests.track(request.id, tracked)
        self._least = min(self._least, tracked.family)
        # every rank must reach this call regardless of its state, since it may be collective
        prepared, unprepared = self.readings.prepare(spec)
        if spec.version != __version__:
            requests.fail(
                tracked,
                (
                    f"the worker runs Midstream {spec.version}, but rank {self._place.rank} runs "
                    f"{__version__}"
                ),
                BY_REQUEST,
            )
            return
        for part in self._parts:
            part.admit(tracked, request)
        for number, recording in tracked.recordings.items():
            recording.prepared = prepared.get(number)
        if unprepared and tracked.failure_kind != "capture_failed":
            requests.fail(tracked, unprepared, "reading_failed")
        for part in self._parts:
            part.acquire(tracked)
        requests.slots.special[tracked.slot] = tracked.special


def answer(action: Callable[[], None]) -> RankAnswer:
    """Run a call of the worker.

    A refused call has changed nothing on this rank.
    """
    try:
        action()
    except (LookupError, ValueError, RuntimeError) as error:
        return False, str(error)
    return True, ""
