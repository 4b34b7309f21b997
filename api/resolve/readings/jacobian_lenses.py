"""Resolution of Jacobian lenses: a registration against the file and the model, a request's name
against what is registered.
"""

from ....broker.ledger.jobs.ledger import Ledger
from ....broker.ledger.named.registry import Registry
from ....schemas.artifacts.jacobian_lenses import (
    JACOBIAN_LENSES,
    JacobianLens,
    JacobianLensRequest,
)
from ....schemas.base.errors import invalid
from ....schemas.base.records import now
from ....schemas.jobs.models import ModelInfo
from ....storage.formats.jacobian_files import check_on
from ....storage.formats.tuned_files import folder_of
from .lens import check_shape


def resolve_jacobian(request: JacobianLensRequest, model: ModelInfo, root: str) -> JacobianLens:
    """Return what should be registered.

    Raises a 400 naming the field. Reads the file: not for the event loop.
    """
    content = check_on(folder_of(root, request.path), model.num_layers, model.hidden_size)
    return JacobianLens(
        name=request.name,
        model=model.name,
        digest=content.digest,
        path=request.path,
        hook="post_block",
        residual=False,
        layers=content.layers,
        hidden_size=model.hidden_size,
        bytes=content.bytes,
        created=now(),
        description=request.description,
        vocabulary=content.vocabulary,
        fit=content.fit,
    )


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
