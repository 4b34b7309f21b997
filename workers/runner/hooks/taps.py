"""Vocabulary of hook points in a loaded layer: which side of which module, and what the rows there
add up to.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ....schemas.prompts.selectors import Hook

Side = Literal["input", "output"]
#: `pair`: the stream is the sum of two tensors, `(hidden, residual)`, that the next norm adds up;
#: `single`: it is one tensor.
Kind = Literal["pair", "single"]
#: A hook's row is the sum of these hooks' rows, each times its multiplier.
Law = Mapping[Hook, float]


@dataclass(frozen=True)
class Tap:
    """The tensor at one side of the module at `path` below the decoder layer; `""` is the layer
    itself.
    """

    path: str
    side: Side
    kind: Kind = "single"


Taps = dict[Hook, Tap]
