"""Doses: jobs that steer a few prompts at several scales and layers, and weigh the effect against
the damage.

The API resolves a `DoseRequest` to a `StoredDose` and the prompts of an ordinary job: for the
unsteered model and for each cell, the prompts to continue, those with their targets, and the
held-out texts. The worker keeps a `DoseMeasured`, from which the `DoseResult` follows.
"""

from typing import Annotated

import msgspec

from ..access.handling import Handling
from ..base.limits import (
    MAX_DOSE_PROMPTS,
    MAX_DOSE_SCALES,
    MAX_DOSE_TOKENS,
    MAX_DOSE_WORDS,
    MAX_STOP_TEXT,
    Metadata,
    Name,
    Reference,
    Text,
    TokenIds,
)
from ..base.records import Plotted, Record
from ..prompts.selectors import LayerSelector
from ..requests.specs import SteeringSpec

Texts = Annotated[list[Text | TokenIds], msgspec.Meta(min_length=1, max_length=MAX_DOSE_PROMPTS)]
Scale = Annotated[float, msgspec.Meta(ge=-1e4, le=1e4)]
Bound = Annotated[float, msgspec.Meta(ge=0, le=100)]
Word = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_STOP_TEXT)]


class DoseEffect(Record):
    """What is measured on the prompts: exactly one of `words`, `target` and `probe`.

    `words`: the share of continuations in which one of them occurs, in any case. `target`: the mean
    log-probability per token of this continuation, in nats. `probe`: the mean of its score over all
    tokens, of the first or of the named `label`.
    """

    words: Annotated[list[Word], msgspec.Meta(max_length=MAX_DOSE_WORDS)] = []
    target: Annotated[str, msgspec.Meta(max_length=MAX_STOP_TEXT)] = ""
    probe: Reference | None = None
    label: str | None = None

    def __post_init__(self) -> None:
        if sum((bool(self.words), bool(self.target), self.probe is not None)) != 1:
            raise ValueError("give exactly one of words, target and probe")
        if self.label is not None and self.probe is None:
            raise ValueError("label requires `probe`")


class DoseRequest(Handling, kw_only=True):
    """Body of `POST /v1/doses`.

    `steering`: one entry without `layers`; each scale multiplies its effect. Each of `layers` is
    steered alone; null, for a module: all of its layers together.
    """

    model: Name
    prompts: Texts
    steering: SteeringSpec
    scales: Annotated[list[Scale], msgspec.Meta(min_length=1, max_length=MAX_DOSE_SCALES)]
    effect: DoseEffect
    held_out: Texts  # texts that have nothing to do with the effect
    layers: LayerSelector | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=4, le=MAX_DOSE_TOKENS)] = 32  # of a continuation
    # a cell is safe if it adds at most this to the loss on `held_out`, in nats per token
    max_loss: Bound = 0.3
    # and to the share of 4-grams of a continuation that it has already had
    max_repetition: Bound = 0.2
    metadata: Metadata = {}

    def __post_init__(self) -> None:
        if len(set(self.scales)) < len(self.scales) or 0 in self.scales:
            raise ValueError("scales must be different and other than 0, which is always measured")


class StoredDose(Record):
    """A dose after validation. `layers` is [null] for a whole module."""

    layers: list[int | None]
    scales: list[float]  # ascending
    effect: DoseEffect
    prompts: int  # continued in each cell
    target_tokens: int  # 0: prompts with targets are not measured
    held_out: int
    max_loss: float
    max_repetition: float

    @property
    def cells(self) -> list[tuple[int | None, float]]:
        """(layer, scale) of each cell, first the unsteered model's."""
        return [(None, 0.0), *((layer, scale) for layer in self.layers for scale in self.scales)]

    @property
    def requests(self) -> int:
        """The number of prompts in each cell: to continue, with targets, held out."""
        return self.prompts * (2 if self.target_tokens else 1) + self.held_out

    def continues(self, request: int) -> bool:
        """Return whether a prompt of the job is continued; otherwise its own tokens count."""
        return request % self.requests < self.prompts


class DoseMeasured(Record):
    """What the worker keeps of a dose: for each cell and prompt the continuation, and for each cell
    its means.
    """

    dose: StoredDose
    texts: list[list[str]]
    repetition: list[float]
    loss: list[float]  # nats per token of the held-out texts
    effect: list[float]  # 0 for a probe, whose scores are in the receipts


class DoseCell(Record):
    """The figures of one cell. `median`, `largest`: of the relative sizes of its edits."""

    layer: int | None  # null: all layers of the module, or none of the unsteered model
    scale: float
    effect: float
    loss: float  # nats per token of the held-out texts, above the unsteered model's
    repetition: float  # mean share of 4-grams that a continuation has already had
    safe: bool
    median: float
    largest: float
    text: str  # the continuation of the first prompt


class DoseResult(Plotted, Record):
    """The outcome of a dose. `safe`: for each layer and sign, the cell of the largest scale up to
    which every cell is safe.
    """

    effect: str  # what is measured
    unsteered: DoseCell
    cells: list[DoseCell]
    safe: list[DoseCell]
    max_loss: float
    max_repetition: float
