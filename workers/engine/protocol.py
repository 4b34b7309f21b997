"""The engine protocol: what a worker requires of an engine."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from ...schemas.access.keys import DEFAULT_TENANT
from ...schemas.artifacts.loras import LoraUse, StoredLora
from ...schemas.artifacts.probes import StoredProbe
from ...schemas.artifacts.saes import StoredSae
from ...schemas.base.errors import KindError, MidstreamError
from ...schemas.base.tensors import Tensor
from ...schemas.jobs.jobs import Job, MessageDelta, Output, Prompted, Sampling, TokenLogprob
from ...schemas.jobs.models import GradientInfo, ModelInfo, TokenizerBundle
from ...schemas.prompts.chat import ToolUse
from ...schemas.prompts.images import ImageRef, ImageSpan
from ...schemas.requests.source_runs import RunFiles
from ...schemas.requests.specs import EntryPoint, Grade, StoredCapture, StoredSteering
from ...schemas.requests.steering import GlobalSteering, RankSteering
from ..runner.probes.probe_news import Scored

T = TypeVar("T")
#: A registered artifact as a job keeps it.
StoredArtifact = StoredLora | StoredSae
#: Returns the tensor of a content hash; raises MidstreamError if it is not stored.
Fetch = Callable[[str], Awaitable[Tensor]]
#: Returns the files with the rows of a run (`run_key`); raises MidstreamError if it is not ready,
#: or deleted.
Locate = Callable[[str], Awaitable[RunFiles]]


@dataclass(frozen=True)
class EngineRequest:
    """One prompt, and everything requested of the engine for it.

    Only `engine.requests` makes it.
    """

    job: str
    request: int  # index of the prompt in its job; for a sweep see `schemas.jobs.sweep_units`
    attempt: int
    token_ids: list[int]
    sampling: Sampling
    steering: list[StoredSteering] = field(default_factory=list)  # including patches
    # of the job's claim; applied before `steering`
    global_steering: GlobalSteering = field(default_factory=GlobalSteering)
    captures: list[StoredCapture] = field(default_factory=list)
    # tag → how many of the job's prompts have a capture under it
    captured: dict[str, int] = field(default_factory=dict)
    stream: bool = False
    entry: EntryPoint | None = None
    grade: Grade | None = None
    base: str = ""  # see `RankSpec`
    keep_blocks: str = ""  # see `RankSpec`
    trace: str = ""  # see `RankSpec`
    tenant: str = DEFAULT_TENANT
    weight: int = 1  # of its tenant
    lora: LoraUse | None = None  # an adapter that `holding_artifacts` has loaded
    chunk: int = 0  # see `RankSpec`
    salt: str = ""  # requests with different salts share no cached blocks
    # with images, tokens and positions are those of the prompt before images are expanded
    images: list[ImageRef] = field(default_factory=list)
    files: list[bytes] = field(default_factory=list)  # of `images`, in their order
    # where the images are, once the engine has expanded the prompt
    spans: list[ImageSpan] = field(default_factory=list)
    probes: list[StoredProbe] = field(default_factory=list)  # their rows are among `captures`
    tools: ToolUse | None = None  # the output is parsed for tool calls
    # text of the prompt, which is returned with the output; empty: decode its tokens; None: do not
    # return the prompt
    echo: str | None = None
    # the prompt has images and no `max_tokens` was set: generate as long as the model's length
    # allows after the expanded prompt
    fills: bool = False


class NotYet(KindError):
    """The engine cannot run the job now, and may later: the attempt ends without being counted, and
    another follows.
    """

    KIND = "unavailable"


def check_lengths(job: Job, info: ModelInfo) -> None:
    """Raises MidstreamError("prompt_too_long") for a job accepted under a larger `max_model_len`
    than this worker's.
    """
    lengths = {
        f"prompts[{index}]": len(prompt.token_ids) for index, prompt in enumerate(job.prompts)
    }
    for field_, tokens in (lengths | dict(job.opened.facts.lengths)).items():
        if tokens >= info.max_model_len:
            detail = (
                f"has {tokens} tokens, which leaves no room to generate: this worker's "
                f"max_model_len is {info.max_model_len}"
            )
            raise MidstreamError(
                "prompt_too_long",
                detail,
                field=field_,
                allowed=f"up to {info.max_model_len - 1} tokens",
            )


@dataclass(frozen=True)
class NewOutput:
    """New output of one prompt since the last `NewOutput`: a delta, never the whole."""

    request: int  # index of the prompt in its job
    text: str
    token_ids: list[int]
    finished: Output | None = None  # the whole output; only in the last `NewOutput`
    # of returned tokens, by position, if the request streams its probes' scores
    scores: Sequence[Scored] = ()
    said: MessageDelta | None = None  # the parsed text of a streamed job with tools
    logprobs: Sequence[TokenLogprob] = ()  # of `token_ids`, if requested
    prompt: Prompted | None = None  # only in the first `NewOutput`, if requested
    stopped_by: str = ""  # with `finished`: the probe that ended the request


class Engine(Protocol):
    """What a worker requires of any engine: it runs requests on one model, which is loaded once,
    from one event loop; it checks that all ranks are in the same state, and brings them into it.

    `info` and `tokenizer` are available after `start`.
    """

    info: ModelInfo
    tokenizer: TokenizerBundle
    world: int  # number of ranks (tp x pp); a request with receipts gets this many
    # set by `RankWatch`; called with the reason when the ranks may differ, before Quarantined is
    # raised
    on_quarantine: Callable[[str], None]
    # why the ranks deliver no receipts, as of the last `steering_status`; empty: they do
    trouble: str

    async def start(self) -> None:
        """Load the model; may take a minute. Raises MidstreamError("engine_failed")."""

    def holding_vectors(
        self,
        names: Sequence[str],
        fetch: Fetch,
        *,
        users: Sequence[list[StoredSteering]] = (),
    ) -> AbstractAsyncContextManager[None]:
        """Load all of these tensors on every rank, and keep them there inside the block; they may
        stay cached.

        `users`: the steering of requests that will use them soon, so that ranks can lay it out
        ahead. Raises MidstreamError("intervention_failed") naming rank and reason, and Quarantined.
        """

    def generate(self, ask: EngineRequest) -> AsyncGenerator[NewOutput, None]:
        """Generate for one prompt; the last item carries `finished`.

        Raises MidstreamError("engine_failed") when the engine has died. Closing the generator stops
        the request.
        """

    async def abort(self, job_id: str, attempt: int) -> None:
        """Stop every request of this attempt that has not ended."""

    async def shutdown(self) -> None:
        """Stop the engine and end its processes; completed captures are delivered first."""

    async def failed(self) -> str:
        """Wait until the engine dies unexpectedly; return the reason."""

    async def check_global(self, steering: GlobalSteering, fetch: Fetch) -> None:
        """Have every rank check that it could apply `steering`, whose tensors it loads first; they
        may stay cached.

        Raises MidstreamError("intervention_failed") naming the ranks that cannot, and why;
        Quarantined; and MidstreamError("engine_failed") when the engine has died.
        """

    async def steering_status(self) -> list[RankSteering]:
        """Return every rank's ledger and occupancy, in rank order."""

    async def restart_ledgers(self) -> None:
        """Begin a resync: every rank drops all rows and tensors, fails the requests that it still
        has, and resets its ledger to zero; cached blocks affected by interventions are not reused.

        Raises Quarantined if a rank fails to reset.
        """

    async def same_content(self) -> bool:
        """Finish a resync: return whether the ranks of every stage have the same bytes in their
        tables.
        """

    @property
    def waiting(self) -> int:
        """The number of requests that wait for rows of the steering table."""


class GeneratingEngine(Engine, Protocol):
    """An engine that generates, and holds what requests need on the ranks."""

    # whether a forward pass may begin at `EngineRequest.entry`; if not, an entry changes only the
    # cache keys
    enters: bool
    # the fields of `proof.comparison.Source`, for manifests of harvests; None: there is none
    checkpoint: list[Any] | None

    def holding_runs(
        self, keys: Sequence[str], locate: Locate
    ) -> AbstractAsyncContextManager[None]:
        """Load all rows of these source runs (`run_key`) on every rank of the stages that have
        their layers, and keep them there inside the block. Unused runs are evicted, least recently
        used first; waits while runs held by others leave no space.

        Raises MidstreamError("intervention_failed") naming rank and reason, what `locate` raises,
        and Quarantined.
        """

    def held_runs(self) -> list[str]:
        """Return the keys of the runs loaded on the ranks, in use or not."""

    def holding_artifacts(
        self, artifacts: Sequence[StoredArtifact]
    ) -> AbstractAsyncContextManager[None]:
        """Load these artifacts, all of one kind and with different contents, on every rank that
        needs them, and keep them there inside the block; they may stay loaded. Waits while
        artifacts held by others leave no space for all of them.

        Raises MidstreamError("invalid_request") when the worker serves none of this kind, a folder
        does not exist, or an adapter is not what was registered or does not fit this model;
        MidstreamError("intervention_failed") when a rank cannot load one or its files have changed;
        and Quarantined.
        """

    async def check(self, ask: EngineRequest) -> None:
        """Wait until the request's format, if it has one, is checked. Call this before the methods
        `holding_…`: what is held during the wait takes space from other requests.

        Raises MidstreamError("invalid_request") for a rejected format, and FormatsBusy when too
        many jobs wait already.
        """


class PublishingEngine(Engine, Protocol):
    """An engine for the queue `gradients` of its model: one rank, which generates nothing."""

    gradients: GradientInfo  # of its model; what is published
