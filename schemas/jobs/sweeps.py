"""Sweeps: grids of patched forward passes that locate where a model computes an answer.

A sweep is a job. The edge resolves what was asked to a `StoredSweep`; the worker runs its units;
readers see a `SweepResult`.
"""

from typing import Annotated, Literal, NamedTuple

import msgspec

from ..artifacts.loras import Adapted
from ..base.limits import (
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
from ..base.records import Record
from ..prompts.selectors import (
    DimensionSelector,
    Hook,
    HookName,
    LayerSelector,
    Place,
    RequestedPositions,
)
from ..requests.sweep_paths import StoredPath, SweepPath
from .receipts import Receipt

#: `logprob`: of the answer. `logit_diff`: log-probability of the answer less that of the foil (of
#: one token each: the difference of their logits). `recovered`: (m − m_base) / (m_source − m_base)
#: with m the logit_diff, or without a foil the logprob.
#: `kl`: D(P_clean ‖ P_cell) over the next token. All in nats but `recovered`, which is a share.
Metric = Literal["logprob", "logit_diff", "recovered", "kl"]
#: `denoise`: rows of the clean prompt are written into the corrupt one. `noise`: rows of the
#: corrupt one into the clean one.
Direction = Literal["denoise", "noise"]
#: Replacement rows without a second prompt; `mean`: over all positions of the patched prompt
#: itself, at that hook and layer.
Ablation = Literal["zeros", "mean"]
#: `auto`: tokens without a counterpart are left out; `left`, `right`: counted from the beginning or
#: the end.
Alignment = Literal["auto", "left", "right"]


#: What the columns of a grid are. `position`: a token each, or a span. `together`: one, all
#: positions immediately. `head`: a head each, at all positions together. `head_position`: a head at
#: a position (or span) each. `neuron`: some dimensions each, at all positions together.
Axis = Literal["position", "together", "head", "head_position", "neuron"]
HEAD_AXES: frozenset[Axis] = frozenset({"head", "head_position"})

#: What is expected after a prompt.
Answer = (
    Annotated[str, msgspec.Meta(max_length=MAX_ANSWER_TEXT)]
    | Annotated[list[Index], msgspec.Meta(max_length=MAX_ANSWER_TOKENS)]
)


TopCount = Annotated[int, msgspec.Meta(ge=1, le=MAX_NEURONS)]
#: (clean, corrupt) positions.
Counterparts = Annotated[list[tuple[Place, Place]], msgspec.Meta(max_length=MAX_POSITIONS)]
Hooks = Annotated[list[HookName], msgspec.Meta(min_length=1, max_length=MAX_HOOKS)]


class PairSpan(Record):
    """A column of the grid: these tokens are patched together."""

    name: Name
    clean: RequestedPositions
    corrupt: RequestedPositions | None = None  # null: the counterparts of `clean`, by the alignment


class SweepPair(Record):
    """Two prompts and the continuations that are measured after them.

    Without `corrupt`: an ablation.
    """

    clean: Text | TokenIds
    corrupt: Text | TokenIds | None = None
    # the continuation that is right after `clean`; null only with metric `kl`
    answer: Answer | None = None
    foil: Answer | None = None  # one that is right after `corrupt`
    # of the prompt that is patched, instead of the sweep's
    positions: RequestedPositions | None = None
    spans: Annotated[list[PairSpan], msgspec.Meta(max_length=MAX_SPANS)] | None = (
        None  # columns of several tokens, instead of positions; the same names in every pair
    )
    alignment: Alignment | Counterparts | None = None  # instead of the sweep's


class PatchWindow(Record):
    """Number of layers and columns of the sweep that are patched together: centred on the cell,
    and cut off at the edges.
    """

    layers: Count = 1
    positions: Count = 1


class Neurons(Record):
    """Columns of axis `neuron`: exactly one of these.

    With `top` and `each`, a pair's cell takes the dimensions in which the rows of its two prompts
    differ most: by |clean − corrupt|, summed over the cell's positions, at its own hook and layer.
    """

    # that many together
    top: (
        Annotated[list[TopCount], msgspec.Meta(min_length=1, max_length=MAX_NEURON_COLUMNS)] | None
    ) = None
    # the first that many, one by one
    each: Annotated[int, msgspec.Meta(ge=1, le=MAX_NEURON_COLUMNS)] | None = None
    # these dimensions
    sets: (
        Annotated[
            list[DimensionSelector], msgspec.Meta(min_length=1, max_length=MAX_NEURON_COLUMNS)
        ]
        | None
    ) = None

    def __post_init__(self) -> None:
        if sum(given is not None for given in (self.top, self.each, self.sets)) != 1:
            raise ValueError("neurons must be exactly one of top, each and sets")


class SweepRequest(Adapted, kw_only=True):
    """Body of `POST /v1/sweeps`."""

    model: Name
    pairs: Annotated[list[SweepPair], msgspec.Meta(min_length=1, max_length=MAX_PAIRS)]
    hooks: Hooks = msgspec.field(default_factory=lambda: ["post_block"])
    layers: LayerSelector = "all"
    positions: RequestedPositions = "all_prompt"  # of the prompt that is patched
    axis: Axis = "position"
    heads: DimensionSelector | None = None  # of the axes `head` and `head_position`; null: all
    neurons: Neurons | None = None  # of the axis `neuron`
    path: SweepPath | None = None  # the cells are one end of a path
    window: PatchWindow = PatchWindow()
    metric: Metric = "recovered"
    direction: Direction = "denoise"
    # instead of rows of the other prompt; `corrupt` and `direction` are left out then
    ablation: Ablation | None = None
    alignment: Alignment = "auto"
    alpha: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    mask: DimensionSelector | None = None  # dimensions that are written
    # patches without effect per pair, which measure the scatter of values
    noise: Annotated[int, msgspec.Meta(ge=1, le=MAX_NOISE)] = 8
    metadata: Metadata = {}


class Column(Record):
    """A column of the grid.

    `places`: (position in the patched prompt, position in the source; −1 in an ablation),
    ascending.
    """

    label: str  # the token's text, or the span's name
    places: list[tuple[int, int]]  # empty: it is skipped
    reason: str = ""  # why it is skipped
    head: int = -1  # −1: no column of a head
    dims: str = ""  # that are written, such as `64-127`; empty: all, but for `ranks`
    ranks: tuple[int, int] | None = (
        # of the dimensions by how far the prompts differ, from 0 up to but not including: those are
        # written
        None
    )

    @property
    def masked(self) -> bool:
        return bool(self.dims) or self.ranks is not None


class StoredPair(Record):
    """A pair as the worker runs it.

    `base`: the tokens of the prompt that is patched; `source`: of the other, empty in an ablation.
    """

    base: list[int]
    source: list[int]
    columns: list[Column]
    answer: list[int] = []
    foil: list[int] = []
    base_tokens: list[str] = []  # how they read
    source_tokens: list[str] = []
    answer_text: str = ""
    foil_text: str = ""
    notes: list[str] = []  # what the alignment did that a reader should know
    sender: list[tuple[int, int]] = []  # places of a path's sender, as `Column.places`

    @property
    def longest(self) -> int:
        """Tokens of its longest request: a prompt, and all but the last token of the longer
        continuation.
        """
        return max(len(self.base), len(self.source)) + max(len(self.answer), len(self.foil), 1) - 1


class StoredSweep(Record):
    """Resolved request of a sweep. All pairs have the same number of columns."""

    pairs: list[StoredPair]
    hooks: list[Hook]
    layers: list[int]  # ascending
    metric: Metric
    direction: Direction
    ablation: Ablation | None = None
    window: PatchWindow = PatchWindow()
    alpha: float = 1.0
    mask: str = ""  # content hash of the mask, see `StoredSteering.tensors`; empty: none
    noise: int = 8
    axis: Axis = "position"
    path: StoredPath | None = None

    @property
    def num_columns(self) -> int:
        return len(self.pairs[0].columns)

    @property
    def num_cells(self) -> int:
        """Places in the grids of all pairs, those that are skipped included."""
        return len(self.pairs) * len(self.hooks) * len(self.layers) * self.num_columns


#: What a unit of a sweep is: the patched prompt as it is; the prompt that rows come from; the first
#: pass of a path whose sender is not the cell; a patch that changes nothing; a cell.
UnitKind = Literal["base", "source", "sender", "noise", "cell"]


class Unit(NamedTuple):
    """A question that the model is asked: `StoredSweep` → units, see `schemas.jobs.sweep_units`."""

    number: int
    kind: UnitKind
    pair: int
    hook: int = 0  # index in `StoredSweep.hooks`
    layer: int = 0  # index in `StoredSweep.layers`
    column: int = 0


#: Of the dimensions that a cell wrote by their rank, results list that many.
SHOWN_NEURONS = 16


class UnitRecord(Record):
    """Record of a unit: stored in the ledger once every rank has confirmed it."""

    unit: int
    # in the metric's units; of `base` and `source` under `recovered`: the metric that it is made of
    value: float | None = None
    logprob: float | None = None  # of the answer, nats
    foil_logprob: float | None = None
    reason: str = ""  # why there is no value
    attempt: int = 0
    neurons: list[int] = []  # that the worker chose, the first `SHOWN_NEURONS`
    # of `base`, `source` and `sender`: where their captured rows are, and what the ranks said
    receipts: list[Receipt] = []


class Baseline(Record):
    """Result of one of the two prompts without a patch.

    `value`: in the metric's units; for `recovered`, in the units of the underlying metric.
    """

    value: float
    logprob: float | None  # of the answer, nats
    foil_logprob: float | None


class PairResult(Record):
    """`grids[hook]` `[layers][columns]` in the metric's units; null: skipped or failed, see
    `SweepResult.skipped`.
    """

    labels: list[str]  # of the columns
    base_tokens: list[str]
    source_tokens: list[str]
    answer: str
    foil: str
    base: Baseline | None  # the prompt that is patched
    source: Baseline | None  # the prompt that rows come from
    # the largest change that a patch made which changes nothing, in the metric's units
    noise_floor: float | None
    grids: dict[Hook, list[list[float | None]]]
    notes: list[str] = []
    # of the columns, in the patched prompt; of one that is skipped: none
    positions: list[list[int]] = []
    # number of patches of which `noise_floor` is the largest change; 0: an older server
    noise_probes: int = 0
    # whose rows are written there, in the other prompt, in the same order; in an ablation: none
    sources: list[list[int]] = []
    heads: list[int] = []  # of the columns, on the axes of heads
    neurons: dict[
        Hook, list[list[list[int]]]
    ] = {}  # `[layers][columns]`: what was chosen by rank, at most `SHOWN_NEURONS`, strongest first


class Skipped(Record):
    """Cells without a value. `layers`: layer numbers of the model."""

    pair: int
    hook: Hook
    layers: list[int]
    column: int
    reason: str


class SweepSummary(Record):
    """Progress of a sweep, without its grids: data of the event `summary`."""

    cells: int  # with a value
    skipped: int
    total: int
    seconds: float | None  # of the attempt that ended it, from its start to its last cell
    metric: Metric
    base: list[float | None]  # of each pair, as `Baseline.value`
    source: list[float | None]
    noise_floor: list[float | None]


class SweepResult(Record):
    """`JobResult.sweep`. Complete when the job succeeded; before that, what is known so far."""

    metric: Metric
    direction: Direction
    ablation: Ablation | None
    hooks: list[Hook]
    layers: list[int]
    window: PatchWindow
    alpha: float
    pairs: list[PairResult]
    #: Over the pairs that have a value there, `[layers][columns]`; null where none has. Of one
    #: pair: that pair's.
    mean: dict[Hook, list[list[float | None]]]
    #: Sample standard deviation over the pairs; null with fewer than two.
    spread: dict[Hook, list[list[float | None]]]
    skipped: list[Skipped]
    summary: SweepSummary
    axis: Axis = "position"
    path: SweepPath | None = None  # `frozen`: what was held


class SweepStart(Record):
    """Data of the event `start`."""

    metric: Metric
    direction: Direction
    ablation: Ablation | None
    hooks: list[Hook]
    layers: list[int]
    labels: list[list[str]]  # of each pair's columns
    total: int  # cells
    skipped: list[Skipped]  # known beforehand
    notes: list[list[str]]  # of each pair
    axis: Axis = "position"
    path: SweepPath | None = None


class SweepCell(Record):
    """Data of the event `cell`. `layer`: of the model."""

    pair: int
    hook: Hook
    layer: int
    column: int
    label: str
    value: float | None
    logprob: float | None = None
    foil_logprob: float | None = None
    reason: str = ""
    neurons: list[int] = []  # as in `PairResult.neurons`
