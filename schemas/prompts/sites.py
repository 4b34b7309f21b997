"""Sites as a request selects them: hook points, each with its layers."""

from typing import Annotated, Literal

import msgspec

from ..base import Record
from ..base.limits import MAX_HOOKS
from .selectors import HookName, LayerSelector

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
