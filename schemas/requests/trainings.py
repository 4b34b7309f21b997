"""What is known of a learned module: how it was fitted, and its effect on held-out examples."""

from typing import Literal

from ..base.records import Record

#: How a module is fitted. From rows: `difference_of_means`, `pca` (first principal component of the
#: pairs' differences) and `logistic` (weight of a logistic regression). By gradient, on the loss of
#: target continuations: `vector` (an added vector) and `reft` (LoReFT: an edit of op `lowrank`).
FitMethod = Literal["difference_of_means", "pca", "logistic", "vector", "reft"]
#: The methods that train by gradient.
BY_GRADIENT: frozenset[FitMethod] = frozenset({"vector", "reft"})


class FitPoint(Record):
    """Losses at one step of a training, in nats per target token."""

    step: int
    loss: float | None  # mean of the steps since the previous point; null before the first step
    validation_loss: float


class FitSite(Record):
    """The edit of one layer, on held-out examples."""

    layer: int
    # median of ‖edit(s) − s‖ / ‖s‖ over the rows
    dose: float
    # of the methods from rows: share of the pairs of a positive and a negative row (one of each
    # class, all combinations) of which the positive has the larger component along the vector
    auroc: float | None = None


class FitEffect(Record):
    """The effect of the module on examples that it was not fitted to.

    `logprob`: log-probability of the target, in nats, mean over the examples, without and with the
    module at scale 1. `auroc`: separation of positive and negative rows, mean over the layers;
    without a direction it is 0.5.
    """

    measure: Literal["logprob", "auroc"]
    before: float
    after: float
    error: float  # standard error of after − before; of `auroc`, if the classes did not differ
    examples: int
    better: bool  # after − before is greater than the error


class Training(Record):
    """The training record of a module."""

    job: str
    method: FitMethod
    hook: str
    examples: int  # that it was fitted to; of methods from rows, positive and negative together
    examples_digest: str  # SHA-256, in hexadecimal, of the tokens of all examples
    seed: int
    identity: str  # of the model
    sites: list[FitSite]
    effect: FitEffect
    steps: int = 0  # of the parameters that were kept
    losses: list[FitPoint] = []
