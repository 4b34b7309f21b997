"""Resolves LoRA adapters: checks a registration against its files and the model, and finds the
adapter that a request names.
"""

from ....broker.ledger.named.registry import Lookup
from ....schemas.artifacts.loras import LORAS, Lora, LoraRequest, LoraSupport, StoredLora
from ....schemas.base.errors import invalid
from ....schemas.jobs.models import ModelInfo
from ....storage.formats.lora_files import check_on, folder_of


def resolve_lora(lora_request: LoraRequest, name: str, model: ModelInfo, root: str) -> Lora:
    """Return the adapter to register.

    Raises a 400 naming the field. Reads files: call it off the event loop.
    """
    support = _support(model)  # first: without it there may be no folder to look for
    content, facts = check_on(folder_of(root, lora_request.path), support)
    return lora_request.registered(
        Lora,
        name,
        model.name,
        digest=content.digest,
        rank=facts.rank,
        modules=facts.modules,
        bytes=content.bytes,
    )


def named_lora(name: str | None, model: ModelInfo, found: Lookup) -> StoredLora | None:
    """Return the adapter that a request names. Raises a 400 naming `lora` and the registered
    ones.
    """
    if name is None:
        return None
    support = _support(model)
    lora = found.known(LORAS, name, "lora")
    # The model may have been restarted since, with other settings or another checkpoint. (The
    # worker compares the adapter's shapes with the model's before it loads the adapter.)
    if lora.rank > support.max_rank:
        raise invalid(
            "lora",
            f"{name!r} has rank {lora.rank}",
            allowed=f"up to {support.max_rank} (setting engine.max_lora_rank)",
        )
    if missing := sorted(set(lora.modules) - support.modules.keys()):
        raise invalid(
            "lora",
            f"{name!r} changes {', '.join(missing)}, which this model does not have",
            hint="register it again",
        )
    return lora.stored()


def _support(model: ModelInfo) -> LoraSupport:
    if model.lora is None:
        raise invalid(
            "lora",
            f"{model.name!r} is served without adapters: the worker's setting engine.max_loras is "
            "0",
            hint="omit it, or have the operator start with `--engine max_loras=4`",
        )
    return model.lora
