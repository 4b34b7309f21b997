"""Harvests, the rows of a corpus as shards: requests, their stored form, plans, records of units,
and manifests.

docs/decisions/0035-harvests.md explains the design.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, Literal

import msgspec

from midstream.schemas.access.handling import Handling, Priority
from midstream.schemas.access.keys import DEFAULT_TENANT
from midstream.schemas.artifacts.loras import StoredLora
from midstream.schemas.base.errors import Problem, refuse
from midstream.schemas.base.limits import (
    MAX_COUNT,
    MAX_EXAMPLE_CONTEXT,
    MAX_EXAMPLES,
    MAX_HARVEST_LINES,
    MAX_HARVEST_SPANS,
    MAX_INT64,
    MAX_PATH,
    MAX_PROMPT_TOKENS,
    MAX_SHARD_MIB,
    MAX_STREAM_CONSUMERS,
    MAX_STREAM_WINDOW,
    Count,
    Metadata,
    Name,
    PathName,
    Text,
    TokenIds,
)
from midstream.schemas.base.records import Record
from midstream.schemas.jobs.jobs import SamplingRequest
from midstream.schemas.jobs.works import SideOf, Work, WorkFacts
from midstream.schemas.prompts.selectors import Hook, Span
from midstream.schemas.prompts.sites import At, SitesSpec, hook_layers
from midstream.schemas.requests.specs import (
    SteeringList,
    StoredCapture,
    StoredSteering,
    depth_of,
)

from ..names import HarvestState
from .work import HarvestPart, ShardDType, Survey

FORMAT = "midstream-harvest-1"
MANIFEST = "manifest.json"

SourceFormat = Literal["auto", "jsonl", "parquet", "arrow", "csv"]
DocumentKind = Literal["text", "chat", "tokens"]
#: Treatment of a document longer than `max_length`: `truncate` drops the rest; `split` makes
#: further sequences of the rest; `pack` also joins documents, with the end-of-text token between
#: them, so that every sequence of a unit except the last is full.
FitMode = Literal["truncate", "split", "pack"]
ShuffleSeed = Annotated[int, msgspec.Meta(ge=0, le=MAX_INT64)]
#: A document in the request itself.
Line = Text | TokenIds


class HarvestSource(Record, kw_only=True):
    """The documents, in order: `lines`, or the files at `path` (a file, or a folder whose files are
    read in order of their names).
    """

    lines: (
        Annotated[list[Line], msgspec.Meta(min_length=1, max_length=MAX_HARVEST_LINES)] | None
    ) = None
    # relative to an entry of the setting `harvest_sources`
    path: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_PATH)] | None = None
    # `auto`: by the names' extensions; a Hugging Face datasets folder is `arrow`
    format: SourceFormat = "auto"
    kind: DocumentKind = "text"  # the field's content: a text, a conversation, or token ids
    field: Name = "text"  # column, or field of a line's JSON object

    def __post_init__(self) -> None:
        refuse(
            {
                "give exactly one of `lines` and `path`": (self.lines is None)
                == (self.path is None),
                "`lines` are texts or token ids: conversations are read from files": self.lines
                is not None
                and self.kind == "chat",
            }
        )


class HarvestCut(Record, kw_only=True):
    """Rules by which documents become sequences."""

    # tokens; null: the model's maximum
    max_length: Annotated[int, msgspec.Meta(ge=1, le=MAX_PROMPT_TOKENS)] | None = None
    fit: FitMode = "truncate"
    # add the tokenizer's special tokens, such as BOS, to texts; conversations have their template's
    special_tokens: bool = True


class HarvestPositions(Record, kw_only=True):
    """The positions of a sequence whose rows are harvested."""

    skip_bos: bool = True  # leave out the model's beginning-of-text token
    # leave out the first positions of each sequence, which are attention sinks
    skip_first: Annotated[int, msgspec.Meta(ge=0, le=MAX_PROMPT_TOKENS)] = 0
    every: Count = 1  # every n-th position of a document, from its first
    # the number of positions of each document, sampled from those that the other fields leave
    sample: Count | None = None
    seed: ShuffleSeed = 0  # of the sampling
    prompt: bool = True  # with `generate`: also harvest the rows of the prompt
    # of each document, with what was generated: `last`, `head_and_tail`, or `around` token ids
    window: Span | None = None
    # of conversations: tokens of messages, by turn, role and part; of messages that a conversation
    # lacks, none. Generated tokens are in no message. Unset it is left out, since older workers and
    # readers know no such field
    spans: (
        Annotated[list[Span], msgspec.Meta(min_length=1, max_length=MAX_HARVEST_SPANS)]
        | msgspec.UnsetType
        | None
    ) = msgspec.UNSET

    def __post_init__(self) -> None:
        window = self.window
        refuse(
            {
                "`window` takes last, head_and_tail, or around with token_ids (POST /v1/tokenize "
                "has those of a text)": window is not None
                and (not window.is_window or window.when or (window.around and window.around.text)),
                "`spans` take turn, role and part (not tools: a harvest has none)": any(
                    not span.is_turn or span.part == "tools" for span in self.spans or ()
                ),
            }
        )


class HarvestShards(Record, kw_only=True):
    """Rules by which rows become files."""

    # approximate size of the rows in a shard, over all stages
    mib: Annotated[int, msgspec.Meta(ge=1, le=MAX_SHARD_MIB)] = 64
    # seed of the order of rows in a shard; null: ordered by document and position
    shuffle: ShuffleSeed | None = 0


# The consumers are named here: one that came later would miss what was dropped, and one that never
# comes would keep everything.
class HarvestStream(Record, kw_only=True):
    """A stream of a harvest's units, in their order, to consumers that acknowledge them."""

    # their names; a unit is acknowledged once each of them has done so
    consumers: Annotated[
        list[PathName], msgspec.Meta(min_length=1, max_length=MAX_STREAM_CONSUMERS)
    ] = msgspec.field(default_factory=lambda: ["trainer"])
    # the most units that are computed and not acknowledged; a unit is about one shard
    window: Annotated[int, msgspec.Meta(ge=1, le=MAX_STREAM_WINDOW)] = 32
    keep: bool = False  # keep the shards of acknowledged units in the store


class HarvestRequest(SitesSpec, kw_only=True):
    """Body of `POST /v1/harvests`."""

    model: Name
    source: HarvestSource
    cut: HarvestCut = HarvestCut()
    positions: HarvestPositions = HarvestPositions()
    at: At = "before"
    generate: SamplingRequest | None = None  # also harvest tokens generated after each document
    dtype: ShardDType = "model"
    shards: HarvestShards = HarvestShards()
    # files that stay, or a stream of them
    to: Literal["store", "stream"] | HarvestStream = "store"
    # an entry of the setting `harvest_stores`; null: the first
    store: Annotated[str, msgspec.Meta(max_length=MAX_PATH)] | None = None
    # the most tokens of all sequences together; later documents are left out
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_INT64)] | None = None
    priority: Priority | None = None
    metadata: Metadata = {}
    steering: SteeringList = []  # edits of all its sequences, at all positions
    lora: Name | None = None  # adapter with which all rows are computed

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = self.positions
        fit = self.cut.fit
        generates = self.generate is not None
        refuse(
            {
                "`generate` takes no log-probabilities: a harvest keeps none": self.generate
                and (self.generate.logprobs, self.generate.prompt_logprobs) != (None, None),
                "`generate` takes fit `truncate` and no `sample`": generates
                and (fit != "truncate" or rule.sample is not None),
                "`window` takes fit `truncate`: a sequence is one document then": rule.window
                and fit != "truncate",
                "`window` takes neither every, skip_first nor sample": rule.window
                and (rule.every, rule.skip_first, rule.sample) != (1, 0, None),
                "`window` beside `spans` takes no `generate`": rule.window
                and rule.spans
                and generates,
                "`prompt: false` requires `generate`": not generates and not rule.prompt,
                "`spans` choose among the prompt's rows: omit `prompt: false`": rule.spans
                and not rule.prompt,
                "`spans` are parts of conversations: they take source kind `chat`": rule.spans
                and self.source.kind != "chat",
            }
        )


class HarvestFacts(Record, kw_only=True):
    """Facts about a harvest that never change, which its manifest has too."""

    id: str
    model: str
    created: float
    metadata: dict[str, str] = {}
    identity: str = ""  # of the model that computes all rows


class StoredHarvest(HarvestFacts, omit_defaults=True, kw_only=True):
    """A harvest after validation, as the ledger stores it. Never changes."""

    uri: str  # of the harvest's store
    sites: dict[Hook, list[int]]
    source: HarvestSource
    root: str = ""  # the store that contains `source.path`
    cut: HarvestCut = HarvestCut()
    max_length: int
    positions: HarvestPositions = HarvestPositions()
    at: At = "before"
    generate: SamplingRequest | None = None
    dtype: ShardDType = "model"
    row_bytes: int  # of one position at all sites, as the model computes them
    shards: HarvestShards = HarvestShards()
    stream: HarvestStream | None = None
    max_tokens: int | None = None
    tenant: str = DEFAULT_TENANT
    key: str = ""
    priority: Priority = "normal"
    steering: str = ""  # digest of the global steering with which all rows are computed
    edits: list[StoredSteering] = []  # with which all rows are computed, beside it
    lora: StoredLora | None = None
    last_layer: int = 0  # of that model: its predictions follow from `post_block` there
    exits: bool = False  # as in `ModelFacts`, of that model

    @property
    def layers(self) -> int | None:
        return self.depth(exits=self.exits)

    def depth(self, beside: Sequence[StoredCapture] = (), *, exits: bool) -> int | None:
        """Return how many layers its longest sequences compute, counted from the first, with these
        captures beside its own; None: the whole model. `exits`: as in `ModelFacts`.
        """
        if self.generate is not None or not exits:
            return None
        own = StoredCapture(sites=self.sites, positions="all", tag="")
        return depth_of([own, *beside], self.max_length)

    @property
    def tensors(self) -> set[str]:
        """The names of its edits' tensors."""
        return {name for edit in self.edits for name in edit.tensors}

    @property
    def shard_rows(self) -> int:
        """The number of rows of a shard, about."""
        return max(1, (self.shards.mib << 20) // self.row_bytes)


class PlannedUnit(Record, array_like=True, kw_only=True):
    """Consecutive documents: rows `[start, stop)` of a table, or those bytes of a JSONL file."""

    file: int
    start: int
    stop: int
    document: int  # number of the first document
    documents: int
    weight: int  # approximate bytes, for the share of the whole harvest
    crc32: int = 0  # of its bytes; for a table, of its values
    tokens: int = -1  # the most tokens of its sequences; -1: no limit


class SourceFile(Record, array_like=True, kw_only=True):
    """A file of a source at planning time. A file that has changed since is not read."""

    key: str  # in the source's store
    size: int
    stamp: str  # see `storage.store.Handle`


class HarvestPlan(Record, kw_only=True):
    """The units of a source, and the files that contain them."""

    files: list[SourceFile]
    units: list[PlannedUnit]
    parts: int  # number of parts: consecutive units that one job computes

    @property
    def weight(self) -> int:
        return sum(unit.weight for unit in self.units)


class CheckedFile(Record, kw_only=True):
    """A reference to an object in the harvest's store: the valid plan, or a part's manifest."""

    key: str
    crc32: int


class ShardFile(Record, omit_defaults=True, kw_only=True):
    """A file of a shard, with the sites of one pipeline stage."""

    key: str
    bytes: int
    crc32: int
    sites: dict[str, list[int]]
    pp: int = 0
    non_finite: int = 0  # rows with values that are not finite


class ShardEntry(Record, kw_only=True):
    """A shard: rows of all sites at the same keys, in the same order."""

    rows: int  # rows of each site
    files: list[ShardFile]
    flagged: int = 0  # sequences that a policy of all traffic flagged

    @property
    def hook_layers(self) -> list[tuple[str, int]]:
        """The sites of all stages, in the order of the files."""
        return [site for file in self.files for site in hook_layers(file.sites)]


class UnitEntry(Record, kw_only=True):
    """The result of a unit."""

    unit: int
    first: int  # number of the first document
    documents: int
    tokens: int  # of the computed sequences
    generated: int = 0
    rows: int
    bytes: int
    shards: list[ShardEntry]
    skipped: int = 0  # documents without a row


class PartManifest(Record, kw_only=True):
    """The object `parts/<number>.json`."""

    part: int
    units: list[UnitEntry]


class HarvestManifest(HarvestFacts, kw_only=True):
    """The object `manifest.json`, which describes a complete harvest. It is written last."""

    format: str
    version: str
    finished: float
    sites: dict[str, list[int]]
    widths: dict[str, int]  # hook → elements of a row
    at: str
    dtype: str  # of the stored rows
    max_length: int
    fit: str
    positions: HarvestPositions
    shuffle: int | None
    source: str  # path, or `lines`
    documents: int
    tokens: int
    generated: int = 0
    rows: int  # positions
    bytes: int
    shards: int
    parts: list[CheckedFile]
    # where that model is, and its content: `workers.engine.proof.comparison.Source`
    checkpoint: list[Any] | None = None
    dropped: bool = False  # shards are deleted once a stream's consumers have acknowledged them


class SurveyRequest(Handling, kw_only=True):
    """Body of `POST /v1/harvests/{id}/surveys`: `sae`, `against` or both."""

    sae: Name | None = None  # whose features are surveyed
    against: Name | None = None  # another harvest of the same tokens, to compare with
    # examples of each feature, of different documents
    top: Annotated[int, msgspec.Meta(ge=1, le=MAX_EXAMPLES)] = 10
    # tokens before and after each example
    context: Annotated[int, msgspec.Meta(ge=0, le=MAX_EXAMPLE_CONTEXT)] = 8
    metadata: Metadata = {}


class SurveyTask(Record, omit_defaults=True, kw_only=True):
    """Tells the process that computes a survey what to do; its worker sends it."""

    job: str
    survey: Survey
    sae_root: str
    sae_bytes: int  # the most of an autoencoder's weights
    data_dir: str  # of the worker, which keeps digests of checkpoints in it


class SurveyEntry(Record, omit_defaults=True, kw_only=True):
    """A finished survey, and its file in the harvest's store."""

    job: str
    survey: Survey
    rows: int  # that were read
    mean_kl: float | None = None  # of all rows, in nats
    key: str
    bytes: int
    crc32: int


class FeatureFigures(Record, kw_only=True):
    """Figures of one feature; in a comparison, of both harvests."""

    feature: int
    density: list[float]  # share of the rows where it is active
    mean: list[float]  # activation over the rows where it is active


class Example(Record, kw_only=True):
    """A token where a feature is strongly active, with its neighbours in the document that have
    rows. In a comparison, the value is the KL divergence of the predictions, in nats.
    """

    document: int
    position: int
    value: float
    positions: list[int]  # of the neighbours, and its own
    token_ids: list[int]
    values: list[float]


class SurveyView(Record, kw_only=True):
    """Answer of `GET /v1/harvests/{id}/surveys/{job}`."""

    survey: SurveyEntry
    features: list[FeatureFigures]
    examples: list[Example]  # of the feature that was asked for, or of the first one
    figures: FeatureFigures | None = None  # of that feature; not of a comparison


class HarvestView(HarvestFacts, omit_defaults=True, kw_only=True):
    """Answer of `GET /v1/harvests/{id}`."""

    state: HarvestState
    version: int
    uri: str  # of its store, for `midstream.harvest.open`
    # how many layers, counted from the first, its rows need; null: the whole model. What the
    # operator captures or scores beside them may need more: see its jobs
    layers: int | None = None
    started: float | None = None  # when its first part started
    finished: float | None = None
    reason: str = ""  # why it waits or is paused
    error: Problem | None = None
    units: int = 0
    units_done: int = 0
    documents: int = 0  # of the finished units, like the following counts
    tokens: int = 0
    rows: int = 0
    bytes: int = 0  # in the store: without shards that were dropped after they were acknowledged
    shards: int = 0
    flagged: int = 0  # sequences that a policy of all traffic flagged
    acknowledged: dict[str, int] = {}  # consumer of a stream → units that it has acknowledged
    share: float = 0.0  # of the source, 0 to 1
    tokens_s: float = 0.0  # tokens per second of its running time
    left_s: float | None = None  # seconds until the end, at this rate
    jobs: list[str] = []  # ids of the jobs of submitted parts
    surveys: list[SurveyEntry] = []  # that are finished; in listings with `surveyed`
    tenant: str = DEFAULT_TENANT


class HarvestPage(Record, kw_only=True):
    harvests: list[HarvestView]


class StreamPage(Record, kw_only=True):
    """Answer of `GET /v1/harvests/{id}/stream`: the units from a cursor on that are ready."""

    state: HarvestState
    uri: str  # of the store with the units' files
    ended: bool  # there are no units from the cursor on, and there will be none
    units: list[UnitEntry]


class StreamCursor(Record, kw_only=True):
    """Body of `POST /v1/harvests/{id}/stream/ack`, and its answer: the consumer has all units
    before `cursor`.
    """

    consumer: PathName
    cursor: Annotated[int, msgspec.Meta(ge=0, le=MAX_INT64)]


def side_of(harvest: str) -> SideOf:
    """Return what surveys of a harvest have in common in the ledger."""
    return SideOf(
        record=f"ms:harvest:{harvest}",
        kept=f"ms:harvest-surveys:{harvest}",
        open=f"ms:harvest-surveying:{harvest}",
        limit="surveys",
    )


class HarvestWork(Work, tag="harvest"):
    """A part of a harvest, or a survey of one."""

    part: HarvestPart

    @cached_property
    def facts(self) -> WorkFacts:
        return WorkFacts(
            tokens=self.part.tokens,
            requests=MAX_COUNT,
            writes_files=self.part.role in ("run", "survey"),
            wants_receipts=True,
            side=side_of(self.part.harvest) if self.part.survey else None,
        )
