"""The gradient worker's engine: the served checkpoint in transformers, loaded while jobs need it.

One thread computes, one call after the other. The model is compared with the vLLM worker's rows
whenever it is loaded (`agreement`), and dropped from memory after `gradients_idle_s` without a
job.
"""

import asyncio
import contextlib
import logging
import os
import threading
import time
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial, reduce
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch

from midstream.broker.ledger.jobs.ledger import Ledger
from midstream.broker.receipts.curve import client_keys
from midstream.broker.receipts.outbox import Outbox
from midstream.schemas.artifacts.saes import StoredSae
from midstream.schemas.base.errors import MidstreamError, Translated
from midstream.schemas.base.ring import plan_writers
from midstream.schemas.base.tensors import Tensor, to_numpy
from midstream.schemas.base.version import __version__
from midstream.schemas.jobs.jobs import Output
from midstream.schemas.jobs.models import GradientInfo, ModelInfo, TokenizerBundle
from midstream.schemas.jobs.receipts import Receipt
from midstream.schemas.requests.steering import GlobalSteering, RankSteering
from midstream.schemas.settings.settings import Settings, SettingsError
from midstream.storage.store import open_store
from midstream.workers.engine.checkpoint_check import check_folder
from midstream.workers.engine.identity import BOOT
from midstream.workers.engine.model_identity import identity_of
from midstream.workers.engine.options.engine_arguments import dtype_of, prepare_environment
from midstream.workers.engine.prompts.tokenizer import bundle_of
from midstream.workers.engine.proof.comparison import source_of
from midstream.workers.engine.protocol import EngineRequest, Fetch, NewOutput
from midstream.workers.engine.vllm import configured, facts_of
from midstream.workers.runner.base.actions import ActionLedger
from midstream.workers.runner.files.finished_rows import FinishedCapture
from midstream.workers.runner.files.writer import WriteJob, make_writer
from midstream.workers.runner.hooks.architectures import UnsupportedArchitectureError
from midstream.workers.runner.readings.sae import Autoencoder, load_registered
from midstream.workers.runner.support.build_errors import reason_of
from midstream.workers.runner.support.quantisation import quantisation_of

from ..records.estimates import Estimate
from . import agreement, captured, estimates
from .loading import Footprint, bare_points, free_on, give_back_memory, load_points, refused
from .points import Points
from .protocol import EstimateRequest, StopCheck

logger = logging.getLogger(__name__)
T = TypeVar("T")

_IDLE_LOOKS = 8  # within `gradients_idle_s`
FLUSH_S = 5.0  # the longest that the end waits for the relay
#: vLLM's options that spread an engine over machines.
OF_MACHINES = ("nnodes", "node_rank", "master_addr", "master_port")
#: The place of the only rank.
_RANK: dict[str, Any] = {"rank": 0, "tp": 0, "pp": 0}


def _alone(settings: Settings) -> Settings:
    """Return the settings with any machine's values for what does not belong to the model."""
    own = msgspec.structs.replace(
        settings.vllm, tensor_parallel_size=1, pipeline_parallel_size=1, max_loras=0
    )
    options = {
        name: value for name, value in settings.engine_options.items() if name not in OF_MACHINES
    }
    return msgspec.structs.replace(
        settings, vllm=own, engine_options=options, executor="auto", speculative_tokens=0
    )


class Stopped(Exception):
    """The job of a computation was stopped."""


class TransformersEngine:
    """`workers.engine.protocol.GradientEngine` on transformers: it generates no tokens, and no
    steering applies to it. `run` computes with the model.
    """

    info: ModelInfo
    gradients: GradientInfo
    tokenizer: TokenizerBundle
    world = 1
    waiting = 0
    trouble = ""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.on_quarantine: Callable[[str], None] = lambda reason: None
        self._loaded: Footprint | None = None  # the model in memory
        self._turn = asyncio.Lock()
        self._used = time.monotonic()  # when the last computation ended
        self._steps = self._running = 0
        self._thread = ThreadPoolExecutor(1, "gradients")
        self._actions = ActionLedger()
        self._tensors: dict[str, tuple[Tensor, int]] = {}  # name → tensor, number of holders
        self._died: asyncio.Future[str] | None = None
        self._paced = ""  # the job of which the pace was measured
        self._pace = 0.0  # seconds of a forward pass for each token

    async def start(self) -> None:
        settings = self._settings
        self._died = asyncio.get_running_loop().create_future()
        try:
            prepare_environment(settings)
            check_folder(settings)
            vllm_config, _ = await asyncio.to_thread(configured, _alone(settings))
            config = vllm_config.model_config
            quantisation = quantisation_of(vllm_config).name
            # the rows are compared with the vLLM worker's in any case
            self._source = source_of(
                msgspec.structs.replace(settings, compare="auto"), config, quantisation
            )
            self.tokenizer = await asyncio.to_thread(bundle_of, config)
            self.info = ModelInfo(
                **facts_of(settings, config),
                dtype_reason=dtype_of(settings).why,
                hooks=[],
                quantization=quantisation,
                identity=await asyncio.to_thread(identity_of, settings, config),
            )
            self.gradients = await asyncio.to_thread(self._facts)
        except (MidstreamError, SettingsError):  # their text explains itself
            raise
        except Exception as error:
            raise MidstreamError(
                "engine_failed", f"the gradient worker did not start: {reason_of(error)}"
            ) from error
        torch.set_num_threads(
            int(os.environ.get("OMP_NUM_THREADS", 0)) or len(os.sched_getaffinity(0))
        )
        loop = asyncio.get_running_loop()

        def fatal(error: Exception) -> None:
            loop.call_soon_threadsafe(self._die, str(error))

        self._outbox = Outbox(
            Path(settings.data_dir).resolve() / "outbox",
            settings.worker_id,
            0,
            settings.relay_url,
            on_fatal=fatal,
            curve=client_keys(settings.curve_secret_file, settings.curve_server_key),
        )
        threads = plan_writers(accelerator=False, cores=1, threads=settings.tuning.writer_threads)
        store = open_store(settings.artifacts)
        self._writer = make_writer(
            settings.tuning, settings.capture_quota_mib, store, BOOT, self._outbox, threads
        )
        self._ledger = Ledger.connect(settings)
        self._idle = asyncio.create_task(self._unload_when_idle(), name="idle")

    def _facts(self) -> GradientInfo:
        """Return what can be said of the model before it is loaded."""
        facts = GradientInfo(
            model=self.info.name,
            identity=self.info.identity,
            dtype=self.info.dtype,
            device=self._settings.gradients_device,
        )
        try:
            absent = bare_points(self._source, self.info.dtype)[2].absent
        except MidstreamError as error:
            logger.warning("no gradients of %s: %s", self.info.name, error.detail)
            return msgspec.structs.replace(facts, refused=error.detail)
        return msgspec.structs.replace(facts, absent=absent)

    # -- Computations

    async def run(self, work: Callable[[Points, StopCheck], T]) -> T:
        """Return what `work(points, check)` returns in the thread that computes.

        Loads the model if it is not in memory. `work` calls `check` often: it raises once the
        caller was cancelled. Raises MidstreamError("gradients_refused") for a model whose gradients
        cannot be computed here, RowsAwaited, and what `work` raises.
        """
        async with self._turn:
            self._running += 1
            try:
                loaded = self._loaded or await self._load()
                return await self._compute(partial(work, loaded.points))
            except torch.OutOfMemoryError as error:
                give_back_memory()
                raise refused(f"memory ran out: {error}") from error
            except UnsupportedArchitectureError as error:
                raise refused(error.detail) from error
            finally:
                self._running -= 1
                self._used = time.monotonic()

    async def _load(self) -> Footprint:
        began = time.monotonic()
        served = await self._ledger.model(self.info.name)
        if served is None or served.identity != self.info.identity:
            raise agreement.RowsAwaited(f"no vLLM worker serves {self.info.name!r} yet")
        points = await self._compute(
            lambda _: load_points(self._source, self.info.dtype, self._settings.gradients_device)
        )
        hooks = [hook for hook in points.hooks if hook in served.hooks]
        rows = await agreement.served_rows(self._ledger, served, hooks)
        try:
            await self._compute(lambda _: agreement.compared(points, rows, self.info.dtype))
        except MidstreamError as error:
            # published with the next heartbeat: further jobs are refused when they are submitted
            why = f"{error.detail} (when it was loaded; a restart of this worker compares again)"
            self.gradients = msgspec.structs.replace(self.gradients, refused=why)
            raise
        self._loaded = await self._compute(lambda _: Footprint(points))
        self.gradients = msgspec.structs.replace(self.gradients, device=str(points.device))
        logger.info("model loaded and compared in %.1f s", time.monotonic() - began)
        return self._loaded

    async def _compute(self, work: Callable[[StopCheck], T]) -> T:
        stopped = threading.Event()

        def check() -> None:
            if stopped.is_set():
                raise Stopped

        future = asyncio.get_running_loop().run_in_executor(self._thread, work, check)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            stopped.set()
            await asyncio.wait([future])  # the next computation must not begin before
            if not future.cancelled():
                future.exception()  # it is not reported as lost
            raise

    async def _unload_when_idle(self) -> None:
        idle_s = self._settings.tuning.gradients_idle_s
        while True:
            await asyncio.sleep(idle_s / _IDLE_LOOKS)
            async with self._turn:
                if self._loaded is not None and time.monotonic() - self._used >= idle_s:
                    self._loaded = None
                    await asyncio.to_thread(give_back_memory)
                    logger.info("model dropped from memory after %.0f s without a job", idle_s)

    def _report(
        self,
        ask: EngineRequest | EstimateRequest,
        content: Iterable[bytes | memoryview],
        captures: Sequence[FinishedCapture] = (),
        **fields: Any,
    ) -> None:
        """Account for a computation, and send its receipt. `content`: what was computed, and from
        what; `fields`: further fields of the receipt.
        """
        self._steps += 1
        crc = reduce(lambda crc, part: zlib.crc32(part, crc), content, 0)
        self._actions.fold(self._steps, "gradient", ask.job, ask.request, ask.attempt, crc)
        receipt = Receipt(
            version=__version__,
            worker=self._settings.worker_id,
            boot=BOOT,
            job=ask.job,
            request=ask.request,
            attempt=ask.attempt,
            world=1,
            step=self._steps,
            identity=self.info.identity,
            trace=ask.trace,
            **_RANK | self._ledger_state() | {"status": "ok"} | fields,
        )
        builds = [lambda capture=capture: capture for capture in captures]
        self._writer.submit(WriteJob(receipt, builds, sum(capture.size for capture in captures)))

    def _ledger_state(self) -> dict[str, Any]:
        ledger = self._actions
        return {"actions": ledger.count, "checksum": ledger.checksum, "epoch": ledger.epoch}

    async def estimate(self, ask: EstimateRequest) -> Estimate:
        def work(points: Points, check: StopCheck) -> Estimate:
            assert self._loaded is not None
            with Translated(
                MidstreamError, lambda error: MidstreamError("intervention_failed", error.detail)
            ):
                pace = self._pace_of(points, ask)
                began = time.perf_counter()
                estimate = estimates.estimate(
                    points, self._loaded, ask, free_on(points), self._load_sae, check
                )
            forwards = (time.perf_counter() - began) / pace
            return msgspec.structs.replace(estimate, forwards=round(forwards, 2))

        asked = msgspec.msgpack.encode((ask.sweep, ask.pair, ask.mask))
        try:
            estimate = await self.run(work)
        except MidstreamError as error:
            if error.kind == "intervention_failed":
                self._report(ask, [asked], status="error", kind=error.kind, message=error.detail)
            raise
        computed = msgspec.msgpack.encode(msgspec.structs.replace(estimate, forwards=0.0))
        self._report(ask, [asked, computed])
        return estimate

    def _pace_of(self, points: Points, ask: EstimateRequest) -> float:
        """Return the seconds of a forward pass of the pair's two prompts; measured once a job."""
        pair = ask.sweep.pairs[ask.pair]
        if self._paced != ask.job:
            began = time.perf_counter()
            points.run(points.batch([pair.base]))
            self._pace = (time.perf_counter() - began) / len(pair.base)
            self._paced = ask.job
        return self._pace * (len(pair.base) + len(pair.source))

    def _load_sae(self, sae: StoredSae) -> Autoencoder:
        settings = self._settings
        return load_registered(
            sae, settings.artifacts_of("saes"), settings.tuning.sae_cache_mib << 20
        )

    async def generate(self, ask: EngineRequest) -> AsyncGenerator[NewOutput, None]:
        """Compute the gradient rows of one prompt, and pass them on; no token is generated."""
        if ask.global_steering.entries:
            raise refused(
                f"global steering version {ask.global_steering.version} is active, and gradients "
                "are those of the unsteered model: clear it first"
            )
        tensors = {name: torch.tensor(to_numpy(kept)) for name, (kept, _) in self._tensors.items()}

        def work(points: Points, check: StopCheck) -> list[FinishedCapture]:
            assert self._loaded is not None
            sites = captured.sites_of(ask.captures)
            kept = max(len(each.gradient.positions) for each in ask.captures if each.gradient)
            tokens = len(ask.token_ids)
            free = free_on(points)
            estimates.at_once(self._loaded, tokens, sites, free, kept=max(1, kept))
            worker = self._settings.worker_id
            return captured.finished(
                points=points,
                ask=ask,
                info=self.info,
                worker=worker,
                tensors=tensors,
                load_sae=self._load_sae,
                check=check,
            )

        captures = await self.run(work)
        rows = (of.rows(*site)[0] for of in captures for site in captured.sites_of([of.capture]))
        self._report(ask, rows, captures, global_version=ask.global_steering.version)
        output = Output(
            index=ask.request,
            text="",
            token_ids=[],
            finish_reason="length",
            prompt_tokens=len(ask.token_ids),
        )
        yield NewOutput(ask.request, "", [], output)

    # -- What requests name

    @contextlib.asynccontextmanager
    async def holding_vectors(
        self, names: Sequence[str], fetch: Fetch, *, users: Any = ()
    ) -> AsyncIterator[None]:
        for name, tensor in {name: await fetch(name) for name in names}.items():
            self._tensors[name] = (tensor, self._tensors.get(name, (tensor, 0))[1] + 1)
        try:
            yield
        finally:
            for name in names:
                tensor, holders = self._tensors.pop(name)
                if holders > 1:
                    self._tensors[name] = (tensor, holders - 1)

    async def abort(self, job_id: str, attempt: int) -> None:
        """Do nothing: a computation ends with its task."""

    async def check_global(self, steering: GlobalSteering, fetch: Fetch) -> None:
        """Accept any steering: jobs that it would edit are refused here."""

    async def steering_status(self) -> list[RankSteering]:
        totals = self._writer.totals
        status = RankSteering(
            step=self._steps,
            rows_used=0,
            rows=0,
            entries_used=0,
            entries=0,
            vectors=len(self._tensors),
            requests=self._running,
            outbox=self._outbox.depth(),
            backlog=self._writer.backlog.size,
            running=self._running,
            captured_rows=totals["captured_rows"],
            captured_bytes=totals["captured_bytes"],
            **_RANK | self._ledger_state(),
        )
        return [status]

    async def restart_ledgers(self) -> None:
        self._actions.restart()

    async def same_content(self) -> bool:
        return True

    # -- The end

    def _die(self, reason: str) -> None:
        if self._died is not None and not self._died.done():
            self._died.set_result(reason)

    async def failed(self) -> str:
        assert self._died is not None, "start() first"
        return await asyncio.shield(self._died)

    async def shutdown(self) -> None:
        """Stop computing, once rows and receipts are written and sent."""
        self._idle.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._idle
        await asyncio.to_thread(self._writer.close)
        await asyncio.to_thread(self._outbox.flush, FLUSH_S)
        await asyncio.to_thread(self._outbox.close)
        await self._ledger.close()
        self._thread.shutdown(wait=False, cancel_futures=True)
