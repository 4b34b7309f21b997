"""Readings: what ranks compute from captured rows instead of storing them, as requested of a rank, as it reports it, and as users see it.

A reading rides on a capture (`StoredCapture.reading`). Its rows go to the rank's readers, which return one part per rank. Parts come
back in the receipt and are joined where results are made: see `broker.ledger.readings`.
"""

from typing import ClassVar

import msgspec

from .base import Record, Wire
from .selectors import Hook

#: The consumer that rows of a reading go to. No request can name it.
READER = "reading"

#: Bytes of a part that belong to a position apart from its rows: its number and token id, as MessagePack writes them.
POSITION_BYTES = 10


class StoredLens(Record, tag="lens", omit_defaults=True):
    """A logit lens after validation: most likely next tokens, and log-probability and rank of each of `tokens`."""

    top_k: int
    tokens: list[int] = []

    #: Each rank of a tensor-parallel stage holds a part of the vocabulary: all of them record, and their parts are joined.
    everywhere: ClassVar[bool] = True

    def size(self, positions: int, sites: int) -> int:
        """Bytes of the part of one rank, at most, its header aside."""
        return positions * (sites * (4 + 8 * self.top_k + 8 * len(self.tokens)) + POSITION_BYTES)


#: What may be read. A further kind is a member of the union, with `everywhere` and `size` as above.
Reading = StoredLens


class LensPart(Wire, tag="lens"):
    """One rank's part of a lens: of its shard of the vocabulary. Arrays are little-endian, in C order, `[layers, positions, …]`."""

    capture: int  # index in `RankSpec.captures`
    shard: int  # of the vocabulary
    shards: int
    hook: Hook
    layers: list[int]
    positions: list[int]  # absolute token positions
    token_ids: list[int]  # the token at each position
    named: list[int]  # token ids, as in `StoredLens.tokens`
    top: bytes  # int32 `[…, k]`: token ids of the largest logits, descending; the shard may have fewer than were asked for
    logits: bytes  # float32 `[…, k]`
    total: bytes  # float32 `[…]`: log-sum-exp of the shard's logits
    named_logits: bytes = b""  # float32 `[…, named]`, the same on every rank
    above: bytes = b""  # int32 `[…, named]`: how many tokens of the shard have a larger logit


#: A part of any kind.
Part = LensPart
part_decoder = msgspec.msgpack.Decoder(Part)


class LensReading(Record):
    """What a logit lens showed of one prompt. Lists of three levels are layers × positions × tokens; log-probabilities are in nats.

    `top_tokens[i][j]`: the tokens that the row of layer `layers[i]` at `positions[j]` makes most likely to come next, most likely
    first. `named_ranks`: 0 for the most likely token of the vocabulary.
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
