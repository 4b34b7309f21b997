"""Resolves a sweep's path: its ends, its frozen branches, and the layers whose cells are on it."""

from collections.abc import Sequence

from midstream.api.resolve.positions.captures import Bounds, at_field, one_hook
from midstream.schemas.base.errors import Excluded, check_excluded, invalid
from midstream.schemas.jobs.models import ModelInfo
from midstream.schemas.prompts.selectors import Hook, as_ranges, resolve_layers

from ..records.sweep_paths import (
    BRANCH_HOOK,
    PathEnd,
    SiteKey,
    StoredEnd,
    StoredPath,
    SweepPath,
    reaches,
)
from ..records.sweeps import PatchWindow, SweepRequest
from .columns import dims_of_head


def resolve_path(
    request: SweepRequest, hooks: Sequence[Hook], layers: list[int], model: ModelInfo
) -> tuple[StoredPath | None, list[int]]:
    """Return the requested path, if any, and those of `layers` that are on it.

    Raises a 400 naming the field.
    """
    path = request.path
    if path is None:
        return None, layers
    _check_fields(request, path)
    for branch in path.frozen:
        if (hook := BRANCH_HOOK[branch]) not in model.hooks:
            raise invalid(
                "path.frozen",
                f"the model does not serve {hook}, the hook at which {branch} is frozen",
                allowed=(
                    ", ".join(branch for branch, hook in BRANCH_HOOK.items() if hook in model.hooks)
                    or "none with this model"
                ),
            )
    ends = path.receivers if isinstance(path.receivers, list) else []
    stored = StoredPath(
        frozen=path.frozen,
        sender=None if path.sender is None else _end("path.sender", path.sender, model),
        receivers=[_end(f"path.receivers[{index}]", end, model) for index, end in enumerate(ends)],
    )
    result = [layer for layer in layers if all(_is_on(stored, (hook, layer)) for hook in hooks)]
    words = (
        "a receiver must come after them in the forward pass"
        if path.sender is None
        else "the other end must come after path.sender in the forward pass"
    )
    if not result:
        raise invalid(
            "path",
            f"none of the sweep's layers ({as_ranges(layers, 8)}) is on the path: {words}",
        )
    if request.layers != "all" and len(result) < len(layers):
        lost = as_ranges(set(layers) - set(result), 8)
        raise invalid(
            "layers",
            f"the sweep has layers that are not on the path ({lost}): {words}",
            allowed=f"all, or some of {as_ranges(result, 8)}",
        )
    return stored, result


def _is_on(path: StoredPath, site: SiteKey) -> bool:
    """Return whether a cell at this site is on the path."""
    if path.sender is not None:
        return reaches(path.sender.site, site)
    return not path.receivers or any(reaches(site, end.site) for end in path.receivers)


def _check_fields(request: SweepRequest, path: SweepPath) -> None:
    unset = {"ablation": None, "mask": None, "alpha": 1.0, "window": PatchWindow()}
    sent = path.sender is not None
    neurons = request.neurons
    check_excluded(
        [
            *(
                Excluded(name, getattr(request, name) != value, "is not valid with path: omit it")
                for name, value in unset.items()
            ),
            Excluded(
                "neurons",
                sent and neurons is not None and neurons.sets is None,
                "top and each need rows of both prompts, but with path.sender a cell writes the "
                "rows of a first pass",
                allowed="sets",
            ),
            *(
                Excluded(
                    f"pairs[{index}].spans",
                    sent and pair.spans is not None,
                    "is not valid with path.sender: give positions, or path.receivers",
                )
                for index, pair in enumerate(request.pairs)
            ),
        ]
    )


def _end(field: str, end: PathEnd, model: ModelInfo) -> StoredEnd:
    with at_field(f"{field}.hook"):
        hook = one_hook(end.hook, Bounds(model, []))
    with at_field(f"{field}.layer"):
        (layer,) = resolve_layers(end.layer, model.num_layers)
    if end.head is None:
        return StoredEnd(layer=layer, hook=hook)
    head, dims = dims_of_head(f"{field}.head", hook, end.head, model)
    return StoredEnd(layer=layer, hook=hook, dims=dims, head=head)
