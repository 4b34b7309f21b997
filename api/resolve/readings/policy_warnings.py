"""What is questionable about a policy, in words, for who registers it: edits longer than the rows
that they change, and thresholds that the first token's row may reach whatever it says.

Typical norms are those that the certificate measured on the loaded model.
"""

import math
from collections.abc import Iterator, Mapping

import numpy as np

from ....schemas.base.tensors import Tensor, to_numpy
from ....schemas.jobs.models import ModelInfo
from ....schemas.requests.policies import PolicyVersion, Steer
from ....schemas.requests.steering import SteeringTemplate

#: Numbers of a hook's layers, by the hook.
Norms = Mapping[str, list[float]]
#: The first token's row is an outlier if it is so many times as long as others.
_OUTLIER = 4.0
#: Scores of a row that says nothing are within so many standard deviations.
_DEVIATIONS = 3.0


def needed(version: PolicyVersion) -> list[str]:
    """Return the content hashes of the tensors that warnings are computed from."""
    modules = [name for module in version.modules for name in module.tensors]
    return [*version.probe.content.tensors, *modules]


def warnings_of(
    version: PolicyVersion, model: ModelInfo, tensors: Mapping[str, Tensor]
) -> list[str]:
    """Return the warnings of a version; none for a model without a certificate. `tensors`: by
    content hash.
    """
    if model.certificate is None:
        return []
    norms = model.certificate.row_norms
    first = model.certificate.first_norms
    return [*_long_edits(version, norms, tensors), *_noisy(version, norms, first, tensors)]


def _long_edits(
    version: PolicyVersion, norms: Norms, tensors: Mapping[str, Tensor]
) -> Iterator[str]:
    """Yield a warning for each action whose edit is longer than the rows that it changes."""
    steers = [
        (number, action)
        for number, action in enumerate(version.content.actions)
        if isinstance(action, Steer)
    ]
    for (number, action), module in zip(steers, version.modules, strict=True):
        scale = 1.0 if action.scale is None else action.scale
        limit = math.inf if action.limit is None else action.limit.relative
        sizes = [
            (min(_relative(entry.scaled(scale), layer, norms, tensors), limit), entry.hook, layer)
            for entry in module.entries
            for layer in entry.layers
        ]
        size, hook, layer = max(sizes, default=(0.0, "", 0))
        if size > 1:
            yield (
                f"actions[{number}]: {module.name!r} at scale {scale:g} is {size:.3g} times as "
                f"long as a typical row at {hook} of layer {layer}: generated text may break; "
                "lower the scale, or set a limit"
            )


def _relative(
    entry: SteeringTemplate, layer: int, norms: Norms, tensors: Mapping[str, Tensor]
) -> float:
    """Return the length of an added vector relative to a typical row; 0 for other edits."""
    limit = abs(entry.limit) or math.inf
    if entry.family == "add_matched":
        return min(abs(entry.numbers[0]), limit)
    of_layers = norms.get(entry.hook, [])
    if entry.family != "add" or layer >= len(of_layers) or not of_layers[layer]:
        return 0.0
    vector = tensors[entry.tensors[0]]
    length = float(np.linalg.norm(to_numpy(vector).astype(np.float64)))
    return min(abs(entry.scale) * length / of_layers[layer], limit)


def _noisy(
    version: PolicyVersion, norms: Norms, first: Norms, tensors: Mapping[str, Tensor]
) -> Iterator[str]:
    """Yield a warning if the first token's row, of any direction, may reach the threshold."""
    condition = version.content.condition
    schedule = condition.schedule
    content = version.probe.content
    reads_it = schedule.tokens != "generated" and schedule.start == 0
    typical, outlier = (
        of.get(content.hook, [])[content.layer : content.layer + 1] for of in (norms, first)
    )
    if not reads_it or not typical or not outlier or outlier[0] < _OUTLIER * typical[0]:
        return
    column = 0 if condition.label is None else content.labels.index(condition.label)
    weight, bias = (to_numpy(tensors[name]).astype(np.float64) for name in content.tensors)
    length = float(np.linalg.norm(weight[column]))
    noise = _DEVIATIONS * length * outlier[0] / math.sqrt(weight.shape[1])
    if condition.at_least <= float(bias[column]) + noise:
        yield (
            f"condition.at_least {condition.at_least:g} is within the noise of a prompt's first "
            f"token, whose row is {outlier[0] / typical[0]:.3g} times as long as others and may "
            f"score up to {float(bias[column]) + noise:.3g}, whatever the text says; chats do not "
            "have it in their content; otherwise start the schedule at 1"
        )
