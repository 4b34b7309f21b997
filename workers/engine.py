"""What must an engine be able to do, so that a worker can host it?"""

from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from ..schemas.errors import MidstreamError
from ..schemas.jobs import Job, Output
from ..schemas.models import ModelInfo, TokenizerBundle
from ..schemas.settings import Settings
from ..schemas.tensors import Tensor

#: Gives the tensor of a content hash; raises MidstreamError when nobody has it.
Fetch = Callable[[str], Awaitable[Tensor]]


@dataclass(frozen=True)
class Progress:
    """What one prompt generated since the last `Progress`: a delta, never the whole."""

    request: int  # index of the prompt in its job
    text: str
    token_ids: list[int]
    finished: Output | None = None  # set on the last one: the whole output


class Engine(Protocol):
    """One model, loaded once, used from one event loop. `info` and `tokenizer` are there after `start`."""

    info: ModelInfo
    tokenizer: TokenizerBundle
    world: int  # number of ranks (tp x pp): this many receipts for every request that wants them

    async def start(self) -> None:
        """Load the model; may take a minute. Raises MidstreamError("engine_failed")."""

    async def hold_vectors(self, job: Job, fetch: Fetch) -> None:
        """Have every vector of the job on every rank, and keep them there until `release_vectors`.

        Raises MidstreamError("intervention_failed") naming rank and reason; a call that raises, or is cancelled, holds nothing.
        """

    async def release_vectors(self, job: Job) -> None:
        """The job no longer needs its vectors; they may stay as a cache."""

    def generate(self, job: Job, request: int, attempt: int) -> AsyncGenerator[Progress, None]:
        """Generate for one prompt; the last item carries `finished`.

        Raises MidstreamError("engine_failed") when the engine has died. Closing the generator stops the request.
        """

    async def abort(self, job_id: str, attempt: int) -> None:
        """Stop every request of this attempt; one that is over already is no error."""

    async def shutdown(self) -> None:
        """Stop the engine and end its processes; what is captured already is delivered first."""

    async def failed(self) -> str:
        """Return, with the reason, only when the engine has died by itself."""


def make_engine(settings: Settings) -> Engine:
    """The engine that `settings.engine` names, not started yet."""
    if settings.engine == "fake":
        from .fake_engine import FakeEngine

        return FakeEngine(settings)
    try:
        from .vllm_engine import VllmEngine
    except ModuleNotFoundError as error:
        raise MidstreamError("engine_failed", f"vLLM is not installed here ({error}): install the `cpu` or `gpu` extra") from error
    return VllmEngine(settings)
