"""The laws that rows of a loaded model must obey, and the hook points that violations disprove.

Pure: rows in, figures out.

Every row is observed on its own, so a law that holds says something about each of its rows. Each
figure is compared with a tolerance that has a reason: see `TOLERANCES`.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import torch

from ....schemas.prompts.selectors import HOOKS, Hook

#: Figures of every law, in units of `eps` of the model's dtype unless the reason says otherwise.
TOLERANCES: Mapping[str, tuple[float, str]] = {
    "sum": (
        1.0,
        (
            "each term and the sum are rounded once: half a unit in the last place each; "
            "relative to |a| + |b| + |sum|"
        ),
    ),
    "seen": (
        1.0,
        (
            "share of a branch's elements that exceed the tolerance of the sum: below 1 % "
            "(figure: 0.01 / share) nothing shows them"
        ),
    ),
    "same": (1.0, "a value handed on is rounded once at most; relative to |a| + |b|"),
    "module": (
        8.0,
        (
            "the same module on the same rows in a batch of another size, or compiled; "
            "norm of the error over the row's norm"
        ),
    ),
    "batch": (
        32.0,
        (
            "the same tokens in another batch: other kernel shapes in every layer; norm of "
            "the error over the row's norm"
        ),
    ),
    "logits": (
        4.0,
        "nats, over the largest logit's size: the output matrix on another number of rows",
    ),
    "edit": (
        4.0,
        (
            "as a sum, with the vector in it; a pair of tensors rounds it apart from the "
            "other; norms instead of elements"
        ),
    ),
    "reach": (
        4.0,
        (
            "least change of what reads an edited row, norm of the change over the row's "
            "norm; the figure is its inverse"
        ),
    ),
}
#: Least tolerance, relative: what fp32 kernels differ by from call to call is not of the size of
#: fp32's eps.
FLOOR = {"module": 1e-4, "batch": 1e-3, "logits": 1e-4, "edit": 1e-5, "reach": 1e-4}
#: Share of a branch's elements that must be visible in the sum.
VISIBLE = 0.01
#: Hooks in the order in which they are blamed where a law does not say which of them is wrong: a
#: branch before the stream.
BLAME: Sequence[Hook] = ("mlp_in", "attn_out", "mlp_out", "post_attn", "pre_attn", "post_block")
#: What a hook's rows are compared with.
NEIGHBOURS: Mapping[Hook, Sequence[Hook]] = {
    "pre_attn": ("post_block",),
    "attn_out": ("pre_attn", "post_attn"),
    "post_attn": ("pre_attn", "attn_out"),
    "mlp_in": ("mlp_out",),
    "mlp_out": ("post_attn", "post_block"),
    "post_block": ("pre_attn",),
}
#: Without these there is no residual stream to speak of.
STREAM: Sequence[Hook] = ("pre_attn", "post_block")

Rows = Callable[[Hook, int], torch.Tensor]  # (hook, layer) → `[rows, hidden]`


class Finding(msgspec.Struct, frozen=True, omit_defaults=True):
    """One law in one layer.

    `figure` is relative to the tolerance: at most 1 where the law holds; infinite where rows are
    not finite.
    """

    law: str  # what is said
    hooks: tuple[str, ...]  # that it speaks about; of an edit: first the one that is edited
    layer: int
    figure: float
    kind: str = "sum"  # of `TOLERANCES`
    edit: bool = False  # of a request with an edit

    @property
    def ok(self) -> bool:
        return self.figure <= 1.0  # not of NaN


class Shape(NamedTuple):
    """Facts about the model that a judge needs."""

    hooks: Sequence[Hook]
    eps: float  # of the dtype
    laws: Callable[[int], Mapping[Hook, Mapping[Hook, float]]] = (
        lambda _: {}
    )  # layer → the sums, see `Variant.laws`
    routes: Callable[[int], bool] = lambda _: (
        False
    )  # this layer chooses experts: rounding decides near a tie, so its median row counts
    follows: Callable[[int], bool] = lambda _: False  # this layer, or one below it, chooses experts

    def tolerance(self, kind: str) -> float:
        """Relative."""
        return max(TOLERANCES[kind][0] * self.eps, FLOOR.get(kind, 0.0))


# --- Figures


def elementwise(total: torch.Tensor, parts: Sequence[torch.Tensor], tolerance: float) -> float:
    """Largest |total − Σ parts| of any element, over `tolerance` · (|total| + Σ |parts|)."""
    size = total.abs() + sum(part.abs() for part in parts)
    error = (total - sum(parts)).abs()
    return _worst(error / (tolerance * size).clamp_min(torch.finfo(torch.float32).tiny))


def sumwise(
    total: torch.Tensor, parts: Sequence[torch.Tensor], tolerance: float, *, median: bool = False
) -> float:
    """Largest (or median) norm of a row of total − Σ parts, over `tolerance` · the norms of all of
    them.
    """
    size = total.norm(dim=-1) + sum(part.norm(dim=-1) for part in parts)
    errors = (total - sum(parts)).norm(dim=-1) / (tolerance * size).clamp_min(
        torch.finfo(torch.float32).tiny
    )
    return _worst(errors.median() if median and errors.numel() else errors)


def rowwise(
    got: torch.Tensor, expected: torch.Tensor, tolerance: float, *, median: bool = False
) -> float:
    """Largest (or median) norm of a row's error, over `tolerance` · the row's norm."""
    if got.shape != expected.shape:
        return math.inf
    errors = (got - expected).norm(dim=-1) / (tolerance * expected.norm(dim=-1)).clamp_min(
        torch.finfo(torch.float32).tiny
    )
    return _worst(errors.median() if median and errors.numel() else errors)


def _worst(values: torch.Tensor) -> float:
    worst = float(values.max()) if values.numel() else math.inf
    return worst if math.isfinite(worst) else math.inf


def visible(
    part: torch.Tensor, total: torch.Tensor, rest: Sequence[torch.Tensor], tolerance: float
) -> float:
    """`VISIBLE` over the share of elements of `part` that the tolerance of a sum does not hide."""
    size = total.abs() + part.abs() + sum(other.abs() for other in rest)
    share = float((part.abs() > tolerance * size).float().mean())
    return VISIBLE / share if share else math.inf


# --- Laws of one layer


def sums(shape: Shape, layer: int) -> list[tuple[Hook, Mapping[Hook, float]]]:
    """(sum, what it is the sum of → multiplier) of a layer: the architecture's own law, over the
    hooks that are there.
    """
    have = set(shape.hooks)
    return [(total, terms) for total, terms in shape.laws(layer).items() if {total, *terms} <= have]


def named(terms: Mapping[Hook, float]) -> str:
    return " + ".join(
        hook if factor == 1 else f"{factor:.4g} {hook}" for hook, factor in terms.items()
    )


def judge_layer(shape: Shape, rows: Rows, layer: int) -> list[Finding]:
    """Sums of one layer, and that every branch is visible in them."""
    findings, tolerance = [], shape.tolerance("sum")
    for total, terms in sums(shape, layer):
        parts = {hook: factor * rows(hook, layer) for hook, factor in terms.items()}
        whole = rows(total, layer)
        figure = elementwise(whole, list(parts.values()), tolerance)
        findings.append(Finding(f"{total} = {named(terms)}", (total, *terms), layer, figure))
        for branch in parts.keys() & {"attn_out", "mlp_out"}:
            rest = [part for hook, part in parts.items() if hook != branch]
            share = visible(parts[branch], whole, rest, tolerance)
            findings.append(
                Finding(f"{branch} is visible in {total}", (branch,), layer, share, "seen")
            )
    return findings


def judge_boundary(
    shape: Shape, leaving: torch.Tensor, entered: torch.Tensor, layer: int
) -> Finding:
    """`post_block` of `layer` against `pre_attn` of the next."""
    figure = elementwise(entered, [leaving], shape.tolerance("same"))
    return Finding(
        "pre_attn[L+1] = post_block[L]", ("post_block", "pre_attn"), layer, figure, "same"
    )


def judge_same(
    shape: Shape, law: str, hook: Hook, layer: int, got: torch.Tensor, expected: torch.Tensor
) -> Finding:
    """The rows of a hook against those of the same tokens in another batch."""
    return Finding(
        law,
        (hook,),
        layer,
        rowwise(got, expected, shape.tolerance("batch"), median=shape.follows(layer)),
        "batch",
    )


def judge_module(
    shape: Shape, got: torch.Tensor, expected: torch.Tensor, layer: int, hooks: Sequence[str]
) -> Finding:
    """Return what the layer's own MLP gives for the rows of its input against the rows of
    `mlp_out`.
    """
    figure = rowwise(got, expected, shape.tolerance("module"), median=shape.routes(layer))
    return Finding(f"MLP({hooks[0]}) = mlp_out", tuple(hooks), layer, figure, "module")


def judge_parts(
    shape: Shape, got: torch.Tensor, entered: torch.Tensor, leaving: torch.Tensor, layer: int
) -> list[Finding]:
    """Return what the layer's own MLP gives for the rows of `mlp_in`, up to one factor, against
    what `post_block` has more than `post_attn`.

    Where an MLP of several parts has no `mlp_out`, which would be their sum.
    """
    part, tolerance = factor_of(got, leaving - entered) * got, shape.tolerance("module")
    law, hooks = "post_block = post_attn + MLP(mlp_in)", ("mlp_in", "post_attn", "post_block")
    visited = visible(part, leaving, [entered], tolerance)
    return [
        Finding(
            law,
            hooks,
            layer,
            sumwise(leaving, [entered, part], tolerance, median=shape.routes(layer)),
            "module",
        ),
        Finding("MLP(mlp_in) is visible in post_block", ("mlp_in",), layer, visited, "seen"),
    ]


def factor_of(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the factor by which `got` is nearest to `expected`."""
    return float(
        (expected * got).sum() / got.square().sum().clamp_min(torch.finfo(torch.float32).tiny)
    )


# --- Laws of an edit


def judge_edit(
    shape: Shape,
    hook: Hook,
    layer: int,
    edited: Rows,
    plain: Rows,
    added: torch.Tensor,
    entered: torch.Tensor | None,
) -> list[Finding]:
    """Return what a vector `added` at `hook` of `layer` must reach, and what it must not, at the
    position where it is added.

    `edited` and `plain`: the rows there of the request with the edit and of the one without, each
    before its edits. `entered`: `pre_attn` of the next layer in the edited request; None where
    another rank has it, or there is none. Of an edit at `mlp_in` the MLP itself says what it
    reaches: see `judge_module`.
    """
    have, law = [item for item in HOOKS if item in shape.hooks], f"edit at {hook}: "
    findings = []
    for item in have[: have.index(hook) + 1]:
        figure = rowwise(edited(item, layer), plain(item, layer), shape.tolerance("batch"))
        findings.append(
            Finding(f"{law}nothing before it", (hook, item), layer, figure, "batch", edit=True)
        )
    for total, terms in sums(shape, layer):
        if hook in terms:
            parts = [factor * edited(term, layer) for term, factor in terms.items()] + [
                terms[hook] * added
            ]
            figure = sumwise(edited(total, layer), parts, shape.tolerance("edit"))
            findings.append(
                Finding(
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
            Finding(
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
    shape: Shape, leaving: torch.Tensor, added: torch.Tensor, entered: torch.Tensor, layer: int
) -> Finding:
    """An edit of `post_block` against what the next layer gets."""
    figure = sumwise(entered, [leaving, added], shape.tolerance("edit"))
    return Finding(
        "edit at post_block: pre_attn[L+1] has it",
        ("post_block", "pre_attn"),
        layer,
        figure,
        "edit",
        edit=True,
    )


# --- The verdict

#: Kinds of laws that show that rows are what they are called. That an edit arrives, or another
#: batch gives the same, does not.
TELLING = frozenset({"sum", "same", "module", "logits"})


class Law(msgspec.Struct, frozen=True):
    """All findings of one law."""

    law: str
    kind: str
    hooks: tuple[str, ...]
    figure: float  # relative to the tolerance
    layer: int  # of the worst finding
    checked: int
    failing: tuple[int, ...]  # layers
    layers: tuple[int, ...]  # checked

    @property
    def ok(self) -> bool:
        return self.figure <= 1.0


def combine(findings: Iterable[Finding]) -> list[Law]:
    """The worst finding of each law."""
    laws: dict[str, list[Finding]] = {}
    for finding in findings:
        laws.setdefault(finding.law, []).append(finding)
    made = []
    for law, value in laws.items():
        worst = max(value, key=lambda finding: (math.isnan(finding.figure), finding.figure))
        failing = tuple(sorted({finding.layer for finding in value if not finding.ok}))
        layers = tuple(sorted({finding.layer for finding in value}))
        made.append(
            Law(
                law, worst.kind, worst.hooks, worst.figure, worst.layer, len(value), failing, layers
            )
        )
    return made


def verdict(
    hooks: Sequence[Hook],
    findings: Iterable[Finding],
    num_layers: int,
    *,
    unshown: dict[Hook, str] | None = None,
) -> tuple[dict[Hook, str], list[Law]]:
    """Hook → why it is not proven (hooks that are proven are missing), and all laws.

    A law that fails says that one of its rows is wrong, not which. The smallest set of hooks
    without which every law holds is taken, branches first. What an edit does is then judged by rows
    that are right, and blamed on the hook that is edited. A hook that no law which holds speaks
    about in some layer is not proven either, but for the stream at its two ends: what enters the
    first layer, and what leaves the last, has no neighbour. `unshown`: takes the hooks that nothing
    proves, and nothing disproves.
    """
    judged = list(findings)
    laws = combine(finding for finding in judged if not finding.edit)
    broken = [law for law in laws if not law.ok]
    blamed = _smallest(hooks, [set(law.hooks) & set(hooks) for law in broken])
    absent: dict[Hook, str] = {hook: _why(broken, hook) for hook in hooks if hook in blamed}
    edits = combine(
        finding for finding in judged if finding.edit and not blamed & set(finding.hooks)
    )
    for hook in hooks:
        if wrong := [law for law in edits if not law.ok and law.hooks[0] == hook]:
            absent[hook] = _why(wrong, hook)
    telling = [
        law for law in laws if law.ok and law.kind in TELLING and not set(law.hooks) & blamed
    ]
    for hook in hooks:
        covered = {layer for law in telling if hook in law.hooks for layer in law.layers}
        covered |= {
            layer + 1
            for law in telling
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
                f"nothing proves its rows, in layer {lacking[0]} for one: only beside {neighbours} "
                "can they be proven"
            )
    return absent, [*laws, *edits]


def verdict_inside(
    hooks: Sequence[str], findings: Iterable[Finding], num_layers: int
) -> tuple[dict[str, str], list[Law]]:
    """Return the verdict on hooks inside attention and MLP: hook → why it is not proven, and all
    laws.

    A law proves and refutes all of its hooks.
    """
    laws = combine(findings)
    absent: dict[str, str] = {}
    for hook in hooks:
        of_hook = [law for law in laws if hook in law.hooks]
        if broken := [law for law in of_hook if not law.ok]:
            absent[hook] = _why(broken, hook)
        elif lacking := sorted(
            set(range(num_layers)) - {layer for law in of_hook for layer in law.layers}
        ):
            absent[hook] = (
                "the certification run did not prove it: no law speaks about its rows in layer "
                f"{lacking[0]}"
            )
    return absent, laws


def _smallest(hooks: Sequence[Hook], broken: Sequence[set[str]]) -> set[str]:
    """The smallest set that has one of each of `broken`; of equal ones that of hooks blamed
    first.
    """
    order = [hook for hook in BLAME if hook in hooks]
    distinct = {frozenset(item) for item in broken if item}
    for size in range(len(order) + 1):
        for chosen in itertools.combinations(order, size):
            if all(set(chosen) & item for item in distinct):
                return set(chosen)
    return set(order)


def _why(broken: Sequence[Law], hook: str) -> str:
    law = max((law for law in broken if hook in law.hooks), key=lambda law: law.figure)
    layers = [layer for layer in law.failing if layer >= 0]
    where = (
        f" in layer {layers[0]}" + (f" and {len(layers) - 1} more" if len(layers) > 1 else "")
        if layers
        else ""
    )
    much = (
        "not finite, or nothing to see"
        if math.isinf(law.figure)
        else f"{law.figure:.3g} times its tolerance"
    )
    return f"the certification run did not prove it: `{law.law}` fails{where} ({much})"
