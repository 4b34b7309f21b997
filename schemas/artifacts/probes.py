"""Linear probes: registration, use in requests, the form that a job stores, and the ranks' reports.

A probe is an affine map of a row: scores = W · row + b, float32. Alain and Bengio 2016
(arXiv:1610.01644).
"""

import hashlib
import math
from typing import Annotated, Literal

import msgspec

from ..base.limits import (
    MAX_DESCRIPTION,
    MAX_LABEL,
    MAX_LAYER,
    MAX_PROBE_LABELS,
    MAX_PROBES,
    MAX_REQUEST_PROBES,
    Name,
    Reference,
)
from ..base.records import Record, Wire
from ..base.tensors import Tensor
from ..prompts.selectors import Hook, HookName
from .registered import Kind, Registered

#: How the scores of a request's tokens become one: that of the last token, the largest, the mean,
#: or the exponential moving average e_0 = s_0, e_p = decay · e_(p−1) + (1 − decay) · s_p.
Aggregation = Literal["last", "max", "mean", "exponential"]
#: What happens when the aggregate of a label reaches its threshold. `steer`: a module edits the
#: generated tokens for as long as the aggregate is at or above it.
Action = Literal["none", "flag", "stop", "steer"]
#: Float32, like the scores.
Threshold = Annotated[float, msgspec.Meta(ge=-3e38, le=3e38)]
ProbeLabel = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_LABEL)]
#: Before or after the interventions of the same site.
Side = Literal["before", "after"]


class ProbeRequest(Record):
    """Body of `PUT /v1/probes/{name}`.

    `weight`: `[k, hidden_size]`, or `[hidden_size]` for one label; `bias`: `[k]`, null: zeros. A
    label's threshold is compared with the aggregate: the probe crosses where the aggregate is at or
    above it; null: never.
    """

    weight: Tensor
    layer: Annotated[int, msgspec.Meta(ge=-MAX_LAYER, le=MAX_LAYER)]  # negative: from the end
    bias: Tensor | None = None
    hook: HookName = "post_block"
    at: Side = "before"
    # null: `0`, `1`, …
    labels: Annotated[list[ProbeLabel], msgspec.Meta(max_length=MAX_PROBE_LABELS)] | None = None
    #: A single number applies to every label.
    thresholds: (
        Threshold
        | Annotated[list[Threshold | None], msgspec.Meta(max_length=MAX_PROBE_LABELS)]
        | None
    ) = None
    aggregation: Aggregation = "last"
    decay: Annotated[float, msgspec.Meta(gt=0, lt=1)] | None = None  # of `exponential`
    model: Name | None = None  # null: the only one there is
    description: Annotated[str, msgspec.Meta(max_length=MAX_DESCRIPTION)] = ""


class ProbeContent(Record):
    """Computation of a probe, with its site."""

    hook: Hook
    layer: int
    tensors: list[str]  # content hashes: weight `[k, hidden_size]` and bias `[k]`, float32
    labels: list[str]
    thresholds: list[float | None]
    at: Side = "before"
    aggregation: Aggregation = "last"
    decay: float = 0.0

    @property
    def digest(self) -> str:
        """SHA-256, in hexadecimal, of everything that determines its scores and crossings."""
        return hashlib.sha256(
            msgspec.msgpack.encode([getattr(self, name) for name in ProbeContent.__struct_fields__])
        ).hexdigest()


class Probe(Registered):
    """A registered probe, as the ledger keeps it and as it is shown; without its numbers."""

    content: ProbeContent
    hidden_size: int
    bytes: int  # of its tensors
    created: float
    description: str = ""
    # its action on all traffic of the model; null: it does not watch all traffic
    watch: Action | None = None
    replaced: str = ""  # the previous digest of the name, if this request replaced it

    def stored(
        self, action: Action, *, tokens: bool = False, watching: bool = False
    ) -> "StoredProbe":
        return StoredProbe(
            name=self.name,
            digest=self.digest,
            content=self.content,
            model=self.model,
            action=action,
            tokens=tokens,
            watching=watching,
        )


class ProbePage(Record):
    """Answer of `GET /v1/probes`."""

    probes: list[Probe]


PROBES = Kind("probe", "probes", "probe", Probe, ProbeRequest, ProbePage, "ms:probes:", MAX_PROBES)


class WatchRequest(Record):
    """Body of `PUT /v1/probes/{name}/watch`: the probe scores every request to the model that is
    accepted from then on.
    """

    action: Action = "flag"


class ProbeUse(Record):
    """A probe that a request names.

    With the action `steer` the module's edits are applied at each generated token before which an
    aggregate was at or above its threshold.
    """

    probe: Reference
    action: Action = "none"
    tokens: bool = False  # return the score of each token, not only the aggregate
    # a named steering module; required for `steer`, and valid for it alone
    module: Reference | None = None
    # of the module's whole effect; null: 1
    scale: Annotated[float, msgspec.Meta(ge=-1e6, le=1e6)] | None = None

    def __post_init__(self) -> None:
        if self.scale is not None and not math.isfinite(self.scale):
            # JSON writes it as null, and null has a meaning
            raise ValueError(f"scale is {self.scale}: omit it, or give a finite number")


#: The probes of a request: names, or names with actions.
ProbeList = Annotated[list[Reference | ProbeUse], msgspec.Meta(max_length=MAX_REQUEST_PROBES)]


class StoredProbe(Record):
    """A probe as a job keeps it: later changes of the name do not affect it."""

    name: str
    digest: str
    content: ProbeContent
    model: str = ""
    action: Action = "none"
    tokens: bool = False
    watching: bool = False  # added by the operator, not by the request


def label_starts(probes: list[StoredProbe]) -> list[int]:
    """Return the index of each probe's first label in the list of all probes' labels."""
    starts = [0]
    for probe in probes:
        starts.append(starts[-1] + len(probe.content.labels))
    return starts[:-1]


class ProbeScore(Wire):
    """A rank's report on one probe of one request."""

    name: str
    digest: str
    labels: list[str]
    score: list[float]  # aggregate of each label over all positions
    positions: int  # tokens that were scored, from the first of the prompt on
    # of each label the first position at which the aggregate reached its threshold
    crossed: list[int | None]
    action: str = "none"
    tokens: bytes = b""  # if requested: float32 `[positions, labels]`, C order, little-endian
    watching: bool = False
    model: str = ""
    stopped: bool = False  # it ended the request
    gate: list[tuple[int, int]] | None = None  # of `steer`, see `ProbeResult.gate`
    gated: int = 0

    @property
    def flagged(self) -> bool:
        """Return whether the job's result reports it as flagged. (The operator's probes are
        reported in metrics instead.)
        """
        return (
            self.action == "flag"
            and not self.watching
            and any(position is not None for position in self.crossed)
        )


class TokenScores(Record):
    """The scores of one token of prompt `index`, as streams carry them: probe → label → value."""

    index: int
    position: int
    scores: dict[str, dict[str, float]]
    aggregates: dict[str, dict[str, float]]  # over the positions up to this one


class ProbeResult(Record):
    """The scores of one probe on one prompt."""

    request: int  # index of the prompt
    probe: str
    digest: str
    scores: dict[str, float]  # label → aggregate over all tokens
    # tokens scored: those of the prompt, and the generated ones that were fed back to the model
    positions: int
    # label → first position at which its aggregate was at or above the threshold
    crossed: dict[str, int] = {}
    action: str = "none"  # what was asked for
    flagged: bool = False
    stopped: bool = False  # it ended the request
    tokens: list[list[float]] | None = None  # for each position, the score of each label
    #: With `steer`: where the module's edits were applied, as first and last position of each run
    #: of tokens; at most `MAX_GATE_RUNS`.
    gate: list[tuple[int, int]] | None = None
    gated: int = 0  # number of tokens in all runs
