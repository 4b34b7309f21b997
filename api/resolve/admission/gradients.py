"""Checks that a model's gradient workers can run a job."""

from collections.abc import Mapping

from ....schemas.base.errors import MidstreamError, invalid
from ....schemas.jobs.models import GradientInfo, ModelInfo
from ....schemas.prompts.selectors import Hook

START = "start one: `midstream up --set gradients=true`"


def check_gradients(
    hooks: Mapping[str, Hook], model: ModelInfo, gradients: GradientInfo | None, steered: bool
) -> None:
    """Check that the model's gradient workers can serve `hooks` (field of the body → hook).

    Raises MidstreamError: a 400, or `conflict` under global steering (`steered`).
    """
    if gradients is None:
        raise invalid("model", f"no gradient worker has served {model.name!r} yet", hint=START)
    if gradients.refused:
        raise invalid("model", f"gradients of {model.name!r} are not served: {gradients.refused}")
    for field, hook in hooks.items():
        if hook in gradients.absent:
            raise invalid(field, f"no gradients at {hook}: {gradients.absent[hook]}")
    if steered:
        raise MidstreamError(
            "conflict",
            f"global steering edits {model.name!r}, and gradients are computed without it",
            hint="clear global steering first",
        )
