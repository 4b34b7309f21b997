"""Stock vLLM as an engine: one AsyncLLM with Midstream's worker and scheduler classes; no vLLM file
is patched.
"""

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec
import vllm
from transformers import AutoConfig
from vllm import SamplingParams, TokensPrompt, envs
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMClientError
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from ...schemas.artifacts.loras import LoraModule, LoraSupport, LoraUse
from ...schemas.base.errors import MidstreamError, Translated, invalid
from ...schemas.base.machine import host_bytes
from ...schemas.base.ring import Ring, plan_queue, plan_ring, plan_writers
from ...schemas.base.version import __version__
from ...schemas.jobs.certificates import UNPROVEN
from ...schemas.jobs.jobs import Prompted
from ...schemas.jobs.models import NO_TOOL_PARSER, ModelInfo, TokenizerBundle
from ...schemas.model.banks import BANK, RESIDUAL, RowShape, asked_hooks, row_widths
from ...schemas.model.layer_kinds import grouped
from ...schemas.prompts.selectors import INSIDE
from ...schemas.requests.specs import StoredCapture
from ...schemas.requests.steering import RankSteering
from ...schemas.service.engine_errors import in_our_settings
from ...schemas.service.global_capture import from_settings
from ...schemas.settings.settings import NO_TOOLS, Settings, SettingsError
from ...storage.formats.lora_files import joined
from ..runner.base.backlog import WORKS
from ..runner.base.config import Found, PlaneConfig
from ..runner.base.engine_step import RequestEnd
from ..runner.base.extensions import agreed, check_installed, named
from ..runner.base.packed_spec import TenantShare
from ..runner.files.consumers import available
from ..runner.hooks.architectures import UnsupportedArchitectureError, describe
from ..runner.support import build_errors, seams
from ..runner.support.denylist import check
from ..runner.support.quantisation import check_kernels, quantisation_of, refuse_gguf
from ..runner.vllm.ring_budget import CapturedRows
from ..runner.vllm.stages import stage_layers
from . import early_core, start_times
from .admission import CaptureBudget, StepRows
from .checkpoint_check import check_folder, check_layers
from .identity import BOOT
from .model_identity import content_of, digests_in, identity_of
from .options.drafts import check_drafter, check_drafts
from .options.engine_arguments import (
    dtype_of,
    engine_options,
    for_platform,
    prepare_environment,
    scheduler_class,
    use_all_cores,
)
from .options.option_check import accepted
from .prompts.format_check import FormatChecker
from .prompts.images import Images, expanded, fitted, images_of, prompt_with_images
from .prompts.tokenizer import bundle_of
from .prompts.tool_calls import ToolParsers, ToolReader
from .prompts.tool_families import candidates
from .proof.certificate import Access, certify, keep
from .proof.comparison import source_of, suspects
from .protocol import EngineRequest, NewOutput
from .ranks.control import RankControl, rank_steering, row_demand
from .ranks.rank_spec import rank_spec
from .ranks.request_ends import Ends
from .vllm_output import OutputJoiner, refusal, sampling_params

logger = logging.getLogger(__name__)

#: Caveat of an engine that did not certify its hook points.
UNCERTIFIED = (
    f"{UNPROVEN}its hook points were not certified on the loaded model (setting certify=false)"
)
#: How often `failed` checks whether the engine is alive.
_HEALTH_INTERVAL_S = 0.25
#: A rank's writing process must answer within this share of `capture_timeout_s`, after which its
#: jobs would fail instead of running again.
ANSWER_SHARE = 3
#: After so many seconds it counts as silent.
SILENT_S = 3.0
#: Calls of ranks that take as long as the model, or the disk under pending captures, needs.
UNBOUNDED = ("midstream_certify", "midstream_close")


class VllmEngine(RankControl):
    """`workers.engine.protocol.Engine` on vLLM's v1 engine, with either model runner."""

    info: ModelInfo
    tokenizer: TokenizerBundle
    enters = False
    checkpoint: list[Any] | None = None

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._settings = for_platform(settings)
        self._dtype_reason = dtype_of(settings).why
        self._captures = CaptureBudget(settings.tuning.capture_memory_mib << 20)
        # set unless the ranks' writers are behind with this kind of work: then none is admitted
        self._keeps_up = {work: asyncio.Event() for work in WORKS}
        for event in self._keeps_up.values():
            event.set()
        self._live: dict[tuple[str, int], set[str]] = {}
        self._stopping = False
        self._broken = ""  # why the ranks' answers are no longer reliable
        self._ends = Ends(self._send_ends)
        self._tools: ToolParsers | None = None

    async def start(self) -> None:
        start_times.begin("configuration")
        settings = self._settings
        caveats = await asyncio.to_thread(_caveats, settings)
        prepare_environment(settings)
        use_all_cores(settings.vllm.ranks)
        plane = plane_of(settings)
        try:
            await asyncio.to_thread(check_installed, settings.extensions)
            await asyncio.to_thread(check_drafter, settings)
            refuse_gguf(settings.model)
            check_folder(settings)
            vllm_config, images = await asyncio.to_thread(configured, settings)
            vllm_config.scheduler_config.scheduler_cls = scheduler_class(vllm_config)
            caveats += check(vllm_config)
            check_drafts(vllm_config, settings)
            quantisation = quantisation_of(vllm_config)
            if quantisation.name:
                check_kernels(vllm_config, quantisation.name)
            config = vllm_config.model_config
            # before any process of the engine starts, for a clear error
            adapter = describe(config.architectures[0], config.hf_config, config.max_model_len)
            hooks = [hook for hook in adapter.hooks if not plane.hooks or hook in plane.hooks]
            check_layers(config.model, config.hf_text_config, config.get_total_num_hidden_layers())
            identity = await asyncio.to_thread(identity_of, settings, config)
            self._stages = stage_layers(
                config.get_total_num_hidden_layers(), settings.vllm.pipeline_parallel_size
            )
            ring = _ring(settings, config, len(hooks), max(map(len, self._stages)), plane.inside)
            plane = msgspec.structs.replace(
                plane,
                step_rows=ring.step_rows if ring else 0,
                capture_queue_mib=_queue_mib(settings, ring),
                caveats=[*dict.fromkeys((*adapter.caveats, *quantisation.caveats, *caveats))],
                identity=identity,
            )
            require_proven(settings, plane.caveats)
            if settings.tool_parser not in ("", NO_TOOLS):
                self._tools = await asyncio.to_thread(ToolParsers, settings.tool_parser, config)
            self._formats = FormatChecker(
                config.tokenizer,
                config.get_vocab_size(),
                settings.tuning.format_compile_s,
                config.trust_remote_code,
                jobs=max(2, settings.tuning.worker_concurrency // 2),
            )
            plane.export()
            early_core.use()
            start_times.begin("core and ranks")
            self._llm = await asyncio.to_thread(
                AsyncLLM.from_vllm_config, vllm_config, disable_log_stats=True
            )
            self.tokenizer = await asyncio.to_thread(bundle_of, config)
            template = self.tokenizer.chat_template
            if not settings.tool_parser:
                self._tools = await asyncio.to_thread(ToolParsers.fitting, template, config)
            if await asyncio.to_thread(identity_of, settings, config) != identity:
                await asyncio.to_thread(self._llm.shutdown)
                raise MidstreamError(
                    "engine_failed",
                    f"files of {config.model} changed while the engine loaded them: start it again",
                )
            of_ranks = [
                msgspec.convert(item, Found) for item in await self._call("midstream_found", ())
            ]
            if refused := next((item.refused for item in of_ranks if item.refused), ""):
                await asyncio.to_thread(self._llm.shutdown)
                raise UnsupportedArchitectureError(refused)
            extensions = agreed([item.extensions for item in of_ranks])
            absent = {hook: why for item in of_ranks for hook, why in item.absent.items()}
            absent |= {
                hook: "the setting hooks leaves it out"
                for hook in of_ranks[0].hooks
                if plane.hooks and hook not in plane.hooks
            }
            hooks = [hook for hook in hooks if all(hook in item.hooks for item in of_ranks)]
            shapes = _shapes(of_ranks, absent)
        except (MidstreamError, SettingsError):  # their text explains itself
            raise
        except Exception as error:
            built = build_errors.kept(_spill_dir(settings), BOOT)
            raise MidstreamError(
                "engine_failed", f"the engine did not start: {_why(error, built, settings)}"
            ) from error
        readings = {
            kind: next((item.readings[kind] for item in of_ranks if item.readings[kind]), "")
            for kind in of_ranks[0].readings
        }
        self.enters = all(item.enters for item in of_ranks)
        self._item_bytes: int = config.dtype.itemsize
        self._row_bytes: int = config.get_hidden_size() * self._item_bytes
        self._step_rows = StepRows(plane.step_rows)
        row_limit = ring.rows if ring else 0
        self.info = ModelInfo(
            **facts_of(settings, config),
            dtype_reason=self._dtype_reason,
            hooks=[*hooks, *shapes],
            inside=shapes,
            multiplied=sorted({hook for item in of_ranks for hook in item.multiplied}),
            tp=settings.vllm.tensor_parallel_size,
            pp=settings.vllm.pipeline_parallel_size,
            runner="v2" if self._llm.vllm_config.use_v2_model_runner else "v1",
            consumers=available(),
            memory_limit_kib=settings.tuning.memory_limit_kib,
            step_tokens=settings.vllm.max_num_batched_tokens,
            capture_row_limit=row_limit,
            speculative_tokens=settings.speculative_tokens,
            steering_rows=settings.tuning.steering_rows,
            steering_entries=settings.tuning.steering_entries,
            global_captures=from_settings(
                settings,
                config.get_total_num_hidden_layers(),
                hooks,
                row_limit * len(self._stages),
            ),
            grades=True,
            exits=all(item.exits for item in of_ranks),
            readings=readings,
            extensions=extensions,
            absent=absent,
            attention=grouped(kind for item in of_ranks for kind in item.attention),
            multimodal=config.is_multimodal_model,
            caveats=plane.caveats,
            quantization=quantisation.name,
            identity=plane.identity,
            lora=await self._lora_support(),
            images=images.number,
            images_refused=images.refused,
            tool_parser=self._tools.name if self._tools else "",
            tool_parsers=[] if self._tools or settings.tool_parser else [*candidates(template)],
            image_placeholder=images.placeholder,
        )
        if not self.info.exits:
            logger.info(
                "prompts of requests without tokens are computed in whole: the forward pass is "
                "compiled, or the architecture is not in the table"
            )
        source = source_of(settings, config, quantisation.name)
        content = await asyncio.to_thread(
            content_of, digests_in(settings.data_dir), config.model, config
        )
        self.checkpoint = [*source._replace(content=content)]
        start_times.begin("certification")
        await self._certify(trusted=adapter.variant.known and bool(plane.hooks))
        if self._tools is not None and settings.tool_parser:
            # where the template chose the parser, the process starts when it is needed
            await self._formats.begin()

    async def _certify(self, *, trusted: bool) -> None:
        """Prove the hook points with real requests; hooks that are not proven are absent from
        `info`.

        `trusted`: the architecture is in the table of hook points and the setting `hooks` leaves
        some out; what only the left-out hooks would prove is served all the same. Raises
        Uncertified.
        """
        if not self._settings.certify:
            return
        config = self._llm.vllm_config
        access = Access(
            generate=self.generate,
            call=self._call,
            holding=self.holding_vectors,
            llm=self._llm,
            stages=self._stages,
            steering_rows=min(
                self._settings.tuning.steering_rows, self._settings.tuning.steering_entries
            ),
            chunked=bool(config.scheduler_config.enable_chunked_prefill),
            step_tokens=self._settings.vllm.max_num_batched_tokens,
        )
        mode = "eager" if self._settings.vllm.enforce_eager else "compiled"
        try:
            certificate = await certify(
                access,
                self.info,
                source_of(self._settings, config.model_config, self.info.quantization),
                trusted=trusted,
                required=self._settings.compare == "require",
                vllm=vllm.__version__,
                mode=mode,
            )
            self._vectors.forget()  # as the ranks did
            await self._llm.reset_prefix_cache()
        except BaseException as error:
            await asyncio.to_thread(self._llm.shutdown)
            built = build_errors.kept(_spill_dir(self._settings), BOOT)
            if not isinstance(error, Exception) or (
                isinstance(error, MidstreamError) and not built
            ):
                raise
            raise MidstreamError(
                "engine_failed", f"the engine did not start: {_why(error, built, self._settings)}"
            ) from error
        path = keep(certificate, Path(self._settings.data_dir).resolve() / "certificates")
        logger.info(
            "certified in %.1f s: %s; %s", certificate.seconds, ", ".join(certificate.proven), path
        )
        for hook, why in certificate.absent.items():
            logger.warning("hook %s is not served: %s", hook, why)
        served = [hook for hook in self.info.hooks if hook in certificate.served]
        self.info = msgspec.structs.replace(
            self.info,
            hooks=served,
            inside={hook: shape for hook, shape in self.info.inside.items() if hook in served},
            caveats=certificate.caveats,
            absent={**self.info.absent, **certificate.absent},
            readings={**self.info.readings, **certificate.readings},
            certificate=certificate,
            global_captures=from_settings(
                self._settings,
                self.info.num_layers,
                served,
                self.info.capture_row_limit * len(self._stages),
            ),
        )
        self.enters = self.enters and "pre_attn" in served

    async def check(self, ask: EngineRequest) -> None:
        params = sampling_params(ask.sampling, None)
        self._tool_reader(ask, params)  # tools are a format too
        await self._formats.check(params, ask.tenant, ask.job)

    async def generate(self, ask: EngineRequest) -> AsyncGenerator[NewOutput, None]:
        ask, prompt = await self._prompt(ask)
        spec = rank_spec(ask, exits=self.info.exits)
        request_id = f"{ask.job}.{ask.request}.{ask.attempt}"
        live = self._live.setdefault((ask.job, ask.attempt), set())
        live.add(request_id)
        submitted = over = False
        ended: Awaitable[None] | None = None
        try:
            params = sampling_params(ask.sampling, spec, TenantShare(ask.tenant, ask.weight))
            lora = self._lora_request(ask.lora)
            reader = self._tool_reader(ask, params)
            await self._formats.check(params, ask.tenant, ask.job)
            captured = self._captured_bytes(ask)
            if spec is not None and captured:  # before it takes room from others
                await self._keeps_up[spec.work].wait()
            async with (
                self._rows.admitted(row_demand(spec), ask.tenant),
                self._step_rows.admitted(self._unsplit_rows(ask), ask.tenant),
                self._captures.admitted(captured, ask.tenant),
            ):
                joiner = OutputJoiner(ask, reader, self._prompted(ask))
                submitted = True
                # Close the generator before the rows are released and the ranks are notified, so
                # that vLLM's abort precedes both.
                async with aclosing(
                    self._llm.generate(prompt, params, request_id, lora_request=lora)
                ) as outputs:
                    async for output in outputs:
                        progress = joiner.add(output)
                        if progress is not None and progress.finished is not None:
                            over = True
                            if spec is not None and spec.worker_reports_end:
                                ended = self._ends.notify(
                                    spec.key, spec.prompt_tokens + len(progress.finished.token_ids)
                                )
                        if progress is not None:
                            yield progress
                if ended is not None:
                    # vLLM may abort a request after it returned the output: until then the rows
                    # are in use
                    await ended
        except EngineDeadError as error:
            raise MidstreamError("engine_failed", f"the engine died: {error}") from error
        except VLLMClientError as error:
            over = True  # the ranks never received the request
            raise refusal(error, ask.sampling) from error
        finally:
            live.discard(request_id)
            if not live:
                self._live.pop((ask.job, ask.attempt), None)
            if submitted and not over and spec is not None and not self._llm.errored:
                # cancelled: vLLM has sent its abort already, so the ranks get this notice with the
                # abort or after it
                self._ends.notify(spec.key, -1)

    def _tool_reader(self, ask: EngineRequest, params: SamplingParams) -> ToolReader | None:
        if ask.tools is None:
            return None
        if self._tools is None:
            raise invalid(
                "tools",
                "this worker has no parser of tool calls",
                hint=NO_TOOL_PARSER,
            )
        return self._tools.begin(ask, params)

    def _prompted(self, ask: EngineRequest) -> Prompted | None:
        if ask.echo is None:
            return None
        tokenizer = self._llm.get_tokenizer()
        text = ask.echo or tokenizer.decode(ask.token_ids)
        return Prompted(
            text=text, token_ids=ask.token_ids, first=tokenizer.decode(ask.token_ids[:1])
        )

    def _lora_request(self, lora: LoraUse | None) -> LoRARequest | None:
        """Return vLLM's request for a held adapter.

        Name and path are the content's digest, because they are part of every block's hash.
        """
        return (
            None
            if lora is None
            # The digest as name and path: then it is in the prefix cache's hashes, and in the keys
            # of kept rows that follow from these.
            else LoRARequest(lora.digest, self._loras.number(lora.digest), lora.digest)
        )

    async def _lora_support(self) -> LoraSupport | None:
        if not self._settings.vllm.max_loras:
            return None
        modules: dict[str, list[LoraModule]] = {}
        for of_rank in await self._call("midstream_lora_modules", ()):
            for name, shapes in msgspec.convert(of_rank, dict[str, list[LoraModule]]).items():
                modules[name] = joined(modules.get(name, []), shapes)
        return LoraSupport(max_rank=self._settings.vllm.max_lora_rank, modules=modules)

    async def _prompt(self, ask: EngineRequest) -> tuple[EngineRequest, Any]:
        """Return the request with its images expanded, and the prompt for vLLM."""
        prompt: Any = TokensPrompt(prompt_token_ids=ask.token_ids)
        if ask.images:
            written = await asyncio.to_thread(prompt_with_images, ask.token_ids, ask.files)
            (prompt,) = await self._llm.renderer.render_cmpl_async([written])
            ask = fitted(expanded(ask, prompt), self.info.max_model_len)
        if self._settings.prefix_cache_scope == "tenant":
            # the salt is part of the first block's hash, on which all later hashes depend
            prompt["cache_salt"] = ask.tenant
        if ask.salt:
            prompt["cache_salt"] = ask.salt
        return ask, prompt

    def _unsplit_rows(self, ask: EngineRequest) -> int:
        """Return how many rows a rank's ring must hold for the request to proceed: those of its
        next token and of its drafts.
        """
        drafts = self._settings.speculative_tokens
        rows = CapturedRows(ask.captures, len(ask.token_ids), self._stages)
        # drafts beyond the end are also computed
        return max(rows.most(1 + drafts, ask.sampling.max_tokens + drafts))

    def _captured_bytes(self, ask: EngineRequest) -> int:
        """Return how many bytes of the request's rows a rank may hold in memory."""
        window = self._settings.tuning.capture_window_mib << 20
        # scored rows are dropped in their step
        kept = (capture for capture in ask.captures if not capture.scored)
        return sum(
            min(
                window,
                self._rows_of(capture, ask)
                * (self._row_bytes if capture.row is None else capture.row.size * self._item_bytes),
            )
            for capture in kept
        )

    def _rows_of(self, capture: StoredCapture, ask: EngineRequest) -> int:
        # drafts beyond the end are also computed
        max_tokens = ask.sampling.max_tokens + self._settings.speculative_tokens
        held = capture.count_held(len(ask.token_ids), max_tokens, ends_late=bool(ask.sampling.stop))
        return capture.num_sites * held

    async def abort(self, job_id: str, attempt: int) -> None:
        for request_id in list(self._live.get((job_id, attempt), ())):
            await self._llm.abort(request_id)

    async def steering_status(self) -> list[RankSteering]:
        """Return the ranks' steering; after a failed intervention, reset the prefix cache."""
        statuses = await self._call("midstream_status", ())
        for work, event in self._keeps_up.items():
            if any(work in rank["behind"] for rank in statuses):
                event.clear()
            else:
                event.set()
        silent_s = max(rank["silent_s"] for rank in statuses)
        self.trouble = (
            f"the process that writes a rank's files has not answered for {silent_s:.0f} s"
            if silent_s >= SILENT_S
            else ""
        )
        if any(rank["tainted"] or rank["unkept"] for rank in statuses):
            # Midstream's scheduler drops the affected blocks, also while requests run
            await self._llm.reset_prefix_cache()
            await self._ranks.apply(
                "forgetting failed interventions",
                "midstream_forget_failures",
                [rank["step"] for rank in statuses],
            )
        return [rank_steering(status) for status in statuses]

    async def restart_ledgers(self) -> None:
        await super().restart_ledgers()
        # Midstream's scheduler does not reuse blocks affected by interventions
        await self._llm.reset_prefix_cache()

    async def shutdown(self) -> None:
        """Stop the engine, after pending captures and receipts have been written and sent."""
        self._stopping = True
        await self._formats.close()
        if not self._llm.errored:
            await self._call("midstream_close", ())
        if self._llm.output_handler is not None:
            self._llm.output_handler.cancel()  # otherwise it would log the shutdown as a crash
        # vLLM's processes hold nothing any more, and end by themselves only after seconds.
        await asyncio.to_thread(self._llm.shutdown, 0.0)

    async def failed(self) -> str:
        while True:
            if not self._stopping and self._broken:
                return self._broken
            if not self._stopping and self._llm.errored:
                return f"the engine died: {self._llm.dead_error}"
            await asyncio.sleep(_HEALTH_INTERVAL_S)

    async def _send_ends(self, ends: list[RequestEnd]) -> None:
        """Notify the ranks where requests end, see `Requests.end`. The notice goes with the next
        step, because a separate call would delay a step.
        """
        try:
            await self._llm.engine_core.call_utility_async("midstream_end", ends)
        except Exception as error:
            if not self._stopping and not self._llm.errored:
                self._broken = (
                    "the ends of requests could not be reported to the engine core (count: "
                    f"{len(ends)}): {error}"
                )

    async def _call(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        # as long as vLLM waits for a step: a rank whose machine is lost never answers
        bound = None if method in UNBOUNDED else envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS
        call = asyncio.ensure_future(self._llm.collective_rpc(method, timeout=bound, args=args))
        try:
            # a core that dies while the call is on its way never answers it
            while not call.done():
                await asyncio.wait({call}, timeout=_HEALTH_INTERVAL_S)
                if self._llm.errored and not call.done():
                    raise EngineDeadError
            results: list[Any] = call.result()
        except EngineDeadError as error:
            raise MidstreamError("engine_failed", f"the engine died: {error}") from error
        except Exception as error:
            # vLLM leaves the other ranks' answers unread, and the next call would return them.
            self._broken = f"a rank failed in {method}: {error}"
            raise MidstreamError("engine_failed", self._broken) from error
        finally:
            call.cancel()
        return results


def _spill_dir(settings: Settings) -> str:
    return str(Path(settings.data_dir).resolve() / "spill")


def _why(error: Exception, built: str, settings: Settings) -> str:
    """Returns why vLLM cannot build or run the model: in terms of Midstream's settings if possible,
    else vLLM's reason with the fields of the config that may be the cause.

    `built`: the reason that a rank kept, or "".
    """
    reason = built or build_errors.reason_of(error)
    explained = in_our_settings(reason)
    if explained != reason or not (
        built
        or isinstance(error, AttributeError | AssertionError | KeyError | TypeError | IndexError)
    ):
        return explained
    try:
        config = AutoConfig.from_pretrained(settings.model, trust_remote_code=False)
        architecture = (config.architectures or ["the model"])[0]
        fields = suspects(config)
    except Exception as unread:  # the config itself may be the cause
        return (
            f"{reason}; transformers does not read its config either: "
            f"{build_errors.reason_of(unread)}"
        )
    suspected = ", ".join(fields) or "none"
    return (
        f"vLLM cannot run {architecture}: {reason}. Fields of config.json that are not "
        f"its class's defaults: {suspected}"
    )


def _caveats(settings: Settings) -> list[str]:
    """Return the caveats of vLLM's version, of unproven options and of a start without certificate.

    Raises MidstreamError for a refused version or option, before a process of the engine starts.
    """
    with Translated(
        (SettingsError, seams.SeamError),
        lambda error: MidstreamError("engine_failed", f"the engine did not start: {error}"),
    ):
        options = accepted(settings).caveats
        return [
            *seams.verify(),
            *options,
            *([] if settings.certify else [UNCERTIFIED]),
        ]


def require_proven(settings: Settings, caveats: Sequence[str]) -> None:
    """Raises MidstreamError if something is unproven and the setting compare=require."""
    unproven = [caveat for caveat in caveats if caveat.startswith(UNPROVEN)]
    if unproven and settings.compare == "require":
        raise MidstreamError(
            "engine_failed",
            "the engine did not start: the setting compare=require refuses what is "
            + "; ".join(unproven),
        )


def plane_of(settings: Settings) -> PlaneConfig:
    """Return the ranks' configuration, as far as it does not depend on the model."""
    residual, inside = asked_hooks(settings.hooks)
    return PlaneConfig(
        version=__version__,
        worker=settings.worker_id,
        boot=BOOT,
        relay_url=settings.relay_url,
        outbox_dir=str(Path(settings.data_dir).resolve() / "outbox"),
        capture_root=settings.artifacts,
        hooks=residual,
        inside=inside,
        steering_rows=settings.tuning.table_rows,
        steering_entries=settings.tuning.table_entries,
        step_tokens=settings.vllm.max_num_batched_tokens,
        step_rows=0,  # `start` sets it: it depends on the model's shape
        capture_queue_mib=0,  # `start` sets it
        capture_window_mib=settings.tuning.capture_window_mib,
        capture_overload=settings.capture_overload,
        spill_dir=_spill_dir(settings),
        # 0 if rows may be dropped: rows that a later request takes from the store must exist
        row_store_mib=settings.tuning.row_store_mib
        if settings.vllm.enable_prefix_caching and settings.capture_overload != "drop"
        else 0,
        sweep_entry=settings.tuning.sweep_entry,
        graph_families=settings.tuning.graph_families,
        writer_threads=plan_writers(
            accelerator=not current_platform.is_cpu(),
            cores=len(os.sched_getaffinity(0)),
            ranks=settings.vllm.ranks,
            threads=settings.tuning.writer_threads,
        ),
        segment_limit_kib=settings.tuning.segment_limit_kib,
        segment_mib=settings.tuning.segment_mib,
        memory_limit_kib=settings.tuning.memory_limit_kib,
        capture_quota_mib=settings.capture_quota_mib,
        lens_dir=settings.artifacts_of("lenses"),
        cores=sorted(os.sched_getaffinity(0)),
        answer_s=settings.capture_timeout_s / ANSWER_SHARE,
        log_format=settings.log_format,
        log_level=settings.log_level,
        extensions=named(settings.extensions),
        fault=settings.fault,
        curve_secret_file=settings.curve_secret_file,
        curve_server_key=settings.curve_server_key,
    )


def configured(settings: Settings) -> tuple[Any, Images]:
    """Returns vLLM's config, without an image encoder if this worker takes no images, and how the
    model takes images.
    """
    config = AsyncEngineArgs(
        **engine_options(settings),
        worker_cls="midstream.workers.runner.vllm.worker_class.MidstreamWorker",
    ).create_engine_config(UsageContext.ENGINE_CONTEXT)
    images = images_of(config, settings.images_per_prompt)
    if settings.images_per_prompt and not images.number and config.model_config.is_multimodal_model:
        logger.warning("the model takes text only: %s", images.refused)
        return configured(msgspec.structs.replace(settings, images_per_prompt=0))[0], images
    return config, images


def facts_of(settings: Settings, config: Any) -> dict[str, Any]:
    """Return the fields of `ModelInfo` that vLLM's `ModelConfig` determines."""
    return {
        "name": settings.served_model,
        "version": __version__,
        "architecture": config.architectures[0],
        "num_layers": config.get_total_num_hidden_layers(),
        "hidden_size": config.get_hidden_size(),
        "vocab_size": config.get_vocab_size(),
        "max_model_len": config.max_model_len,
        "dtype": str(config.dtype).removeprefix("torch."),
        "tokenizer": "",
    }


def _shapes(reports: Sequence[Found], absent: dict[str, str]) -> dict[str, RowShape]:
    """Returns the row shapes of the hooks inside attention and MLP that all ranks have; adds the
    reason to `absent` for the others.
    """
    shapes = {}
    for hook in dict.fromkeys(hook for item in reports for hook in item.inside):
        of_ranks = {item.inside.get(hook) for item in reports}
        if len(of_ranks) == 1 and (shape := of_ranks.pop()) is not None:
            shapes[hook] = shape
        else:
            absent.setdefault(hook, "layers of another pipeline stage have rows of another width")
    return shapes


def _ring(
    settings: Settings, config: Any, hooks: int, layers: int, inside: Sequence[str]
) -> Ring | None:
    """Return the ring that one step's rows are captured to; None on the CPU, which has none.

    The rings of all banks have the same number of rows, so that rows are counted together; their
    sizes together have the bound of a single ring.
    """
    if current_platform.is_cpu():
        return None
    text = config.hf_text_config
    widths = row_widths(
        config.get_hidden_size(),
        heads=int(getattr(text, "num_attention_heads", 1)),
        key_heads=config.get_total_num_kv_heads(),
        head_size=config.get_head_size(),
        neurons=int(getattr(text, "intermediate_size", None) or 4 * config.get_hidden_size()),
        experts=int(
            getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None) or 0
        ),
    )
    return plan_ring(
        sum(widths[bank] for bank in {RESIDUAL, *(BANK[hook] for hook in INSIDE if hook in inside)})
        * config.dtype.itemsize,
        hooks + len(inside),
        layers,
        step_tokens=settings.vllm.max_num_batched_tokens,
        requests=settings.vllm.max_num_seqs,
        drafts=settings.speculative_tokens,
        memory_bytes=current_platform.get_device_total_memory(),
        size_mib=settings.tuning.capture_buffer_mib,
    )


def _queue_mib(settings: Settings, ring: Ring | None) -> int:
    size_mib = settings.tuning.capture_queue_mib
    return (
        plan_queue(ring, host_bytes=host_bytes(), ranks=settings.vllm.ranks, size_mib=size_mib)
        >> 20
    )
