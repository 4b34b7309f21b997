"""The logit lens as users request it, and the affine maps of a tuned lens as they are
registered.
"""

from typing import Annotated

import msgspec

from ..artifacts.registered import FolderRequest, Kind, Registered
from ..base.limits import (
    MAX_LENS_TOKEN,
    MAX_LENS_TOKENS,
    MAX_LENS_TOP,
    MAX_TUNED,
    Index,
    Reference,
)
from ..base.records import Record
from ..prompts.selectors import Hook, HookName, LayerSelector, RequestedPositions
from .readings import StoredTuned
from .specs import At

#: Hook points whose rows the final norm and the head can read: the stream, and what is added to it.
LENS_HOOKS: tuple[Hook, ...] = ("pre_attn", "attn_out", "post_attn", "mlp_out", "post_block")
#: A token by its id, or a text that is one token.
NamedToken = Index | Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_LENS_TOKEN)]


class LensSpec(Record):
    """Read rows at `hook` of each of `layers`, at `positions`, through the model's own final norm
    and output matrix.

    For each: the `top_k` most likely next tokens with log-probabilities, and log-probability and
    rank of each of `tokens`. (nostalgebraist 2020, "interpreting GPT: the logit lens".) With
    `tuned`, the name of a tuned lens, each row goes through its layer's affine map first (Belrose
    et al. 2023, arXiv:2303.08112).
    """

    layers: LayerSelector = "all"
    hook: HookName | None = None  # post_block; with `tuned`: the one that it was trained on
    positions: RequestedPositions = "last_prompt"
    top_k: Annotated[int, msgspec.Meta(ge=1, le=MAX_LENS_TOP)] = 5
    tokens: Annotated[list[NamedToken], msgspec.Meta(max_length=MAX_LENS_TOKENS)] = []
    tuned: Reference | None = None
    at: At = "after"


class TunedLensRequest(FolderRequest):
    """Body of `POST /v1/lenses`."""

    hook: HookName = "post_block"  # whose rows the maps take
    residual: bool = False  # the maps give what is added to a row: h + W h + b instead of W h + b


class TunedLens(Registered):
    """A registered tuned lens, as the ledger keeps it and as it is shown."""

    path: str
    hook: Hook
    residual: bool
    layers: list[int]  # that have a map, ascending
    hidden_size: int
    bytes: int  # of its file
    created: float
    description: str = ""
    replaced: str = ""  # digest that the name had until this request

    def stored(self) -> StoredTuned:
        return StoredTuned(
            name=self.name, digest=self.digest, path=self.path, residual=self.residual
        )


class FittedLens(LensSpec, kw_only=True):
    """A lens whose tuned lens is looked up."""

    found: TunedLens


class TunedLensPage(Record):
    """Answer of `GET /v1/lenses`."""

    lenses: list[TunedLens]


TUNED_LENSES = Kind(
    "lens",
    "lenses",
    "tuned lens",
    TunedLens,
    TunedLensRequest,
    TunedLensPage,
    "ms:lenses:",
    MAX_TUNED,
)
