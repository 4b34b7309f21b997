"""How do the fake engine's ranks report? As real ones do: captures go through the writer, then a receipt into the outbox."""

import asyncio
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from .. import __version__
from ..broker.outbox import Outbox
from ..schemas.jobs import Job
from ..schemas.receipts import Receipt
from ..schemas.selectors import select
from ..schemas.settings import Settings
from ..schemas.specs import RankSpec, StoredCapture
from .fake_model import HIDDEN_SIZE, NUM_LAYERS, residual_rows
from .identity import BOOT
from .runner.finished import FinishedCapture
from .runner.layouts import StoreConfig
from .runner.writer import BOOT_DIGITS, WriteJob, Writer

#: Seconds that closing waits for the relay to take what is left; the rest is replayed by the next start.
FLUSH_S = 2.0


@dataclass(frozen=True)
class _Finished:
    job: Job
    request: int
    attempt: int
    token_ids: list[int]  # generated

    @property
    def prompt(self) -> list[int]:
        return self.job.prompts[self.request].token_ids

    @property
    def fed(self) -> list[int]:
        """What the model was fed: the last sampled token never is."""
        return self.prompt + self.token_ids[:-1]


class FakeRanks:
    """`tp x pp` ranks; TP rank 0 of each stage writes the stage's layers."""

    def __init__(self, settings: Settings, on_fatal: Callable[[str], None], disagree: int | None = None, silent: int | None = None):
        """`on_fatal(reason)` is called on the loop when receipts can no longer be kept or delivered."""
        self._settings = settings
        self._on_fatal = on_fatal
        self._disagree = disagree
        self._silent = silent
        self._stages = np.array_split(np.arange(NUM_LAYERS), settings.pipeline_parallel_size)
        self._outboxes: list[Outbox] = []
        self._writers: list[Writer] = []
        self._steps = 0
        self._actions = 0
        self._checksum = 0

    @property
    def world(self) -> int:
        return self._settings.tensor_parallel_size * self._settings.pipeline_parallel_size

    async def start(self) -> None:
        """Open the outboxes, which replay what a former start left in them."""
        directory = Path(self._settings.data_dir).resolve() / "outbox"
        loop = asyncio.get_running_loop()

        def fatal(error: Exception) -> None:
            loop.call_soon_threadsafe(self._on_fatal, f"receipts cannot be delivered: {error}")

        self._outboxes = [
            await asyncio.to_thread(Outbox, directory, self._settings.worker_id, rank, self._settings.relay_url, fatal)
            for rank in range(self.world)
        ]
        self._writers = [self._make_writer(rank, outbox) for rank, outbox in enumerate(self._outboxes)]

    def _make_writer(self, rank: int, outbox: Outbox) -> Writer:
        settings = self._settings
        store = StoreConfig(
            root=settings.capture_root,
            owner=f"{settings.worker_id}.{BOOT[:BOOT_DIGITS]}.{rank}",
            segment_limit=settings.segment_limit_kib << 10,
            segment_bytes=settings.segment_mib << 20,
            quota=settings.capture_quota_mib << 20,
        )
        return Writer(store, outbox, threads=1, memory_limit=settings.memory_limit_kib << 10)

    async def close(self) -> None:
        """Publish and report what is finished, then close the outboxes."""
        for writer in self._writers:
            await asyncio.to_thread(writer.close)
        for outbox in self._outboxes:
            await asyncio.to_thread(outbox.flush, FLUSH_S)
            await asyncio.to_thread(outbox.close)

    def report(self, job: Job, request: int, attempt: int, token_ids: list[int]) -> None:
        """A request is over; its receipts follow when its files are durable."""
        self._steps += 1
        if not job.wants_receipts:
            return
        finished = _Finished(job, request, attempt, list(token_ids))
        steering = job.steering[request] if job.steering else []
        if steering:
            self._actions += len(steering)
            self._checksum = zlib.crc32(repr(steering).encode(), self._checksum)
        for rank, writer in enumerate(self._writers):
            if rank == self._silent:
                continue
            pp, tp = divmod(rank, self._settings.tensor_parallel_size)
            writer.submit(WriteJob(self._receipt(finished, rank, pp, tp), self._builds(finished, rank, pp) if tp == 0 else []))

    def _receipt(self, finished: _Finished, rank: int, pp: int, tp: int) -> Receipt:
        return Receipt(
            version=__version__,
            worker=self._settings.worker_id,
            boot=BOOT,
            job=finished.job.id,
            request=finished.request,
            attempt=finished.attempt,
            rank=rank,
            world=self.world,
            tp=tp,
            pp=pp,
            step=self._steps,
            actions=self._actions,
            checksum=f"{self._checksum ^ (rank == self._disagree):016x}",
            status="ok",
            applied=self._applied(finished, pp),
        )

    def _applied(self, finished: _Finished, pp: int) -> int:
        """Token rows that steering would have changed on a stage, over its layers."""
        steering = finished.job.steering[finished.request] if finished.job.steering else []
        rows = 0
        for entry in steering:
            layers = len(set(entry.layers) & set(self._stages[pp].tolist()))
            rows += layers * len(select(entry.positions, 0, len(finished.fed), len(finished.prompt)))
        return rows

    def _builds(self, finished: _Finished, rank: int, pp: int) -> Sequence[Callable[[], FinishedCapture]]:
        """One for each capture that has layers on this stage."""
        builds = []
        for capture in finished.job.captures[finished.request] if finished.job.captures else []:
            share = set(self._stages[pp].tolist())
            sites = {str(hook): mine for hook, layers in capture.sites.items() if (mine := [layer for layer in layers if layer in share])}
            if sites:
                builds.append(partial(self._build, finished, capture, sites, rank, pp))
        return builds

    def _build(self, finished: _Finished, capture: StoredCapture, sites: dict[str, list[int]], rank: int, pp: int) -> FinishedCapture:
        positions = np.array(capture.select(0, len(finished.fed), len(finished.prompt)), dtype=np.int64)
        token_ids = np.array(finished.fed, dtype=np.int64)[positions]
        dtype = "float32" if capture.dtype == "model" else capture.dtype

        def rows(hook: str, layer: int) -> list[memoryview]:
            return [memoryview(_stored_as(dtype, residual_rows(layer, positions, token_ids, hook)))]

        return FinishedCapture(
            spec=RankSpec(
                version=__version__,
                job=finished.job.id,
                request=finished.request,
                attempt=finished.attempt,
                prompt_tokens=len(finished.prompt),
                captures=[capture],
                requests=finished.job.captured,
            ),
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
        )


def _stored_as(dtype: str, rows: np.ndarray) -> bytes:
    """float32 rows in another dtype; bfloat16 by rounding to nearest, ties to even."""
    if dtype != "bfloat16":
        return rows.astype(dtype).tobytes()
    bits = rows.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()
