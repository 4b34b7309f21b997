"""Differentiable scalars: the metrics of sweeps, and what gradient rows are gradients of.

Values are computed in float64 from the model's logits and rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

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
    """Where the tokens of an answer or a foil are graded."""

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
        found = next(n for n, suffix in enumerate(self.suffixes) if suffix[: len(prefix)] == prefix)
        return Continuation(found, tokens)

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

    def baseline(self, logits: torch.Tensor, value: float) -> Baseline:
        answer, foil = (self._logprob(logits, part) for part in (self._answer, self._foil))
        return Baseline(
            value=value,
            logprob=None if answer is None else float(answer),
            foil_logprob=None if foil is None else float(foil),
        )

    def _logprob(self, logits: torch.Tensor, part: Continuation | None) -> torch.Tensor | None:
        if part is None:
            return None
        count = len(part.tokens)
        scores = logits[part.sequence, :count].double().log_softmax(-1)
        return scores[torch.arange(count), part.tokens].sum()


# --- Scalars of gradient rows


class Scalar(Protocol):
    """A differentiable number of one prompt.

    `positions`: where it reads logits; `sites`: whose rows it reads. Negative positions count from
    the end.
    """

    @property
    def positions(self) -> Sequence[int]: ...
    @property
    def sites(self) -> Sequence[Site]: ...
    def __call__(
        self,
        tokens: Sequence[int],
        logits: Mapping[int, torch.Tensor],
        rows: Mapping[Site, torch.Tensor],
    ) -> torch.Tensor:
        """Return the number, 0-d float64. `logits`: requested position → `[vocabulary]` float64;
        `rows`: site → `[tokens, width]`.
        """


@dataclass(frozen=True)
class Logit:
    """The logit of `token` minus that of `foil`, if there is one."""

    token: int
    foil: int | None = None
    position: int = -1
    sites: tuple[Site, ...] = ()

    @property
    def positions(self) -> list[int]:
        return [self.position]

    def __call__(
        self,
        tokens: Sequence[int],
        logits: Mapping[int, torch.Tensor],
        rows: Mapping[Site, torch.Tensor],
    ) -> torch.Tensor:
        at = logits[self.position]
        return at[self.token] if self.foil is None else at[self.token] - at[self.foil]


@dataclass(frozen=True)
class Loss:
    """−Σ log P of the prompt's tokens at `targets`, each given those before it; nats."""

    targets: Sequence[int]  # absolute, from 1
    sites: tuple[Site, ...] = ()

    @property
    def positions(self) -> list[int]:
        return [target - 1 for target in self.targets]

    def __call__(
        self,
        tokens: Sequence[int],
        logits: Mapping[int, torch.Tensor],
        rows: Mapping[Site, torch.Tensor],
    ) -> torch.Tensor:
        parts = [logits[at - 1].log_softmax(-1)[tokens[at]] for at in self.targets]
        return -torch.stack(parts).sum()


@dataclass(frozen=True)
class ProbeScore:
    """W · row + b of one label, summed over the positions `at`."""

    site: Site
    weight: torch.Tensor  # float32 [hidden_size]
    bias: float
    at: Sequence[int]
    positions: tuple[int, ...] = ()

    @property
    def sites(self) -> list[Site]:
        return [self.site]

    def __call__(
        self,
        tokens: Sequence[int],
        logits: Mapping[int, torch.Tensor],
        rows: Mapping[Site, torch.Tensor],
    ) -> torch.Tensor:
        chosen = rows[self.site][list(self.at)].double()
        return (chosen @ self.weight.to(chosen)).sum() + self.bias * len(self.at)


@dataclass(frozen=True)
class FeatureActivation:
    """The activation of an autoencoder's feature, as the ranks compute it, summed over `at`."""

    site: Site
    sae: Autoencoder
    feature: int
    at: Sequence[int]
    positions: tuple[int, ...] = field(default=())

    @property
    def sites(self) -> list[Site]:
        return [self.site]

    def __call__(
        self,
        tokens: Sequence[int],
        logits: Mapping[int, torch.Tensor],
        rows: Mapping[Site, torch.Tensor],
    ) -> torch.Tensor:
        chosen = rows[self.site][list(self.at)]
        encoded = self.sae.to(chosen.device).encode(chosen.float())
        return encoded[:, self.feature].double().sum()


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
        value = scalar(tokens, logits, rows)
        gradients = run.gradients(value)
    require_finite({("", -1): value.detach(), **gradients})
    return GradientRows(float(value), {site: gradients[site][0] for site in sites})


def require_finite(tensors: Mapping[tuple[str, int], torch.Tensor]) -> None:
    """Raises NonFiniteGradient for the first site, in this order, with a value that is not finite.

    A key without a hook stands for the scalar itself.
    """
    for (hook, layer), tensor in tensors.items():
        count = int((~tensor.isfinite()).sum())
        if count and not hook:
            raise NonFiniteGradient(f"the value itself is not finite: {float(tensor)}")
        if count:
            raise NonFiniteGradient(
                f"{hook} of layer {layer}: not finite: {count} of {tensor.numel()} values"
            )
