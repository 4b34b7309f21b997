"""Per-rank data plane: tracks requests, has their rows planned, and accounts for both.

The adapters call `begin` (new and ended requests), `plan` (the rows of each request), let the
forward run, then `drain`. An error in here must not take the engine down: it fails the requests
concerned, through their receipts.
"""

import logging
import os
import sys
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec
import torch

from ....broker.receipts.curve import client_keys
from ....broker.receipts.outbox import Outbox
from ....kernels.plan import ROWS_PER_TOKEN
from ....schemas.base.faults import arm
from ....schemas.base.version import __version__
from ....schemas.model.attention import AttentionKind
from ....schemas.model.banks import RESIDUAL
from ....schemas.model.routing import RoutingKind
from ....schemas.prompts.selectors import select
from ....schemas.requests.specs import RankSpec, StoredSteering, columns_of, steering_rows, touched
from ....storage.calls import CALLS
from ....storage.file_store import scratch
from ....storage.store import open_store
from ..base.config import Place, PlaneConfig
from ..base.engine_step import Finish, Load, NewRequest, StepView
from ..base.host_memory import HostMemoryError
from ..base.process import begin_helper
from ..base.row_index import Keeping, KeptBlock
from ..edits.actions import ActionLedger
from ..edits.installed_ops import check_here
from ..edits.model_state import RankState
from ..edits.prepared_rows import rows_of
from ..edits.source_runs import RunStore
from ..edits.steering_tables import HeldRows
from ..edits.taints import Taints
from ..files.writer import Diversion, make_writer
from ..hooks.sites import Buffers, Site
from ..probes.gates import gates_of
from ..readings.readings import Reader, Readings
from ..rows.banks import Banks, Part
from ..rows.capture import Extent, Recording
from ..rows.execution_check import Miscount
from ..rows.finite_check import NonFinite, precedes_edits, reason
from ..rows.memory_bound import Room
from ..rows.mover import Mover
from ..rows.overload import Overload
from ..rows.planner import Tracked
from ..rows.row_store import RowStore
from ..rows.slabs import SlabPool
from ..rows.streams import Streams
from .faults import Faults
from .grading import Grading
from .probe_scores import Scorer
from .reentry import Reentry, ReentryGate
from .reports import Reports, unreadable

if TYPE_CHECKING:
    from .loras import Loras

logger = logging.getLogger(__name__)

#: A rank that cannot deliver receipts ends with this code, and so the engine does: jobs are then
#: tried elsewhere.
EXIT_NO_RECEIPTS = 70
#: How long a closing rank waits for the relay to take its receipts; what is left is sent after the
#: next start.
FLUSH_S = 5.0

_TAINTED = "its cached prefix was computed by a request whose intervention failed"
_TAINTING = "its cached prefix is being computed by a request whose intervention failed"
_IDLE = (
    "internal error: its rows are not where the scheduler said: the step's forward "
    "pass runs without hook sites"
)
_BEGAN_ANEW = (
    "the worker's ranks were resynced while the request ran: its steering cannot be verified"
)


class DataPlane:
    """One per rank."""

    def __init__(
        self,
        config: PlaneConfig,
        place: Place,
        sites: Sequence[Site],
        buffers: Buffers,
        *,
        num_layers: int,
        traced: bool,
        gate: ReentryGate | None = None,
        loras: "Loras | None" = None,
        readers: Mapping[type, Reader] | None = None,
        inside: Sequence[Part] = (),
    ) -> None:
        """`sites`, `buffers`: of the residual bank; `inside`: the other banks.

        `num_layers`: of the whole model.

        `traced`: the forward is compiled or graph-captured. `gate`: where it may begin, if it may.
        `loras`: None if no adapters are served.
        `readers`: what computes readings, by the type of `StoredCapture.reading`.
        """
        self._config, self._place = config, place
        self.faults = Faults(config.fault, place.rank)
        arm(config.fault, Path(config.outbox_dir).parent)
        self._hidden_size, self._dtype = buffers.ring.shape[1], buffers.ring.dtype
        self.actions = ActionLedger(self.faults.of_action)
        every = [*sites, *(site for part in inside for site in part.sites)]
        self.runs = RunStore(
            open_store(config.capture_root), every, self._hidden_size, self.faults.of_run
        )
        queue_bytes = config.capture_queue_mib << 20
        self._slabs = SlabPool(
            queue_bytes, Path(config.spill_dir), pinned=buffers.ring.device.type != "cpu"
        )
        curve = client_keys(config.curve_secret_file, config.curve_server_key)
        self._outbox = Outbox(
            Path(config.outbox_dir),
            config.worker,
            place.rank,
            config.relay_url,
            on_fatal=_give_up,
            curve=curve,
        )
        device = buffers.ring.device
        begin = partial(
            begin_helper,
            device,
            device.type == "cpu" and torch.get_num_threads() >= len(config.cores),
        )
        self.readings = readings = Readings(
            readers or {}, config.memory_limit_kib << 10, self.faults.of_reading
        )
        self._writer = make_writer(
            config, place.rank, self._outbox, self.faults.of_write, begin, readings
        )
        self._reports = Reports(
            config,
            place,
            self._writer,
            self.actions,
            hidden_size=self._hidden_size,
            dtype=self._dtype,
            num_layers=num_layers,
        )
        self._streams = Streams(
            open_store(config.capture_root),
            partial(scratch, Path(config.spill_dir)),
            config.capture_window_mib << 20,
            self._reports.origin,
            hidden_size=self._hidden_size,
            dtype=self._dtype,
        )
        # of blocks whose rows are kept; set once it is known
        self.block_size = sys.maxsize if config.row_store_mib else 1
        self._overload = Overload(
            config.capture_overload, queue_bytes, lambda: self._writer.backlog
        )
        self._mover = Mover(begin)
        self._room = Room(
            self._slabs,
            queue_bytes,
            self._overload,
            self._mover,
            self._writer,
            self._streams,
            self._hidden_size,
            self._dtype,
        )
        residual = Part(RESIDUAL, sites, buffers)
        self._banks = Banks(
            residual,
            inside,
            self.runs,
            self.faults.of_row,
            self._slabs,
            self._overload,
            self._mover,
            traced=traced,
        )
        self._table = self._banks.table
        self._table.prepared.start()
        self._rows = HeldRows(self._table, self.actions)
        self.rank_state = RankState(
            every, num_layers, self._table, self.actions, lambda: self._step
        )
        self._row_store, self._keeping = RowStore(self._mover), cast("Keeping | None", None)
        self._grading = Grading()
        waits, whole = device.type == "cpu", place.stages == 1
        self._probes = Scorer(
            self._table.vectors,
            self._hidden_size,
            waits=waits,
            streams=whole,
            faulty=self.faults.of_score,
        )
        self.probe_news = self._probes.news  # of the step that ran last, as `found`
        self._view: StepView | None = None  # of the step that was planned and has not run
        self.entering = (
            Reentry(gate, self.runs, self._hidden_size, self._dtype, buffers.ring.device)
            if gate is not None
            else None
        )
        self.loras = loras
        # the last step in which a failed request did not leave rows that the scheduler takes for
        # kept
        self._unkept = 0
        self._tracked: dict[str, Tracked] = {}
        self._taints = Taints()
        self._live: set[str] = set()  # keys of the tracked
        # reported by the worker, for requests that have not finished here
        self._ends: dict[str, int] = {}
        # finished here; the worker has not reported where they end
        self._finished: dict[str, tuple[Tracked, Finish]] = {}
        self.load = Load()
        self._traced = traced
        self._idle = False  # the forward that follows is of the idle family
        self._step = self._idle_steps = 0
        self._preemptions = 0
        # how batches were composed since this rank last began with nothing to do: two runs can be
        # compared
        self._schedule = 0
        self._token_rows = 0  # computed so far, rejected drafts included

    # -- calls of the worker
    # ----------------------------------------------------------------------------------------------

    def cleanse(self, steps: list[int]) -> None:
        """The prefix cache was reset at each rank's step in `steps`: earlier failures can no longer
        be served from it.
        """
        step = steps[self._place.rank]
        self._taints.forget(
            step, {tracked.spec.digest for tracked in self._tracked.values() if tracked.failure}
        )
        if self._unkept <= step:
            self._unkept = 0

    def end(self, key: str, num_tokens: int) -> None:
        """Record where a request (`RankSpec.key`) ends, as reported by the worker: after
        `num_tokens`, prompt included, or -1: forget it.

        Called in `begin`, with what travelled with the step: every rank gets it in the same one.

        The engine may have computed more by then, and calls an output that a stop string ended, as
        well as a cancelled one, aborted.
        """
        if key in self._finished:
            tracked, finish = self._finished.pop(key)
            with self._guard([tracked], ""):
                self._close(tracked, finish.token_ids, num_tokens)
        elif key in self._live:
            self._ends[key] = num_tokens

    def expect(self, users: list[Any]) -> None:
        """Lay out steering that requests will have soon, in a thread: each a `list[StoredSteering]`
        as plain containers.
        """
        for user in users:
            self._table.prepared.expect(
                lambda user=user: steering_rows(  # type: ignore[misc]
                    msgspec.convert(user, list[StoredSteering])
                )
            )

    def restart(self) -> None:
        """Reset: no rows, tensors, source runs or steering state, and an empty ledger in its next
        epoch.

        Every request that is here fails with the reason. The engine may continue some of them,
        without any edit, until the worker's abort arrives: they are kept as failed ones, so that
        none is resumed halfway and no request is served the cache blocks that they fill.
        """
        waiting = [tracked for tracked, _ in self._finished.values()]
        for tracked in [*waiting, *self._tracked.values()]:
            self._fail(tracked, _BEGAN_ANEW, "")
            tracked.holds([])
            tracked.recordings = {}
        self._finished.clear()
        self._table.clear()
        self.runs.clear()
        self.rank_state.forget()
        self._grading.forget()
        self._probes.clear()
        self.actions.restart()

    def divert(self, to: Diversion | None) -> None:
        """Give captures and receipts to `to`: see `certify`.

        None: to where they belong, from a plane that never saw a request.
        """
        self._writer.divert(to)
        if to is None:
            self.restart()
            self.actions.epoch = 0
            self._taints = Taints()
            self._row_store.clear()
            self._unkept = self._idle_steps = self._preemptions = self._schedule = (
                self._token_rows
            ) = 0

    def stamp(self, caveats: Sequence[str]) -> None:
        """The caveats of every later manifest."""
        self._reports.origin["caveats"] = tuple(caveats)

    def describe(self, attention: Sequence[AttentionKind], routing: Sequence[RoutingKind]) -> None:
        """Set how the stage's layers attend and choose experts, for every later manifest."""
        self._reports.origin |= {"attention": tuple(attention), "routing": tuple(routing)}

    def fingerprint(self) -> str:
        """CRC32, 8 hex digits, of all that is here and of the table as the device has it: equal
        where ranks of a stage are.
        """
        loras = self.loras.names() if self.loras is not None else []
        content = self.rank_state.names(), self.runs.names(), loras, self._table.fingerprint()
        return f"{zlib.crc32(msgspec.msgpack.encode(content)):08x}"

    def status(self) -> dict[str, Any]:
        """For inspection: checksum, counts, occupancy."""
        return {
            "rank": self._place.rank,
            "tp": self._place.tp,
            "pp": self._place.pp,
            "step": self._step,
            "idle_steps": self._idle_steps,
            "checksum": self.actions.checksum,
            "actions": self.actions.count,
            "epoch": self.actions.epoch,
            "global_version": self.rank_state.steering.version,
            "global_digest": self.rank_state.steering.digest,
            "modules": self.rank_state.modules,
            "rows_used": self._table.used,
            "rows": self._config.steering_rows,
            "entries_used": self._table.entries_used,
            "entries": self._config.steering_entries,
            "vectors": len(self.rank_state.vectors),
            "runs": len(self.runs),
            "run_bytes": self.runs.bytes,
            "requests": len(self._tracked) + len(self._finished),
            "preemptions": self._preemptions,
            "token_rows": self._token_rows,
            "entered_steps": self.entering.steps if self.entering is not None else 0,
            "skipped_rows": self.entering.skipped if self.entering is not None else 0,
            "schedule": f"{self._schedule:08x}",
            "tainted": len(self._taints),
            "kept_row_bytes": self._row_store.held,
            "unkept": self._unkept,
            "spilled_bytes": self._slabs.spilled,
            "outbox": self._outbox.depth(),
            "backlog": self._writer.backlog,
            "behind": self._overload.behind,
            **self._writer.totals,
            "running": self.load.running,
            "queued": self.load.queued,
            "kv_cache": self.load.kv_cache,
            "store": msgspec.to_builtins(CALLS.read()),
        }

    def close(self) -> None:
        """Write and send what is pending, then stop."""
        self._table.prepared.close()
        self._writer.close()
        self._mover.close()
        self._outbox.flush(FLUSH_S)
        self._outbox.close()

    # -- the step
    # ----------------------------------------------------------------------------------------------

    def begin(
        self,
        new: Sequence[NewRequest],
        finished: dict[str, Finish],
        preempted: int,
        keeping: Keeping | None = None,
        resumed: dict[str, int] | None = None,
        ends: Sequence[tuple[str, int]] = (),
        waiting: Sequence[dict[str, Any]] = (),
    ) -> None:
        """Requests that ended before this step, then new ones: rows are released before they are
        acquired.

        `preempted`: requests that lost their KV cache before this step; their rows stay recorded.
        `resumed`: those that continue now → tokens that the prefix cache serves them. `ends`: what
        `end` takes. `waiting`: specs of requests that will come in a later step.
        """
        self._keeping = keeping
        self._step += 1
        self._preemptions += preempted
        needed = {
            request_id: len(finish.token_ids)
            for request_id, finish in finished.items()
            if request_id in self._tracked
        }
        with self._guard(self._tracked.values(), ""):
            self._judge(self._banks.settle(needed))
        with self._guard(
            [tracked for tracked in self._tracked.values() if tracked.watch is not None],
            "probe_failed",
        ):
            over = [
                watch
                for request_id in needed
                if (watch := self._tracked[request_id].watch) is not None
            ]
            self._probes.settle(
                wait=bool(needed)
                or any(tracked.gates is not None for tracked in self._tracked.values()),
                over=over,
            )
        for request_id in sorted(finished):
            tracked = self._tracked.pop(request_id, None)
            if tracked is not None:
                with self._guard([tracked], ""):
                    self._finish(tracked, finished[request_id])
        for key, num_tokens in ends:
            self.end(key, num_tokens)
        if new and not self._tracked:
            self._schedule = 0
        for spec in waiting:
            self._table.prepared.expect(partial(rows_of, spec))
        for request in new:
            if request.id in self._tracked:  # in the v2 runner a resumed request arrives as new
                self._check_cached(self._tracked[request.id], request.cached_tokens)
            else:
                self._admit(request)
        for request_id, cached_tokens in (resumed or {}).items():
            if request_id in self._tracked:
                self._check_cached(self._tracked[request_id], cached_tokens)
        for block in keeping.serve if keeping else ():
            self._with_recording(block, self._row_store.serve)
        if recording := [
            tracked
            for tracked in self._tracked.values()
            if tracked.recordings and not tracked.reported
        ]:
            with self._guard(recording, "capture_failed"):
                self._room.make(recording, self._guard)

    def choose(self, windows: Iterable[tuple[str, int, int]]) -> bool:
        """Return whether the forward of these (request, first position, how many) is of the idle
        family, in which no site does anything.

        From what every rank is sent alone: the ranks of a stage must replay the same graph, also
        those that record nothing or whose own plan fails. A forward that runs as Python has no
        families, and asks each site.
        """
        self._idle = self._traced and not (
            self._tracked and any(self._touches(*window) for window in windows)
        )
        self._idle_steps += self._idle
        return self._idle

    def _touches(self, request_id: str, first: int, count: int) -> bool:
        tracked = self._tracked.get(request_id)
        return (
            tracked is not None
            and first < tracked.touched[1]
            and tracked.touched[0] < first + count
        )

    def plan(self, view: StepView) -> None:
        """Fill the buffers for the forward pass that follows."""
        self._token_rows += view.num_rows
        self._view = view
        if not self._tracked:
            return
        places = [(rows.first_row, rows.num_rows, rows.first_position) for rows in view.requests]
        self._schedule = zlib.crc32(msgspec.msgpack.encode(places), self._schedule)
        own = [(self._tracked[rows.id], rows) for rows in view.requests if rows.id in self._tracked]
        if self._idle:
            lost = {
                rows.id
                for _, rows in own
                if self._touches(rows.id, rows.first_position, rows.num_rows)
            }
            for request_id in lost:
                self._fail(self._tracked[request_id], _IDLE, "intervention_failed")
            own = [(tracked, rows) for tracked, rows in own if rows.id not in lost]
        for tracked, rows in own:
            if tracked.gates is not None and (
                why := tracked.decide(rows.first_position + rows.num_rows)
            ):
                self._fail(tracked, f"{why} (rank {self._place.rank})", "probe_failed")
        with self._guard([tracked for tracked, _ in own if tracked.rows], "intervention_failed"):
            self._banks.plan_steering(own)
        with self._guard([tracked for tracked, _ in own if tracked.recordings], "capture_failed"):
            if "plan" in self.faults:
                raise RuntimeError("fault injected: plan")
            self._banks.plan_capture(own)
        with self._guard([tracked for tracked, _ in own if tracked.rows or tracked.recordings], ""):
            if "commit" in self.faults:
                raise HostMemoryError("fault injected: commit")
            self._banks.commit()
        if self._banks.busy and self.faults.of_site():
            self._banks.lose_site()
        if self.entering is not None:
            with self._guard(
                [tracked for tracked, _ in own if tracked.spec.entry is not None],
                "intervention_failed",
            ):
                self.entering.plan(
                    own, view, lambda tracked, why: self._fail(tracked, why, "intervention_failed")
                )
        if self._place.grades:
            self._grading.plan(own, view)

    def grade(self, logits: torch.Tensor) -> None:
        """Take these as the logits of the planned step, unless no request waits for any."""
        if self._grading.due:
            with self._guard(self._grading.due, "intervention_failed"):
                for tracked, why in self._grading.take(logits):
                    self._reports.failed(self._step, tracked, why, "intervention_failed")

    def drain(self, hidden: torch.Tensor | None = None) -> None:
        """Take the captured rows of the forward pass that ran.

        `hidden`: `[tokens, hidden_size]`, what left the last layer; None on other stages.
        """
        view, self._view = self._view, None
        if self.loras is not None and view is not None:
            self.loras.account(self._step, view, self._tracked, self.actions, self.faults.of_lora)
        with self._guard(self._tracked.values(), ""):
            self._banks.take(self._step, view, hidden if self._place.grades else None)
        if self.entering is not None:
            self.entering.done()
        if self._banks.busy:
            recorded: list[tuple[Recording, Extent]] = []
            with self._guard(
                [tracked for tracked in self._tracked.values() if tracked.recordings],
                "capture_failed",
            ):
                recorded = self._banks.drain()
            self._score(recorded)
        with self._guard(self._tracked.values(), ""):
            if "settle" in self.faults:
                raise RuntimeError("fault injected: settle")
            self._judge(self._banks.settle())
        if self._keeping is not None:
            for block in self._keeping.keep:
                if block.request_id in self._tracked and self._tracked[block.request_id].reported:
                    self._unkept = self._step
                self._with_recording(block, self._row_store.keep)
            self._row_store.drop(self._keeping.drop)
            self._keeping = None
        self._room.leave(view, self._tracked, self.block_size, self._guard)

    def _score(self, recorded: list[tuple[Recording, Extent]]) -> None:
        """Score the rows of this step that probes watch, and those that the prefix cache served."""
        if watched := [
            tracked
            for tracked in self._tracked.values()
            if tracked.watch is not None and not tracked.reported
        ]:
            with self._guard(watched, "probe_failed"):
                self._probes.take(
                    recorded,
                    [recording for tracked in watched for recording in tracked.recordings.values()],
                )

    def found(self) -> Callable[[], list[tuple[str, int]]]:
        """Return (request, first position) of the rows of the last step that are not finite.

        Waits for the step, in any thread.
        """
        return self._banks.found()

    def _judge(self, non_finites: Sequence[NonFinite | Miscount]) -> None:
        """Fail the requests whose edits left rows that are not finite, or whose sites did not do
        what was planned.

        Of other rows that are not finite, note that the model made them so.
        """
        for item in non_finites:
            if isinstance(item, Miscount):
                self._miscounted(item)
                continue
            tracked = self._tracked.get(item.id)
            if tracked is None or tracked.reported:
                continue
            place = (item.site.hook, item.site.layer) if item.site is not None else None
            if not item.edited and (
                tracked.unsound or precedes_edits(tracked.spec, item.position, place, after=False)
            ):
                tracked.unsound = True
            else:
                self._fail(
                    tracked,
                    f"{reason(tracked.spec, item)} (rank {self._place.rank})",
                    "intervention_failed",
                    since=item.step,
                )

    def _miscounted(self, miscount: Miscount) -> None:
        """Fail the request; where its rows were not captured as planned, also those that may have
        been served rows of that step.
        """
        concerned = [tracked for tracked in [self._tracked.get(miscount.id)] if tracked is not None]
        if miscount.kind == "capture_failed":
            self._row_store.clear()
            self._unkept = self._step
            concerned += [
                item
                for item in self._tracked.values()
                if any(recording.reused for recording in item.recordings.values())
            ]
        for tracked in concerned:
            self._fail(
                tracked, f"{miscount} (rank {self._place.rank})", miscount.kind, since=miscount.step
            )

    def _with_recording(
        self, block: KeptBlock, action: Callable[[int, Recording, int, int], None]
    ) -> None:
        """Let the row store act on the recording that a block's rows belong to, if this rank has
        one.
        """
        tracked = self._tracked.get(block.request_id)
        recording = (
            tracked.recordings.get(block.capture)
            if tracked is not None and not tracked.reported
            else None
        )
        if tracked is not None and recording is not None:
            with self._guard([tracked], "capture_failed"):
                action(block.number, recording, block.first, block.stop)

    @contextmanager
    def _guard(self, tracked: Collection[Tracked], kind: str) -> Iterator[None]:
        """An error in here fails these requests and nothing else."""
        try:
            yield
        except Exception as error:
            logger.exception("the data plane failed in step %d", self._step)
            for request in list(tracked):
                self._fail(
                    request,
                    f"internal error on rank {self._place.rank}: {type(error).__name__}: {error}",
                    kind,
                )

    # -- requests
    # ----------------------------------------------------------------------------------------------

    def _admit(self, request: NewRequest) -> None:
        try:
            spec = msgspec.convert(request.spec, RankSpec)
        except msgspec.ValidationError as error:  # another version's, most likely
            self._fail(
                unreadable(request.spec),
                (
                    f"rank {self._place.rank} (Midstream {__version__}) cannot read the request: "
                    f"{error}"
                ),
                "",
            )
            return
        tracked = Tracked(
            spec, admitted=self._step, cached_tokens=request.cached_tokens, touched=touched(spec)
        )
        self._tracked[request.id] = tracked
        self._live.add(spec.key)
        # every rank must get here: no state of a single rank may prevent it
        prepared, unprepared = self.readings.prepare(spec)
        if spec.version != __version__:
            self._fail(
                tracked,
                (
                    f"the worker runs Midstream {spec.version}, but rank {self._place.rank} runs "
                    f"{__version__}"
                ),
                "",
            )
            return
        try:
            for capture in spec.captures:
                for hook, layers in capture.sites.items():
                    self.rank_state.check_sites(hook, layers)
            recordings = [
                self._banks.recording(capture, self._place.tp == 0) for capture in spec.captures
            ]
        except ValueError as error:
            # it is steered all the same: its cached blocks say that they were
            self._fail(tracked, str(error), "capture_failed")
        if not tracked.reported:
            tracked.recordings = {
                number: recording
                for number, recording in enumerate(recordings)
                if recording is not None
            }
            with self._guard([tracked], "probe_failed"):
                tracked.watch = self._probes.watch(request.id, spec, tracked.recordings.values())
                tracked.gates = gates_of(spec, tracked.watch)
            for number, recording in tracked.recordings.items():
                recording.stream = self._streams.of(spec, recording, request.max_tokens)
                recording.prepared = prepared.get(number)
            if unprepared:
                self._fail(tracked, unprepared, "reading_failed")
        needed = steering_rows(spec.global_steering) + steering_rows(spec.steering)
        try:
            if self._taints.spoil(spec, request.cached_tokens):
                raise RuntimeError(_TAINTED)
            if needed and "admit" in self.faults:
                raise RuntimeError("fault injected: admit")
            if (most := max(columns_of(needed), default=-1) + 1) > ROWS_PER_TOKEN:
                raise ValueError(
                    f"its steering takes {most} rows of the table at one token; at most "
                    f"{ROWS_PER_TOKEN} are allowed"
                )
            for entry in (*spec.global_steering, *spec.steering):
                self.rank_state.check_sites(entry.hook, entry.layers)
                check_here([entry])
            tracked.holds(self._rows.acquire(self._step, needed))
            if needed:
                self.actions.fold(self._step, "steer", *spec.ids, spec.digest)
        except Exception as error:
            # raised with a reason; a sweep may raise thousands of them
            known = type(error) in (LookupError, ValueError)
            logger.error("request %s cannot be steered: %s", spec.key, error, exc_info=not known)
            self._fail(tracked, str(error), "intervention_failed")

    def _check_cached(self, tracked: Tracked, cached_tokens: int) -> None:
        """Check a resumed request, which may continue on blocks that another one computed."""
        tracked.admitted, tracked.cached_tokens = self._step, cached_tokens
        if self._taints.spoil(tracked.spec, cached_tokens):
            self._fail(tracked, _TAINTED, "intervention_failed")

    def _finish(self, tracked: Tracked, finish: Finish) -> None:
        tracked.edited = [(spec, self._banks.num_sites(row, spec)) for row, spec in tracked.rows]
        self._rows.release(self._step, tracked.rows)
        tracked.holds([])
        tracked.stopped_by = finish.stopped_by
        key = tracked.spec.key
        self._live.discard(key)
        end = self._ends.pop(key, None)
        if tracked.reported:
            self._taints.renew(tracked.spec.digest, self._step)
            return
        if not finish.aborted and not tracked.spec.told_when_over:
            self._close(tracked, finish.token_ids, len(finish.token_ids))
        elif end is not None:
            self._close(tracked, finish.token_ids, end)
        else:
            self._finished[key] = (tracked, finish)

    def _close(self, tracked: Tracked, token_ids: list[int], num_tokens: int) -> None:
        """Write what was recorded of the first `num_tokens` tokens, and report; with -1 neither."""
        if num_tokens >= 0:
            token_id = token_ids[:num_tokens]
            # The last sampled token was never fed back, unless a probe found in its row that the
            # request ends there.
            rows = len(token_id) - (
                1 if len(token_id) < len(token_ids) or not tracked.stopped_by else 0
            )
            for row, sites in tracked.edited:
                # rejected drafts, and what was computed before the end was known, are not its own
                beyond = select(row.positions, rows, tracked.reached, tracked.spec.prompt_tokens)
                tracked.applied -= len(tracked.open_of(row, beyond)) * sites
            self._reports.over(self._step, tracked, token_id, rows)

    def _fail(self, tracked: Tracked, message: str, kind: str, since: int | None = None) -> None:
        """Report the failure now, without waiting for the request to end.

        The request continues in the engine and fills cache blocks that claim its interventions:
        their digest is tainted.
        `since`: the step in which it went wrong, where that is not this one.
        """
        self._reports.failed(self._step, tracked, message, kind)
        digest = tracked.spec.digest
        edited = kind not in ("capture_failed", "probe_failed")
        # else no request, not even itself, is served what it fills under this digest
        shared = edited and tracked.spec.entry is None
        if digest and shared and (self._taints.add(digest, self._step) or since is not None):
            first = self._step if since is None else since
            for other in list(self._tracked.values()):
                # came in the same step or later, on blocks that this one was to fill
                served = other.cached_tokens > other.spec.first_affected
                if (
                    other.spec.digest == digest
                    and other.admitted >= first
                    and served
                    and not other.reported
                ):
                    self._fail(other, _TAINTING, kind)


def _give_up(error: Exception) -> None:
    """Receipts cannot be kept or delivered: without them no request may succeed, so this rank must
    not continue.
    """
    logger.critical("this rank cannot deliver receipts: %s", error)
    os._exit(EXIT_NO_RECEIPTS)
