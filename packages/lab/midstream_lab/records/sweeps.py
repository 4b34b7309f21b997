"""Sweeps: grids of patched forward passes that locate where a model computes an answer.

A sweep is a job. The API resolves a `SweepRequest` to a `StoredSweep`; the worker runs its units;
readers get a `SweepResult`.
"""

from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from midstream.schemas.artifacts.loras import Adapted
from midstream.schemas.base.limits import (
    MAX_ANSWER_TEXT,
    MAX_ANSWER_TOKENS,
    MAX_HOOKS,
    MAX_NEURON_COLUMNS,
    MAX_NEURONS,
    MAX_NOISE,
    MAX_PAIRS,
    MAX_POSITIONS,
    MAX_SPANS,
    Count,
    Index,
    Metadata,
    Name,
    Text,
    TokenIds,
)
from midstream.schemas.base.records import Plotted, Record
from midstream.schemas.jobs.receipts import Receipt
from midstream.schemas.prompts.selectors import (
    DimensionSelector,
    Hook,
    HookName,
    KeyedByHook,
    LayerSelector,
    PositionNumber,
    PromptPositions,
)

from .estimates import Estimate, StoredAttribution
from .sweep_paths import SiteKey, StoredPath, SweepPath

#: `logprob`: log-probability of the answer. `logit_diff`: log-probability of the answer minus that
#: of the foil (for single tokens, the difference of their logits). `recovered`: (m − m_base) /
#: (m_source − m_base), where m is the logit_diff, or the logprob if there is no foil. `kl`:
#: D(P_clean ‖ P_cell) over the next token. All in nats, except `recovered`, which is a share.
Metric = Literal["logprob", "logit_diff", "recovered", "kl"]
#: `denoise`: rows of the clean prompt are written into the corrupt prompt. `noise`: the reverse.
Direction = Literal["denoise", "noise"]
#: Replacement rows that need no second prompt; `mean`: the mean over all positions of the patched
#: prompt itself, at the cell's hook and layer.
Ablation = Literal["zeros", "mean"]
#: How positions of the two prompts correspond. `auto`: by their tokens, and tokens without a
#: counterpart are left out; `left`, `right`: counted from the beginning or the end.
Alignment = Literal["auto", "left", "right"]
#: A position in the patched prompt, and that in the source; −1 in an ablation.
PatchPlace = tuple[int, int]
#: Hook → `[layers][columns]`; null: a cell without a value.
GridValues = dict[Hook, list[list[float | None]]]


#: The columns of a grid. `position`: one for each token or span. `together`: a single column, all
#: positions together. `head`: one for each head, at all positions together. `head_position`: one
#: for each head at each position or span. `neuron`: one for each set of dimensions, at all
#: positions together.
Axis = Literal["position", "together", "head", "head_position", "neuron"]
HEAD_AXES: frozenset[Axis] = frozenset({"head", "head_position"})

#: The expected continuation of a prompt.
ExpectedAnswer = (
    Annotated[str, msgspec.Meta(max_length=MAX_ANSWER_TEXT)]
    | Annotated[list[Index], msgspec.Meta(max_length=MAX_ANSWER_TOKENS)]
)


TopCount = Annotated[int, msgspec.Meta(ge=1, le=MAX_NEURONS)]
#: (clean, corrupt) positions.
Counterparts = Annotated[
    list[tuple[PositionNumber, PositionNumber]], msgspec.Meta(max_length=MAX_POSITIONS)
]
Hooks = Annotated[list[HookName], msgspec.Meta(min_length=1, max_length=MAX_HOOKS)]


#: The fields of a pair that are text or token ids.
TEXTS = ("clean", "corrupt", "answer", "foil")


class PairSpan(Record):
    """A column of the grid whose tokens are patched together."""

    name: Name
    clean: PromptPositions
    corrupt: PromptPositions | None = None  # null: the counterparts of `clean`, by the alignment


class SweepPair(Record):
    """Two prompts and the continuations that are measured after them.

    Without `corrupt`, the pair is for an ablation.
    """

    clean: Text | TokenIds
    corrupt: Text | TokenIds | None = None
    # the right continuation of `clean`; null only with metric `kl`
    answer: ExpectedAnswer | None = None
    foil: ExpectedAnswer | None = None  # the right continuation of `corrupt`
    # of the patched prompt, instead of the sweep's
    positions: PromptPositions | None = None
    # columns of several tokens, instead of positions; the same names in every pair
    spans: Annotated[list[PairSpan], msgspec.Meta(max_length=MAX_SPANS)] | None = None
    alignment: Alignment | Counterparts | None = None  # instead of the sweep's


class PatchWindow(Record):
    """The number of the sweep's layers and columns that are patched together: centred on the cell,
    and cut off at the edges.
    """

    layers: Count = 1
    positions: Count = 1


class Neurons(Record):
    """Columns of axis `neuron`: exactly one of the fields.

    `top` and `each` rank a pair's dimensions by how much the rows of its two prompts differ:
    |clean − corrupt|, summed over the cell's positions, at the cell's hook and layer.
    """

    # for each number n, a column with the first n dimensions together
    top: (
        Annotated[list[TopCount], msgspec.Meta(min_length=1, max_length=MAX_NEURON_COLUMNS)] | None
    ) = None
    # a column for each of the first `each` dimensions
    each: Annotated[int, msgspec.Meta(ge=1, le=MAX_NEURON_COLUMNS)] | None = None
    # a column for each set of dimensions
    sets: (
        Annotated[
            list[DimensionSelector], msgspec.Meta(min_length=1, max_length=MAX_NEURON_COLUMNS)
        ]
        | None
    ) = None

    def __post_init__(self) -> None:
        if sum(field is not None for field in (self.top, self.each, self.sets)) != 1:
            raise ValueError("neurons must be exactly one of top, each and sets")


class SweepRequest(Adapted, kw_only=True):
    """Body of `POST /v1/sweeps`."""

    model: Name
    pairs: Annotated[list[SweepPair], msgspec.Meta(min_length=1, max_length=MAX_PAIRS)]
    hooks: Hooks = msgspec.field(default_factory=lambda: ["post_block"])
    layers: LayerSelector = "all"
    positions: PromptPositions = "all_prompt"  # of the patched prompt
    # what a column is: a token; all positions together; a head, at all positions together or at
    # one; dimensions of the row
    axis: Axis = "position"
    heads: DimensionSelector | None = None  # for the axes `head` and `head_position`; null: all
    neurons: Neurons | None = None  # for the axis `neuron`
    path: SweepPath | None = None  # the cells are one end of a path
    window: PatchWindow = PatchWindow()
    # `recovered`: (m − m_base) / (m_source − m_base), where m is `logit_diff`, or `logprob` without
    # a foil; 0: as unpatched, 1: as the prompt that gives the rows. The others are in nats
    metric: Metric = "recovered"
    # rows of the clean prompt go into the corrupt one, or (`noise`) the reverse
    direction: Direction = "denoise"
    # instead of rows of the other prompt; omit `corrupt` and `direction`
    ablation: Ablation | None = None
    # `auto`: position by position where lengths are equal, else common prefix, suffix and equal
    # tokens; `left`, `right`: counted from that end
    alignment: Alignment = "auto"
    alpha: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0  # how much of the row is replaced
    mask: DimensionSelector | None = None  # dimensions to write; null: all
    # number of no-op patches per pair, which measure the noise floor
    noise: Annotated[int, msgspec.Meta(ge=1, le=MAX_NOISE)] = 8
    metadata: Metadata = {}


class Column(Record):
    """A column of the grid."""

    label: str  # the token's text, or the span's name
    places: list[PatchPlace]  # ascending; empty: the column is skipped
    reason: str = ""  # why the column is skipped
    head: int = -1  # −1: the column is not a head's
    dims: str = ""  # dimensions to write, such as `64-127`; empty: all, unless `ranks` is set
    # write the dimensions with these ranks `[start, stop)`, by how much the prompts differ
    ranks: tuple[int, int] | None = None

    @property
    def masked(self) -> bool:
        return bool(self.dims) or self.ranks is not None


class StoredPair(Record):
    """A pair as the worker runs it.

    `base`: the tokens of the patched prompt; `source`: those of the other prompt, empty in an
    ablation.
    """

    base: list[int]
    source: list[int]
    columns: list[Column]
    answer: list[int] = []
    foil: list[int] = []
    base_tokens: list[str] = []  # the text of each token
    source_tokens: list[str] = []
    answer_text: str = ""
    foil_text: str = ""
    notes: list[str] = []  # remarks on the alignment
    sender: list[PatchPlace] = []  # of a path's sender

    @property
    def longest(self) -> int:
        """The number of tokens of its longest request: a prompt, and all but the last token of the
        longer continuation.
        """
        return max(len(self.base), len(self.source)) + max(len(self.answer), len(self.foil), 1) - 1


class SweepTerms(Record):
    """What all cells of a sweep share."""

    hooks: list[Hook]
    layers: list[int]  # ascending
    metric: Metric
    direction: Direction
    ablation: Ablation | None = None
    axis: Axis = "position"

    @property
    def patches_clean(self) -> bool:
        """Whether the patched prompt is the clean one; otherwise it is the corrupt one."""
        return self.ablation is not None or self.direction == "noise"


class StoredSweep(SweepTerms, kw_only=True):
    """The resolved request of a sweep. All pairs have the same number of columns."""

    pairs: list[StoredPair]
    window: PatchWindow = PatchWindow()
    alpha: float = 1.0
    mask: str = ""  # content hash of the mask, see `StoredSteering.tensors`; empty: none
    noise: int = 8
    path: StoredPath | None = None
    attribution: StoredAttribution | UnsetType = UNSET

    @property
    def attributed(self) -> StoredAttribution | None:
        """The method that estimates the cells; None: all are computed."""
        return None if isinstance(self.attribution, UnsetType) else self.attribution

    @property
    def adaptive(self) -> bool:
        """Whether the cells that are computed exactly are chosen round by round."""
        return self.attributed is not None and self.attributed.method == "adaptive"

    @property
    def sites(self) -> list[SiteKey]:
        """The (hook, layer) of its cells."""
        return [(hook, layer) for hook in self.hooks for layer in self.layers]

    @property
    def num_columns(self) -> int:
        return len(self.pairs[0].columns)

    @property
    def num_cells(self) -> int:
        """The number of cells in the grids of all pairs, including skipped cells."""
        return len(self.pairs) * self.cells_of_pair

    @property
    def cells_of_pair(self) -> int:
        return len(self.hooks) * len(self.layers) * self.num_columns

    @property
    def num_exact(self) -> int:
        """The most cells that are computed exactly: all of them, or those of an attribution."""
        attributed = self.attributed
        if attributed is None:
            return self.num_cells
        possible = self.cells_of_pair if attributed.sae is None else attributed.most
        return len(self.pairs) * min(possible, attributed.most)


#: Kinds of units, in this order: the patched prompt without a patch; the prompt whose rows are
#: written; the first pass of a path with a fixed sender; a no-op patch; a cell; the estimates of
#: all cells of a pair.
UnitKind = Literal["base", "source", "sender", "noise", "cell", "estimate"]


class Unit(NamedTuple):
    """A unit of a `StoredSweep`: `schemas.jobs.sweep_units` numbers them."""

    number: int
    kind: UnitKind
    pair: int
    hook: int = 0  # index in `StoredSweep.hooks`
    layer: int = 0  # index in `StoredSweep.layers`
    column: int = 0
    # of a cell: the feature of an autoencoder that it patches, −1: its error; null: the whole row
    feature: int | None = None


#: The most dimensions, chosen by rank for a cell, that results list.
SHOWN_NEURONS = 16


class UnitRecord(Record):
    """A unit's record, stored in the ledger once every rank has confirmed the unit."""

    unit: int
    # in the metric's units; for `base` and `source` with `recovered`, of the underlying metric
    value: float | None = None
    logprob: float | None = None  # of the answer, nats
    foil_logprob: float | None = None
    reason: str = ""  # why there is no value
    attempt: int = 0
    neurons: list[int] = []  # the first `SHOWN_NEURONS` of the dimensions that the worker chose
    # for `base`, `source` and `sender`: the ranks' receipts, which name the files of captured rows
    receipts: list[Receipt] = []
    estimate: Estimate | UnsetType = UNSET  # of a unit `estimate`

    @property
    def estimated(self) -> Estimate | None:
        return None if isinstance(self.estimate, UnsetType) else self.estimate


class Baseline(Record):
    """The result of one of the two prompts without a patch.

    `value`: in the metric's units; for `recovered`, in the units of the underlying metric.
    """

    value: float
    logprob: float | None  # of the answer, nats
    foil_logprob: float | None


class PairResult(KeyedByHook, Record):
    """The result of one pair.

    `grids[hook]`: `[layers][columns]` in the metric's units; null: skipped or failed, see
    `SweepResult.skipped`.
    """

    labels: list[str]  # of the columns
    base_tokens: list[str]
    source_tokens: list[str]
    answer: str
    foil: str
    base: Baseline | None  # the patched prompt
    source: Baseline | None  # the prompt whose rows are written
    # the largest change by a no-op patch, in the metric's units
    noise_floor: float | None
    grids: GridValues
    notes: list[str] = []
    # of each column, in the patched prompt; empty for a skipped column
    positions: list[list[int]] = []
    # number of no-op patches behind `noise_floor`; 0: an older server
    noise_probes: int = 0
    # positions in the other prompt whose rows are written to `positions`, in the same order; empty
    # in an ablation
    sources: list[list[int]] = []
    heads: list[int] = []  # of each column, on the axes of heads
    # `[layers][columns]`: the dimensions chosen by rank, at most `SHOWN_NEURONS`, strongest first
    neurons: dict[Hook, list[list[list[int]]]] = {}


class Skipped(Record):
    """Cells without a value. `layers`: layer numbers of the model."""

    pair: int
    hook: Hook
    layers: list[int]
    column: int
    reason: str


class SweepSummary(Record):
    """The progress of a sweep, without its grids: data of the event `summary`."""

    cells: int  # with a value
    skipped: int
    total: int
    seconds: float | None  # of the attempt that ended it, from its start to its last cell
    metric: Metric
    base: list[float | None]  # `Baseline.value` of each pair
    source: list[float | None]
    noise_floor: list[float | None]


class SweepReport(SweepTerms, kw_only=True):
    """What is known of a sweep when it starts."""

    skipped: list[Skipped]  # cells
    path: SweepPath | None = None


class SweepResult(KeyedByHook, Plotted, SweepReport, kw_only=True):
    """`JobResult.sweep`. Complete if the job has succeeded; before, the results so far."""

    window: PatchWindow
    alpha: float
    pairs: list[PairResult]
    #: Mean over the pairs with a value, `[layers][columns]`; null where no pair has one. With one
    #: pair: that pair's values.
    mean: GridValues
    #: Sample standard deviation over the pairs; null with fewer than two.
    spread: GridValues
    summary: SweepSummary


class SweepStart(SweepReport, kw_only=True):
    """Data of the event `start`."""

    labels: list[list[str]]  # of each pair's columns
    total: int  # cells
    notes: list[list[str]]  # of each pair


class CellPlace(Record, kw_only=True):
    """A cell of a grid, or a feature in a column of it."""

    hook: Hook
    layer: int  # its number in the model
    column: int
    label: str
    reason: str = ""  # why it has no value
    feature: int | None = None  # of the autoencoder; −1: its error; null: the whole row


class SweepCell(CellPlace, kw_only=True):
    """Data of the event `cell`."""

    pair: int
    value: float | None
    logprob: float | None = None
    foil_logprob: float | None = None
    neurons: list[int] = []  # as in `PairResult.neurons`
