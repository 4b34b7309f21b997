"""The table of interventions: the fields, limits and defaults of each op, and the form in which the
kernels store it.

API rules, client options, modules, the ranks' rows and the kernels' families are derived from
`FAMILIES`; only the arithmetic is elsewhere (`kernels/reference.py`, `kernels/triton_site.py`).
`docs/developing.md` describes how to add a row.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

#: The ops of steering entries, as users write them. Each edits a row s at the entry's hook.
SteeringOp = Literal["replace", "lowrank", "add", "ablate", "clamp"]
#: The ranks' families of interventions. An op may map to several: `add_matched` is `add` with
#: `norm_match`.
OpFamily = Literal[
    "replace",
    "replace_masked",
    "lowrank",
    "add",
    "add_matched",
    "ablate",
    "clamp",
    "feature",
    "installed",
]
#: `rewrite`: computes a new row from the row s. `shift`: adds a value that does not depend on s. If
#: a rewrite changes a token's row, all families compute in float32, and the result is rounded once.
#: Without a rewrite, a single shift is added in the model's dtype; several shifts are summed in
#: float32 and added in one operation.
EditEffect = Literal["rewrite", "shift"]

#: Number of scalars of one pool entry: columns of the ranks' `scalars`.
SCALARS = 7
#: The columns of an application's limit and owner, in its first entry: see `StoredSteering.limit`;
#: 1 for the operator's edits, 0 for a request's.
LIMIT = SCALARS - 2
OWNER = SCALARS - 1
#: The largest rank of one `lowrank`.
MAX_RANK = 64
#: The largest float32, which stands for no limit of a component. (JSON cannot express infinity.)
NO_LIMIT = float.fromhex("0x1.fffffep127")


#: A feature's target and activation count as equal if they differ by at most this share of the sum
#: of the absolute terms of its dot product. Float32 sums in a different order differ by less.
NEAR = 2.0**-20
#: A feature's `norm`: how its autoencoder normalises a row before encoding, by SAELens' names. It
#: differs from row to row, so that it cannot be folded into the encoder.
NORMS = ("none", "layer_norm", "constant_norm_rescale")
#: SAELens' constant of `layer_norm`.
LAYER_NORM_EPS = 1e-5


class TensorField(NamedTuple):
    """A tensor of an entry."""

    symbol: str  # in the formulas
    ranked: bool  # each term has its own vector or number
    wide: bool = True  # it has `hidden_size` numbers (per term) instead of a single number


TENSORS: dict[str, TensorField] = {
    "vector": TensorField("v0", ranked=False),
    "mask": TensorField("m", ranked=False),
    "rotation": TensorField("R", ranked=True),
    "weight": TensorField("W", ranked=True),
    "bias": TensorField("bias", ranked=True, wide=False),
    # a float32 encoder is stored as the sum of three parts in the model's dtype, which is exact in
    # bfloat16
    "encoder": TensorField("e0", ranked=False),
    "encoder_middle": TensorField("e1", ranked=False),
    "encoder_last": TensorField("e2", ranked=False),
    "decoder": TensorField("d", ranked=False),
}


class Number(NamedTuple):
    """A numeric parameter that users set."""

    name: str
    limit: float = NO_LIMIT  # its largest absolute value
    default: float = 1.0


#: A factor of the row or of one component of it. At 100, the edit already dominates the rest of the
#: row.
_STRENGTH = Number("strength", 100.0)
#: In units of the stream, which may be large.
_STREAM = 1e6
_ALPHA = Number("alpha")  # 0 to 1 by schema


@dataclass(frozen=True)
class Intervention:
    """One kind of intervention.

    s is the family's input, a float32 row of the hidden size.

    An application consists of `terms` terms; each takes `len(vectors)` consecutive entries of the
    ranks' pool, term after term. Its numbers (`scalars`) are in its first entry, except those in
    `of_each_term`, which are in the first entry of each term.
    """

    name: OpFamily
    op: SteeringOp
    effect: EditEffect
    result: str  # in users' terms; v̂ = v/‖v‖
    formula: str  # in the kernels' terms, with what the pool holds
    source: str
    flag: str = ""  # the field of a spec that selects this variant of `op`, or a patch's `mask`
    tensors: tuple[str, ...] = ("vector",)  # all are required
    scale: Number | None = None  # a factor of the vector, applied when it is written to the pool
    numbers: tuple[Number, ...] = ()  # the first is its strength: at 0, the row keeps its bits
    # names of two numbers: lower and upper limit, of which at least one is required
    limits: tuple[str, str] | None = None
    unit: bool = False  # its vector is a direction, stored with length 1
    # it sums over the row, in a device-specific order: devices agree to float32's rounding, not to
    # the bit
    sums: bool = False
    joined: bool = False  # several at one site with the same positions are combined into one
    # the fields of a steering entry from which its tensors and numbers are computed; empty: the
    # tensors and numbers are fields themselves
    fields: tuple[str, ...] = ()

    @property
    def written(self) -> str:
        """The name as users write it."""
        return self.op if self.flag in ("", "mask") else f"{self.op} with {self.flag}"

    @property
    def options(self) -> tuple[str, ...]:
        """The fields of a steering entry other than its tensors."""
        if self.fields:
            return self.fields
        flags = (self.flag,) if self.flag not in ("", "mask") else ()
        return tuple(number.name for number in (*filter(None, [self.scale]), *self.numbers)) + flags

    @property
    def vectors(self) -> tuple[str, ...]:
        """Symbols of the vectors in the entries of one term."""
        return tuple(TENSORS[name].symbol for name in self.tensors if TENSORS[name].wide)

    @property
    def ranked(self) -> bool:
        """Return whether it has as many terms as its tensors have rows."""
        return any(TENSORS[name].ranked for name in self.tensors)

    @property
    def most_terms(self) -> int:
        return MAX_RANK if self.ranked else 1

    @property
    def of_each_term(self) -> tuple[str, ...]:
        """The scalars that each term has separately."""
        return tuple(name for name in self.tensors if not TENSORS[name].wide)

    @property
    def scalars(self) -> tuple[str, ...]:
        """Names of the columns of the ranks' `scalars`."""
        return (
            *(number.name for number in self.numbers),
            *(("rank",) if self.ranked else ()),
            *self.of_each_term,
        )

    @property
    def has_strength(self) -> bool:
        """Return whether the first scalar is a strength: if it is 0, the row keeps its bits."""
        return bool(self.numbers)

    @property
    def is_one_vector(self) -> bool:
        """Return whether its only tensor is a vector that is used without normalisation. A patch
        can take such a vector from a module.
        """
        return self.tensors == ("vector",) and not self.unit

    def entries(self, terms: int = 1) -> int:
        """Return the number of consecutive pool entries of one application."""
        return len(self.vectors) * terms

    def column(self, scalar: str) -> int:
        """Return the index of a number in `scalars`.

        Raises ValueError for a number that the family does not have.
        """
        return self.scalars.index(scalar)

    def shapes(self, rank: int, hidden_size: int) -> list[list[int]]:
        """Return the shapes of its tensors, in their order."""
        fields = map(TENSORS.__getitem__, self.tensors)
        return [[rank] * field.ranked + [hidden_size] * field.wide for field in fields]


_REPLACE_SOURCE = (
    "activation patching: Vig et al. 2020, arXiv:2004.12265; Meng et al. 2022, arXiv:2202.05262"
)

#: The families, in the order in which they are applied; within a family, the configuration rows of
#: a token are applied in the order of their columns.
FAMILIES: tuple[Intervention, ...] = (
    Intervention(
        "replace",
        "replace",
        "rewrite",
        "(1 − alpha) · s + alpha · scale · v; with `alpha` 1, scale · v bit for bit",
        "s ← (1 − alpha) · s + alpha · v0; alpha = 1 gives v0 bit for bit",
        _REPLACE_SOURCE,
        scale=Number("scale", _STREAM),
        numbers=(_ALPHA,),
        joined=True,
    ),
    Intervention(
        "replace_masked",
        "replace",
        "rewrite",
        "as `replace`, but only in the dimensions of a patch's `mask`",
        (
            "where m = 1: s ← (1 − alpha) · s + alpha · v0, with alpha = 1, v0 bit for "
            "bit; where m = 0: s"
        ),
        "`replace` in some dimensions only; with m = 1 everywhere it gives the same bits",
        flag="mask",
        tensors=("vector", "mask"),
        scale=Number("scale", _STREAM),
        numbers=(_ALPHA,),
    ),
    Intervention(
        "lowrank",
        "lowrank",
        "rewrite",
        "s + strength · Rᵀ(W s + b − R s)",
        "s ← s + strength · Σ_i R_i · (W_i·s + b_i − R_i·s)",
        "LoReFT: Wu et al. 2024, arXiv:2404.03592",
        tensors=("rotation", "weight", "bias"),
        numbers=(_STRENGTH,),
        sums=True,
    ),
    Intervention(
        "add",
        "add",
        "shift",
        "s + scale · v",
        "s ← s + v0",
        "activation addition: Turner et al. 2023, arXiv:2308.10248",
        scale=Number("scale", _STREAM),
        joined=True,
    ),
    Intervention(
        "add_matched",
        "add",
        "rewrite",
        "s + scale · ‖s‖ · v̂",
        "s ← s + scale · ‖s‖₂ · v0",
        "activation addition, scaled relative to the norm of the stream",
        flag="norm_match",
        numbers=(Number("scale", 100.0),),
        unit=True,
        sums=True,
    ),
    Intervention(
        "ablate",
        "ablate",
        "rewrite",
        "s − strength · (s·v̂) v̂",
        "s ← s − strength · (s·v0) · v0",
        "directional ablation: Arditi et al. 2024, arXiv:2406.11717",
        numbers=(_STRENGTH,),
        unit=True,
        sums=True,
    ),
    Intervention(
        "clamp",
        "clamp",
        "rewrite",
        (
            "s + strength · (min(max(s·v̂, low), high) − s·v̂) v̂; a component within the "
            "range leaves s unchanged, bit for bit"
        ),
        (
            "s ← s + strength · (min(max(s·v0, low), high) − s·v0) · v0; a component "
            "inside [low, high] leaves the row unchanged"
        ),
        "like feature clamping: Templeton et al. 2024, Scaling Monosemanticity",
        numbers=(_STRENGTH, Number("low", _STREAM, -NO_LIMIT), Number("high", _STREAM, NO_LIMIT)),
        limits=("low", "high"),
        unit=True,
        sums=True,
    ),
    Intervention(
        "feature",
        "clamp",
        "rewrite",
        "s + (value − a) · σ · d, where a is the activation of a feature of a sparse "
        "autoencoder, d its decoder row, and σ the number by which the autoencoder divides "
        "a row (`ablate`: `value` 0); if a equals `value`, s is unchanged, bit for bit",
        "p = (s − μ)·(e0 + e1 + e2) / (σ + ε) + bias, a = p where p > threshold, else "
        "0; s ← s + strength · (target − a) · σ · d; where "
        "target is a, up to float32's rounding (`NEAR`), the row is left unchanged; by "
        "norm, 0: μ = 0, σ = 1, ε = 0; 1: μ the mean of s, "
        "σ its standard deviation (of width − 1), ε = 1e-5; 2: μ = 0, σ = ‖s‖₂ / √width, ε = 0",
        (
            "clamped features with the reconstruction's error kept: Templeton et al. 2024, "
            "Scaling Monosemanticity"
        ),
        flag="sae",
        tensors=("encoder", "encoder_middle", "encoder_last", "decoder"),
        numbers=(
            _STRENGTH,
            Number("target", _STREAM),
            Number("bias"),
            Number("threshold"),
            Number("norm"),
        ),
        sums=True,
        fields=("sae", "feature", "value"),
    ),
)
#: A function from an extension. It works only on CPUs, because kernels on accelerators cannot call
#: it, and is applied after all other families.
INSTALLED = Intervention(
    "installed",
    "replace",
    "rewrite",
    "s + strength · (op(s) − s), with the operator's own op",
    "s ← s + strength · (op_code(s, v0, first, second) − s); strength = 1 gives the op's bits",
    "see docs/extending.md",
    flag="extension",
    numbers=(_STRENGTH, Number("first"), Number("second"), Number("code")),
    sums=True,
    fields=("extension", "strength", "options"),
)
#: All families, in order. On a CPU, `site_rows` has a row for each; on accelerators, only for
#: `FAMILIES`.
EVERY: tuple[Intervention, ...] = (*FAMILIES, INSTALLED)
#: Families whose tensors and numbers are fields of a steering entry or of a patch.
PLAIN: tuple[Intervention, ...] = tuple(family for family in FAMILIES if not family.fields)
#: Name → index in `EVERY`, which is also its row in the ranks' `site_rows`.
PLACE: dict[str, int] = {family.name: place for place, family in enumerate(EVERY)}
FAMILY: dict[OpFamily, Intervention] = {family.name: family for family in EVERY}
#: Op → its family, followed by variants.
VARIANTS: dict[SteeringOp, tuple[Intervention, ...]] = {
    op: tuple(family for family in PLAIN if family.op == op) for op in get_args(SteeringOp)
}


class OpFields(NamedTuple):
    """The fields of an op other than sites and positions; fields of other ops must be omitted."""

    tensors: tuple[str, ...]  # all of them, in the order of `StoredSteering.tensors`
    options: tuple[str, ...]


STEERING_FIELDS: dict[SteeringOp, OpFields] = {
    op: OpFields(
        variants[0].tensors,
        tuple(dict.fromkeys(option for family in variants for option in family.options)),
    )
    for op, variants in VARIANTS.items()
}
#: Text for documentation: each op with its formula.
MEANINGS = "; ".join(
    f"`{family.written}`: {family.result}" for family in FAMILIES if family.flag != "mask"
)
