"""The logit lens as users request it."""

from typing import Annotated

import msgspec

from .base import Record
from .limits import MAX_LENS_TOKEN, MAX_LENS_TOKENS, MAX_LENS_TOP, Index
from .selectors import Hook, HookName, LayerSelector, RequestedPositions
from .specs import At

#: Hook points whose rows the final norm and the head can read: the stream, and what is added to it.
LENS_HOOKS: tuple[Hook, ...] = ("pre_attn", "attn_out", "post_attn", "mlp_out", "post_block")
#: A token by its id, or a text that is one token.
NamedToken = Index | Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_LENS_TOKEN)]


class LensSpec(Record):
    """Read rows at `hook` of each of `layers`, at `positions`, through the model's own final norm and output matrix.

    For each: the `top_k` most likely next tokens with log-probabilities, and log-probability and rank of each of `tokens`.
    (nostalgebraist 2020, "interpreting GPT: the logit lens".)
    """

    layers: LayerSelector = "all"
    hook: HookName = "post_block"
    positions: RequestedPositions = "last_prompt"
    top_k: Annotated[int, msgspec.Meta(ge=1, le=MAX_LENS_TOP)] = 5
    tokens: Annotated[list[NamedToken], msgspec.Meta(max_length=MAX_LENS_TOKENS)] = []
    at: At = "after"
