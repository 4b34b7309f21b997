"""Sites as a request selects them: hook points, each with its layers; and the names that it gives
hook points, under which it is answered in Python.
"""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

import msgspec

from ..base.limits import MAX_HOOKS
from ..base.records import Record, T
from .selectors import ByHook, Hook, HookName, LayerSelector, resolve_hook

#: Before or after the interventions of the same site.
At = Literal["before", "after"]
LAYERS_AND_HOOKS = "give either `hooks` or `hook` with `layers`, not both"


class SitesSpec(Record):
    """A selection of sites: `hook` with `layers`, or `hooks`, which gives each hook point its own
    layers.
    """

    layers: LayerSelector | None = None  # null: all
    hook: HookName | None = None  # null: post_block
    hooks: Annotated[dict[HookName, LayerSelector], msgspec.Meta(max_length=MAX_HOOKS)] | None = (
        None
    )

    def __post_init__(self) -> None:
        if self.hooks is not None and (self.hook is not None or self.layers is not None):
            raise ValueError(LAYERS_AND_HOOKS)
        if self.hooks is not None and not self.hooks:
            raise ValueError("hooks is empty: give at least one")

    @property
    def wanted(self) -> dict[HookName, LayerSelector]:
        """Hook as the user named it → layers, from either form of the spec."""
        return (
            self.hooks
            if self.hooks is not None
            else {self.hook or "post_block": "all" if self.layers is None else self.layers}
        )


def hook_layers(sites: Mapping[T, Iterable[int]]) -> list[tuple[T, int]]:
    """Return (hook, layer) of each site, in order. `sites`: hook → layers."""
    return [(hook, layer) for hook, layers in sites.items() for layer in layers]


#: Fields that name hook points: one, a list, or the keys of a mapping.
_NAMED = ("hook", "hooks", "sites")


def asked_names(*specs: Any) -> dict[Hook, HookName]:
    """Return hook point → the name that parts of a request, each with `hook` or `hooks`, first give
    it, if that is TransformerLens'.
    """
    given = [getattr(spec, "hooks", None) or [getattr(spec, "hook", None)] for spec in specs]
    first = {resolve_hook(name): name for names in reversed(given) for name in names}
    return {hook: name for hook, name in first.items() if name != hook}


def renamed(answer: Any, names: Mapping[Any, str], named: bool = False) -> Any:
    """Return an answer with its hook points under these names, where they have others. `named`: its
    texts are hook points. Outputs, which name none and may be many, stay as they are.
    """
    if isinstance(answer, str) and named:
        return names.get(answer, answer)
    if isinstance(answer, dict) and (named or isinstance(answer, ByHook)):
        return type(answer)((names.get(hook, hook), item) for hook, item in answer.items())
    if isinstance(answer, list) and (named or isinstance(next(iter(answer), None), Record)):
        return [renamed(item, names, named) for item in answer]
    if not isinstance(answer, Record):
        return answer
    found = {
        field: renamed(getattr(answer, field), names, field in _NAMED)
        for field in answer.__struct_fields__
        if field != "outputs"
    }
    return msgspec.structs.replace(answer, **found)
