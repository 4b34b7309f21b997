"""The logit lens: what a request gives, what a job stores, one rank's part, and the result."""

from collections.abc import Sequence
from typing import Annotated, ClassVar

import msgspec
import numpy as np

from ..artifacts.jacobian_lenses import JACOBIAN_LENSES
from ..artifacts.registered import NamedArtifact, references
from ..artifacts.tuned_lenses import TUNED_LENSES, StoredTuned
from ..base.limits import MAX_LENS_TOKEN, MAX_LENS_TOKENS, MAX_LENS_TOP, Index, Reference
from ..base.records import Record, Wire, fields_of
from ..prompts.selectors import Hook, HookName, LayerSelector, RequestedPositions
from ..prompts.sites import At
from .stored import ReadingKind, StoredReading

#: A token by its id, or a text that is one token.
NamedToken = Index | Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_LENS_TOKEN)]


class LensSpec(Record):
    """Read rows at `hook` of each of `layers`, at `positions`, through the model's own final norm
    and output matrix.

    For each: the `top_k` most likely next tokens with log-probabilities, and log-probability and
    rank of each of `tokens`. (nostalgebraist 2020, "interpreting GPT: the logit lens".) With
    `tuned`, the name of a tuned lens, each row goes through its layer's affine map first (Belrose
    et al. 2023, arXiv:2303.08112); with `jacobian`, the name of a Jacobian lens, it is
    multiplied by its layer's mean Jacobian.
    """

    layers: LayerSelector = "all"
    hook: HookName | None = None  # post_block; with `tuned`: the one that it was trained on
    positions: RequestedPositions = "last_prompt"
    top_k: Annotated[int, msgspec.Meta(ge=1, le=MAX_LENS_TOP)] = 5
    tokens: Annotated[list[NamedToken], msgspec.Meta(max_length=MAX_LENS_TOKENS)] = []
    tuned: Reference | None = None
    jacobian: Reference | None = None  # in place of `tuned`
    at: At = "after"

    @property
    def references(self) -> list[NamedArtifact]:
        """The registered artifacts that it names."""
        return references((TUNED_LENSES, self.tuned), (JACOBIAN_LENSES, self.jacobian))


class StoredLens(StoredReading, tag="lens", omit_defaults=True):
    """A logit lens after validation: most likely next tokens, and log-probability and rank of each
    of `tokens`.
    """

    top_k: int
    tokens: list[int] = []
    tuned: StoredTuned | None = None  # each row goes through its map (or J) first

    #: Each rank holds a part of the vocabulary; their parts are joined.
    everywhere: ClassVar[bool] = True

    def row_work(self, hidden_size: int, vocab_size: int) -> int:
        return hidden_size * (vocab_size + (hidden_size if self.tuned else 0))

    def row_size(self) -> int:
        return 4 + 8 * self.top_k + 8 * len(self.tokens)


class LensPart(Wire, tag="lens"):
    """One rank's part of a lens: of its shard of the vocabulary.

    Arrays are little-endian, in C order, `[layers, positions, …]`.
    """

    capture: int  # index in `RankSpec.captures`
    shard: int  # of the vocabulary
    shards: int
    hook: Hook
    layers: list[int]
    positions: list[int]  # absolute token positions
    token_ids: list[int]  # the token at each position
    named: list[int]  # token ids, as in `StoredLens.tokens`
    # int32 `[…, k]`: token ids of the largest logits, descending; the shard may have fewer than
    # were asked for
    top: bytes
    logits: bytes  # float32 `[…, k]`
    total: bytes  # float32 `[…]`: log-sum-exp of the shard's logits
    named_logits: bytes = b""  # float32 `[…, named]`, the same on every rank
    above: bytes = b""  # int32 `[…, named]`: how many tokens of the shard have a larger logit

    @staticmethod
    def joined(request: int, parts: Sequence["LensPart"]) -> "LensReading | None":
        """Return the reading over all shards of the vocabulary; None while a shard is missing."""
        if {part.shard for part in parts} != set(range(parts[0].shards)):
            return None
        first = parts[0]
        shape = len(first.layers), len(first.positions)
        total = np.logaddexp.reduce(
            [_array(part.total, "<f4", shape).astype(np.float64) for part in parts]
        )
        tops = [_array(part.top, "<i4", (*shape, -1)) for part in parts]
        ids = np.concatenate(tops, axis=-1)
        logits = np.concatenate(
            [_array(part.logits, "<f4", (*shape, -1)) for part in parts], axis=-1
        )
        most = max(top.shape[-1] for top in tops)
        order = np.argsort(-logits, axis=-1, kind="stable")[..., :most]
        named = (*shape, len(first.named))
        own = _array(first.named_logits, "<f4", named)
        return LensReading(
            **fields_of(first, LensReading),
            request=request,
            top_tokens=np.take_along_axis(ids, order, axis=-1).tolist(),
            top_logprobs=(np.take_along_axis(logits, order, axis=-1) - total[..., None])
            .astype(np.float32)
            .tolist(),
            named_tokens=first.named,
            named_ranks=np.sum(
                [_array(part.above, "<i4", named) for part in parts], axis=0
            ).tolist()
            if first.named
            else [],
            named_logprobs=(own - total[..., None]).astype(np.float32).tolist()
            if first.named
            else [],
        )


class LensReading(Record):
    """Logit lens of one prompt.

    Lists of three levels are layers × positions × tokens; log-probabilities are in nats.

    `top_tokens[i][j]`: the tokens that the row of layer `layers[i]` at `positions[j]` makes most
    likely to come next, most likely first. `named_ranks`: 0 for the most likely token of the
    vocabulary.
    """

    request: int  # index of the prompt
    hook: Hook
    layers: list[int]
    positions: list[int]  # absolute token positions
    token_ids: list[int]  # the token at each position
    top_tokens: list[list[list[int]]]
    top_logprobs: list[list[list[float]]]
    named_tokens: list[int] = []
    named_ranks: list[list[list[int]]] = []
    named_logprobs: list[list[list[float]]] = []


LENS = ReadingKind(LensSpec | None, None, StoredLens, LensPart)


def _array(raw: bytes, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    if shape[-1] == -1:
        rows = shape[0] * shape[1]
        shape = (*shape[:-1], len(raw) // (4 * rows) if rows else 0)
    return np.frombuffer(raw, dtype=dtype).reshape(shape)
