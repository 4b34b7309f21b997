"""The fake engine: the control plane without a model.

`FakeEngine` generates without a model: deterministic text, a settable time per token, and real
receipts and real capture files for every rank it claims to have. Steering of every op is checked,
accounted for on each rank and decides the text; captured rows stay as they are. For control-plane
tests and benchmarks only; its output says nothing about a language model. Faults that
`settings.fault` may name (see `FakeFaults`): `engine_dies:tokens=N` (after N tokens in all),
`generate:request=I` (that prompt of each job fails), `disagree:rank=R` (rank R's receipts report
another checksum), `refuse:request=I` (the ranks report an error of that prompt of each job;
`kind=K`: of this kind), `silent:rank=R` (rank R never reports), `turnstile:file=PATH` (see
`turnstile`), `start:reason=TEXT`, `slow_start:seconds=S`; and of a call to rank R: `hold`, `drop`,
`put_lora`, `put_sae`, `put_run`, `drop_runs`, `check_global`, `restart` (the rank refuses),
`lose_run` (it has none of the source run that a request names), `desync` (it does not account for a
steered request), `fingerprint` (it has other bytes).
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, UnsetType
from tokenizers import Tokenizer

from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.jobs.jobs import Output, Prompted, TokenLogprob
from midstream.schemas.requests.specs import RankSpec, StoredSteering
from midstream.schemas.requests.steering import RankSteering
from midstream.schemas.settings.settings import Settings
from midstream.workers.engine.protocol import EngineRequest, NewOutput
from midstream.workers.engine.ranks.control import RankControl, row_demand
from midstream.workers.engine.ranks.rank_spec import rank_spec
from midstream.workers.runner.probes.deciders import seen_by
from midstream.workers.runner.probes.probe_news import Scored

from .model import Dice, make_bundle, make_info, make_tokenizer, weights_of
from .rank import FakeFaults
from .ranks import FakeRanks
from .readings import loaded
from .turnstile import Turnstile


class FakeOptions(msgspec.Struct, forbid_unknown_fields=True):
    """The setting `engine_options` of a fake engine."""

    token_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """Seconds per token; 0 returns a whole output immediately."""


def _options(settings: Settings) -> FakeOptions:
    try:
        return msgspec.convert(settings.engine_options, FakeOptions)
    except msgspec.ValidationError as error:
        raise MidstreamError("engine_failed", f"engine_options: {error}") from error


class FakeEngine(RankControl):
    """An `Engine` without a model.

    Its options are `FakeOptions`.
    """

    checkpoint = None
    enters = True  # no layer is skipped, but the rows at the entry are checked

    def __init__(self, settings: Settings):
        super().__init__(settings)
        self._token_s = _options(settings).token_s
        self.faults = FakeFaults(settings.fault)
        turnstile = self.faults.get("turnstile")
        self._turnstile = Turnstile(turnstile["file"]) if turnstile else None
        self._tokenizer = make_tokenizer()
        self._weights = weights_of(settings)
        self.tokenizer = make_bundle(self._tokenizer)
        installed = loaded(settings)
        self.info = make_info(settings, self._tokenizer, self.tokenizer, installed)
        self._slots = asyncio.Semaphore(settings.vllm.max_num_seqs)
        self._tokens = 0  # generated so far, over all requests
        self._running = 0  # requests that are being generated, and do not wait
        self._death: asyncio.Event = asyncio.Event()
        self._reason = ""
        # requests of an attempt that are being generated
        self._active: Counter[tuple[str, int]] = Counter()
        self._aborted: set[tuple[str, int]] = set()
        self.ranks = FakeRanks(settings, self.faults, self._die, installed)

    async def start(self) -> None:
        if (faults := self.faults.get("start")) is not None:
            raise MidstreamError("engine_failed", faults["reason"])
        if (faults := self.faults.get("slow_start")) is not None:
            # In a thread, where a real engine is built: nothing can interrupt that.
            await asyncio.to_thread(time.sleep, float(faults["seconds"]))
        await self.ranks.start()

    async def _call(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        await asyncio.sleep(0)
        if self._reason:
            raise MidstreamError("engine_failed", self._reason)
        return self.ranks.call(method, args)

    async def steering_status(self) -> list[RankSteering]:
        self.ranks.tell_load(self._running, sum(self._active.values()) - self._running)
        return await super().steering_status()

    async def check(self, ask: EngineRequest) -> None:
        """Formats are ignored."""

    async def generate(self, ask: EngineRequest) -> AsyncGenerator[NewOutput, None]:
        attempt = ask.job, ask.attempt
        self._active[attempt] += 1
        try:
            async with aclosing(
                self._generate(ask, rank_spec(ask, exits=self.info.exits))
            ) as progresses:
                async for progress in progresses:
                    yield progress
        finally:
            self._active[attempt] -= 1
            if not self._active[attempt]:
                del self._active[attempt]
                self._aborted.discard(attempt)

    async def _generate(
        self, ask: EngineRequest, spec: RankSpec | None
    ) -> AsyncGenerator[NewOutput, None]:
        steering = list(spec.steering) if spec is not None else []
        async with self._rows.admitted(row_demand(spec)), self._slots, self._stepping():
            if (faults := self.faults.get("generate")) is not None and int(
                faults["request"]
            ) == ask.request:
                raise MidstreamError(
                    "intervention_failed", f"rank 0 rejected prompt {ask.request}: injected fault"
                )
            writing = _Writing(self._tokenizer, ask, steering, self._weights)
            if spec is not None:
                self.ranks.begin(spec)
            try:
                while writing.finish_reason is None:
                    await self._take_time(ask)
                    if (ask.job, ask.attempt) in self._aborted:
                        return
                    writing.add_token()
                    if writing.finish_reason is None and (ask.stream or self._token_s):
                        yield writing.progress()
            finally:
                if spec is not None:
                    self.ranks.end(spec)
            if spec is not None:
                self.ranks.report(ask, spec, writing.token_ids)
        yield writing.progress()

    @asynccontextmanager
    async def _stepping(self) -> AsyncGenerator[None, None]:
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1

    async def _take_time(self, ask: EngineRequest) -> None:
        if self._turnstile is not None:
            attempt = ask.job, ask.attempt
            await self._turnstile.step(
                attempt, lambda: attempt in self._aborted or bool(self._reason)
            )
        if self._token_s:
            await asyncio.sleep(self._token_s)
        elif ask.stream:
            await asyncio.sleep(0)
        if self._reason:
            raise MidstreamError("engine_failed", self._reason)
        self._tokens += 1
        if (faults := self.faults.get("engine_dies")) is not None and self._tokens >= int(
            faults["tokens"]
        ):
            self._die(f"the fake engine died after {self._tokens} tokens")
            raise MidstreamError("engine_failed", self._reason)

    async def abort(self, job_id: str, attempt: int) -> None:
        if (job_id, attempt) in self._active:
            self._aborted.add((job_id, attempt))

    async def shutdown(self) -> None:
        await self.ranks.close()

    def _die(self, reason: str) -> None:
        self._reason = reason
        self._death.set()

    async def failed(self) -> str:
        await self._death.wait()
        return self._reason


def _crossing(ask: EngineRequest) -> tuple[float, str]:
    """The first position at which a probe that stops crosses, and its name: label number n scores
    position + n.
    """
    crossings = [
        (max(0.0, threshold - number), probe.name)
        for probe in ask.probes
        if "stop" in probe.actions and probe.policy is None
        for number, threshold in enumerate(probe.content.thresholds)
        if threshold is not None
    ]
    for probe in ask.probes:
        if "stop" in probe.actions and probe.policy is not None:
            prompt = len(ask.token_ids)
            read = [*seen_by(probe.policy, prompt).tolist(), prompt]
            least = probe.policy.condition.at_least - probe.policy.column
            at = next((position for position in read if position >= least), least)
            crossings.append((0.0 if probe.policy.inherited else at, probe.name))
    return min(crossings, default=(math.inf, ""))


class _Writing:
    """One output on its way."""

    def __init__(
        self, tokenizer: Tokenizer, ask: EngineRequest, steering: list[StoredSteering], weights: int
    ):
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self._text = ""
        self._sent_tokens = 0
        self._sent_text = 0
        self._ask = ask
        self._dice = Dice(tokenizer, ask.token_ids, ask.sampling.seed, steering, weights)
        self._decode: Callable[[list[int]], str] = tokenizer.decode
        #: Characters held back while they may turn out to begin a stop string.
        self._held_back = max((len(stop) for stop in ask.sampling.stop), default=1) - 1
        self._stop_at, self._probe = _crossing(ask)
        is_policy = self._probe.startswith("policy:")
        self._reason = self._probe if is_policy else f"probe:{self._probe}"
        if self._stop_at < len(ask.token_ids):
            self.finish_reason = self._reason

    def add_token(self) -> None:
        sampling = self._ask.sampling
        if not sampling.max_tokens:
            self.finish_reason = "length"
            return
        self.token_ids.append(self._dice.roll())
        self._text += self._decode(self.token_ids[-1:])
        ends = [result for stop in sampling.stop if (result := self._text.find(stop)) >= 0]
        if ends:
            self._text = self._text[: min(ends)]
            self.finish_reason = "stop"
        elif self.token_ids[-1] in sampling.stop_token_ids:
            self.finish_reason = "stop"
        elif self._stop_at < len(self._ask.token_ids) + len(self.token_ids):
            self.finish_reason = self._reason
        elif len(self.token_ids) >= sampling.max_tokens:
            self.finish_reason = "length"

    def progress(self) -> NewOutput:
        until = (
            len(self._text)
            if self.finish_reason
            else max(len(self._text) - self._held_back, self._sent_text)
        )
        text = self._text[self._sent_text : until]
        tokens = self.token_ids[self._sent_tokens :]
        first = len(self._ask.token_ids) - 1 + self._sent_tokens
        self._sent_text = until
        self._sent_tokens = len(self.token_ids)
        scores = (
            [self._score(position) for position in range(first, first + len(tokens))]
            if self._ask.stream and self._ask.probes
            else []
        )
        output = self._output() if self.finish_reason else None
        stopped_by = self._probe if self.finish_reason == self._reason else ""
        return NewOutput(self._ask.request, text, tokens, output, scores, stopped_by=stopped_by)

    def _score(self, position: int) -> Scored:
        """Score a prompt as the fake ranks do."""
        values = [
            float(position + number)
            for probe in self._ask.probes
            for number in range(len(probe.content.labels))
        ]
        return Scored(position, values, values)

    def _output(self) -> Output:
        assert self.finish_reason is not None
        return Output(
            index=self._ask.request,
            text=self._text,
            token_ids=self.token_ids,
            finish_reason=self.finish_reason,
            prompt_tokens=len(self._ask.token_ids),
            logprobs=self._logprobs(self.token_ids, self._ask.sampling.logprobs),
            prompt=self._prompted(),
        )

    def _prompted(self) -> Prompted | UnsetType:
        ids = self._ask.token_ids
        logprobs = self._logprobs(ids[1:], self._ask.sampling.prompt_logprobs)
        if logprobs is None:
            return UNSET
        return Prompted(text=self._decode(ids), token_ids=ids, logprobs=[None, *logprobs])

    def _logprobs(self, tokens: list[int], top: int | None) -> list[TokenLogprob] | None:
        """Each token as if all letters had the same chance."""
        if top is None:
            return None
        chance = -3.2958  # ln(1/27)
        return [
            TokenLogprob(
                token_id=token,
                token=self._decode([token]),
                logprob=chance,
                top=[TokenLogprob(token_id=token, token=self._decode([token]), logprob=chance)]
                * min(top, 1),
            )
            for token in tokens
        ]
