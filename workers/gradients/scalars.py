"""Differentiable scalars: the metrics of sweeps, and what gradient rows are gradients of.

Values are computed in float64 from the model's logits and rows.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.functional import cross_entropy

from ...schemas.base.errors import MidstreamError
from ...schemas.jobs.sweeps import Baseline, Metric, StoredPair
from ..runner.readings.sae import Autoencoder
from .points import Points, Site


class NonFiniteGradient(MidstreamError):
    """A value or gradient is infinite or not a number; the message names the first site."""

    def __init__(self, detail: str) -> None:
        super().__init__("reading_failed", detail)


class PairMetric:
    """The metric of a pair's prompts, each followed by the pair's continuations but for their last
    token (teacher forcing): the log-probability of a continuation is the sum over its tokens, as in
    `sweep_units.nodes_of`.
    """

    def __init__(self, metric: Metric, pair: StoredPair) -> None:
        self._metric, self._answer, self._foil = metric, pair.answer, pair.foil
        #: What follows the prompt in each sequence; a suffix that begins another is left out.
        self.suffixes: list[list[int]] = []
        for suffix in sorted((pair.answer[:-1], pair.foil[:-1]), key=len, reverse=True):
            if self._sequence(suffix) is None:
                self.suffixes.append(suffix)
        #: log P of the clean prompt's next token, float64 `[vocabulary]`; required for `kl`.
        self.clean: torch.Tensor | None = None

    def _sequence(self, suffix: list[int]) -> int | None:
        """Return the first sequence in which `suffix` follows the prompt."""
        starts = (other[: len(suffix)] == suffix for other in self.suffixes)
        return next((number for number, same in enumerate(starts) if same), None)

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
        answer = self._logprob(logits, self._answer)
        if self._metric == "logprob" or not self._foil:
            return answer
        return answer - self._logprob(logits, self._foil)

    def baseline(self, logits: torch.Tensor) -> Baseline:
        answer, foil = (
            self._logprob(logits, tokens).item() if tokens else None
            for tokens in (self._answer, self._foil)
        )
        return Baseline(value=self.value(logits).item(), logprob=answer, foil_logprob=foil)

    def _logprob(self, logits: torch.Tensor, tokens: list[int]) -> torch.Tensor:
        sequence = self._sequence(tokens[:-1])
        assert sequence is not None
        return -_loss(logits[sequence, : len(tokens)], tokens)


def _loss(logits: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
    """Return −Σ log P(token), in nats. `logits`: `[tokens, vocabulary]`."""
    return cross_entropy(
        logits.double(), torch.tensor(tokens, device=logits.device), reduction="sum"
    )


# --- Scalars of gradient rows


class Scalar(NamedTuple):
    """A differentiable number of one prompt.

    `compute` receives the logits at `positions`, by default the last, `[positions, vocabulary]`,
    and the rows of `sites`, `[tokens, width]`; its result is 0-d float64.
    """

    compute: Callable[[torch.Tensor, Mapping[Site, torch.Tensor]], torch.Tensor]
    positions: Sequence[int] = ()
    sites: Sequence[Site] = ()


def logit(token: int, foil: int | None = None) -> Scalar:
    """Return the last logit of `token`, minus that of `foil` if there is one."""
    if foil is None:
        return Scalar(lambda logits, _: logits[-1, token].double())
    return Scalar(lambda logits, _: logits[-1, token].double() - logits[-1, foil].double())


def loss(tokens: Sequence[int], targets: Sequence[int]) -> Scalar:
    """Return −Σ log P(token at a target | tokens before it), in nats. `targets`: positions from 1
    to the last.
    """
    wanted = [tokens[at] for at in targets]
    return Scalar(lambda logits, _: _loss(logits, wanted), [at - 1 for at in targets])


def probe_score(site: Site, weight: torch.Tensor, bias: float, at: Sequence[int]) -> Scalar:
    """Return W · row + b of one label, summed over the positions `at`. `weight`: `[width]`."""

    def compute(_: torch.Tensor, rows: Mapping[Site, torch.Tensor]) -> torch.Tensor:
        chosen = rows[site][list(at)].double()
        return (chosen @ weight.to(chosen)).sum() + bias * len(at)

    return Scalar(compute, sites=[site])


def feature_activation(site: Site, sae: Autoencoder, feature: int, at: Sequence[int]) -> Scalar:
    """Return a feature's activation, as the ranks compute it, summed over the positions `at`."""

    def compute(_: torch.Tensor, rows: Mapping[Site, torch.Tensor]) -> torch.Tensor:
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
    # the encoders of autoencoders write to their products in place
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        run = points.run(
            points.batch([tokens]), {*sites, *scalar.sites}, keep=scalar.positions, grad=True
        )
        rows = {site: run.view(site, run.raw[site])[0] for site in scalar.sites}
        value = scalar.compute(run.logits[0], rows)
        gradients = run.gradients(value)
    require_finite({("", -1): value.detach()} | gradients)
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
