"""Per-rank data plane: tracks requests, and calls the parts of a step in their order.

The adapters call `begin` (new and ended requests), `plan` (the rows of each request), let the
forward run, then `drain`. An error in here must not take the engine down: it fails the requests
concerned, through their receipts.
"""

import logging
import os
import sys
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from ....broker.receipts.curve import client_keys
from ....broker.receipts.outbox import Outbox
from ....schemas.base.faults import arm
from ....schemas.base.version import __version__
from ....schemas.jobs.receipts import BY_REQUEST
from ....schemas.model.attention import AttentionKind
from ....schemas.model.banks import RESIDUAL
from ....schemas.model.routing import RoutingKind
from ....schemas.requests.specs import StoredSteering, steering_rows, touched
from ....storage.calls import CALLS
from ....storage.file_store import scratch
from ....storage.store import open_store
from ..base.config import Place, PlaneConfig
from ..base.engine_step import Finish, Load, NewRequest, StepView
from ..base.process import begin_helper
from ..base.row_index import Keeping
from ..edits.actions import ActionLedger
from ..edits.model_state import RankState
from ..edits.prepared_rows import rows_of
from ..edits.source_runs import RunStore
from ..edits.taints import Taints
from ..files.writer import Diversion, make_writer
from ..hooks.sites import Buffers, Site
from ..readings.readings import Reader, Readings
from ..rows.banks import Banks, Part
from ..rows.memory_bound import Room
from ..rows.mover import Mover
from ..rows.overload import Overload
from ..rows.planner import Tracked
from ..rows.row_store import RowStore
from ..rows.slabs import SlabPool
from ..rows.streams import Streams
from .grading import Grading
from .probe_scores import Scorer
from .reentry import Reentry, ReentryGate
from .reports import Reports
from .requests import Requests
from .step_edits import Edits
from .step_loras import Adapters
from .step_parts import RanStep, StepPart
from .step_probes import Probes
from .step_rows import Rows

if TYPE_CHECKING:
    from .loras import Loras

logger = logging.getLogger(__name__)

#: A rank that cannot deliver receipts ends with this code, and so the engine does: jobs are then
#: tried elsewhere.
EXIT_NO_RECEIPTS = 70
#: How long a closing rank waits for the relay to take its receipts; what is left is sent after the
#: next start.
FLUSH_S = 5.0

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
        arm(config.fault, Path(config.outbox_dir).parent)
        self._hidden_size, self._dtype = buffers.ring.shape[1], buffers.ring.dtype
        self.actions = ActionLedger()
        every = [*sites, *(site for part in inside for site in part.sites)]
        self.runs = RunStore(open_store(config.capture_root), every, self._hidden_size)
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
        self.readings = readings = Readings(readers or {}, config.memory_limit_kib << 10)
        self._writer = make_writer(config, place.rank, self._outbox, begin, readings)
        self._reports = Reports(
            config,
            place,
            self._writer,
            self.actions,
            hidden_size=self._hidden_size,
            dtype=self._dtype,
            num_layers=num_layers,
        )
        self._requests = requests = Requests(place.rank, self._reports)
        self._tracked = requests.tracked
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
            self._slabs,
            self._overload,
            self._mover,
            traced=traced,
        )
        self._table = self._banks.table
        self._table.prepared.start()
        self.rank_state = RankState(
            every, num_layers, self._table, self.actions, lambda: requests.step
        )
        self._grading = Grading()
        waits, whole = device.type == "cpu", place.stages == 1
        self._probes = Scorer(self._table.vectors, self._hidden_size, waits=waits, streams=whole)
        self.probe_news = self._probes.news  # of the step that ran last, as `found`
        self._view: StepView | None = None  # of the step that was planned and has not run
        self.entering = (
            Reentry(requests, gate, self.runs, self._hidden_size, self._dtype, device)
            if gate is not None
            else None
        )
        self.loras = loras
        self._rows = Rows(
            requests,
            place,
            self._banks,
            self.rank_state,
            self._streams,
            self._room,
            RowStore(self._mover),
            lambda: self.block_size,
        )
        parts: list[StepPart | None] = [
            # First: after a wrong adapter nothing of the step may be used.
            Adapters(requests, loras, self.actions) if loras is not None else None,
            # The plan of the edits starts the step's plan; that of the rows ends and commits it.
            Edits(requests, self._banks, self.rank_state, self.runs, self.actions),
            self._rows,
            # Requests that failed so far take no part in these.
            self.entering,
            self._grading if place.grades else None,
            # Scores are of rows that were recorded, and watch their recordings.
            Probes(requests, self._probes),
        ]
        #: The order within each phase of a step, see `StepPart`.
        self._parts = tuple(part for part in parts if part is not None)
        self.load = Load()
        self._traced = traced
        self._idle = False  # the forward that follows is of the idle family
        self._idle_steps = 0
        self._preemptions = 0
        # how batches were composed since this rank last began with nothing to do: two runs can be
        # compared
        self._schedule = 0
        self._token_rows = 0  # computed so far, rejected drafts included

    # --- Calls of the worker

    def cleanse(self, steps: list[int]) -> None:
        """The prefix cache was reset at each rank's step in `steps`: earlier failures can no longer
        be served from it.
        """
        step = steps[self._place.rank]
        self._requests.cleanse(step)
        self._rows.cleanse(step)

    def end(self, key: str, num_tokens: int) -> None:
        """Record where a request (`RankSpec.key`) ends, as reported by the worker: after
        `num_tokens`, prompt included, or -1: forget it.

        Called in `begin`, with what travelled with the step: every rank gets it in the same one.

        The engine may have computed more by then, and calls an output that a stop string ended, as
        well as a cancelled one, aborted.
        """
        self._requests.end(key, num_tokens)

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
        self._requests.fail_all(_BEGAN_ANEW)
        for part in self._parts:
            part.forget()
        self.actions.restart()

    def divert(self, to: Diversion | None) -> None:
        """Give captures and receipts to `to`: see `certify`.

        None: to where they belong, from a plane that never saw a request.
        """
        self._writer.divert(to)
        if to is None:
            self.restart()
            self.actions.epoch = 0
            self._requests.taints = Taints()
            self._rows.drop_kept()
            self._idle_steps = self._preemptions = self._schedule = self._token_rows = 0

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
            "step": self._requests.step,
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
            "requests": len(self._tracked) + len(self._requests.finished),
            "preemptions": self._preemptions,
            "token_rows": self._token_rows,
            "entered_steps": self.entering.steps if self.entering is not None else 0,
            "skipped_rows": self.entering.skipped if self.entering is not None else 0,
            "schedule": f"{self._schedule:08x}",
            "tainted": len(self._requests.taints),
            "kept_row_bytes": self._rows.kept_bytes,
            "unkept": self._rows.unkept,
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
        for part in self._parts:
            part.close()
        self._outbox.flush(FLUSH_S)
        self._outbox.close()

    # --- The step

    def begin(
        self,
        new: Sequence[NewRequest],
        finished: dict[str, Finish],
        preempted: int,
        keeping: Keeping | None = None,
        resumed: dict[str, int] | None = None,
        ends: Sequence[tuple[str, int]] = (),
        waiting: Sequence[bytes] = (),
    ) -> None:
        """Requests that ended before this step, then new ones: rows are released before they are
        acquired.

        `preempted`: requests that lost their KV cache before this step; their rows stay recorded.
        `resumed`: those that continue now → tokens that the prefix cache serves them. `ends`: what
        `end` takes. `waiting`: packed specs of requests that will come in a later step.
        """
        requests = self._requests
        requests.step += 1
        self._preemptions += preempted
        ended = {
            request_id: len(finish.token_ids)
            for request_id, finish in finished.items()
            if request_id in self._tracked
        }
        for part in self._parts:
            part.begin(ended)
        for request_id in sorted(ended):
            tracked = self._tracked.pop(request_id)
            with requests.guard([tracked], BY_REQUEST):
                for part in self._parts:
                    part.release(tracked)
                requests.finish(tracked, finished[request_id])
        for key, num_tokens in ends:
            requests.end(key, num_tokens)
        if new and not self._tracked:
            self._schedule = 0
        for packed in waiting:
            self._table.prepared.expect(partial(rows_of, packed))
        for request in new:
            if request.id in self._tracked:  # in the v2 runner a resumed request arrives as new
                requests.resume(self._tracked[request.id], request.cached_tokens)
            else:
                self._admit(request)
        for request_id, cached_tokens in (resumed or {}).items():
            if request_id in self._tracked:
                requests.resume(self._tracked[request_id], cached_tokens)
        for part in self._parts:
            part.prepare(keeping)

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
        tracked_rows = [
            (self._tracked[rows.id], rows) for rows in view.requests if rows.id in self._tracked
        ]
        if self._idle:
            lost = {
                rows.id
                for _, rows in tracked_rows
                if self._touches(rows.id, rows.first_position, rows.num_rows)
            }
            for request_id in lost:
                self._requests.fail(self._tracked[request_id], _IDLE, "intervention_failed")
            tracked_rows = [
                (tracked, rows) for tracked, rows in tracked_rows if rows.id not in lost
            ]
        for part in self._parts:
            part.plan(tracked_rows, view)

    def grade(self, logits: torch.Tensor) -> None:
        """Take these as the logits of the planned step, unless no request waits for any."""
        if self._grading.due:
            with self._requests.guard(self._grading.due, "intervention_failed"):
                for tracked, why in self._grading.take(logits):
                    self._reports.failed(self._requests.step, tracked, why, "intervention_failed")

    def drain(self, hidden: torch.Tensor | None = None) -> None:
        """Take the captured rows of the forward pass that ran.

        `hidden`: `[tokens, hidden_size]`, what left the last layer; None on other stages.
        """
        step, self._view = RanStep(self._view, hidden), None
        for part in self._parts:
            part.drain(step)
        for part in self._parts:
            part.settle(step)

    def found(self) -> Callable[[], list[tuple[str, int]]]:
        """Return (request, first position) of the rows of the last step that are not finite.

        Waits for the step, in any thread.
        """
        return self._banks.found()

    def _admit(self, request: NewRequest) -> None:
        requests, spec = self._requests, request.spec
        if request.unreadable:  # another version's, most likely
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
            spec, admitted=requests.step, cached_tokens=request.cached_tokens, touched=touched(spec)
        )
        self._tracked[request.id] = tracked
        requests.live.add(spec.key)
        # every rank must get here: no state of a single rank may prevent it
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


def answer(action: Callable[[], None]) -> tuple[bool, str]:
    """Return how a rank answers a call of the worker: (ok, why not).

    A refused call has changed nothing on this rank.
    """
    try:
        action()
    except (LookupError, ValueError, RuntimeError) as error:
        return False, str(error)
    return True, ""


def _give_up(error: Exception) -> None:
    """Receipts cannot be kept or delivered: without them no request may succeed, so this rank must
    not continue.
    """
    logger.critical("this rank cannot deliver receipts: %s", error)
    os._exit(EXIT_NO_RECEIPTS)
