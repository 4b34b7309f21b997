"""The fake engine's ranks, which report like real ones: captures go through the writer, then a
receipt to the outbox.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from midstream.broker.receipts.curve import client_keys
from midstream.broker.receipts.outbox import Outbox
from midstream.schemas.artifacts.hits import with_text
from midstream.schemas.artifacts.probes import ProbeScore
from midstream.schemas.base.dtypes import narrowed
from midstream.schemas.base.version import __version__
from midstream.schemas.jobs.receipts import Receipt
from midstream.schemas.prompts.selectors import select
from midstream.schemas.requests.specs import RankSpec, StoredCapture
from midstream.schemas.settings.settings import Settings
from midstream.storage.store import open_store
from midstream.workers.engine.identity import BOOT
from midstream.workers.engine.protocol import EngineRequest
from midstream.workers.engine.ranks.collective import check_apply_results
from midstream.workers.runner.files.finished_rows import FinishedCapture
from midstream.workers.runner.files.writer import CaptureWriter, WriteJob, make_writer
from midstream.workers.runner.probes.gates import gates_of, open_among, shown
from midstream.workers.runner.probes.watches import Watch
from midstream.workers.runner.readings.installed_readers import LoadedReader

from .grades import FakeGrades, Ungradable
from .model import HIDDEN_SIZE, NUM_LAYERS, identity_of, residual_rows, weights_of
from .rank import FakeFaults, FakeRank
from .readings import FakeReadings
from .watch_kit import lone_watch, put_scores

#: Seconds that closing waits for the relay to take what is left; the rest is replayed by the next
#: start.
FLUSH_S = 2.0


@dataclass(frozen=True)
class _Finished:
    ask: EngineRequest
    spec: RankSpec
    token_ids: list[int]  # generated

    @property
    def prompt(self) -> list[int]:
        return self.ask.token_ids

    @property
    def fed(self) -> list[int]:
        """Return what the model was fed: the last sampled token never is."""
        return self.prompt + self.token_ids[:-1]


class FakeRanks:
    """`tp x pp` ranks; TP rank 0 of each stage writes the stage's layers."""

    def __init__(
        self,
        settings: Settings,
        faults: FakeFaults,
        on_fatal: Callable[[str], None],
        installed: Mapping[str, LoadedReader] | None = None,
    ):
        """`on_fatal(reason)` is called on the loop when receipts can no longer be kept or
        delivered.
        """
        self._settings = settings
        self._on_fatal = on_fatal
        self._faults = faults
        self._stages = np.array_split(np.arange(NUM_LAYERS), settings.vllm.pipeline_parallel_size)
        places = [divmod(rank, settings.vllm.tensor_parallel_size) for rank in range(self.world)]
        self.ranks = [
            FakeRank(rank, tp, pp, settings, faults) for rank, (pp, tp) in enumerate(places)
        ]
        self._installed = installed or {}
        self._identity = identity_of(settings)
        self._weights = weights_of(settings)
        self._outboxes: list[Outbox] = []
        self._writers: list[CaptureWriter] = []
        self._grades = FakeGrades(
            open_store(settings.artifacts), lambda: self.ranks[-1].runs, self._weights
        )

    @property
    def world(self) -> int:
        return self._settings.vllm.ranks

    def call(self, method: str, arguments: tuple[Any, ...]) -> list[Any]:
        """The answer of every rank, in rank order."""
        return [getattr(rank, method)(*arguments) for rank in self.ranks]

    def tell_load(self, running: int, queued: int) -> None:
        """Set the further figures of a real rank: requests in the engine, and its own captures and
        outbox.
        """
        for rank, outbox, writer in zip(self.ranks, self._outboxes, self._writers, strict=False):
            # before `start` there are none
            busy = {
                "running": running,
                "queued": queued,
                "kv_cache": running / self._settings.vllm.max_num_seqs,
            }
            rank.load = {
                "outbox": outbox.depth(),
                "backlog": writer.backlog.size,
                **writer.totals,
                **busy,
            }

    def begin(self, spec: RankSpec) -> None:
        """A request enters every rank.

        Raises MidstreamError("intervention_failed") when it cannot be steered.
        """
        results = [rank.begin(spec) for rank in self.ranks]
        check_apply_results("steering a request", results, self.world)

    def end(self, spec: RankSpec) -> None:
        """The request has left every rank."""
        for rank in self.ranks:
            rank.end(spec)

    async def start(self) -> None:
        """Open the outboxes, which replay what a previous start left in them."""
        directory = Path(self._settings.data_dir).resolve() / "outbox"
        loop = asyncio.get_running_loop()

        def fatal(error: Exception) -> None:
            loop.call_soon_threadsafe(self._on_fatal, f"receipts cannot be delivered: {error}")

        curve = client_keys(self._settings.curve_secret_file, self._settings.curve_server_key)
        self._outboxes = [
            await asyncio.to_thread(
                Outbox,
                directory,
                self._settings.worker_id,
                rank,
                self._settings.relay_url,
                fatal,
                curve=curve,
            )
            for rank in range(self.world)
        ]
        self._writers = [
            make_writer(
                self._settings.tuning,
                self._settings.capture_quota_mib,
                open_store(self._settings.artifacts),
                BOOT,
                outbox,
                threads=1,
                readings=FakeReadings(self._installed),
            )
            for outbox in self._outboxes
        ]

    async def close(self) -> None:
        """Publish and report what is finished, then close the outboxes."""
        for writer in self._writers:
            await asyncio.to_thread(writer.close)
        for outbox in self._outboxes:
            await asyncio.to_thread(outbox.flush, FLUSH_S)
            await asyncio.to_thread(outbox.close)

    def report(self, ask: EngineRequest, spec: RankSpec, token_ids: list[int]) -> None:
        """A request has generated everything; its receipts follow when its files are durable."""
        finished = _Finished(ask, spec, list(token_ids))
        graded, failure = self._graded(finished)
        for rank, writer in zip(self.ranks, self._writers, strict=True):
            rank.step += 1
            if rank.rank != self._faults.rank("silent"):
                writer.submit(
                    WriteJob(
                        self._receipt(finished, rank, graded, failure),
                        self._builds(finished, rank.rank, rank.pp) if rank.tp == 0 else [],
                        work=finished.spec.work,
                        tenant=finished.spec.tenant,
                    )
                )

    def _graded(self, finished: _Finished) -> tuple[list[float], str]:
        """The next-token grades of the last stage's first rank, and why every rank fails the
        request; empty if none does.
        """
        if (faults := self._faults.get("refuse")) is not None and int(
            faults["request"]
        ) == finished.spec.request:
            return [], "injected fault"
        try:
            return self._grades.of(finished.spec, finished.prompt), ""
        except Ungradable as error:
            return [], str(error)

    def _receipt(
        self, finished: _Finished, rank: FakeRank, graded: list[float], failure: str
    ) -> Receipt:
        spec = finished.spec
        differs = self._faults.strikes("disagree", rank.rank)
        tells = rank.tp == 0 and rank.pp == len(self._stages) - 1
        return Receipt(
            version=__version__,
            worker=self._settings.worker_id,
            boot=BOOT,
            job=spec.job,
            request=spec.request,
            attempt=spec.attempt,
            rank=rank.rank,
            world=self.world,
            tp=rank.tp,
            pp=rank.pp,
            step=rank.step,
            actions=rank.ledger.count,
            checksum=f"{int(rank.ledger.checksum, 16) ^ differs:016x}",
            status="error" if failure else "ok",
            message=failure,
            kind=(self._faults.get("refuse") or {}).get("kind", "") if failure else "",
            graded=graded if tells else [],
            applied=self._applied(finished, rank.pp),
            global_version=spec.global_version,
            epoch=rank.ledger.epoch,
            trace=spec.trace,
            scores=self._scores(finished, rank.pp) if rank.tp == 0 or failure else [],
            identity=self._identity,
        )

    def _scores(self, finished: _Finished, pp: int) -> list[ProbeScore]:
        """Return the scores of the probes with layers on this stage: at position p label number
        n has the score p + n; if the only label is `token`, the token's id is the score.
        """
        watch = self._watch(finished, pp)
        positions = len(finished.fed)
        if watch is None:
            return []
        gates = gates_of(finished.spec, watch)
        found = [
            shown(watch, score, positions) if score.name in gates else score
            for score in watch.results(positions)[0]
        ]
        token_ids = [*finished.prompt, *finished.token_ids]
        return [with_text(score, token_ids, len(finished.prompt)) for score in found]

    def _watch(self, finished: _Finished, pp: int) -> Watch | None:
        share = set(self._stages[pp].tolist())
        probes = [probe for probe in finished.spec.probes if probe.content.layer in share]
        if not probes:
            return None
        spec = finished.spec
        positions = len(finished.fed)
        watch = lone_watch(spec.key, probes, spec.prompt_tokens)
        for probe, column in zip(probes, watch.kind.columns, strict=True):
            scores = np.arange(positions)[:, None] + np.arange(len(column))
            if probe.content.labels == ["token"]:
                scores = np.array(finished.fed)[:, None]
            put_scores(watch, 0, np.array(column), scores.astype(np.float32))
        return watch

    def _applied(self, finished: _Finished, pp: int) -> int:
        """Token rows that steering would have changed on a stage, over its layers."""
        rows = 0
        watch = self._watch(finished, pp)
        for entry in finished.spec.steering:
            layers = len(set(entry.layers) & set(self._stages[pp].tolist()))
            named = select(entry.positions, 0, len(finished.fed), len(finished.prompt))
            if entry.gate and watch is not None:
                watch.decide()
                named = open_among(watch, entry.gate, named)
            rows += layers * len(named)
        return rows

    def _builds(
        self, finished: _Finished, rank: int, pp: int
    ) -> Sequence[Callable[[], FinishedCapture]]:
        """One for each capture that has layers on this stage."""
        builds = []
        for capture in finished.spec.captures:
            share = set(self._stages[pp].tolist())
            sites = {
                str(hook): own
                for hook, layers in capture.sites.items()
                if (own := [layer for layer in layers if layer in share])
            }
            if sites and not capture.scored:
                builds.append(partial(self._build, finished, capture, sites, rank, pp))
        return builds

    def _build(
        self,
        finished: _Finished,
        capture: StoredCapture,
        sites: dict[str, list[int]],
        rank: int,
        pp: int,
    ) -> FinishedCapture:
        chosen = capture.select(0, len(finished.fed), len(finished.prompt))
        if capture.window is not None:
            chosen = sorted(capture.window.keep(chosen, finished.fed))
        positions = np.array(chosen, dtype=np.int64)
        token_ids = np.array(finished.fed, dtype=np.int64)[positions]
        dtype = "float32" if capture.dtype == "model" else capture.dtype

        def rows(hook: str, layer: int) -> list[memoryview]:
            return [
                memoryview(
                    narrowed(
                        residual_rows(layer, positions, token_ids, hook, self._weights), dtype
                    ).tobytes()
                )
            ]

        return FinishedCapture(
            spec=finished.spec,
            capture=capture,
            sites=sites,
            hidden_size=HIDDEN_SIZE,
            dtype=dtype,
            positions=positions.tolist(),
            token_ids=token_ids.tolist(),
            worker=self._settings.worker_id,
            rank=rank,
            pp=pp,
            stages=len(self._stages),
            rows=rows,
            num_layers=NUM_LAYERS,
            identity=self._identity,
        )
