"""Views of a sweep in addition to its result: the plan of a request, and a sweep in progress with
its request.
"""

from ..base.records import Record
from ..prompts.selectors import Hook
from .jobs import JobView
from .sweeps import Axis, SweepRequest, SweepResult


class PlannedColumn(Record):
    """A column of the grid to come."""

    label: str  # the token's text, or the span's name
    positions: list[int]  # in the patched prompt; none: it is skipped
    # positions in the other prompt whose rows are written to `positions`, in the same order; in an
    # ablation: none
    sources: list[int]
    reason: str  # why it is skipped
    head: int  # number of the head; −1: the column is not a head's


class PlannedPair(Record):
    """A pair with its tokens, aligned."""

    clean_tokens: list[str]  # the text of each token
    corrupt_tokens: list[str]  # in an ablation: none
    columns: list[PlannedColumn]
    answer_tokens: list[int]  # ids, as a continuation of the prompts
    foil_tokens: list[int]
    notes: list[str]  # remarks on the alignment, for people


class SweepPlan(Record):
    """Answer of `POST /v1/sweeps/plan`: what `POST /v1/sweeps` would run with the same body."""

    model: str
    hooks: list[Hook]
    layers: list[int]
    axis: Axis
    patched: str  # `clean` or `corrupt`: the prompt to which `positions` refer
    cells: int  # of all pairs, including skipped ones
    skipped: int  # how many of the cells are skipped
    tokens: int  # that the tenant is charged for
    pairs: list[PlannedPair]


class SweepView(Record):
    """Answer of `GET /v1/sweeps/{id}`."""

    job: JobView
    request: SweepRequest | None  # as it was sent; null: an older server accepted it
    result: SweepResult  # what is known so far
    last_event: str  # pass it as `Last-Event-ID` to receive the events since
