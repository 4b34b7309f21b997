"""Specs of captures, steering and patches: the form in requests, and the compact form for ranks."""

import hashlib
import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Annotated, Literal, Self

import msgspec

from ..artifacts.jacobian_lenses import JACOBIAN_LENSES
from ..artifacts.loras import LoraUse
from ..artifacts.probes import StoredProbe
from ..artifacts.registered import NamedArtifact, references
from ..artifacts.saes import SAES
from ..base.dtypes import ITEM_BYTES, RowDType
from ..base.edit_sizes import EditLimit
from ..base.limits import (
    MAX_CONSUMERS,
    MAX_ENTRIES,
    MAX_OPTIONS,
    MAX_POSITIONS,
    MAX_TAG,
    Count,
    Factor,
    Index,
    Name,
    Reference,
    Share,
)
from ..base.records import Published, Record
from ..base.tensors import NumbersOrTensor, pack_numbers
from ..model.banks import BANK, RESIDUAL, RowShape, banks_of
from ..prompts.images import ImageSpan
from ..prompts.selectors import (
    DimensionSelector,
    HeadSelector,
    Hook,
    HookName,
    LayerSelector,
    PositionNumber,
    PositionSelector,
    PositionWindow,
    RequestedPositions,
    Sites,
    Span,
    end_position,
    lowest_position,
    ranges_of,
    select,
)
from ..prompts.sites import At, SitesSpec
from ..prompts.windows import Trigger
from ..readings.lens import NamedToken
from ..readings.readings import AnyStoredReading
from .interventions import FAMILY, MEANINGS, OpFamily, SteeringOp
from .scalars import ScalarSpec, StoredScalar

#: A tag is a folder name: one path segment, so it cannot leave the capture root. (`(?!\n)`, because
#: Python's `$` also matches before a final line break.)
Tag = Annotated[
    str, msgspec.Meta(max_length=MAX_TAG, pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}(?!\n)$")
]

#: Name of a source run. A run may also be given by a job's id, so a name may not begin with `job_`.
RunName = Annotated[
    str, msgspec.Meta(max_length=MAX_TAG, pattern=r"^(?!job_)[A-Za-z0-9][A-Za-z0-9_-]{0,63}(?!\n)$")
]

#: Layout of captured rows in files, see `docs/capture.md`; `auto`: `segment` for small captures,
#: `packed` for others.
FileLayout = Literal["auto", "packed", "per_file", "segment"]
#: Names of consumers of the rows: `filesystem`, `memory`, `logging`, and installed consumers.
Consumers = Annotated[list[Name], msgspec.Meta(min_length=1, max_length=MAX_CONSUMERS)]
DEFAULT_CONSUMERS = ("filesystem",)
#: The consumer of rows that probes score; users cannot name it.
PROBED = "probes"


class CaptureSpec(SitesSpec):
    """Capture rows, one for each (hook, layer, position): `[hidden_size]`.

    `hooks` gives each hook point its own layers (`{"post_block": "all", "pre_attn": "0-17"}`) and
    replaces `hook` and `layers`. `all_generated` selects the generated tokens that were fed back to
    the model: the last sampled token never is, so n generated tokens give n − 1 rows. `every_n`
    keeps only every n-th generated token, from the first.

    With `of` = `gradient` the rows are d `scalar` / d row, computed by the model's gradient worker
    from the prompt alone: nothing is generated, and nothing else may be requested.
    """

    positions: RequestedPositions = "last_prompt"  # docs/capture.md#which-positions
    every_n: Count = 1
    at: At = "before"  # the steering at the same site, or after it
    dtype: RowDType = "model"  # of the stored rows; `model`: the model's own
    tag: Tag = "default"  # folder; that of the operator's global capture is reserved
    layout: FileLayout = "auto"  # how rows are packed into files: docs/capture.md#files
    # which receive the rows; `memory` returns them in the response, base64 of safetensors
    consumers: Consumers = msgspec.field(default_factory=lambda: list(DEFAULT_CONSUMERS))
    # at hooks with heads: store only these heads, one after the other; null: all
    heads: HeadSelector | None = None
    # keep the rows as a source run of this name, for patches; requires the consumer `filesystem`
    run: RunName | None = None
    of: Literal["activation", "gradient"] = "activation"
    scalar: ScalarSpec | None = None  # required with `of` = `gradient`

    @property
    def references(self) -> list[NamedArtifact]:
        """The registered artifacts that it names."""
        return [] if self.scalar is None else self.scalar.references

    def stored(
        self,
        sites: Sites,
        positions: PositionSelector,
        *,
        heads: Sequence[int] = (),
        window: Span | None = None,
    ) -> "StoredCapture":
        """Return the capture for one prompt, at resolved sites and positions."""
        return StoredCapture(
            sites=sites,
            positions=positions,
            tag=self.tag,
            every_n=self.every_n,
            at=self.at,
            dtype=self.dtype,
            layout=self.layout,
            consumers=self.consumers,
            heads=[*heads],
            window=window,
        )


FIRST_TOKEN = (
    "`scale` is relative to the norm of each row (default: false). The first token's norm may be a "
    'hundred times that of the others, and steering it then breaks the text: `positions` {"start": '
    "1} leaves it out."
)


class SteeringSpec(Record):
    """Edit the rows at `hook` of each of `layers`, at `positions`, as `op` defines.

    A null field takes its default. A field that the op does not use must be null.

    Alternatively, apply a named `module`, with `scale` (of its whole effect), `positions` (instead
    of the module's own) and `layers` (those of its own that are edited). Or set the `feature` of a
    sparse autoencoder `sae`, at its hook and layer, to `value` (`op` is `clamp`) or to 0
    (`ablate`), or add `value` times its decoder row (`add`). Or edit along the direction that a
    Jacobian lens `jacobian` gives a `token`, at `layers`: `add` and `ablate` take it in place of
    `vector`; with `swap`, another token, the row's coordinates in the plane of both directions are
    exchanged, `strength` times.

    `vector` v: `[hidden_size]`, finite; its norm does not matter for `ablate` and `clamp`, or with
    `norm_match`. `rotation` R and `weight` W: `[rank, hidden_size]`, `bias` b: `[rank]`.
    """

    layers: LayerSelector | None = None  # required without `module`; default with it: all its own
    vector: NumbersOrTensor | None = None
    hook: HookName | None = None  # default: post_block
    positions: RequestedPositions | None = None  # default: all; for a module, its own
    op: Annotated[SteeringOp, msgspec.Meta(description=MEANINGS)] | None = None  # default: add
    module: Reference | None = None
    scale: float | None = None  # default: 1
    norm_match: Annotated[bool, msgspec.Meta(description=FIRST_TOKEN)] | None = None
    alpha: Share | None = None  # default: 1
    strength: float | None = None  # default: 1
    # limits of the component along v, in units of the stream; default: no limit
    low: float | None = None
    high: float | None = None
    rotation: NumbersOrTensor | None = None
    weight: NumbersOrTensor | None = None
    bias: NumbersOrTensor | None = None
    # at a hook with heads: edit only these heads; tensors may be as wide as one head
    heads: HeadSelector | None = None
    sae: Reference | None = None  # the name of a sparse autoencoder
    feature: Index | None = None  # the feature's number; required with `sae`
    # an installed op; valid with `layers`, `hook`, `positions`, `strength`, `options`, `vector`
    extension: Reference | None = None
    # options of the installed op
    options: Annotated[dict[Name, Factor], msgspec.Meta(max_length=MAX_OPTIONS)] | None = None
    # in units of the feature's activation; required with `sae` for `clamp` and `add`
    value: Factor | None = None
    jacobian: Reference | None = None  # the name of a Jacobian lens with an output matrix
    token: NamedToken | None = None  # required with `jacobian`
    swap: NamedToken | None = None  # exchanged with `token`; without `op`
    # of all edits of the request at its sites and positions; valid with every other field
    limit: EditLimit | None = None
    # tokens that decide at which of `positions` it edits; valid with every other field
    trigger: Trigger | None = None

    def __post_init__(self) -> None:
        pack_numbers(self, "vector", "rotation", "weight", "bias")
        # JSON would encode such numbers as null, which has a meaning
        for name in ("scale", "alpha", "strength", "low", "high", "value"):
            value = getattr(self, name)
            if value is not None and not math.isfinite(value):
                raise ValueError(f"{name} is {value}: omit it, or give a finite number")

    @property
    def references(self) -> list[NamedArtifact]:
        """The registered artifacts that it names, besides its module."""
        return references((JACOBIAN_LENSES, self.jacobian), (SAES, self.sae))


class PatchSource(Record):
    """The source of a patch: exactly one of `run`, `vector`, `module` and `zeros`.

    `run`: the name of a source run, or the id of a job with a capture. The source is its row at
    `position` of its prompt number `prompt`, at the patch's own hook and layer; a null `position`
    is the patched position. With `mean`, the source is the mean over `positions` of the run (null:
    all its positions), in float32.
    """

    run: Name | None = None
    prompt: Index = 0
    # a list: one for each patched position, in ascending order of the patched positions
    position: (
        PositionNumber
        | Annotated[list[PositionNumber], msgspec.Meta(max_length=MAX_POSITIONS)]
        | None
    ) = None
    mean: bool = False
    positions: RequestedPositions | None = None  # of the mean
    vector: NumbersOrTensor | None = None  # `[hidden_size]`
    module: Reference | None = None  # a named module with a single vector
    zeros: bool = False

    def __post_init__(self) -> None:
        pack_numbers(self, "vector")
        if (
            sum(
                (self.run is not None, self.vector is not None, self.module is not None, self.zeros)
            )
            != 1
        ):
            raise ValueError("a source must be exactly one of run, vector, module and zeros")
        if self.run is None and (
            self.prompt or self.position is not None or self.mean or self.positions is not None
        ):
            raise ValueError("prompt, position, mean and positions require `run`")
        if self.mean and self.position is not None:
            raise ValueError("`mean` takes `positions`, not `position`")
        if not self.mean and self.positions is not None:
            raise ValueError("`positions` requires `mean`; use `position` for single rows")


class PatchSpec(Record):
    """Activation patching: replace rows s at `hook` of each of `layers`, at `positions`, by (1 −
    alpha) · s + alpha · t, in the dimensions of `mask`, where t is the source's row.

    With alpha = 1 the result is t, bit for bit (Vig et al. 2020, arXiv:2004.12265; Meng et al.
    2022, arXiv:2202.05262). At the same site, patches are applied after the replacements of global
    steering and before the request's own replacements; see `docs/steering.md`.
    """

    layers: LayerSelector
    positions: RequestedPositions
    source: PatchSource
    hook: HookName = "post_block"
    alpha: Share = 1.0
    # at a hook with heads: write only these heads; not valid together with `mask`
    heads: HeadSelector | None = None
    # dimensions to write, in the syntax of layers: "0-63,100" or a list; null: all
    mask: DimensionSelector | None = None


#: The fields `steering` and `patch` of a request.
SteeringList = Annotated[list[SteeringSpec], msgspec.Meta(max_length=MAX_ENTRIES)]
PatchList = Annotated[list[PatchSpec], msgspec.Meta(max_length=MAX_ENTRIES)]


class CheckedSteering(Record, kw_only=True):
    """A `SteeringSpec` after validation: layers are numbers, tensors are named by their content
    hashes.
    """

    layers: list[int]
    hook: Hook
    family: OpFamily
    tensors: list[str]  # in the family's order; in a mask, 1: written, 0: not written
    scale: float = 1.0  # factor of the vector, if the family has a scale
    numbers: list[float] = []  # in the family's order
    rank: int = 0  # of the tensors, if the family has ranked tensors
    # the largest relative size of all edits of its owner at its sites and positions together:
    # larger ones are scaled to it, or, if it is negative, fail the request; 0: no limit
    limit: float = 0.0
    # decides at which of the positions; not null, so that other entries keep their digests
    trigger: Trigger | msgspec.UnsetType = msgspec.UNSET

    def shapes(self, hidden_size: int) -> list[list[int]]:
        """Return the shapes that its tensors must have."""
        return FAMILY[self.family].shapes(self.rank, hidden_size)

    def scaled(self, factor: float) -> Self:
        """Return the entry with its effect multiplied by `factor`: scale · factor if the family has
        a scale, otherwise strength · factor.
        """
        if factor == 1.0:
            return self
        if FAMILY[self.family].scale is not None:
            return msgspec.structs.replace(self, scale=self.scale * factor)
        return msgspec.structs.replace(self, numbers=[self.numbers[0] * factor, *self.numbers[1:]])


#: Whose an edit is; the operator is above the request.
Owner = Literal["request", "operator"]
#: Which threads of a rank's writer consume a request's rows.
WriterWork = Literal["writer", "placed", "reading"]


#: What decides about the effect of an entry at its positions.
_DECIDING = ("hook", "layers", "family", "tensors", "scale", "numbers", "limit")
_EFFECT = attrgetter(*_DECIDING)
#: Read a field of many entries without a line of Python for each.
HOOK, LAYERS, FAMILY_NAME = map(attrgetter, ("hook", "layers", "family"))
TENSORS, LIMIT, _ENTRIES = map(attrgetter, ("tensors", "limit", "entries"))


class StoredSteering(CheckedSteering, kw_only=True):
    """A `SteeringSpec` after validation, for one prompt."""

    positions: PositionSelector
    # name of the probe that decides at which of `positions` the entry is applied; empty: at all
    gate: str = ""
    # whose edit it is: no wish of a request (its limit or its tenant's, a dose) changes what the
    # operator's edits do, which are those of global steering and of policies
    owner: Owner = "request"

    @property
    def condition(self) -> tuple[str, bytes]:
        """Its gate, and what only entries with an equal trigger have; empty without one."""
        return self.gate, msgspec.msgpack.encode(self.trigger) if self.trigger else b""

    @property
    def num_vectors(self) -> int:
        """The number of entries of the ranks' pool for each site."""
        return FAMILY[self.family].entries(self.rank or 1)

    def masked(self, mask: str) -> "StoredSteering":
        """Return a replacement as one in the dimensions of the mask of this name alone."""
        tensors = [*self.tensors, mask]
        return msgspec.structs.replace(self, family="replace_masked", tensors=tensors)


#: The edits of each prompt.
PromptEdits = list[list[StoredSteering]]


def occurrences(steering: Iterable[StoredSteering], prompt: Sequence[int]) -> dict[bytes, bytes]:
    """Return `RankSpec.occurrences` for the tokens of a prompt."""
    triggers = {entry.condition[1]: entry.trigger for entry in steering if entry.trigger}
    return {
        key: array("i", [hit[-1] for hit in trigger.hits(prompt)]).tobytes()
        for key, trigger in triggers.items()
    }


class StoredCapture(Record, omit_defaults=True):
    """A validated capture for one prompt: the hooks of a `CaptureSpec` in one bank, or the rows for
    a reading (`reading`).
    """

    sites: Sites  # hook → ascending layers, at least one
    positions: PositionSelector
    tag: str
    every_n: int = 1
    at: At = "before"
    dtype: RowDType = "model"
    layout: FileLayout = "auto"
    consumers: list[str] = msgspec.field(default_factory=lambda: list(DEFAULT_CONSUMERS))
    # the reading for which the rows are captured; they are not stored, and `consumers` has only
    # `readings.READER`
    reading: AnyStoredReading | None = None
    row: RowShape | None = None  # null: the model's hidden size
    beside: Sites = {}  # sites of the same `CaptureSpec` in other banks
    heads: list[int] = []  # stored heads, ascending; empty: whole rows
    # destination of its rows, packed by the package whose consumer is the only one in `consumers`
    place: bytes = b""
    # its rows are gradients of this number; null: activations
    gradient: StoredScalar | None = None
    window: Span | None = None  # which of the positions are stored; null: all

    @property
    def bank(self) -> str:
        """The bank of its hooks, see `schemas.model.banks`."""
        return BANK[next(iter(self.sites))]

    def split(self, inside: Mapping[str, RowShape]) -> "list[StoredCapture]":
        """Return one capture for each bank of its hooks. `inside`: as in `ModelInfo.inside`."""
        result = []
        for bank, sites in banks_of(self.sites).items():
            row = None if bank == RESIDUAL else inside[next(iter(sites))]
            beside = {hook: layers for hook, layers in self.sites.items() if hook not in sites}
            result.append(msgspec.structs.replace(self, sites=sites, row=row, beside=beside))
        return result

    def stored_size(self, hidden_size: int) -> int:
        """Return the number of stored elements of a row, over all ranks."""
        if self.row is None:
            return hidden_size
        return len(self.heads) * self.row.width if self.heads else self.row.size

    @property
    def tensors(self) -> list[str]:
        """The names of the tensors that its computation needs: those of a scalar's probe."""
        probe = None if self.gradient is None else self.gradient.probe
        return [] if probe is None else probe.content.tensors

    @property
    def everywhere(self) -> bool:
        """Return whether every rank of a tensor-parallel stage records the rows, not only the
        first.
        """
        return self.scored or (self.reading is not None and self.reading.everywhere)

    @property
    def scored(self) -> bool:
        """Return whether its rows are for probes, and so not stored."""
        return self.consumers == [PROBED]

    @property
    def num_sites(self) -> int:
        """The number of rows per captured position."""
        return sum(len(layers) for layers in self.sites.values())

    def select(self, start: int, stop: int, prompt_tokens: int) -> "list[int] | range":
        """Return the captured absolute positions in `[start, stop)`, ascending."""
        chosen = select(self.positions, start, stop, prompt_tokens)
        if self.every_n == 1:
            return chosen
        return [
            position
            for position in chosen
            if position < prompt_tokens or (position - prompt_tokens) % self.every_n == 0
        ]

    def count_held(self, prompt_tokens: int, max_tokens: int, *, ends_late: bool) -> int:
        """Return the most rows per site that a rank holds, if up to `max_tokens` are generated.
        `ends_late`: see `RankSpec.worker_reports_end`.
        """
        recorded = self.count_positions(prompt_tokens, max_tokens)
        late = max_tokens if ends_late else 0
        return min(recorded, (self.window and self.window.held(late)) or recorded)

    def count_stored(self, prompt_tokens: int, max_tokens: int) -> int:
        """Return the most stored rows per site, if up to `max_tokens` tokens are generated."""
        recorded = self.count_positions(prompt_tokens, max_tokens)
        return min(recorded, (self.window and sum(self.window.ends)) or recorded)

    def count_positions(self, prompt_tokens: int, max_tokens: int) -> int:
        """Return the most recorded rows per site, if up to `max_tokens` tokens are generated.

        Takes constant time for names and ranges.
        """
        chosen = select(self.positions, 0, prompt_tokens + fed_back(max_tokens), prompt_tokens)
        if self.every_n == 1 or not isinstance(chosen, range):
            return len(chosen)  # a list has only prompt positions, which `every_n` keeps
        of_prompt = range(chosen.start, min(chosen.stop, prompt_tokens))
        skipped = max(chosen.start - prompt_tokens, 0)  # generated tokens before the range
        first = prompt_tokens + -(-skipped // self.every_n) * self.every_n
        return len(of_prompt) + len(range(first, chosen.stop, self.every_n))


def fed_back(max_tokens: int) -> int:
    """Return how many of the generated tokens are inputs of the model: all but the last."""
    return max(max_tokens - 1, 0)


def captured_layers(captures: Iterable[StoredCapture]) -> Iterator[int]:
    """Yield the layers of the captures' sites; one may come several times."""
    for capture in captures:
        for layers in capture.sites.values():
            yield from layers


def depth_of(captures: Sequence[StoredCapture], prompt_tokens: int) -> int:
    """Return how many layers, counted from the first, must be computed for these rows of a prompt
    of so many tokens, if none is generated; 0: there are no captures.

    A capture that selects none of its positions, as one of generated tokens, needs no layer of its
    own.
    """
    if not captures:
        return 0
    recorded = [capture for capture in captures if capture.count_positions(prompt_tokens, 0)]
    return 1 + max(captured_layers(recorded), default=0)


def within(steering: Iterable[StoredSteering], depth: int) -> list[StoredSteering]:
    """Return the entries as they act in the first `depth` layers: no row there depends on later
    ones.
    """
    reaching = []
    for entry in steering:
        layers = [layer for layer in entry.layers if layer < depth]
        if layers:
            reaching.append(msgspec.structs.replace(entry, layers=layers))
    return reaching


def probe_captures(probes: Sequence[StoredProbe]) -> list[StoredCapture]:
    """Return captures that record the rows of these probes at all positions: one before the
    interventions and one after, as needed.
    """
    sides: dict[At, dict[Hook, set[int]]] = {}
    for content in (probe.content for probe in probes):
        sides.setdefault(content.at, {}).setdefault(content.hook, set()).add(content.layer)
    return [
        StoredCapture(
            sites={hook: sorted(layers) for hook, layers in sorted(hooks.items())},
            positions="all",
            tag=PROBED,
            at=at,
            consumers=[PROBED],
        )
        for at, hooks in sides.items()
    ]


#: Bytes of a captured position without its rows: its number and its token id, int64 each.
POSITION_BYTES = 16
#: Bytes of rows that all prompts of a job together may return, since Redis keeps them with the
#: job's result (one prompt may return its `memory_limit_kib`, if that is more).
MEMORY_JOB_BYTES = 16 << 20


def memory_bytes(positions: int, sites: int, hidden_size: int, dtype: str, stages: int = 1) -> int:
    """Return the bytes of one prompt's rows that count against `memory_limit_kib`: rows, positions
    and token ids, but not the blob's header.

    `positions` `[hidden_size]` rows of `dtype` at each of `sites`; each of `stages` repeats the
    positions.
    """
    return positions * (sites * hidden_size * ITEM_BYTES[dtype] + stages * POSITION_BYTES)


class EntryPoint(Record):
    """The entry point of a request's forward pass (re-entry): at `layer`, with the rows of
    `pre_attn` that a run saved for the same tokens.

    All interventions of the request are at `layer` or above. A rank may begin there or at the first
    layer: the result is the same. A step with several entries begins at the lowest of their layers,
    so each run named by the entries of a job has rows at all of these layers.
    """

    run: str  # `run_key`: rows of `pre_attn` at `layer` for every prompt position
    layer: int


class Grade(Record):
    """Values to compute for the next token after a request's prompt, returned in the last stage's
    receipt (`Receipt.graded`).
    """

    # return the log-probability of each, in nats, log-softmax in float32
    token_ids: list[int]
    keep: str = ""  # keep the distribution on the rank under this name
    # then return the Kullback–Leibler divergence D(kept distribution of this name ‖ this one), nats
    against: str = ""


class RankSpec(Published):
    """A request as ranks receive it, packed into vLLM's `SamplingParams.extra_args`.

    Positions are resolved against this request's prompt. A rank ignores fields of another version,
    since it refuses that version's requests.
    """

    version: str  # Midstream's version; a rank of another version rejects the request
    job: str
    request: int  # index of the prompt in its job
    attempt: int  # fencing token
    prompt_tokens: int
    # of the entries of global steering, then of the request's own
    rows: list["SteeringRow"] = []
    # trigger, as in `StoredSteering.condition` → the positions of the prompt at which occurrences
    # end, ascending, int32: a rank searches only what is generated
    occurrences: dict[bytes, bytes] = {}
    captures: list[StoredCapture] = []  # the user's captures and global capture
    digest: str = ""  # content hash of the interventions; empty if there are none
    first_affected: int = -1  # lowest absolute position that an intervention edits; -1: none
    # the edited positions depend on the prompt's length: `all_prompt`, `last_prompt`,
    # `all_generated`
    by_prompt: bool = False
    lowest_captured: int = -1  # lowest captured prompt position; -1: none
    requests: dict[str, int] = {}  # tag → how many of the job's prompts have a capture under it
    # the worker reports where the output ends, because it detects stop strings after the ranks have
    # computed the tokens; encoded under the name that it had in earlier versions
    worker_reports_end: bool = msgspec.field(default=False, name="told_when_over")
    global_version: int = 0  # of the global steering with which the request began
    entry: EntryPoint | None = None  # only in requests for one token; their `digest` is unique
    grade: Grade | None = None
    # key of a run of the same tokens without interventions, whose kept KV blocks are used for
    # positions before `first_affected`
    base: str = ""
    # keep the KV cache of the prompt, if there is room, for requests whose `base` names this run
    keep_blocks: str = ""
    trace: str = ""  # W3C traceparent of the attempt, copied into the receipts
    lora: LoraUse | None = None  # the adapter with which its rows are computed
    # the most tokens in one step, if the engine can split a prefill; 0: no limit
    chunk: int = 0
    images: list[ImageSpan] = []  # of the prompt
    probes: list[StoredProbe] = []  # score its tokens; their rows are among `captures`
    stream_scores: bool = False  # the probes' scores are sent with the tokens
    tenant: str = ""  # whose turn its readings take
    # layers that its rows need, counted from the first: it needs no token, and a step may end
    # there; 0: it needs the whole forward
    depth: int = 0

    @property
    def steering(self) -> tuple[StoredSteering, ...]:
        """The entries of its rows."""
        return tuple(chain.from_iterable(map(_ENTRIES, self.rows)))

    @property
    def ids(self) -> tuple[str, int, int]:
        """Job, index of the prompt, and attempt."""
        return self.job, self.request, self.attempt

    @property
    def work(self) -> WriterWork:
        """Return which threads of a rank consume its rows."""
        if any(capture.place for capture in self.captures):
            return "placed"
        if any(capture.reading is not None for capture in self.captures):
            return "reading"
        return "writer"

    @property
    def key(self) -> str:
        """The name of this request in calls to the ranks."""
        return f"{self.job}.{self.request}.{self.attempt}"


CaptureStatus = Literal["not_requested", "pending", "ok", "partial", "error", "timed_out"]


def touched(spec: RankSpec) -> tuple[int, int]:
    """Return the window `[first, stop)` of positions that the request's steering and captures
    select; `(0, 0)` if they select none.
    """
    selectors = [row.positions for row in spec.rows]
    selectors += [capture.positions for capture in spec.captures]
    first = min((lowest_position(item, spec.prompt_tokens) for item in selectors), default=0)
    return first, max((end_position(item, spec.prompt_tokens) for item in selectors), default=0)


def touched_hooks(spec: RankSpec) -> set[Hook]:
    """Return the hooks of the request's steering and captures."""
    hooks = set(map(HOOK, spec.steering))
    return hooks.union(*(capture.sites for capture in spec.captures))


class SteeringRow(Record):
    """Entries of one request with the same positions: one row of the rank's steering table.

    `key` identifies the row's content (layers, tensors, numbers) but not its positions, so that
    equal configurations share a row.
    """

    key: str
    positions: PositionSelector
    # all at hooks of one bank, with one gate, one trigger, one limit and one owner
    entries: list[StoredSteering]
    column: int = 0  # see `columns_of`

    @property
    def gate(self) -> str:
        """The entries' gate, see `StoredSteering.gate`."""
        return self.entries[0].gate if self.entries else ""

    @property
    def condition(self) -> tuple[str, bytes]:
        """The entries' condition, see `StoredSteering.condition`."""
        return self.entries[0].condition if self.entries else ("", b"")

    @property
    def bank(self) -> str:
        """The bank of the entries' hooks, see `schemas.model.banks`."""
        return BANK[self.entries[0].hook] if self.entries else RESIDUAL

    @property
    def num_vectors(self) -> int:
        """The most entries of the ranks' pool that the row needs. Sites with the same steering
        entries share pool entries.
        """
        # (hook, layer, family) → indices of the entries that apply there
        applied: dict[tuple[Hook, int, OpFamily], list[int]] = {}
        for number, entry in enumerate(self.entries):
            for layer in entry.layers:
                applied.setdefault((entry.hook, layer, entry.family), []).append(number)
        chains = set(map(tuple, applied.values()))
        return sum(self.entries[numbers[-1]].num_vectors for numbers in chains)


#: Name of a mask of all dimensions, for which no bytes are stored.
ONES = "ones"
#: Prefix of a mask's name that lists its dimensions, such as `dims:0-63,100`; no bytes are stored
#: for this mask either.
DIMS_PREFIX = "dims:"


def dims_name(dims: str) -> str:
    """Return the name of a mask that is 1 at these dimensions (of the whole row, as `as_ranges`
    writes them) and 0 elsewhere.
    """
    return DIMS_PREFIX + dims.replace(" ", "")


def dims_named(name: str) -> list[range]:
    """Invert `dims_name`. Raises ValueError for an invalid name."""
    return ranges_of(name.removeprefix(DIMS_PREFIX))


def steering_rows(steering: Iterable[StoredSteering]) -> list[SteeringRow]:
    """Group a request's steering into rows by bank and what `shared_by` returns, in the order of
    first occurrence.

    Entries of one family at one site are applied row by row; within a row, `joined` entries are
    combined in their order. To keep the request's order, an entry goes into the last row that
    already has its family at one of its sites, or into a later row; if the family is not `joined`,
    only into a later row. An addition may go into any row, because the order does not matter.

    The ranks apply masked replacements after full replacements, but users see a single op.
    Therefore, a full replacement that follows a masked one at the same site becomes a masked one
    with a mask of all dimensions. Successive masked ones with equal masks are combined, too:
    otherwise a masked replacement of all requests would split one row of a request into many.
    """
    groups: list[list[StoredSteering]] = []
    # bank and `shared_by` → the last group with these
    last_group: dict[object, int] = {}
    # (hook, layer, family) → the last group that applies the family there
    last_applied: dict[tuple[Hook, int, OpFamily], int] = {}
    # such a site of `replace_masked` → the mask of the last entry there
    last_mask: dict[tuple[Hook, int, OpFamily], str] = {}
    for entry in steering:
        if entry.family == "replace" and any(
            (entry.hook, layer, "replace_masked") in last_applied for layer in entry.layers
        ):
            entry = entry.masked(ONES)
        positions = (BANK[entry.hook], *shared_by(entry))
        sites = [(entry.hook, layer, entry.family) for layer in entry.layers]
        before = (
            -1
            if entry.family == "add"
            else max((last_applied.get(site, -1) for site in sites), default=-1)
        )
        joined = FAMILY[entry.family].joined
        if entry.family == "replace_masked":
            mask = entry.tensors[1]
            joined = all(last_mask.get(site, mask) == mask for site in sites)
            last_mask.update(dict.fromkeys(sites, mask))
        number = last_group.get(positions, -1)
        if number < max(0, before if joined else before + 1):
            number = len(groups)
            groups.append([])
        groups[number].append(entry)
        last_group[positions] = number
        last_applied.update((site, max(number, last_applied.get(site, -1))) for site in sites)
    rows = []
    for group in groups:
        content = [(*_EFFECT(entry), entry.owner) for entry in group]
        rows.append(
            SteeringRow(key=content_key(content), positions=group[0].positions, entries=group)
        )
    return rows


def with_columns(rows: list[SteeringRow]) -> list[SteeringRow]:
    """Return all rows of a request with their columns."""
    return [
        msgspec.structs.replace(row, column=column)
        for row, column in zip(rows, columns_of(rows), strict=True)
    ]


def columns_of(rows: list[SteeringRow]) -> list[int]:
    """Return the column of each row in the table that lists, per bank and token, the token's rows:
    after the columns of all earlier rows that may share a token with it.

    Rows with disjoint lists of positions share a column, so a request may have many such rows.
    """
    result: list[int] = []
    columns: dict[str, tuple[list[set[int]], list[bool]]] = {}
    for row in rows:
        # for each column of the bank: the listed positions of its rows, and whether it has a row
        # whose positions are not a list
        listed, open_ended = columns.setdefault(row.bank, ([], []))
        positions = set(row.positions) if isinstance(row.positions, list) else None
        overlapping = [
            column
            for column in range(len(listed))
            if positions is None or open_ended[column] or positions & listed[column]
        ]
        column = overlapping[-1] + 1 if overlapping else 0
        if column == len(listed):
            listed.append(set())
            open_ended.append(False)
        listed[column] |= positions or set()
        open_ended[column] = open_ended[column] or positions is None
        result.append(column)
    return result


def shared_by(entry: StoredSteering) -> tuple[object, ...]:
    """Return what the entries of one row have in common, besides their bank."""
    return hashable(entry.positions), *entry.condition, entry.limit, entry.owner


def hashable(positions: PositionSelector) -> str | tuple[int, ...] | PositionWindow:
    return tuple(positions) if isinstance(positions, list) else positions


def steering_digest(steering: Sequence[StoredSteering]) -> str:
    """Return the digest of everything that determines the effect of steering on a request's KV
    cache; empty without steering.
    """
    if not steering:
        return ""
    gates: list[object] = [entry.gate for entry in steering]
    content = [(*_EFFECT(entry), entry.positions) for entry in steering]
    triggers = [entry.trigger or None for entry in steering]
    conditions = [*([gates] if any(gates) else []), *([triggers] if any(triggers) else [])]
    return content_key([content, *conditions] if conditions else content)


def content_key(content: object) -> str:
    return hashlib.sha256(msgspec.msgpack.encode(content)).hexdigest()
