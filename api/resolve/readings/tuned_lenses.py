"""Resolution of tuned lenses: a registration against the file and the model, a request's name
against what is registered.
"""

from ....schemas.artifacts.tuned_lenses import LENS_HOOKS, TunedLens, TunedLensRequest
from ....schemas.base.errors import invalid
from ....schemas.base.records import now
from ....schemas.jobs.models import ModelInfo
from ....schemas.prompts.selectors import resolve_hook
from ....storage.formats.lens_files import check_on, folder_of


def resolve_tuned(
    tuned_lens_request: TunedLensRequest, name: str, model: ModelInfo, root: str
) -> TunedLens:
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
        name=name,
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
