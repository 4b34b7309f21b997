"""Differentiable scalars: the metrics of sweeps, and what gradient rows are gradients of.

Values are computed in float64 from the model's logits and rows.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ...schemas.base.errors import MidstreamError
from ...schemas.jobs.sweeps import Baseline, Metric, StoredPair
from ..runner.readings.sae import Autoencoder
from .points import Points, Site


class NonFiniteGradient(MidstreamError):
    """A value or gradient is infinite or not a number; the message names the first site."""

    def __init__(self, detail: str) -> None:
        super().__init__("reading_failed", detail)


# --- Metrics of sweeps


class Continuation(NamedTuple):
    """The places at which the tokens of an answer or a foil are graded."""

    sequence: int
    tokens: list[int]


class PairMetric:
    """The metric of a pair's prompts, each followed by the pair's continuations but for their last
    token (teacher forcing): the log-probability of a continuation is the sum over its tokens, as in
    `sweep_units.nodes_of`.
    """

    def __init__(self, metric: Metric, pair: StoredPair) -> None:
        self._metric = metric
        texts = [tokens for tokens in (pair.answer, pair.foil) if tokens]
        longest_first = sorted((tokens[:-1] for tokens in texts), key=len, reverse=True) or [[]]
        self.suffixes: list[list[int]] = []
        for suffix in longest_first:
            if not any(other[: len(suffix)] == suffix for other in self.suffixes):
                self.suffixes.append(suffix)
        self._answer, self._foil = self._place(pair.answer), self._place(pair.foil)
        #: log P of the clean prompt's next token, float64 `[vocabulary]`; required for `kl`.
        self.clean: torch.Tensor | None = None

    def _place(self, tokens: list[int]) -> Continuation | None:
        if not tokens:
            return None
        prefix = tokens[:-1]
        sequence = next(
            n for n, suffix in enumerate(self.suffixes) if suffix[: len(prefix)] == prefix
        )
        return Continuation(sequence, tokens)

    def sequences(self, prompt: Sequence[int]) -> list[list[int]]:
        """Return the token ids to run, one list for each suffix."""
        return [[*prompt, *suffix] for suffix in self.suffixes]

    def keep(self, prompt: Sequence[int]) -> range:
        """Return the positions whose logits are needed, of all `sequences`."""
        return range(len(prompt) - 1, len(prompt) + max(map(len, self.suffixes)))

    def next_token(self, logits: torch.Tensor) -> torch.Tensor:
        """Return log P over the token after the prompt, float64 `[vocabulary]`.

        `logits`: `[sequences, kept, vocabulary]`.
        """
        return logits[0, 0].double().log_softmax(-1)

    def value(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the metric in nats, 0-d float64; for `recovered`, of the underlying metric."""
        if self._metric == "kl":
            assert self.clean is not None
            clean = self.clean.to(logits.device)
            return (clean.exp() * (clean - self.next_token(logits))).sum()
        answer, foil = self._logprob(logits, self._answer), self._logprob(logits, self._foil)
        assert answer is not None
        if self._metric == "logprob" or foil is None:
            return answer
        return answer - foil

    def baseline(self, logits: torch.Tensor) -> Baseline:
        answer, foil = (self._logprob(logits, part) for part in (self._answer, self._foil))
        return Baseline(
            value=self.value(logits).item(),
            logprob=None if answer is None else answer.item(),
            foil_logprob=None if foil is None else foil.item(),
        )

    def _logprob(self, logits: torch.Tensor, part: Continuation | None) -> torch.Tensor | None:
        if part is None:
            return None
        count = len(part.tokens)
        scores = logits[part.sequence, :count].double().log_softmax(-1)
        return scores[torch.arange(count), part.tokens].sum()


# --- Scalars of gradient rows

#: Position as requested → logits `[vocabulary]` float64.
Logits = Mapping[int, torch.Tensor]
#: Site → rows `[tokens, width]`.
Rows = Mapping[Site, torch.Tensor]


class Scalar(NamedTuple):
    """A differentiable number of one prompt.

    `positions`: whose logits `compute` receives, negative ones counted from the end; `sites`: whose
    rows; its result is 0-d float64.
    """

    compute: Callable[[Logits, Rows], torch.Tensor]
    positions: Sequence[int] = ()
    sites: Sequence[Site] = ()


def logit(token: int, foil: int | None = None, position: int = -1) -> Scalar:
    """Return the logit of `token`, minus that of `foil` if there is one."""

    def compute(logits: Logits, _: Rows) -> torch.Tensor:
        at = logits[position]
        return at[token] if foil is None else at[token] - at[foil]

    return Scalar(compute, [position])


def loss(tokens: Sequence[int], targets: Sequence[int]) -> Scalar:
    """Return −Σ log P(token at a target | tokens before it), in nats. `targets`: positions from 1
    to the last.
    """

    def compute(logits: Logits, _: Rows) -> torch.Tensor:
        terms = [logits[at - 1].log_softmax(-1)[tokens[at]] for at in targets]
        return -torch.stack(terms).sum()

    return Scalar(compute, [at - 1 for at in targets])


def probe_score(site: Site, weight: torch.Tensor, bias: float, at: Sequence[int]) -> Scalar:
    """Return W · row + b of one label, summed over the positions `at`. `weight`: `[width]`."""

    def compute(_: Logits, rows: Rows) -> torch.Tensor:
        chosen = rows[site][list(at)].double()
        return (chosen @ weight.to(chosen)).sum() + bias * len(at)

    return Scalar(compute, sites=[site])


def feature_activation(site: Site, sae: Autoencoder, feature: int, at: Sequence[int]) -> Scalar:
    """Return a feature's activation, as the ranks compute it, summed over the positions `at`."""

    def compute(_: Logits, rows: Rows) -> torch.Tensor:
        chosen = rows[site][list(at)].float()
        return sae.to(chosen.device).encode(chosen)[:, feature].double().sum()

    return Scalar(compute, sites=[site])


class GradientRows(NamedTuple):
    """`rows`: site → d scalar / d row, `[tokens, width]` in the model's dtype."""

    value: float
    rows: dict[Site, torch.Tensor]


def gradient_rows(
    points: Points, tokens: Sequence[int], scalar: Scalar, sites: Sequence[Site]
) -> GradientRows:
    """Return the gradient of a scalar with respect to the rows of `sites`.

    Raises UnsupportedArchitectureError for a hook point that the model lacks, and
    NonFiniteGradient.
    """
    every = list(dict.fromkeys((*sites, *scalar.sites)))
    length = len(tokens)
    kept = sorted({at % length for at in scalar.positions})
    # the encoders of autoencoders write to their products in place
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        run = points.run(points.batch([tokens]), every, keep=kept, grad=True)
        logits = {at: run.logits[0, kept.index(at % length)].double() for at in scalar.positions}
        rows = {site: run.views[site](run.raw[site])[0] for site in scalar.sites}
        value = scalar.compute(logits, rows)
        gradients = run.gradients(value)
    require_finite({("", -1): value.detach()})
    require_finite(gradients)
    return GradientRows(value.item(), {site: gradients[site][0] for site in sites})


def require_finite(tensors: Mapping[Any, torch.Tensor]) -> None:
    """Raises NonFiniteGradient for the first site, in this order, with a value that is not finite.

    Keys are (hook, layer); a key without a hook stands for the scalar itself.
    """
    for (hook, layer), tensor in tensors.items():
        count = int((~tensor.isfinite()).sum())
        if count and not hook:
            raise NonFiniteGradient(f"the value itself is not finite: {float(tensor)}")
        if count:
            raise NonFiniteGradient(
                f"{hook} of layer {layer}: not finite: {count} of {tensor.numel()} values"
            )
