"""Linear probes: registration, use in requests, the form that a job stores, and the ranks' reports.

A probe is an affine map of a row: scores = W · row + b, float32. Alain and Bengio 2016
(arXiv:1610.01644).
"""

import hashlib
import itertools
import math
from typing import Annotated, Literal

import msgspec

from ..base.limits import (
    MAX_PROBE_BINS,
    MAX_PROBE_LABELS,
    MAX_PROBES,
    MAX_REQUEST_PROBES,
    Factor,
    Reference,
    Share,
)
from ..base.records import Plotted, Record, Wire
from ..base.tensors import NumbersOrTensor, pack_numbers
from ..prompts.selectors import Hook, HookName, LayerNumber
from ..prompts.sites import At
from .conditions import Aggregation, Decay, Decision, ProbeLabel, StoredPolicy, Threshold
from .registered import ArtifactKind, Registered, Registration

#: What happens when the aggregate of a label reaches its threshold. `steer`: a module edits the
#: generated tokens for as long as the aggregate is at or above it.
ProbeAction = Literal["none", "flag", "stop", "steer"]
Counts = Annotated[
    list[Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]],
    msgspec.Meta(min_length=1, max_length=MAX_PROBE_BINS),
]


class Roc(Record):
    """A ROC curve: at each threshold, the shares of negative and positive rows at or above it."""

    fpr: Annotated[list[Share], msgspec.Meta(min_length=2, max_length=MAX_PROBE_BINS)]
    tpr: Annotated[list[Share], msgspec.Meta(min_length=2, max_length=MAX_PROBE_BINS)]
    auc: Share  # of all scores

    def __post_init__(self) -> None:
        if len(self.fpr) != len(self.tpr):
            raise ValueError(f"fpr has {len(self.fpr)} points, tpr {len(self.tpr)}")
        if any(values != sorted(values) for values in (self.fpr, self.tpr)):
            raise ValueError("fpr and tpr must ascend")


class ScoreHistogram(Record):
    """How many negative and positive rows have a score in each bin."""

    edges: Annotated[list[Threshold], msgspec.Meta(max_length=MAX_PROBE_BINS + 1)]
    negative: Counts
    positive: Counts

    def __post_init__(self) -> None:
        if not len(self.negative) == len(self.positive) == len(self.edges) - 1:
            raise ValueError("negative and positive need a count for each bin, edges one more")
        if any(not low < high for low, high in itertools.pairwise(self.edges)):
            raise ValueError("edges must ascend")


class HeldOut(Record):
    """The scores of one label on rows that the probe was not trained on; positive rows are those of
    the label.
    """

    roc: Roc
    histogram: ScoreHistogram


class ProbeRequest(Registration, kw_only=True):
    """Body of `PUT /v1/artifacts/probes/{name}`.

    `weight`: `[k, hidden_size]`, or `[hidden_size]` for one label; `bias`: `[k]`, null: zeros. A
    label crosses its threshold where its aggregate is at or above the threshold; null: never.
    """

    weight: NumbersOrTensor
    layer: LayerNumber  # negative: from the end
    bias: NumbersOrTensor | None = None
    hook: HookName = "post_block"
    at: At = "before"
    # null: `0`, `1`, …
    labels: Annotated[list[ProbeLabel], msgspec.Meta(max_length=MAX_PROBE_LABELS)] | None = None
    #: A single number applies to every label.
    thresholds: (
        Threshold
        | Annotated[list[Threshold | None], msgspec.Meta(max_length=MAX_PROBE_LABELS)]
        | None
    ) = None
    aggregation: Aggregation = "last"
    decay: Decay | None = None  # of `exponential`
    # what its training measured, for each label; empty: unknown
    held_out: Annotated[list[HeldOut], msgspec.Meta(max_length=MAX_PROBE_LABELS)] = []

    def __post_init__(self) -> None:
        pack_numbers(self, "weight", "bias")


class ProbeContent(Record):
    """The site and the computation of a probe."""

    hook: Hook
    layer: int
    tensors: list[str]  # content hashes: weight `[k, hidden_size]` and bias `[k]`, float32
    labels: list[str]
    thresholds: list[float | None]
    at: At = "before"
    aggregation: Aggregation = "last"
    decay: float = 0.0

    @property
    def digest(self) -> str:
        """SHA-256, in hexadecimal, of everything that determines the scores and crossings."""
        return hashlib.sha256(
            msgspec.msgpack.encode([getattr(self, name) for name in ProbeContent.__struct_fields__])
        ).hexdigest()


class Probe(Plotted, Registered, kw_only=True):
    """A registered probe, as the ledger stores it and the API returns it; without its tensors."""

    content: ProbeContent
    hidden_size: int
    bytes: int  # of its tensors
    held_out: list[HeldOut] = []  # see `ProbeRequest`

    @property
    def tensors(self) -> list[str]:
        return self.content.tensors

    def stored(self, action: ProbeAction, *, tokens: bool = False) -> "StoredProbe":
        return StoredProbe(
            name=self.name,
            digest=self.digest,
            content=self.content,
            model=self.model,
            actions=[] if action == "none" else [action],
            tokens=tokens,
        )


PROBES = ArtifactKind(
    plural="probes",
    short="probe",
    noun="probe",
    record=Probe,
    request=ProbeRequest,
    takes="a linear map of a row to a score for each label. Policies keep the version that they "
    "were registered with.",
    make="midstream.api.routes.registered:make_probe",
    calls="midstream.client.sdk.registered:Probes",
    acts={
        "put": "midstream.client.cli.named:put_probe",
        "export": "midstream.client.cli.named:export_probe",
    },
    limit=MAX_PROBES,
)


class ProbeUse(Record):
    """A probe that a request names.

    With the action `steer`, the module's edits are applied at each generated token if, before it,
    an aggregate was at or above its threshold.
    """

    probe: Reference
    action: ProbeAction = "none"
    tokens: bool = False  # return the score of each token, not only the aggregate
    # a named steering module; required for `steer`, and valid only for it
    module: Reference | None = None
    # scale of the module's whole effect; null: 1
    scale: Factor | None = None

    def __post_init__(self) -> None:
        if self.scale is not None and not math.isfinite(self.scale):
            # JSON writes it as null, and null has a meaning
            raise ValueError(f"scale is {self.scale}: omit it, or give a finite number")


#: The probes of a request: names, or names with actions.
ProbeList = Annotated[list[Reference | ProbeUse], msgspec.Meta(max_length=MAX_REQUEST_PROBES)]


# A policy's scores are a probe of the request, and a probe's own action is a policy without a name,
# so that rows, weights, receipts and gates need no case for either.
class StoredProbe(Record):
    """A probe as a job stores it: registering the name again does not affect the job."""

    name: str
    digest: str
    content: ProbeContent
    model: str = ""
    # what happens while it is on: at tokens up to which an aggregate is at or above its threshold,
    # or at which its policy is on
    actions: list[str] = []
    tokens: bool = False
    # the policy that these scores are for, whose name follows `POLICY` in `name`
    policy: StoredPolicy | None = None

    def averaged(self) -> "StoredProbe":
        """Return the probe with the mean over the text as its score: another content, with its own
        digest, because ranks know a probe's computation by its digest.
        """
        content = msgspec.structs.replace(self.content, aggregation="mean", decay=0.0)
        return msgspec.structs.replace(self, content=content, digest=content.digest)


class ProbeScore(Wire):
    """A rank's report on one probe of one request."""

    name: str
    digest: str
    labels: list[str]
    score: list[float]  # aggregate of each label over all positions
    positions: int  # number of scored tokens, from the prompt's first
    # for each label, the first position at which the aggregate reached its threshold, or the policy
    # was triggered
    crossed: list[int | None]
    actions: list[str] = []  # see `StoredProbe.actions`
    tokens: bytes = b""  # if requested: float32 `[positions, labels]`, C order, little-endian
    model: str = ""
    stopped: bool = False  # it ended the request
    gate: list[tuple[int, int]] | None = None  # of `steer`, see `ProbeResult.gate`
    gated: int = 0
    policy: StoredPolicy | None = None  # whose decisions follow
    decisions: list[Decision] = []  # the first `MAX_DECISIONS`
    triggers: int = 0  # of all decisions
    # with `StoredPolicy.keep_texts`: the tokens around its first trigger, see `hits.HitText`
    text_ids: bytes = b""
    text_from: int = 0
    text_prompt: int = 0

    @property
    def triggered(self) -> bool:
        """Return whether it was on at a token."""
        inherited = self.policy is not None and bool(self.policy.inherited)
        return inherited or any(position is not None for position in self.crossed)

    @property
    def flagged(self) -> bool:
        """Return whether the job's result reports it as flagged."""
        return self.triggered and "flag" in self.actions


class TokenScores(Record):
    """The scores of one token of prompt `index`, as streamed: probe → label → value."""

    index: int
    position: int
    scores: dict[str, dict[str, float]]
    aggregates: dict[str, dict[str, float]]  # over the positions up to this one


class ProbeResult(Plotted, Record):
    """The scores of one probe on one prompt."""

    request: int  # index of the prompt
    probe: str
    digest: str
    scores: dict[str, float]  # label → aggregate over all tokens
    # number of scored tokens: those of the prompt, and generated tokens fed back to the model
    positions: int
    # label → first position at which its aggregate was at or above the threshold
    crossed: dict[str, int] = {}
    action: str = "none"  # the requested action
    flagged: bool = False
    stopped: bool = False  # it ended the request
    tokens: list[list[float]] | None = None  # for each position, the score of each label
    #: With `steer`: the tokens at which the module's edits were applied, as first and last position
    #: of each run of consecutive tokens; at most `MAX_GATE_RUNS` runs.
    gate: list[tuple[int, int]] | None = None
    gated: int = 0  # number of tokens in all runs
    # of a policy, whose scores these are: `probe` is `policy:` and its name, `crossed` has its
    # first trigger
    policy: StoredPolicy | None = None
    decisions: list[Decision] = []  # the first `MAX_DECISIONS`, in token order
    triggers: int = 0  # of all decisions

    @property
    def triggered(self) -> bool:
        """Return whether its policy was on at a token."""
        return self.policy is not None and bool(self.policy.inherited or self.crossed)
