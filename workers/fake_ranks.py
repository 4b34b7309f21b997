"""How do the fake engine's ranks report? As real ones do: publish the files, then put a receipt into the outbox."""

import asyncio
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .. import __version__
from ..broker.outbox import Outbox
from ..schemas.jobs import Job
from ..schemas.receipts import CapturedFile, Receipt
from ..schemas.selectors import select
from ..schemas.settings import Settings
from ..schemas.specs import StoredCapture
from .fake_model import HIDDEN_SIZE, NUM_LAYERS, residual_rows
from .identity import BOOT
from .storage import PendingFile, publish

#: Seconds that closing waits for the relay to take what is left; the rest is replayed by the next start.
FLUSH_S = 2.0


@dataclass(frozen=True)
class _Finished:
    job: Job
    request: int
    attempt: int
    token_ids: list[int]  # generated


class FakeRanks:
    """`tp x pp` ranks; TP rank 0 of each stage writes the stage's layers."""

    def __init__(self, settings: Settings, on_fatal: Callable[[str], None], disagree: int | None = None, silent: int | None = None):
        """`on_fatal(reason)` is called on the loop when receipts can no longer be kept or delivered."""
        self._settings = settings
        self._on_fatal = on_fatal
        self._disagree = disagree
        self._silent = silent
        self._stages = np.array_split(np.arange(NUM_LAYERS), settings.pipeline_parallel_size)
        self._finished: asyncio.Queue[_Finished | None] = asyncio.Queue()
        self._outboxes: list[Outbox] = []
        self._writer: asyncio.Task[None] | None = None
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
        self._writer = asyncio.create_task(self._write())

    async def close(self) -> None:
        """Publish and report what is finished, then close the outboxes."""
        if self._writer is not None:
            self._finished.put_nowait(None)
            await self._writer
        for outbox in self._outboxes:
            await asyncio.to_thread(outbox.flush, FLUSH_S)
            await asyncio.to_thread(outbox.close)

    def report(self, job: Job, request: int, attempt: int, token_ids: list[int]) -> None:
        """A request is over; its receipts follow when its files are durable."""
        self._steps += 1
        if job.wants_receipts:
            self._finished.put_nowait(_Finished(job, request, attempt, list(token_ids)))

    async def _write(self) -> None:
        """Take everything that is finished, publish it as one group, report it."""
        while True:
            group = [await self._finished.get()]
            while not self._finished.empty():
                group.append(self._finished.get_nowait())
            done = [finished for finished in group if finished is not None]
            pending = [[self._file(finished, pp) for pp in range(len(self._stages))] for finished in done]
            files = [file for stages in pending for file in stages if file is not None]
            published: dict[str, CapturedFile] = {}
            message = ""
            try:
                captured = await asyncio.to_thread(publish, self._settings.capture_root, files) if files else []
                published = {file.path: file for file in captured}
            except OSError as error:
                message = f"capture files could not be written: {error}"
            for finished, stages in zip(done, pending, strict=True):
                self._append_receipts(finished, [published.get(file.path) if file else None for file in stages], message)
            if None in group:
                return

    def _append_receipts(self, finished: _Finished, files: list[CapturedFile | None], message: str) -> None:
        job, tp_size = finished.job, self._settings.tensor_parallel_size
        steering = job.steering[finished.request] if job.steering else []
        if steering:
            self._actions += len(steering)
            self._checksum = zlib.crc32(repr(steering).encode(), self._checksum)
        for rank, outbox in enumerate(self._outboxes):
            if rank == self._silent:
                continue
            pp, tp = divmod(rank, tp_size)
            mine = files[pp] if tp == 0 else None
            outbox.append(
                Receipt(
                    version=__version__,
                    worker=self._settings.worker_id,
                    boot=BOOT,
                    job=job.id,
                    request=finished.request,
                    attempt=finished.attempt,
                    rank=rank,
                    world=self.world,
                    tp=tp,
                    pp=pp,
                    step=self._steps,
                    actions=self._actions,
                    checksum=f"{self._checksum ^ (rank == self._disagree):016x}",
                    status="error" if message else "ok",
                    message=message,
                    applied=self._applied(finished, pp),
                    files=[mine] if mine else [],
                )
            )

    def _applied(self, finished: _Finished, pp: int) -> int:
        """Token rows that steering would have changed on a stage, over its layers."""
        prompt = len(finished.job.prompts[finished.request].token_ids)
        steering = finished.job.steering[finished.request] if finished.job.steering else []
        rows = 0
        for entry in steering:
            layers = len(set(entry.layers) & set(self._stages[pp].tolist()))
            rows += layers * len(select(entry.positions, 0, prompt + len(finished.token_ids) - 1, prompt))
        return rows

    def _file(self, finished: _Finished, pp: int) -> PendingFile | None:
        """The packed file of one stage; None when the stage has nothing to capture."""
        job = finished.job
        if not job.captures:
            return None
        capture: StoredCapture = job.captures[finished.request]
        layers = [layer for layer in self._stages[pp].tolist() if layer in capture.layers]
        prompt = job.prompts[finished.request].token_ids
        fed = np.array(prompt + finished.token_ids[:-1], dtype=np.int64)  # the last sampled token is never fed back
        positions = np.array(select(capture.positions, 0, len(fed), len(prompt)), dtype=np.int64)
        if not layers or not len(positions):
            return None
        token_ids = fed[positions]
        blocks = [(f"post_block.{layer}", residual_rows(layer, positions, token_ids)) for layer in layers]
        manifest = {
            "job": job.id,
            "request": finished.request,
            "attempt": finished.attempt,
            "stage": pp,
            "hook": capture.hook,
            "layers": layers,
            "dtype": "float32",
            "positions": positions.tolist(),
            "token_ids": token_ids.tolist(),
        }
        return PendingFile(
            path=f"{capture.tag}/{job.id}/p{finished.request:04d}.a{finished.attempt}.pp{pp}.safetensors",
            tensors=[
                *[(name, "float32", (len(positions), HIDDEN_SIZE), [rows.tobytes()]) for name, rows in blocks],
                ("positions", "int64", (len(positions),), [positions.tobytes()]),
                ("token_ids", "int64", (len(positions),), [token_ids.tobytes()]),
            ],
            manifest=manifest,
            rows=len(layers) * len(positions),
            layers=layers,
            positions=len(positions),
        )
