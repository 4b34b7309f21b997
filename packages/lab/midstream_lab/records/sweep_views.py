"""Views of a sweep or an attribution other than its result: the plan of a request, and a job in
progress with its request.
"""

from midstream.schemas.base.records import Record
from midstream.schemas.jobs.jobs import JobView
from midstream.schemas.prompts.selectors import Hook

from .attributions import AttributionRequest, AttributionResult
from .sweeps import Axis, SweepRequest, SweepResult


class PlannedColumn(Record):
    """A column of the planned grid."""

    label: str  # the token's text, or the span's name
    positions: list[int]  # in the patched prompt; empty: the column is skipped
    # positions in the other prompt whose rows are written to `positions`, in the same order; empty
    # in an ablation
    sources: list[int]
    reason: str  # why the column is skipped
    head: int  # number of the head; −1: the column is not a head's


class PlannedPair(Record):
    """A pair with its tokens, aligned."""

    clean_tokens: list[str]  # the text of each token
    corrupt_tokens: list[str]  # empty in an ablation
    columns: list[PlannedColumn]
    answer_tokens: list[int]  # ids of the answer, tokenized as a continuation of the prompts
    foil_tokens: list[int]
    notes: list[str]  # remarks on the alignment


class SweepPlan(Record):
    """Answer of `POST /v1/sweeps` with `dry_run`: what it would run without."""

    model: str
    hooks: list[Hook]
    layers: list[int]
    axis: Axis
    patched: str  # `clean` or `corrupt`: the prompt to which `positions` refer
    cells: int  # of all pairs, including skipped ones
    skipped: int  # how many of the cells are skipped
    tokens: int  # charged to the tenant
    pairs: list[PlannedPair]


class SweepView(Record):
    """Answer of `GET /v1/sweeps/{id}`."""

    job: JobView
    request: SweepRequest | None  # as it was sent; null: an older server accepted it
    result: SweepResult  # the results so far
    last_event: str  # pass it as `Last-Event-ID` to receive later events


class AttributionView(Record):
    """Answer of `GET /v1/attributions/{id}`."""

    job: JobView
    request: AttributionRequest
    result: AttributionResult  # the results so far
    last_event: str  # pass it as `Last-Event-ID` to receive later events
