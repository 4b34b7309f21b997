"""Kinds of attention: how layers of the loaded model turn queries and keys into patterns."""

from .layer_kinds import LayerKind

#: Version of the arithmetic that a kind describes; readers reject kinds of a later version.
#: A capture can be read years later, without the service, by a reader that ignores unknown fields.
VERSION = 1
#: Hook points whose rows determine a pattern: queries and keys, as attention uses them.
ATTENDING = frozenset({"q", "k"})


class AttentionKind(LayerKind):
    """The kind of attention of some layers, which is the same in all of them.

    It describes all heads of the model, over all ranks, in the model's order.

    Query `i` sees key `j ≤ i` if `i - j < window` (unless `window` is 0) and `i // chunk == j //
    chunk` (unless `chunk` is 0). The score is `scale · q·k`; with a softcap, it becomes `softcap ·
    tanh(score / softcap)`; with slopes, `slope · (j - i)` is added. The pattern is the softmax of
    the scores, with the head's sink as one more score that belongs to no key.
    """

    # number of query heads; consecutive query heads share a key head
    heads: int = 0
    head_dim: int = 0
    scale: float = 0.0
    window: int = 0  # number of keys that a query sees, including its own; 0: all earlier keys
    chunk: int = 0  # length of the chunks within which tokens see each other; 0: no chunks
    softcap: float = 0.0  # 0: none
    sinks: list[float] = []  # [heads]; empty: none
    slopes: list[float] = []  # [heads], ALiBi; empty: none
    # tokens of an image see each other in both directions, so patterns of prompts with images are
    # rejected
    text_only: bool = False
    refused: str = ""  # why patterns of these layers cannot be computed; empty: they can
    version: int = VERSION
