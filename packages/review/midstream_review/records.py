"""Records of reviews: hits as the API shows them, marks, and the precision of versions."""

from typing import Annotated, Literal

import msgspec

from midstream.schemas.base.limits import MAX_HIT_NOTE
from midstream.schemas.base.records import Record, Result

#: What a person says of a hit. `right`: the policy was to turn on there; `false_alarm`: it was not.
HitVerdict = Literal["right", "false_alarm", "unsure"]


class MarkRequest(Record):
    """Body of `PUT /v1/policies/{name}/hits/{id}/mark`."""

    verdict: HitVerdict
    note: Annotated[str, msgspec.Meta(max_length=MAX_HIT_NOTE)] = ""


class Mark(MarkRequest):
    """A mark of a hit. Other tenants than that of its author do not see author and note."""

    at: float = 0.0  # seconds since the epoch
    tenant: str = ""  # of the key that set it
    key: str = ""  # its id


class HitWords(Record):
    """The text around a hit's token."""

    before: str
    token: str
    after: str


class Hit(Record, kw_only=True):
    """The first token of a prompt at which a policy turned on."""

    id: str
    policy: str
    at: float  # when its receipt was settled, in seconds since the epoch
    job: str
    tenant: str  # of the job
    request: int  # index of the prompt in the job
    version: int  # of the policy
    digest: str  # of the version
    label: str
    position: int  # of the token, from the prompt's first
    score: float  # the aggregate that decided
    threshold: float
    triggers: int  # how often the policy turned on in the prompt
    mode: str
    acted: bool
    actions: list[str]
    text: HitWords | None = None  # null: the policy keeps no texts, or it was deleted
    mark: Mark | None = None
    # if asked for: the tokens up to the hit's own; null: their text is not kept as a whole
    token_ids: list[int] | None = None


class HitPage(Result, Record):
    hits: list[Hit]
    next: str | None = None


class VersionPrecision(Record):
    """What the marks say of a version."""

    version: int
    right: int
    false_alarm: int
    unsure: int
    # right / (right + false_alarm); null: there is no such mark
    precision: float | None


class PrecisionList(Result, Record):
    """Answer of `GET /v1/policies/{name}/precision`: of versions with marks, newest first."""

    versions: list[VersionPrecision]


class MarkedText(Record):
    """A marked hit as an example to train a probe with."""

    id: str
    token_ids: list[int]  # up to the hit's token
    label: str
    right: bool
