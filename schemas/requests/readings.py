"""Readings: what ranks compute from captured rows instead of storing them. Three forms of each: the
instruction to a rank, the rank's report, and the result for users.

A reading is attached to a capture (`StoredCapture.reading`). The capture's rows go to the rank's
readers, which return one part per rank. Parts travel in the receipt and are joined in
`broker.ledger.results.readings`.
"""

import math
from typing import Annotated, ClassVar, Literal

import msgspec
import numpy as np

from ..artifacts.saes import StoredSae
from ..base.limits import MAX_INT64, MAX_OPTION_TEXT
from ..base.records import Record, Wire
from ..prompts.selectors import Hook

#: The consumer that rows of a reading go to. No request can name it.
READER = "reading"

#: Bytes of a part for each position, in addition to those for its rows: position and token id in
#: MessagePack.
POSITION_BYTES = 10


class StoredTuned(Record):
    """A tuned lens as a job stores it. The job uses this content, even if the name has since been
    given another.
    """

    name: str
    digest: str  # SHA-256 of its file
    path: str  # of its folder, below `lens_dir`
    residual: bool  # its maps give what is added to a row


class StoredLens(Record, tag="lens", omit_defaults=True):
    """A logit lens after validation: most likely next tokens, and log-probability and rank of each
    of `tokens`.
    """

    top_k: int
    tokens: list[int] = []
    tuned: StoredTuned | None = None  # each row goes through its layer's map first

    #: Each rank of a tensor-parallel stage holds a part of the vocabulary: all of them record, and
    #: their parts are joined.
    everywhere: ClassVar[bool] = True
    #: What ranks hold for it.
    artifact: ClassVar[StoredSae | None] = None

    def size(self, positions: int, sites: int) -> int:
        """Return the most bytes of one rank's part, without its header."""
        return positions * (sites * (4 + 8 * self.top_k + 8 * len(self.tokens)) + POSITION_BYTES)


#: Types of the options of installed readers.
OptionValue = (
    bool
    | Annotated[int, msgspec.Meta(ge=-MAX_INT64, le=MAX_INT64)]
    | Annotated[float, msgspec.Meta(ge=-MAX_INT64, le=MAX_INT64)]
    | Annotated[str, msgspec.Meta(max_length=MAX_OPTION_TEXT)]
)


class StoredReader(Record, tag="reader", omit_defaults=True):
    """An installed reader after validation, see `schemas.extensions`.

    Ranks refuse it when they hold another version.
    """

    name: str
    digest: str  # of its package's files, as the ranks reported it when the job was accepted
    row_bytes: int  # of the answer, for each captured row, at most
    fixed_bytes: int = 0
    options: dict[str, OptionValue] = {}  # all that it declares

    #: The ranks of a stage hold equal rows: one reads them.
    everywhere: ClassVar[bool] = False
    artifact: ClassVar[StoredSae | None] = None

    def size(self, positions: int, sites: int) -> int:
        """Return the most bytes of one rank's part, without its header."""
        return self.fixed_bytes + positions * (sites * self.row_bytes + POSITION_BYTES)


class StoredFeatures(Record, tag="features", omit_defaults=True):
    """Features of a sparse autoencoder after validation: the most active ones of each row."""

    sae: StoredSae
    top_k: int

    #: The ranks of a stage hold equal rows.
    everywhere: ClassVar[bool] = False

    @property
    def artifact(self) -> StoredSae:
        """What ranks hold for it."""
        return self.sae

    def size(self, positions: int, sites: int) -> int:
        """Return the most bytes of one rank's part, without its header."""
        return positions * (sites * (8 + 8 * self.top_k) + POSITION_BYTES)


#: All kinds of readings. A new kind is another member of the union, with `everywhere`, `artifact`
#: and `size` as above.
Reading = StoredLens | StoredFeatures | StoredReader


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


#: dtypes of arrays that installed readers return, as numpy names them, and bytes of an element.
ArrayDType = Literal["float32", "float64", "int32", "int64", "uint8", "bool"]
ARRAY_BYTES: dict[str, int] = {
    "float32": 4,
    "float64": 8,
    "int32": 4,
    "int64": 8,
    "uint8": 1,
    "bool": 1,
}


class Array(Record):
    """An array of numbers: little-endian, in C order; in JSON `data` is base64 text."""

    dtype: ArrayDType
    shape: list[int]
    data: bytes

    def __post_init__(self) -> None:
        if len(self.data) != math.prod(self.shape) * ARRAY_BYTES[self.dtype]:
            raise ValueError(
                f"data holds {len(self.data)} bytes, which is not {self.dtype} of shape "
                f"{self.shape}"
            )

    def numpy(self) -> np.ndarray:
        """Return the array, read-only."""
        return np.frombuffer(self.data, dtype=np.dtype(self.dtype).newbyteorder("<")).reshape(
            self.shape
        )


class ReaderPart(Wire, tag="reader"):
    """Answer of an installed reader on one pipeline stage, and the code that gave it."""

    capture: int  # index in `RankSpec.captures`
    name: str
    package: str
    version: str
    digest: str
    options: dict[str, OptionValue]
    sites: dict[str, list[int]]  # hook → layers that the stage holds
    of: int  # sites of the whole reading, over all stages
    positions: list[int]  # absolute token positions
    token_ids: list[int]  # the token at each position
    arrays: dict[str, Array]


class FeaturesPart(Wire, tag="features"):
    """The features of a prompt's rows. Arrays are little-endian, in C order, `[positions, …]`."""

    capture: int  # index in `RankSpec.captures`
    sae: str
    digest: str
    hook: Hook
    layer: int
    positions: list[int]  # absolute token positions
    token_ids: list[int]  # the token at each position
    indices: bytes  # int32 `[positions, k]`: most active first; −1: no more are active
    activations: bytes  # float32 `[positions, k]`
    active: bytes  # int32 `[positions]`: how many features are active
    errors: bytes  # float32 `[positions]`: ‖row − reconstruction‖ / ‖row‖


#: A part of any kind.
Part = LensPart | FeaturesPart | ReaderPart
part_decoder = msgspec.msgpack.Decoder(Part)


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


class ReaderResult(Record):
    """Answer of a reader on the sites of one pipeline stage."""

    sites: dict[str, list[int]]  # hook → layers
    positions: list[int]  # absolute token positions
    token_ids: list[int]  # the token at each position
    arrays: dict[str, Array]


class ReaderReading(Record):
    """Answer of an installed reader on one prompt, and the code that gave it.

    An engine without pipeline stages has one part.
    """

    request: int  # index of the prompt
    name: str
    package: str
    version: str  # of the package
    digest: str  # SHA-256 of the package's files
    options: dict[str, OptionValue]
    parts: list[ReaderResult]


class FeaturesReading(Record):
    """The features of one prompt.

    Lists of two levels are positions × features, most active first; inactive ones are left out.
    """

    request: int  # index of the prompt
    sae: str
    digest: str  # of the autoencoder's files
    hook: Hook
    layer: int
    positions: list[int]  # absolute token positions
    token_ids: list[int]  # the token at each position
    features: list[list[int]]
    activations: list[list[float]]
    active: list[int]  # how many features are active, of all
    errors: list[float]  # ‖row − reconstruction‖ / ‖row‖, of all active features
