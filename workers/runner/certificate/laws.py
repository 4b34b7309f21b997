"""Laws that rows of a loaded model must obey, and the hook points that violations disprove.

Pure functions from rows to figures; and the messages of a certification run, which say what the
ranks must judge, and their judgements. A law that holds is evidence for each row in it, since every
row is captured independently. Each figure is compared with a tolerance, whose reason is in
`TOLERANCES`.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from ....schemas.base.records import by_key
from ....schemas.prompts.selectors import HOOKS, Hook

#: Kind of law → tolerance, in units of the model dtype's `eps` unless another unit is given.
TOLERANCES: Mapping[str, float] = {
    # each term and the sum are rounded once: half a unit in the last place each; relative to
    # |a| + |b| + |sum|
    "sum": 1.0,
    # share of a branch's elements that exceed the tolerance of the sum: below 1 % (figure: 0.01 /
    # share) the sum does not show the branch
    "seen": 1.0,
    # a value passed on is rounded once at most; relative to |a| + |b|
    "same": 1.0,
    # the same module on the same rows in a batch of another size, or compiled; norm of the error
    # over the row's norm
    "module": 8.0,
    # the same tokens in another batch: other kernel shapes in every layer; norm of the error over
    # the row's norm
    "batch": 32.0,
    # nats, over the largest logit's size: the output matrix on another number of rows
    "logits": 4.0,
    # like a sum that includes the vector; in a pair of tensors one of the two is rounded
    # separately; norms instead of elements
    "edit": 4.0,
    # least change of a row computed from an edited row, norm of the change over the row's norm; the
    # figure is its inverse
    "reach": 4.0,
}
#: Least relative tolerances: fp32 kernels differ between calls by much more than fp32's eps.
FLOOR = {"module": 1e-4, "batch": 1e-3, "logits": 1e-4, "edit": 1e-5, "reach": 1e-4}
#: Share of a branch's elements that must be visible in the sum.
VISIBLE = 0.01
#: Hooks in the order in which they are blamed for a failed law, which does not show which of its
#: hooks is wrong: branches before the stream.
BLAME: Sequence[Hook] = ("mlp_in", "attn_out", "mlp_out", "post_attn", "pre_attn", "post_block")
#: Hook → the hooks with whose rows its own are compared.
NEIGHBOURS: Mapping[Hook, Sequence[Hook]] = {
    "pre_attn": ("post_block",),
    "attn_out": ("pre_attn", "post_attn"),
    "post_attn": ("pre_attn", "attn_out"),
    "mlp_in": ("mlp_out",),
    "mlp_out": ("post_attn", "post_block"),
    "post_block": ("pre_attn",),
}
#: Hooks without which a model has no usable residual stream.
STREAM: Sequence[Hook] = ("pre_attn", "post_block")
RowsAt = Callable[[Hook, int], torch.Tensor]  # (hook, layer) → `[rows, hidden]`
#: Kinds of laws that prove that rows belong to the hook that names them. The arrival of an edit, or
#: equal rows in another batch, are no such proof.
PROVING = frozenset({"sum", "same", "module", "logits"})


class LayerEdit(msgspec.Struct):
    """A vector that a request adds at `hook` of `layer`, at `position`, times `scale`. A request
    may edit several layers, each at its own position.
    """

    request: int
    plain: int  # a request in the same batch with the same tokens and no edits
    hook: Hook
    layer: int
    position: int
    scale: float


class Copy(msgspec.Struct):
    """A request whose rows must equal the base's at these positions."""

    law: str
    request: int
    positions: list[int]
    depth: int = 0  # only the rows of so many layers, counted from the first; 0: of all


class CertificatePlan(msgspec.Struct):
    """Requests, by number, whose rows all ranks judge."""

    base: int
    tokens: list[int]  # the base's prompt and generated tokens
    positions: list[int]  # the base's captured positions, ascending
    first: int  # the first position with a next token: the last of the prompt
    copies: list[Copy]
    edits: list[LayerEdit]
    final: LayerEdit | None = None  # an edit of the last layer's `post_block` at `first`


def direction(hidden_size: int) -> np.ndarray:
    """Return the vector of all edits, float32 `[hidden_size]`: standard normal elements."""
    return np.random.default_rng(16).normal(size=hidden_size).astype(np.float32)


class LawFinding(msgspec.Struct, frozen=True, omit_defaults=True):
    """One law in one layer.

    `figure` is relative to the tolerance: at most 1 where the law holds; infinite where rows are
    not finite.
    """

    law: str  # the law as text
    hooks: tuple[str, ...]  # the hooks whose rows are compared; for an edit, the edited one first
    layer: int
    figure: float
    kind: str = "sum"  # key of `TOLERANCES`
    edit: bool = False  # the law is about a request with an edit

    @property
    def ok(self) -> bool:
        return self.figure <= 1.0  # False for NaN


class Judgement(msgspec.Struct):
    """Judgement of one rank."""

    findings: list[LawFinding]
    not_compared: dict[str, str]  # law → why it was not judged
    # float32 rows at the stage's first and last layer, for the neighbouring stages
    edges: dict[str, bytes]
    readings: dict[str, str] = {}  # kind of reading → why the run disproved it


class JudgedShape(NamedTuple):
    """Facts about the model that a judge needs."""

    hooks: Sequence[Hook]
    eps: float  # of the dtype
    # layer → the sums, see `Variant.laws`
    laws: Callable[[int], Mapping[Hook, Mapping[Hook, float]]] = lambda _: {}
    # whether a layer chooses experts: near a tie rounding decides, so the median row is judged
    routes: Callable[[int], bool] = lambda _: False
    follows: Callable[[int], bool] = lambda _: False  # the layer, or one below it, chooses experts

    def tolerance(self, kind: str) -> float:
        """Return the relative tolerance of a kind of law."""
        return max(TOLERANCES[kind] * self.eps, FLOOR.get(kind, 0.0))


# --- Figures


def elementwise(total: torch.Tensor, parts: Sequence[torch.Tensor], tolerance: float) -> float:
    """Return an element's largest |total − Σ parts|, over `tolerance` · (|total| + Σ |parts|)."""
    size = total.abs() + sum(part.abs() for part in parts)
    error = (total - sum(parts)).abs()
    return _worst(error, tolerance * size)


def sumwise(
    total: torch.Tensor, parts: Sequence[torch.Tensor], tolerance: float, *, median: bool = False
) -> float:
    """Return the largest (or median) norm of a row of total − Σ parts, over `tolerance` · the sum
    of the norms of total and parts.
    """
    size = total.norm(dim=-1) + sum(part.norm(dim=-1) for part in parts)
    return _worst((total - sum(parts)).norm(dim=-1), tolerance * size, median)


def rowwise(
    got: torch.Tensor, expected: torch.Tensor, tolerance: float, *, median: bool = False
) -> float:
    """Return the largest (or median) norm of a row's error, over `tolerance` · the row's norm."""
    if got.shape != expected.shape:
        return math.inf
    return _worst((got - expected).norm(dim=-1), tolerance * expected.norm(dim=-1), median)


def _worst(errors: torch.Tensor, allowed: torch.Tensor, median: bool = False) -> float:
    """Return the largest (or median) error, over what is allowed."""
    values = errors / allowed.clamp_min(torch.finfo(torch.float32).tiny)
    judged = np.median(values.cpu()) if median and values.numel() else values
    worst = float(judged.max()) if values.numel() else math.inf
    return worst if math.isfinite(worst) else math.inf


def visible(
    part: torch.Tensor, total: torch.Tensor, rest: Sequence[torch.Tensor], tolerance: float
) -> float:
    """Return `VISIBLE` over the share of elements of `part` that exceed the sum's tolerance."""
    size = total.abs() + part.abs() + sum(other.abs() for other in rest)
    share = float((part.abs() > tolerance * size).float().mean())
    return VISIBLE / share if share else math.inf


# --- Laws of one layer


def sums(shape: JudgedShape, layer: int) -> list[tuple[Hook, Mapping[Hook, float]]]:
    """Return (sum, term → multiplier) of a layer: the architecture's laws whose hooks are all
    installed.
    """
    have = set(shape.hooks)
    return [(total, terms) for total, terms in shape.laws(layer).items() if {total, *terms} <= have]


def named(terms: Mapping[Hook, float]) -> str:
    return " + ".join(
        hook if factor == 1 else f"{factor:.4g} {hook}" for hook, factor in terms.items()
    )


def judge_layer(shape: JudgedShape, rows: RowsAt, layer: int) -> list[LawFinding]:
    """Judge the sums of one layer, and whether each branch is visible in them."""
    findings = []
    tolerance = shape.tolerance("sum")
    for total, terms in sums(shape, layer):
        parts = {hook: factor * rows(hook, layer) for hook, factor in terms.items()}
        whole = rows(total, layer)
        figure = elementwise(whole, list(parts.values()), tolerance)
        findings.append(LawFinding(f"{total} = {named(terms)}", (total, *terms), layer, figure))
        for branch in parts.keys() & {"attn_out", "mlp_out"}:
            rest = [part for hook, part in parts.items() if hook != branch]
            share = visible(parts[branch], whole, rest, tolerance)
            findings.append(
                LawFinding(f"{branch} is visible in {total}", (branch,), layer, share, "seen")
            )
    return findings


def judge_boundary(
    shape: JudgedShape, leaving: torch.Tensor, entered: torch.Tensor, layer: int
) -> LawFinding:
    """Compare `post_block` of `layer` with `pre_attn` of the next layer."""
    figure = elementwise(entered, [leaving], shape.tolerance("same"))
    return LawFinding(
        "pre_attn[L+1] = post_block[L]", ("post_block", "pre_attn"), layer, figure, "same"
    )


def judge_same(
    shape: JudgedShape, law: str, hook: Hook, layer: int, got: torch.Tensor, expected: torch.Tensor
) -> LawFinding:
    """Compare the rows of a hook with those of the same tokens in another batch."""
    return LawFinding(
        law,
        (hook,),
        layer,
        rowwise(got, expected, shape.tolerance("batch"), median=shape.follows(layer)),
        "batch",
    )


def judge_module(
    shape: JudgedShape, got: torch.Tensor, expected: torch.Tensor, layer: int, hooks: Sequence[str]
) -> LawFinding:
    """Compare the output of the layer's own MLP, for the rows of its input, with the rows of
    `mlp_out`.
    """
    figure = rowwise(got, expected, shape.tolerance("module"), median=shape.routes(layer))
    return LawFinding(f"MLP({hooks[0]}) = mlp_out", tuple(hooks), layer, figure, "module")


def judge_parts(
    shape: JudgedShape, got: torch.Tensor, entered: torch.Tensor, leaving: torch.Tensor, layer: int
) -> list[LawFinding]:
    """Compare the output of the layer's own MLP for the rows of `mlp_in`, up to one factor, with
    `post_block` − `post_attn`.

    Used where an MLP of several parts has no `mlp_out`, which would be their sum.
    """
    part = factor_of(got, leaving - entered) * got
    tolerance = shape.tolerance("module")
    law = "post_block = post_attn + MLP(mlp_in)"
    hooks = ("mlp_in", "post_attn", "post_block")
    share = visible(part, leaving, [entered], tolerance)
    return [
        LawFinding(
            law,
            hooks,
            layer,
            sumwise(leaving, [entered, part], tolerance, median=shape.routes(layer)),
            "module",
        ),
        LawFinding("MLP(mlp_in) is visible in post_block", ("mlp_in",), layer, share, "seen"),
    ]


def factor_of(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the factor that brings `got` nearest to `expected` (least squares)."""
    return float(
        (expected * got).sum() / got.square().sum().clamp_min(torch.finfo(torch.float32).tiny)
    )


# --- Laws of an edit


def judge_edit(
    shape: JudgedShape,
    hook: Hook,
    layer: int,
    edited: RowsAt,
    plain: RowsAt,
    added: torch.Tensor,
    entered: torch.Tensor | None,
) -> list[LawFinding]:
    """Judge, at the position where a vector is `added` at `hook` of `layer`, which rows it reaches
    and which it must not.

    `edited` and `plain`: rows at that position of the requests with and without the edit, captured
    before edits. `entered`: `pre_attn` of the next layer in the edited request; None if another
    rank has it, or it does not exist. `ModuleLaws.mlp` judges the reach of an edit at `mlp_in`.
    """
    have = [item for item in HOOKS if item in shape.hooks]
    law = f"edit at {hook}: "
    findings = []
    for item in have[: have.index(hook) + 1]:
        figure = rowwise(edited(item, layer), plain(item, layer), shape.tolerance("batch"))
        findings.append(
            LawFinding(f"{law}nothing before it", (hook, item), layer, figure, "batch", edit=True)
        )
    for total, terms in sums(shape, layer):
        if hook in terms:
            parts = [factor * edited(term, layer) for term, factor in terms.items()] + [
                terms[hook] * added
            ]
            figure = sumwise(edited(total, layer), parts, shape.tolerance("edit"))
            findings.append(
                LawFinding(
                    f"{law}{total} has it", (hook, total, *terms), layer, figure, "edit", edit=True
                )
            )
    if hook == "post_block" and entered is not None:
        findings.append(judge_entered(shape, edited("post_block", layer), added, entered, layer))
    reads: dict[str, Hook] = {
        "pre_attn": "attn_out",
        "post_attn": "mlp_in" if "mlp_in" in have else "mlp_out",
        "mlp_in": "mlp_out",
    }
    reader = reads.get(hook)
    if reader is not None and reader in have:
        moved = rowwise(edited(reader, layer), plain(reader, layer), shape.tolerance("reach"))
        findings.append(
            LawFinding(
                f"{law}{reader} sees it",
                (hook, reader),
                layer,
                1 / moved if moved else math.inf,
                "reach",
                edit=True,
            )
        )
    return findings


def judge_entered(
    shape: JudgedShape,
    leaving: torch.Tensor,
    added: torch.Tensor,
    entered: torch.Tensor,
    layer: int,
) -> LawFinding:
    """Judge whether an edit of `post_block` reaches the input of the next layer."""
    figure = sumwise(entered, [leaving, added], shape.tolerance("edit"))
    return LawFinding(
        "edit at post_block: pre_attn[L+1] has it",
        ("post_block", "pre_attn"),
        layer,
        figure,
        "edit",
        edit=True,
    )


# --- The verdict


class LawFindings(msgspec.Struct, frozen=True):
    """All findings of one law."""

    law: str
    kind: str
    hooks: tuple[str, ...]
    figure: float  # relative to the tolerance
    layer: int  # layer of the worst finding
    checked: int  # number of findings
    failing: tuple[int, ...]  # layers in which it fails
    layers: tuple[int, ...]  # layers in which it was judged

    @property
    def ok(self) -> bool:
        return self.figure <= 1.0


def combine(findings: Iterable[LawFinding]) -> list[LawFindings]:
    """Combine the findings of each law, with the figure of the worst."""
    combined = []
    for law, of_law in by_key((finding.law, finding) for finding in findings).items():
        worst = max(of_law, key=lambda finding: (math.isnan(finding.figure), finding.figure))
        failing = tuple(sorted({finding.layer for finding in of_law if not finding.ok}))
        layers = tuple(sorted({finding.layer for finding in of_law}))
        of_worst = worst.kind, worst.hooks, worst.figure, worst.layer
        combined.append(LawFindings(law, *of_worst, len(of_law), failing, layers))
    return combined


def verdict(
    hooks: Sequence[Hook],
    findings: Iterable[LawFinding],
    num_layers: int,
    *,
    unshown: dict[Hook, str] | None = None,
) -> tuple[dict[Hook, str], list[LawFindings]]:
    """Return hook → why it is not proven (proven hooks are missing), and all laws.

    A failed law shows that one of its hooks is wrong, but not which. The smallest set of hooks that
    explains all failures is blamed, branches first. Edits are then judged by the remaining hooks,
    and failures are blamed on the edited hook: a wrong branch makes its neighbours' edits look
    wrong. A hook is also not proven if no law that holds covers it in some layer. Exempt are the
    two ends of the stream, the first layer's input and the last layer's output, which have no
    neighbour. `unshown`: receives the hooks that nothing proves and nothing disproves.
    """
    judged = list(findings)
    laws = combine(finding for finding in judged if not finding.edit)
    broken = [law for law in laws if not law.ok]
    blamed = _smallest(hooks, [set(law.hooks) & set(hooks) for law in broken])
    absent: dict[Hook, str] = {hook: _why(broken, hook) for hook in hooks if hook in blamed}
    edits = combine(
        finding for finding in judged if finding.edit and not blamed & set(finding.hooks)
    )
    absent |= {
        hook: _why(wrong, hook)
        for hook in hooks
        if (wrong := [law for law in edits if not law.ok and law.hooks[0] == hook])
    }
    proving = [
        law for law in laws if law.ok and law.kind in PROVING and not set(law.hooks) & blamed
    ]
    for hook in hooks:
        covered = {layer for law in proving if hook in law.hooks for layer in law.layers}
        covered |= {
            layer + 1
            for law in proving
            if hook == "pre_attn" and law.kind == "same"
            for layer in law.layers
        }
        lacking = sorted(set(range(num_layers)) - covered)
        if (
            hook not in absent
            and lacking
            and lacking != [{"pre_attn": 0, "post_block": num_layers - 1}.get(hook)]
        ):
            neighbours = " and ".join(NEIGHBOURS[hook])
            (absent if unshown is None else unshown)[hook] = (
                f"nothing proves its rows (first in layer {lacking[0]}): their "
                f"proof needs {neighbours}"
            )
    return absent, [*laws, *edits]


def verdict_inside(
    hooks: Sequence[str], findings: Iterable[LawFinding], num_layers: int
) -> tuple[dict[str, str], list[LawFindings]]:
    """Return the verdict on hooks inside attention and MLP: hook → why it is not proven, and all
    laws.

    A law that holds proves all of its hooks, and one that fails disproves all of them.
    """
    laws = combine(findings)
    absent: dict[str, str] = {}
    for hook in hooks:
        of_hook = [law for law in laws if hook in law.hooks]
        broken = [law for law in of_hook if not law.ok]
        proven = {layer for law in of_hook for layer in law.layers}
        lacking = sorted(set(range(num_layers)) - proven)
        if broken:
            absent[hook] = _why(broken, hook)
        elif lacking:
            absent[hook] = (
                "the certification run did not prove it: no law speaks about its rows in layer "
                f"{lacking[0]}"
            )
    return absent, laws


def _smallest(hooks: Sequence[Hook], broken: Sequence[set[str]]) -> set[str]:
    """Return the smallest set with a hook of each set in `broken`; among equal sizes, hooks that
    are first in `BLAME`.
    """
    order = [hook for hook in BLAME if hook in hooks]
    distinct = {frozenset(item) for item in broken if item}
    for size in range(len(order) + 1):
        for chosen in itertools.combinations(order, size):
            if all(set(chosen) & item for item in distinct):
                return set(chosen)
    return set(order)


def _why(broken: Sequence[LawFindings], hook: str) -> str:
    law = max((law for law in broken if hook in law.hooks), key=lambda law: law.figure)
    layers = [layer for layer in law.failing if layer >= 0]
    where = f" in layer {layers[0]}" if layers else ""
    if len(layers) > 1:
        where += f" and {len(layers) - 1} more"
    error = (
        "not finite, or nothing to see"
        if math.isinf(law.figure)
        else f"{law.figure:.3g} times its tolerance"
    )
    return f"the certification run did not prove it: `{law.law}` fails{where} ({error})"
