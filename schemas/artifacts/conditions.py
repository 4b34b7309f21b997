"""Conditions of policies: which scores of a probe trigger one, and the form that ranks receive."""

import functools
import logging
from typing import Annotated, Literal, get_args

import msgspec

from ..base.errors import refuse
from ..base.limits import (
    MAX_LABEL,
    MAX_LATCH_S,
    MAX_POLICY_WINDOW,
    Count,
    Index,
)
from ..base.records import Record
from ..prompts.sight import Looks, Sight, TokenSet

log = logging.getLogger(__name__)

#: `shadow`: decisions are recorded, and nothing else happens. `active`: the actions are taken.
Mode = Literal["shadow", "active"]
ProbeLabel = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_LABEL)]
#: In the range of float32, like the scores.
Threshold = Annotated[float, msgspec.Meta(ge=-3e38, le=3e38)]
#: `StoredProbe.name` of a policy's scores: this, then the policy's name.
POLICY = "policy:"
#: How the scores of tokens are combined into one: the last token's, the largest, the mean, or the
#: exponential moving average e_0 = s_0, e_p = decay · e_(p−1) + (1 − decay) · s_p.
Aggregation = Literal["last", "max", "mean", "exponential"]
Decay = Annotated[float, msgspec.Meta(gt=0, lt=1)]


def decay_fault(aggregation: Aggregation, decay: float | None) -> str | None:
    """Return why this decay is not valid with the aggregation; None: it is."""
    needed = aggregation == "exponential"
    if needed == (decay is not None):
        return None
    return f"is {'required' if needed else 'not valid'} for aggregation {aggregation!r}"


class Schedule(Record):
    """The tokens whose scores a policy reads: of `tokens`, every `every`-th from number `start` to
    `stop`, exclusive; null: to the last.

    `tokens`: of a conversation the `content`, which is all that its messages and the request say,
    and the generated tokens; parts of it by role and turn; `generated` tokens alone; or `all`, with
    those that the chat template adds. Of a prompt whose turns are not known, `content` and parts of
    it are the whole prompt.
    """

    tokens: TokenSet | Looks = "content"
    start: Index = 0
    stop: Index | None = None
    every: Count = 1


class Condition(Record):
    """When a policy is triggered, and for how long it is on.

    The scores of the `schedule` are aggregated in token order: the last one, the mean or the
    maximum of the last `window`, or their exponential average with this `decay`. The policy turns
    on at a token at which the aggregate is `at_least` this, and off where it is below
    `release_below`; for `cool_down` tokens from then on it stays off. A `latch` keeps it on: for
    the rest of the request, or for the conversation, until `latch_s` seconds have passed.
    """

    at_least: Threshold
    release_below: Threshold | None = None  # null: `at_least`
    # of the probe; null: its only label
    label: ProbeLabel | None = None
    aggregation: Aggregation = "last"
    window: Annotated[int, msgspec.Meta(ge=1, le=MAX_POLICY_WINDOW)] | None = None
    decay: Decay | None = None
    schedule: Schedule = Schedule()
    cool_down: Index = 0
    latch: Literal["none", "request", "conversation"] = "none"
    latch_s: Annotated[int, msgspec.Meta(ge=1, le=MAX_LATCH_S)] = 24 * 3600

    def __post_init__(self) -> None:
        kind = self.aggregation
        below = self.release_below
        fault = decay_fault(kind, self.decay)
        refuse(
            {
                "window is required for mean and max, and not valid otherwise": (
                    kind in ("mean", "max")
                )
                == (self.window is None),
                f"decay {fault}": fault is not None,
                "release_below is above at_least": below is not None and below > self.at_least,
            }
        )


class StoredPolicy(Record, omit_defaults=True):
    """A version of a policy, as a job, its ranks and its results have it."""

    name: str
    version: int
    digest: str  # of the version's content
    condition: Condition
    actions: list[str]  # `flag`, `stop`, `steer`, `capture` or `webhook`, in their order
    # one of `Mode`; earlier builds also stored `canary`, which was `active` for a share of the
    # requests and `shadow` for the others
    mode: Annotated[str, msgspec.Meta(extra_json_schema={"enum": list(get_args(Mode))})]
    acts: bool  # on this request, see `StoredProbe.actions`; otherwise it only records
    column: int = 0  # of the condition's label, among the probe's labels
    # the job of the same conversation whose latch turned it on before this request
    inherited: str = ""
    registered: float = 0.0  # when that content was registered: latches are those of a registration
    keep_texts: bool = False  # whether its hits keep the tokens around them
    told: bool = False  # see `PolicyRequest`
    # the tokens of this prompt that it reads; null: the condition's schedule says it alone
    sight: Sight | None = None

    def __post_init__(self) -> None:
        if self.mode == "canary":
            mode = "active" if self.acts else "shadow"
            msgspec.structs.force_setattr(self, "mode", mode)
            _say_former()


@functools.cache
def _say_former() -> None:
    log.warning(
        "a job or its result has a policy of the mode `canary` of an earlier build; it is shown as "
        "`active` if it acted there, and as `shadow` otherwise"
    )


class Decision(Record):
    """A token at which a policy turned on or off."""

    position: int  # of the token, from the prompt's first
    event: Literal["trigger", "release"]
    score: float  # the aggregate that decided, float64
