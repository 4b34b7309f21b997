"""Resolution of sparse autoencoders: a registration against the files and the model, a request's
name against what is registered.
"""

from ....broker.ledger.named.registry import Lookup
from ....schemas.artifacts.saes import SAES, Sae, SaeRequest
from ....schemas.base.errors import invalid
from ....schemas.jobs.models import ModelInfo
from ....schemas.prompts.selectors import resolve_hook
from ....storage.formats.sae_files import check_on, folder_of, size_of


def resolve_sae(sae_request: SaeRequest, name: str, model: ModelInfo, root: str) -> Sae:
    """Return what should be registered.

    Raises a 400 naming the field. Reads files: not for the event loop.
    """
    hook = None if sae_request.hook is None else resolve_hook(sae_request.hook)
    content, hook, layer = check_on(
        folder_of(root, sae_request.path),
        hook,
        sae_request.layer,
        model.hooks,
        model.num_layers,
        model.hidden_size,
    )
    return sae_request.registered(
        Sae,
        name,
        model.name,
        digest=content.digest,
        hook=hook,
        layer=layer,
        form=content.form,
        bytes=size_of(content.form),
        trained_on=content.trained_on,
    )


def named_sae(name: str, field: str, model: ModelInfo, found: Lookup) -> Sae:
    """Return the SAE that a request names in `field`. Raises a 400 with the registered names."""
    sae = found.known(SAES, name, field)
    # The model may have been restarted since, with other settings or another checkpoint.
    if (
        sae.hook not in model.hooks
        or sae.layer >= model.num_layers
        or sae.form.d_in != model.hidden_size
    ):
        wrong = (
            f"{name!r} reads {sae.hook} of layer {sae.layer}, of width {sae.form.d_in}, "
            "which this model does not have"
        )
        raise invalid(field, wrong, hint="register it again")
    return sae
