"""Records of replays."""

from functools import cached_property
from typing import Annotated, Literal

import msgspec

from midstream.schemas.access.handling import Handling
from midstream.schemas.base.limits import Index, Metadata
from midstream.schemas.base.records import Record, Result
from midstream.schemas.jobs.jobs import State
from midstream.schemas.jobs.works import Work, WorkFacts
from midstream.schemas.requests.policies import ConditionChange

from .records import HitWords

#: The most prompts of a replay.
MAX_REPLAYED = 1000
#: Prompts that are replayed: those of the last hits' jobs, or of the last jobs.
Source = Literal["hits", "jobs"]


class ReplayRequest(Handling, kw_only=True):
    """Body of `POST /v1/policies/{name}/replays`: prompts of the past under two versions of a
    policy, without any action.
    """

    version: Index | None = None  # null: the current one
    condition: ConditionChange | None = None  # type: ignore[valid-type]  # changes of that version
    against: Index | None = None  # the version that it is compared with; null: the current one
    of: Source = "jobs"
    last: Annotated[int, msgspec.Meta(ge=1, le=MAX_REPLAYED)] = 100  # prompts, the newest
    metadata: Metadata = {}


class ReplayedPrompt(Record):
    """Where the prompt of a replay is from."""

    job: str
    request: int  # index of the prompt in that job
    tenant: str  # of that job


class ReplayWork(Work, tag="replay"):
    """What is stored with a replay beside its prompts."""

    policy: str
    old: int  # the version that is compared with
    new: int
    changed: bool  # whether the condition of `new` is another one than the version's
    origins: list[ReplayedPrompt]  # of each prompt

    @cached_property
    def facts(self) -> WorkFacts:
        return WorkFacts(title=f"replay of {self.policy}")


class ReplayTurn(Record):
    """The first token of a prompt at which a version turned on."""

    position: int
    score: float


class ReplayedHit(ReplayedPrompt):
    """A prompt at which one of the versions turned on. A version that did not is null."""

    old: ReplayTurn | None = None
    new: ReplayTurn | None = None
    text: HitWords | None = None  # around that token; null: it is another tenant's


class ReplayView(Result, Record):
    """Answer of `GET /v1/policies/{name}/replays/{id}`."""

    id: str  # of its job
    state: State
    policy: str
    old: int  # versions
    new: int
    changed: bool  # whether the condition of `new` is another one than the version's
    prompts: int
    kept: int = 0  # prompts at which both turned on
    # prompts at which only `new` turned on, or only `old`; the highest score first
    gained: list[ReplayedHit] = []
    lost: list[ReplayedHit] = []
