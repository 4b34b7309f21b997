"""Types for hook points in a loaded layer: the module and its side, and the sums that rows form."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ....schemas.prompts.selectors import Hook

TapSide = Literal["input", "output"]
#: `pair`: the hook's row is the sum of two tensors, `(hidden, residual)`, that the next norm adds;
#: `single`: it is in one tensor.
TapKind = Literal["pair", "single"]
#: A hook's row is the sum of these hooks' rows, each times its multiplier.
SumLaw = Mapping[Hook, float]


@dataclass(frozen=True)
class Tap:
    """The tensor at the input or output of the module at `path` below the decoder layer; `""` is
    the layer itself.
    """

    path: str
    side: TapSide
    kind: TapKind = "single"


Taps = dict[Hook, Tap]
