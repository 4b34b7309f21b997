"""Doses: jobs that steer a few prompts at several scales and layers, and weigh the effect against
the damage.

A dose is an ordinary job, whose prompts are, for the unsteered model and then for each cell: the
prompts to continue, the same with the target after them, and the held-out texts.
"""

from typing import Annotated

import msgspec

from midstream.schemas.access.handling import Handling
from midstream.schemas.base.limits import (
    MAX_DOSE_PROMPTS,
    MAX_DOSE_SCALES,
    MAX_DOSE_TOKENS,
    MAX_DOSE_WORDS,
    MAX_STOP_TEXT,
    Metadata,
    Name,
    Reference,
    Text,
)
from midstream.schemas.base.records import Plotted, Record
from midstream.schemas.jobs.works import Work
from midstream.schemas.prompts.selectors import LayerSelector
from midstream.schemas.requests.steering import SteeringEntries

DosePrompts = Annotated[list[Text], msgspec.Meta(min_length=1, max_length=MAX_DOSE_PROMPTS)]
Scale = Annotated[float, msgspec.Meta(ge=-1e4, le=1e4)]
Bound = Annotated[float, msgspec.Meta(ge=0, le=100)]
Word = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_STOP_TEXT)]


class DoseEffect(Record):
    """What is measured on the prompts: exactly one of its fields.

    `words`: the share of continuations in which one of them occurs, in any case. `target`: the
    log-probability per token of this text after the prompt, in nats. `probe`: the score of its
    first label, as its mean over all tokens, the first included.
    """

    words: Annotated[list[Word], msgspec.Meta(max_length=MAX_DOSE_WORDS)] = []
    target: Annotated[str, msgspec.Meta(max_length=MAX_STOP_TEXT)] = ""
    probe: Reference | None = None

    def __post_init__(self) -> None:
        if sum((bool(self.words), bool(self.target), self.probe is not None)) != 1:
            raise ValueError("give exactly one of words, target and probe")


class DoseRequest(Handling, kw_only=True):
    """Body of `POST /v1/doses`.

    Each scale multiplies the effect of all of `steering`. Each of `layers` is steered alone: its
    entries without layers get them, and those of a module count at their own. Null: all together.
    """

    model: Name
    prompts: DosePrompts
    steering: SteeringEntries
    scales: Annotated[list[Scale], msgspec.Meta(min_length=1, max_length=MAX_DOSE_SCALES)]
    effect: DoseEffect
    held_out: DosePrompts  # texts that have nothing to do with the effect
    layers: LayerSelector | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=4, le=MAX_DOSE_TOKENS)] = 32  # of a continuation
    # a cell is safe if it adds at most this to the loss on `held_out`, in nats per token
    max_loss: Bound = 0.3
    # and to the share of 4-grams of a continuation that it has already had
    max_repetition: Bound = 0.2
    metadata: Metadata = {}

    def __post_init__(self) -> None:
        if len({0, *self.scales}) <= len(self.scales):
            raise ValueError("scales must differ from each other and from 0, which is always there")


class StoredDose(Record):
    """A dose after validation."""

    cells: list[tuple[int | None, float]]  # layer and scale; the first is the unsteered model's
    effect: DoseEffect
    prompts: int  # continued in each cell
    requests: int  # prompts of each cell, in all
    target_tokens: list[int]  # after each prompt; empty without a target
    max_loss: float
    max_repetition: float

    def continues(self, request: int) -> bool:
        """Return whether a prompt of the job is continued; otherwise its own tokens count."""
        return request % self.requests < self.prompts


class DoseCell(Record):
    """The figures of one cell; a mean over its prompts or texts."""

    layer: int | None  # null: all together
    scale: float
    effect: float
    loss: float  # on the held-out texts, nats per token; of a steered cell, above the unsteered one
    repetition: float  # share of 4-grams that a continuation has already had
    safe: bool  # false, too, if a policy ended continuations, of this cell or the unsteered one
    text: str  # the continuation of the first prompt
    # relative sizes of its edits: the median of the sites' and prompts' medians, and the largest
    median: float = 0.0
    largest: float = 0.0
    stopped: int = 0  # continuations that a policy ended: the figures are those of what is left


class DoseResult(Plotted, Record):
    """The outcome of a dose. `safe`: for each layer and sign, the cell of the largest scale up to
    which every cell is safe.
    """

    dose: StoredDose
    unsteered: DoseCell
    cells: list[DoseCell]
    safe: list[DoseCell] = []


class DoseWork(Work, tag="dose"):
    """Answering the prompts of all cells of a dose, and measuring the answers."""

    dose: StoredDose

    def continues(self, request: int) -> bool:
        return self.dose.continues(request)
