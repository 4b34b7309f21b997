"""Kinds of attention: how layers turn queries and keys into patterns, as read from the loaded
model.
"""

from .layer_kinds import LayerKind

#: Version of the arithmetic that a kind describes; readers reject kinds of a later version.
VERSION = 1
#: Hook points whose rows make a pattern: queries and keys, as attention uses them.
ATTENDING = frozenset({"q", "k"})


class AttentionKind(LayerKind):
    """Attention of some layers, which is alike in all of them.

    All heads of the model, over all ranks, in its order.

    Query `i` sees key `j ≤ i` if `i - j < window` and `i // chunk == j // chunk`, where these are
    not 0. Its score is `scale · q·k`; with a softcap `softcap · tanh(score / softcap)`; with slopes
    plus `slope · (j - i)`. The pattern is the softmax of the scores, with the head's sink as one
    more score that belongs to no key.
    """

    # number of query heads; consecutive query heads share a key head
    heads: int = 0
    head_dim: int = 0
    scale: float = 0.0
    window: int = 0  # keys that a query sees, its own included; 0: all before it
    chunk: int = 0  # tokens that see each other; 0: all
    softcap: float = 0.0  # 0: none
    sinks: list[float] = []  # [heads]; empty: none
    slopes: list[float] = []  # [heads], ALiBi; empty: none
    # tokens of an image see each other in both directions: patterns of prompts with images are
    # refused
    text_only: bool = False
    refused: str = ""  # why patterns of these layers cannot be computed; empty: they can
    version: int = VERSION
