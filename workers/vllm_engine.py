"""How is stock vLLM hosted? One AsyncLLM, told to use our worker and scheduler classes, and nothing patched in its files."""

import asyncio
import logging
import os
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec
from vllm import SamplingParams, TokensPrompt
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from .. import __version__
from ..schemas.errors import MidstreamError
from ..schemas.global_capture import from_settings
from ..schemas.jobs import Job, Output, TokenLogprob
from ..schemas.models import ModelInfo, TokenizerBundle
from ..schemas.selectors import HOOKS, depends_on_prompt, lowest_position
from ..schemas.settings import Settings, SettingsError
from ..schemas.specs import RankSpec, steering_digest, steering_rows
from .admission import CaptureBudget, RowAdmission, RowWish, StepRows
from .collective import check_apply_results
from .engine import Fetch, Progress
from .identity import BOOT
from .runner.architectures import describe
from .runner.config import PlaneConfig
from .runner.consumers import available
from .tokenizer import tokenizer_bundle
from .vectors import RankVectors

logger = logging.getLogger(__name__)

#: How often the ranks' checksums are compared, beside the comparison in every receipt.
_RANKS_INTERVAL_S = 5.0
#: How often a quiet engine is asked whether it is still alive.
_HEALTH_INTERVAL_S = 0.25


#: Draft tokens are looked up in the prompt by its last 4 to 2 tokens.
_NGRAMS = {"prompt_lookup_max": 4, "prompt_lookup_min": 2}


class VllmEngine:
    """`workers.engine.Engine` on vLLM's v1 engine, with either model runner."""

    info: ModelInfo
    tokenizer: TokenizerBundle

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.world = settings.tensor_parallel_size * settings.pipeline_parallel_size
        self._rows = RowAdmission(settings.steering_rows, settings.steering_entries)
        self._captures = CaptureBudget(settings.capture_memory_mib << 20)
        self._live: dict[tuple[str, int], set[str]] = {}
        self._stopping = False
        self._ending: set[asyncio.Future[None]] = set()

    async def start(self) -> None:
        settings = self._settings
        _environment(settings)
        plane = PlaneConfig(
            version=__version__,
            worker=settings.worker_id,
            boot=BOOT,
            relay_url=settings.relay_url,
            outbox_dir=str(Path(settings.data_dir).resolve() / "outbox"),
            capture_root=str(settings.capture_root),
            hooks=_hooks(settings),
            steering_rows=settings.steering_rows,
            steering_entries=settings.steering_entries,
            step_tokens=settings.max_num_batched_tokens,
            capture_buffer_mib=settings.capture_buffer_mib,
            capture_queue_mib=settings.capture_queue_mib,
            capture_overload=settings.capture_overload,
            spill_dir=str(Path(settings.data_dir).resolve() / "spill"),
            row_store_mib=_row_store_mib(settings),
            writer_threads=settings.writer_threads,
            segment_limit_kib=settings.segment_limit_kib,
            segment_mib=settings.segment_mib,
            memory_limit_kib=settings.memory_limit_kib,
            capture_quota_mib=settings.capture_quota_mib,
            cores=sorted(os.sched_getaffinity(0)),
            fault=settings.fault,
        )
        plane.export()
        try:
            self._llm = await asyncio.to_thread(AsyncLLM.from_engine_args, _engine_args(settings, plane))
            self.tokenizer = await asyncio.to_thread(tokenizer_bundle, settings.model)
        except Exception as error:
            raise MidstreamError("engine_failed", f"the engine did not start: {error}") from error
        config = self._llm.model_config
        adapter = describe(config.architectures[0], config.hf_config)
        hooks = [hook for hook in adapter.hooks if not plane.hooks or hook in plane.hooks]
        self._row_bytes = config.get_hidden_size() * config.dtype.itemsize
        row_limit = _row_limit(settings, plane, config)
        self._step_rows = StepRows(row_limit)
        self._vectors = RankVectors(self._call, self.world, settings.vector_cache_mib << 20)
        self.info = ModelInfo(
            name=settings.served_model,
            version=__version__,
            architecture=config.architectures[0],
            num_layers=config.get_total_num_hidden_layers(),
            hidden_size=config.get_hidden_size(),
            vocab_size=config.get_vocab_size(),
            max_model_len=config.max_model_len,
            dtype=str(config.dtype).removeprefix("torch."),
            hooks=list(hooks),
            tokenizer="",
            tp=settings.tensor_parallel_size,
            pp=settings.pipeline_parallel_size,
            runner="v2" if self._llm.vllm_config.use_v2_model_runner else "v1",
            consumers=available(),
            memory_limit_kib=settings.memory_limit_kib,
            step_tokens=settings.max_num_batched_tokens,
            capture_row_limit=row_limit,
            steering_rows=settings.steering_rows,
            steering_entries=settings.steering_entries,
            global_captures=from_settings(settings, config.get_total_num_hidden_layers(), hooks, row_limit),
        )

    async def hold_vectors(self, job: Job, fetch: Fetch) -> None:
        names = _vector_names(job)
        if names:
            await self._vectors.hold(names, fetch)

    async def release_vectors(self, job: Job) -> None:
        self._vectors.release(_vector_names(job))

    async def generate(self, job: Job, request: int, attempt: int) -> AsyncGenerator[Progress, None]:
        spec = rank_spec(job, request, attempt)
        rows = frozenset(RowWish(row.key, row.num_vectors) for row in steering_rows(spec.steering)) if spec else frozenset()
        request_id = f"{job.id}.{request}.{attempt}"
        live = self._live.setdefault((job.id, attempt), set())
        live.add(request_id)
        submitted = over = False
        try:
            async with (
                self._rows.admitted(rows),
                self._step_rows.admitted(self._captured_rows(job, request, self.info.step_tokens)),
                self._captures.admitted(self._captured_rows(job, request) * self._row_bytes),
            ):
                prompt = TokensPrompt(prompt_token_ids=job.prompts[request].token_ids)
                parts = _Parts(request)
                submitted = True
                # Closed before the rows are given back and the ranks are told: an abort then goes ahead of both.
                async with aclosing(self._llm.generate(prompt, sampling_params(job, spec), request_id)) as outputs:
                    async for output in outputs:
                        progress = parts.add(output)
                        if progress is not None and progress.finished is not None:
                            over = True
                            if spec is not None and spec.told_when_over:
                                await self._end(spec, spec.prompt_tokens + len(progress.finished.token_ids))
                        if progress is not None:
                            yield progress
        except EngineDeadError as error:
            raise MidstreamError("engine_failed", f"the engine died: {error}") from error
        finally:
            live.discard(request_id)
            if not live:
                self._live.pop((job.id, attempt), None)
            if submitted and not over and spec is not None and not self._llm.errored:
                # Cancelled: vLLM has sent its abort by now, so the ranks hear this after it or with it.
                task = asyncio.ensure_future(self._end(spec, -1))
                self._ending.add(task)
                task.add_done_callback(self._ended)

    def _captured_rows(self, job: Job, request: int, positions: int = sys.maxsize) -> int:
        """How many rows the captures of one prompt may have, of at most so many positions."""
        prompt_tokens = len(job.prompts[request].token_ids)
        captures = job.captures[request] if job.captures else []
        max_tokens = job.sampling.max_tokens + self._settings.speculative_tokens  # drafts beyond the end are computed, too
        return sum(capture.num_sites * min(positions, capture.count_positions(prompt_tokens, max_tokens)) for capture in captures)

    async def abort(self, job_id: str, attempt: int) -> None:
        for request_id in list(self._live.get((job_id, attempt), ())):
            await self._llm.abort(request_id)

    async def status(self) -> list[dict[str, Any]]:
        """Each rank's checksum, counts and occupancy, in rank order."""
        return [dict(status) for status in await self._call("midstream_status", ())]

    async def shutdown(self) -> None:
        """Captures and receipts that are on their way are written and sent first."""
        self._stopping = True
        if not self._llm.errored:
            await self._call("midstream_close", ())
        if self._llm.output_handler is not None:
            self._llm.output_handler.cancel()  # or it would log the end of the engine as its death
        await asyncio.to_thread(self._llm.shutdown)

    async def failed(self) -> str:
        # Apart from the loop below: a call to ranks that are dying may never return.
        disagreement = asyncio.ensure_future(self._disagreement())
        try:
            while True:
                if self._llm.errored and not self._stopping:
                    return f"the engine died: {self._llm.dead_error}"
                if disagreement.done():
                    return disagreement.result()
                await asyncio.sleep(_HEALTH_INTERVAL_S)
        finally:
            disagreement.cancel()

    async def _disagreement(self) -> str:
        """Return, with the reason, only when the ranks no longer agree."""
        while True:
            await asyncio.sleep(_RANKS_INTERVAL_S)
            if self._stopping:
                continue
            try:
                if reason := await self._look_at_ranks():
                    return reason
            except MidstreamError as error:
                logger.warning("the ranks could not be asked for their status: %s", error)

    async def _look_at_ranks(self) -> str:
        """Why this engine must be started anew, if it must: the ranks of a stage no longer agree.

        Also has the prefix cache begin anew after a failed intervention.
        """
        statuses = await self.status()
        stages: dict[int, set[tuple[str, int]]] = {}
        for rank in statuses:
            stages.setdefault(rank["pp"], set()).add((rank["checksum"], rank["actions"]))
        for stage, found in stages.items():
            if len(found) > 1:
                logger.error("the ranks of stage %d disagree: %s", stage, sorted(found))
                return f"the ranks of stage {stage} disagree on the actions they applied: {sorted(found)}"
        if any(rank["tainted"] or rank["unkept"] for rank in statuses):
            await self._llm.reset_prefix_cache()  # see our scheduler: what matters is forgotten also while requests run
            await self._call("midstream_cleanse", ([rank["step"] for rank in statuses],))
        return ""

    async def _end(self, spec: RankSpec, num_tokens: int) -> None:
        """Tell the ranks where a request ends, see `DataPlane.end`."""
        results = await self._call("midstream_end", (spec.key, num_tokens))
        check_apply_results("ending a request", [tuple(result) for result in results], self.world)

    def _ended(self, task: "asyncio.Future[None]") -> None:
        self._ending.discard(task)
        if not task.cancelled() and task.exception() is not None and not self._llm.errored:
            logger.error("the ranks could not be told of a cancelled request: %s", task.exception())

    async def _call(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        try:
            results: list[Any] = await self._llm.collective_rpc(method, args=args)
        except EngineDeadError as error:
            raise MidstreamError("engine_failed", f"the engine died: {error}") from error
        return results


def rank_spec(job: Job, request: int, attempt: int) -> RankSpec | None:
    """What the ranks are told about one prompt of a job; None when it asks for nothing."""
    steering = job.steering[request] if job.steering else []
    captures = job.captures[request] if job.captures else []
    if not steering and not captures:
        return None
    prompt_tokens = len(job.prompts[request].token_ids)
    lowest = min((lowest_position(capture.positions, prompt_tokens) for capture in captures), default=prompt_tokens)
    return RankSpec(
        version=__version__,
        job=job.id,
        request=request,
        attempt=attempt,
        prompt_tokens=prompt_tokens,
        steering=steering,
        captures=captures,
        digest=steering_digest(steering),
        by_prompt=any(depends_on_prompt(entry.positions) for entry in steering),
        first_affected=min((lowest_position(entry.positions, prompt_tokens) for entry in steering), default=-1),
        lowest_captured=lowest if lowest < prompt_tokens else -1,
        requests=job.captured,
        told_when_over=bool(job.sampling.stop),
    )


def sampling_params(job: Job, spec: RankSpec | None) -> SamplingParams:
    """vLLM's parameters of a job's sampling, with the spec for the ranks."""
    sampling = job.sampling
    return SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
        stop=sampling.stop,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        logprobs=sampling.logprobs,
        output_kind=RequestOutputKind.DELTA,
        extra_args={"midstream": msgspec.to_builtins(spec, builtin_types=(bytes,))} if spec else None,
    )


class _Parts:
    """Joins vLLM's deltas of one prompt into the whole output."""

    def __init__(self, request: int) -> None:
        self._request = request
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] | None = None

    def add(self, output: RequestOutput) -> Progress | None:
        part = output.outputs[0]
        self._text.append(part.text)
        self._token_ids += part.token_ids
        if part.logprobs is not None:
            self._logprobs = (self._logprobs or []) + _logprobs(part)
        if not output.finished:
            return Progress(self._request, part.text, list(part.token_ids)) if part.token_ids or part.text else None
        if part.finish_reason not in ("stop", "length"):
            raise MidstreamError("engine_failed", f"the engine ended the request with {part.finish_reason!r}")
        finished = Output(
            index=self._request,
            text="".join(self._text),
            token_ids=self._token_ids,
            finish_reason=part.finish_reason,
            prompt_tokens=len(output.prompt_token_ids or []),
            cached_tokens=output.num_cached_tokens or 0,
            logprobs=self._logprobs,
        )
        return Progress(self._request, part.text, list(part.token_ids), finished)


def _logprobs(part: CompletionOutput) -> list[TokenLogprob]:
    found = []
    for token_id, choices in zip(part.token_ids, part.logprobs or [], strict=True):
        entries = {
            other: TokenLogprob(token_id=other, token=choice.decoded_token or "", logprob=choice.logprob)
            for other, choice in choices.items()
        }
        chosen = entries[token_id]
        top = sorted(entries.values(), key=lambda entry: -entry.logprob)
        found.append(msgspec.structs.replace(chosen, top=top))
    return found


def _hooks(settings: Settings) -> list[str]:
    """The hook points that the settings name; empty for all. Raises SettingsError."""
    names = [] if settings.hooks == "all" else [name.strip() for name in settings.hooks.split(",")]
    for name in names:
        if name not in HOOKS:
            raise SettingsError(f"hooks: {name!r} is not a hook point: use `all`, or some of {', '.join(HOOKS)}")
    return names


def _row_limit(settings: Settings, plane: PlaneConfig, config: Any) -> int:
    """How many rows a step may capture; 0 where rows are captured straight into memory that is made for the step."""
    if current_platform.is_cpu():
        return 0 if settings.enforce_eager else plane.ring_rows(config.get_hidden_size(), config.dtype.itemsize)
    return plane.ring_rows(config.get_hidden_size(), config.dtype.itemsize) // 2  # one half is filled while the other is read


def _row_store_mib(settings: Settings) -> int:
    """What is promised to a later request must be there: rows that may be dropped are not kept for others."""
    return settings.row_store_mib if settings.enable_prefix_caching and settings.capture_overload != "drop" else 0


def _vector_names(job: Job) -> list[str]:
    return sorted({name for entries in job.steering for entry in entries for name in entry.tensors})


def _engine_args(settings: Settings, plane: PlaneConfig) -> AsyncEngineArgs:
    scheduler = "MidstreamAsyncScheduler" if _overlaps(settings) else "MidstreamScheduler"
    return AsyncEngineArgs(
        **engine_options(settings),
        worker_cls="midstream.workers.runner.worker_class.MidstreamWorker",
        scheduler_cls=f"midstream.workers.runner.scheduler.{scheduler}",
        additional_config=plane.layout(),
    )


def engine_options(settings: Settings) -> dict[str, Any]:
    """What the settings ask of vLLM, without anything of ours: a stock engine started so is what we compare with."""
    options: dict[str, Any] = {
        "model": settings.model,
        "served_model_name": settings.served_model,
        "dtype": settings.dtype,
        "max_model_len": settings.max_model_len,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "pipeline_parallel_size": settings.pipeline_parallel_size,
        "enforce_eager": settings.enforce_eager,
        "max_num_seqs": settings.max_num_seqs,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "enable_prefix_caching": settings.enable_prefix_caching,
        "num_gpu_blocks_override": settings.num_gpu_blocks,
        "async_scheduling": _overlaps(settings),
        "disable_log_stats": True,
        "generation_config": "vllm",  # sampling is what the job says, never a file beside the weights
    }
    if settings.speculative_tokens:
        options["speculative_config"] = {"method": "ngram", "num_speculative_tokens": settings.speculative_tokens} | _NGRAMS
    if current_platform.is_cpu():
        options["kv_cache_memory_bytes"] = int(settings.kv_cache_gib * (1 << 30))
    return options


def _overlaps(settings: Settings) -> bool:
    """Asynchronous scheduling; the v1 runner does not support it over pipeline stages, nor vLLM with drafts by n-gram."""
    return settings.pipeline_parallel_size == 1 and not settings.speculative_tokens


def _environment(settings: Settings) -> None:
    """What vLLM reads from the environment; set before its processes start."""
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    runner = settings.runner
    if runner == "auto" and current_platform.is_cpu():
        runner = "v1"  # the v2 runner needs Triton, which has no CPU backend
    if runner != "auto":
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1" if runner == "v2" else "0"
    ranks = settings.tensor_parallel_size * settings.pipeline_parallel_size
    if current_platform.is_cpu() and ranks > 1 and "VLLM_CPU_OMP_THREADS_BIND" not in os.environ:
        cores = sorted(os.sched_getaffinity(0))
        share = max(1, len(cores) // ranks)
        groups = [cores[rank * share : (rank + 1) * share] or [cores[rank % len(cores)]] for rank in range(ranks)]
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, group)) for group in groups)
