"""An engine whose scheduler, rank and model run in this process: the caller makes every step, so
that two engines get the same ones.
"""

import asyncio
import os
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import msgspec

from midstream.schemas.base.tensors import Tensor, content_hash
from midstream.schemas.jobs.models import TokenizerBundle
from midstream.schemas.requests.specs import PROBED
from midstream.schemas.settings.settings import Settings
from midstream.workers.engine.protocol import EngineRequest


def direct_engine(settings: Settings, extra: dict[str, Any]) -> Any:
    """A `VllmEngine` that gives vLLM the extra arguments, too.

    Without a tokenizer it serves token ids only.
    """
    from midstream.workers.engine import vllm as module

    options = module.engine_options
    module.engine_options = lambda settings: options(settings) | extra
    if extra.get("skip_tokenizer_init"):
        module.bundle_of = lambda _: TokenizerBundle("", None, {}, [])
    return module.VllmEngine(settings)


def facts_of(llm: Any) -> dict[str, Any]:
    """What was measured: the runner, graphs, and how steps are scheduled."""
    config = llm.vllm_config
    compilation = config.compilation_config
    return {
        "runner": "v2" if config.use_v2_model_runner else "v1",
        "eager": bool(config.model_config.enforce_eager),
        "cudagraphs": getattr(compilation.cudagraph_mode, "name", str(compilation.cudagraph_mode)),
        "async_scheduling": bool(config.scheduler_config.async_scheduling),
    }


class Stepped:
    """What `VllmEngine` uses of vLLM's AsyncLLM, on an engine that steps when it is told to.

    One thread does all of its work.
    """

    thread = ThreadPoolExecutor(1)

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.model_config = llm.model_config
        self.vllm_config = llm.vllm_config
        self.errored = False
        self.dead_error = None
        self.output_handler = None

    @classmethod
    def from_vllm_config(cls, config: Any, disable_log_stats: bool) -> "Stepped":
        from vllm.v1.engine.llm_engine import LLMEngine

        return cls(
            cls.thread.submit(
                LLMEngine.from_vllm_config, config, disable_log_stats=disable_log_stats
            ).result()
        )

    def call(self, work: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        return self.thread.submit(work, *arguments, **named).result()

    async def collective_rpc(self, method: str, **options: Any) -> list[Any]:
        return list(self.call(self.llm.collective_rpc, method, **options))

    async def reset_prefix_cache(self) -> bool:
        return bool(self.call(self.llm.reset_prefix_cache))

    def shutdown(self, timeout: float | None = None) -> None:
        self.call(self.llm.engine_core.shutdown, timeout)


class Direct:
    """`VllmEngine` with that, without asynchronous scheduling unless `extra` has it: the batches of
    a step follow from what was added before it alone.
    """

    def __init__(self, settings: Settings, extra: dict[str, Any]) -> None:
        from midstream.workers.engine import vllm

        self._loop = asyncio.new_event_loop()
        # The certification run submits requests of its own, and nothing steps the engine for them.
        chosen = msgspec.structs.replace(settings, certify=False)
        self.engine = direct_engine(chosen, {"async_scheduling": False} | extra)
        vllm.AsyncLLM = Stepped  # type: ignore[attr-defined, assignment, misc]
        self.wait(self.engine.start())
        self._llm: Stepped = self.engine._llm
        self.facts = facts_of(self._llm)
        self._live: set[str] = set()
        self.steps = 0
        self.outputs: dict[str, list[Any]] = {}

    def wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run_until_complete(work)

    def hold(self, tensors: list[Tensor]) -> list[str]:
        """Their names, once the rank has them."""
        named = {content_hash(tensor): tensor for tensor in tensors}

        async def fetch(name: str) -> Tensor:
            return named[name]

        self.wait(self.engine._vectors.hold(list(named), fetch))
        return list(named)

    def add(self, ask: EngineRequest) -> None:
        """The request begins in the next step that has room."""
        from vllm import TokensPrompt

        from midstream.workers.engine.ranks.rank_spec import rank_spec
        from midstream.workers.engine.vllm_output import sampling_params

        params = sampling_params(ask.sampling, rank_spec(ask))
        name = f"{ask.job}.{ask.request}.{ask.attempt}"
        self._llm.call(
            self._llm.llm.add_request, name, TokensPrompt(prompt_token_ids=ask.token_ids), params
        )
        self._live.add(name)
        self.outputs[name] = []

    @property
    def live(self) -> int:
        return len(self._live)

    def step(self) -> None:
        for output in self._llm.call(self._llm.llm.step):
            part = output.outputs[0]
            chosen = part.logprobs or [None] * len(part.token_ids)
            pairs = zip(part.token_ids, chosen, strict=True)
            self.outputs[output.request_id] += [
                (token, found[token].logprob if found else None) for token, found in pairs
            ]
            if output.finished:
                self._live.discard(output.request_id)
        self.steps += 1

    def drain(self) -> None:
        while self._live:
            self.step()
        self.step()  # in which the rank is told of the last ends

    def in_its_thread(self, work: Callable[[], Any]) -> Any:
        return self._llm.call(work)

    def status(self) -> dict[str, Any]:
        return self.wait(self.engine._call("midstream_status", ()))[0]

    def close(self) -> None:
        """Everything captured is written, and its receipts are sent."""
        self.wait(self.engine.shutdown())


def request(
    number: int,
    token_ids: list[int],
    generated: int,
    *,
    job: str = "",
    logprobs: int | None = None,
    **wish: Any,
) -> EngineRequest:
    """`wish`: steering and captures, see `EngineRequest`."""
    from midstream.schemas.jobs.jobs import Sampling

    sampling = msgspec.structs.replace(
        Sampling(), max_tokens=generated, ignore_eos=True, temperature=0.0, logprobs=logprobs
    )
    captured = {capture.tag: 1 for capture in wish.get("captures", ()) if capture.tag != PROBED}
    return EngineRequest(
        job or f"job{number}", 0, 1, token_ids, sampling, captured=captured, **wish
    )
