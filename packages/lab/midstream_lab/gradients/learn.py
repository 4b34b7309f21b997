"""Learns steering from examples: directions between rows in closed form, and edits trained on the
loss of target continuations.

The same inputs and seed give the same result on the same device. Rows and edits are float32,
statistics of rows float64.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, softplus

from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.prompts.selectors import select
from midstream.schemas.requests.trainings import BY_GRADIENT, FitEffect, FitPoint, FitSite

from ..records.fits import FitTokens, StoredModuleFit
from .estimates import at_once
from .loading import Footprint, free_on
from .points import ForwardPass, Points, SiteKey
from .protocol import StopCheck

#: scikit-learn's C, as in `midstream.probes.fit`.
STRENGTH = 1.0
#: Tokens of one forward pass, including padding; a longer example has its own.
PASS_TOKENS = 4096
#: Looks at the validation loss, evenly spaced over the steps.
LOOKS = 20
#: Training stops after so many looks without a new minimum.
PATIENCE = 4

#: Field of a steering entry → float32 tensor: `vector` of op `add`, or those of op `lowrank`.
EntryTensors = Mapping[str, Tensor]
#: Layer → its edit.
Edits = Mapping[int, EntryTensors]
FitTexts = Sequence[FitTokens]


@dataclass(frozen=True)
class Fitted:
    """A learned module, and its effect on held-out examples."""

    tensors: Edits
    examples: int
    sites: list[FitSite]
    effect: FitEffect
    steps: int = 0
    losses: Sequence[FitPoint] = ()


# --- Directions between rows `[n, width]`


def difference_of_means(positive: Tensor, negative: Tensor) -> Tensor:
    return positive.mean(0) - negative.mean(0)


def pca(positive: Tensor, negative: Tensor) -> Tensor:
    """Return the first principal component of the pairs' differences, as repeng's `pca_diff`: the
    differences are centred, and the positive row of most pairs has the larger component.
    """
    differences = positive - negative
    direction = torch.linalg.svd(differences - differences.mean(0), full_matrices=False)[2][0]
    direction = direction * direction[direction.abs().argmax()].sign()  # if the pairs tie
    return direction * (-1.0 if (differences @ direction).sign().sum() < 0 else 1.0)


def logistic(positive: Tensor, negative: Tensor) -> Tensor:
    """Return the weight of an L2-regularised logistic regression on standardised rows, for rows
    that are not standardised, as `midstream.probes.fit` computes it.
    """
    rows = torch.cat([positive, negative])
    scale = rows.std(0, correction=0)
    scale = torch.where(scale > 0, scale, 1.0)
    rows = (rows - rows.mean(0)) / scale
    signs = torch.cat([rows.new_ones(len(positive)), -rows.new_ones(len(negative))])
    weight, bias = (rows.new_zeros(size, requires_grad=True) for size in (rows.shape[1], 1))
    optimizer = torch.optim.LBFGS(
        [weight, bias],
        max_iter=2000,
        tolerance_grad=1e-9,
        tolerance_change=1e-14,
        line_search_fn="strong_wolfe",
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        margins = signs * (rows @ weight + bias)
        value = weight.square().sum() / 2 + STRENGTH * softplus(-margins).sum()
        value.backward()
        return value

    optimizer.step(loss)
    return weight.detach() / scale


DIRECTIONS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "difference_of_means": difference_of_means,
    "pca": pca,
    "logistic": logistic,
}


def scaled(direction: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
    """Return the direction with the length of the difference of means along it, so that scale 1
    moves the mean of the negative rows to that of the positive rows, in this direction.

    Raises MidstreamError for a direction without length.
    """
    length = direction.norm()
    if not (length > 0 and torch.isfinite(length)):
        raise MidstreamError(
            "invalid_request", "the examples' rows do not differ", field="positive"
        )
    unit = direction / length
    return unit * (difference_of_means(positive, negative) @ unit).abs()


def auroc(positive: Tensor, negative: Tensor) -> float:
    """Return the share of pairs of which the positive score is the larger; ties count half."""
    return float(((positive[:, None] - negative).sign().mean() + 1) / 2)


# --- Edits


def edited(rows: Tensor, tensors: EntryTensors) -> Tensor:
    """Return `rows` `[..., width]` with an edit: s + v, or LoReFT's s + Rᵀ(W s + b − R s)
    (arXiv:2404.03592), R and W `[rank, width]`, b `[rank]`.
    """
    if "vector" in tensors:
        return rows + tensors["vector"]
    rotation = tensors["rotation"]
    return rows + (rows @ tensors["weight"].T + tensors["bias"] - rows @ rotation.T) @ rotation


def beginning(rows: Tensor, rank: int | None, generator: torch.Generator) -> dict[str, Tensor]:
    """Return the parameters of an edit that changes nothing: the vector 0, or with a `rank`, W = R
    and b = 0. `rows`: `[n, width]`.
    """
    width = rows.shape[1]
    if rank is None:
        return {"vector": rows.new_zeros(width)}
    basis = torch.linalg.qr(torch.randn(width, rank, generator=generator))[0].T.to(rows.device)
    return {"rotation": basis, "weight": orthonormal(basis), "bias": rows.new_zeros(rank)}


def units(rows: Tensor) -> dict[str, float]:
    """Return the step of each parameter that changes a row by about the row's norm."""
    length = rows.shape[1] ** -0.5
    norm = float(rows.norm(dim=1).mean())
    return {"vector": norm * length, "rotation": length, "weight": length, "bias": norm}


def orthonormal(basis: Tensor) -> Tensor:
    """Return the rows of `basis` `[rank, width]` made orthonormal in their order; differentiable,
    and without effect on orthonormal rows.
    """
    columns, factor = torch.linalg.qr(basis.T)
    return (columns * factor.diagonal().sign()).T


def edits_of(parameters: Edits) -> dict[int, EntryTensors]:
    """Return the edit of each layer as a module has it."""
    return {
        layer: {
            name: orthonormal(value) if name == "rotation" else value
            for name, value in edit.items()
        }
        for layer, edit in parameters.items()
    }


# --- Fits


def fit(
    points: Points,
    wanted: StoredModuleFit,
    report: Callable[[FitPoint], None] = lambda point: None,
    check: StopCheck = lambda: None,
) -> Fitted:
    """Learn a module, and measure its effect on the held-out examples.

    `report` is called with the losses during a training; `check` before each forward pass, and what
    it raises ends the fit. Raises MidstreamError if the examples do not determine a module, or if
    the longest of them does not fit into free memory.
    """
    longest = max(
        len(text.token_ids) for text in (*wanted.positive, *wanted.negative, *wanted.examples)
    )
    run = _Fit(points, wanted, check)
    together = at_once(
        Footprint(points),
        longest,
        run.sites,
        free_on(points),
        most=max(1, PASS_TOKENS // longest),
        kept=longest if wanted.examples else 1,
    )
    run.pass_tokens = together * longest
    return run.train(report) if wanted.request.method in BY_GRADIENT else run.direction()


class _Fit:
    def __init__(self, points: Points, wanted: StoredModuleFit, check: StopCheck) -> None:
        self.points = points
        self.wanted = wanted
        self.check = check
        self.sites: list[SiteKey] = [(wanted.hook, layer) for layer in wanted.layers]
        self.pass_tokens = PASS_TOKENS

    def direction(self) -> Fitted:
        wanted = self.wanted
        method = DIRECTIONS[self.wanted.request.method]
        positive, held_positive = self._split(wanted.positive)
        negative, held_negative = self._split(wanted.negative)
        rows = [self._read(side) for side in (positive, negative, held_positive, held_negative)]
        fitted: dict[int, EntryTensors] = {}
        sites = []
        for layer in wanted.layers:
            here, there, *held = (side[layer].double() for side in rows)
            vector = scaled(method(here, there), here, there)
            fitted[layer] = {"vector": vector.float()}
            dose = float((vector.norm() / torch.cat(held).norm(dim=1)).quantile(0.5))
            separation = auroc(*(side @ vector for side in held))
            sites.append(FitSite(layer=layer, dose=dose, auroc=separation))
        effect = (
            self._effect(wanted.examples, fitted)
            if wanted.examples
            else _separation(sites, len(held_positive), len(held_negative))
        )
        return Fitted(fitted, len(positive) + len(negative), sites, effect)

    def train(self, report: Callable[[FitPoint], None]) -> Fitted:
        request = self.wanted.request
        examples, held = self._split(self.wanted.examples)
        # the effect is not measured on the examples that decide when to stop
        validation = held[::2]
        test = held[1::2]
        generator = torch.Generator().manual_seed(request.seed)
        rank = request.rank if request.method == "reft" else None
        read = self._read(examples)
        parameters = {layer: beginning(rows, rank, generator) for layer, rows in read.items()}
        optimizer = torch.optim.Adam(
            {"params": [value.requires_grad_()], "lr": request.learning_rate * units(rows)[name]}
            for layer, rows in read.items()
            for name, value in parameters[layer].items()
        )
        order = _batches(len(examples), request.batch, generator)
        interval = -(-request.steps // LOOKS)
        losses = list[FitPoint]()
        recent = list[float]()
        best: tuple[float, int, Edits] = (float("inf"), 0, {})
        for step in range(request.steps + 1):
            if step:
                optimizer.zero_grad()
                batch = [examples[index] for index in next(order)]
                recent.append(self._loss(batch, parameters, backward=True))
                optimizer.step()
            if step % interval and step < request.steps:
                continue
            validated = self._loss(validation, parameters, backward=False)
            loss = sum(recent) / len(recent) if recent else None
            losses.append(FitPoint(step=step, loss=loss, validation_loss=validated))
            recent.clear()
            if step:
                report(losses[-1])
            if validated < best[0]:
                edits = edits_of(parameters).items()
                kept = {at: {n: t.detach().clone() for n, t in edit.items()} for at, edit in edits}
                best = validated, step, kept
            elif step - best[1] >= PATIENCE * interval:
                break
        _, steps, fitted = best
        doses: dict[int, list[Tensor]] = {layer: [] for layer in fitted}
        effect = self._effect(test, fitted, doses)
        sites = [
            FitSite(layer=layer, dose=float(torch.cat(shares).quantile(0.5)))
            for layer, shares in doses.items()
        ]
        return Fitted(fitted, len(examples), sites, effect, steps, losses)

    def _split(self, examples: FitTexts) -> tuple[FitTexts, FitTexts]:
        """Return training and held-out examples, at least four. Lists of the same length are split
        alike, so that no pair is divided.
        """
        generator = torch.Generator().manual_seed(self.wanted.request.seed)
        order = torch.randperm(len(examples), generator=generator).tolist()
        count = max(4, round(self.wanted.request.held_out * len(examples)))
        return [examples[i] for i in order[count:]], [examples[i] for i in order[:count]]

    def _read(self, examples: FitTexts) -> dict[int, Tensor]:
        """Return layer → float32 `[examples, width]`, the mean over each example's positions."""
        means: dict[int, list[Tensor]] = {layer: [] for layer in self.wanted.layers}
        for chunk in _passes(examples, self.pass_tokens):
            places = self._places(chunk)
            run = self._run(chunk, self.sites)
            for site in self.sites:
                chosen = torch.where(places, run.rows(site).float(), 0.0)
                means[site[1]].append(chosen.sum(1) / places.sum(1))
        return {layer: torch.cat(parts) for layer, parts in means.items()}

    def _loss(self, examples: FitTexts, parameters: Edits, backward: bool) -> float:
        """Return the mean loss in nats per target token; `backward` adds its gradient to the
        parameters.
        """
        targets = sum(len(example.token_ids) - example.prompt_tokens for example in examples)
        total = 0.0
        for chunk in _passes(examples, self.pass_tokens):
            edits = edits_of(parameters)
            loss = -self._log_probabilities(chunk, edits, grad=backward).sum() / targets
            if not torch.isfinite(loss):
                raise MidstreamError(
                    "intervention_failed", "the loss is not finite", hint="lower learning_rate"
                )
            if backward:
                loss.backward()
            total += float(loss.detach())
        return total

    def _effect(
        self,
        examples: FitTexts,
        edits: Edits,
        doses: Mapping[int, list[Tensor]] | None = None,
    ) -> FitEffect:
        """Return the effect of edits on the targets. `doses`: gets the relative size of each edited
        row's change, by layer.
        """
        chunks = _passes(examples, self.pass_tokens)
        before = torch.cat([self._log_probabilities(chunk, {}) for chunk in chunks]).double()
        after = torch.cat([self._log_probabilities(chunk, edits, doses) for chunk in chunks])
        gain = after.double() - before
        error = float(gain.std() / len(gain) ** 0.5) if len(gain) > 1 else 0.0
        return _judged("logprob", float(before.mean()), float(gain.mean()), error, len(gain))

    def _log_probabilities(
        self,
        chunk: FitTexts,
        edits: Edits,
        doses: Mapping[int, list[Tensor]] | None = None,
        grad: bool = False,
    ) -> Tensor:
        """Return the log-probability of each example's target, `[examples]`."""
        places = self._places(chunk)

        def edit(site: SiteKey, rows: Tensor) -> Tensor:
            given = rows.float()
            made = edited(given, edits[site[1]])
            if doses is not None:
                shares = (made - given).norm(dim=-1) / given.norm(dim=-1)
                doses[site[1]].append(shares[places[..., 0]])
            return torch.where(places, made.to(rows.dtype), rows)

        first = min(example.prompt_tokens for example in chunk) - 1
        keep = range(first, places.shape[1])
        sites = self.sites if edits else ()
        logits = self._run(chunk, sites, keep=keep, edit=edit, grad=grad).logits
        sums = []
        for example, scores in zip(chunk, logits, strict=True):
            ids = torch.tensor(example.token_ids[example.prompt_tokens :], device=scores.device)
            start = example.prompt_tokens - 1 - first
            sums.append(
                -cross_entropy(scores[start : start + len(ids)].float(), ids, reduction="sum")
            )
        return torch.stack(sums)

    def _run(self, chunk: FitTexts, sites: Sequence[SiteKey], **options: Any) -> ForwardPass:
        self.check()
        tokens = self.points.batch([example.token_ids for example in chunk])
        return self.points.run(tokens, sites, **options)

    def _places(self, chunk: FitTexts) -> Tensor:
        """Return which rows are read or edited, `[examples, tokens, 1]`."""
        longest = max(len(example.token_ids) for example in chunk)
        places = torch.zeros(len(chunk), longest, 1, dtype=torch.bool)
        for place, example in zip(places, chunk, strict=True):
            place[list(select(example.at, 0, len(example.token_ids), example.prompt_tokens))] = True
        return places.to(self.points.device)


def _batches(examples: int, size: int, generator: torch.Generator) -> Iterator[list[int]]:
    """Yield batches of indices without end; each pass over the examples is shuffled."""
    while True:
        order = torch.randperm(examples, generator=generator)
        yield from (batch.tolist() for batch in order.split(size))


def _passes(examples: FitTexts, most: int) -> list[list[FitTokens]]:
    """Cut examples into forward passes of at most `most` tokens with padding, in their order."""
    passes: list[list[FitTokens]] = []
    longest = 0
    for example in examples:
        longest = max(longest, len(example.token_ids))
        if not passes or longest * (len(passes[-1]) + 1) > most:
            passes.append([])
            longest = len(example.token_ids)
        passes[-1].append(example)
    return passes


def _separation(sites: Sequence[FitSite], positive: int, negative: int) -> FitEffect:
    gain = sum(site.auroc or 0.0 for site in sites) / len(sites) - 0.5
    # of the Mann-Whitney statistic
    error = ((positive + negative + 1) / (12 * positive * negative)) ** 0.5
    return _judged("auroc", 0.5, gain, error, positive + negative)


def _judged(
    measure: Literal["logprob", "auroc"], before: float, gain: float, error: float, examples: int
) -> FitEffect:
    return FitEffect(
        measure=measure,
        before=before,
        after=before + gain,
        error=error,
        examples=examples,
        better=gain > error,
    )
