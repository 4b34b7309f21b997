"""Resolution of tuned lenses: a registration against the file and the model, a request's name
against what is registered.
"""

import msgspec

from ....broker.ledger.jobs.ledger import Ledger
from ....broker.ledger.named.registry import Registry
from ....schemas.base.errors import invalid
from ....schemas.base.records import now
from ....schemas.jobs.models import ModelInfo
from ....schemas.prompts.selectors import resolve_hook
from ....schemas.requests.lens import (
    LENS_HOOKS,
    TUNED_LENSES,
    FittedLens,
    LensSpec,
    TunedLens,
    TunedLensRequest,
)
from ....storage.formats.tuned_files import check_on, folder_of


def resolve_tuned(tuned_lens_request: TunedLensRequest, model: ModelInfo, root: str) -> TunedLens:
    """Return what should be registered.

    Raises a 400 naming the field. Reads the file: not for the event loop.
    """
    hook = resolve_hook(tuned_lens_request.hook)
    present = [item for item in LENS_HOOKS if item in model.hooks]
    if hook not in present:
        raise invalid(
            "hook",
            f"{tuned_lens_request.hook!r} is not a hook point that a lens of this model reads",
            allowed=", ".join(present),
        )
    digest, layers, size = check_on(
        folder_of(root, tuned_lens_request.path), model.num_layers, model.hidden_size
    )
    return TunedLens(
        name=tuned_lens_request.name,
        model=model.name,
        digest=digest,
        path=tuned_lens_request.path,
        hook=hook,
        residual=tuned_lens_request.residual,
        layers=layers,
        hidden_size=model.hidden_size,
        bytes=size,
        created=now(),
        description=tuned_lens_request.description,
    )


async def fitted(spec: LensSpec, field: str, model: ModelInfo, ledger: Ledger) -> LensSpec:
    """Return the lens with the tuned lens that it names.

    Raises a 400 naming `tuned` below `field`, with the names that exist.
    """
    if spec.tuned is None:
        return spec
    lenses, at = Registry(ledger, TUNED_LENSES), f"{field}.tuned"
    tuned = await lenses.known(model.name, spec.tuned, at, "invalid_request")
    # The model may have been restarted since, with other settings or another checkpoint.
    if tuned.hidden_size != model.hidden_size or tuned.layers[-1] >= model.num_layers:
        raise invalid(
            at,
            f"{spec.tuned!r} was registered for a model of another shape",
            allowed="register it again",
        )
    return FittedLens(**msgspec.structs.asdict(spec), found=tuned)
