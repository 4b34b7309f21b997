"""Resolution of the name of a Jacobian lens against what is registered."""

from ....broker.ledger.jobs.ledger import Ledger
from ....broker.ledger.named.registry import Registry
from ....schemas.artifacts.jacobian_lenses import JACOBIAN_LENSES, JacobianLens
from ....schemas.base.errors import invalid
from ....schemas.jobs.models import ModelInfo
from .lens import check_shape


async def named_jacobian(name: str, field: str, model: ModelInfo, ledger: Ledger) -> JacobianLens:
    """Return the lens whose directions a request's `field` names; it must have an output matrix.

    Raises a 400 with the registered names.
    """
    lens = await Registry(ledger, JACOBIAN_LENSES).known(model.name, name, field, "invalid_request")
    check_shape(lens, model, field)
    if not lens.vocabulary:
        raise invalid(
            field,
            f"the file of {name!r} has no output matrix, so tokens have no directions",
            hint="convert it with the model's checkpoint, and register it again",
        )
    return lens
