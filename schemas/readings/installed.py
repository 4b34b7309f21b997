"""Readings by installed readers: what a request gives, what a job stores, one rank's part, and the
result.
"""

import math
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
import numpy as np

from ..artifacts.registered import NamedArtifact
from ..base.limits import MAX_INT64, MAX_OPTION_TEXT, MAX_OPTIONS, MAX_READERS, Name
from ..base.records import JsonObject, Record, Wire, fields_of
from ..prompts.selectors import RequestedPositions, StoredSites
from ..prompts.sites import At, SitesSpec
from .stored import ReadingKind, StoredReading

#: Types of the options of installed readers.
OptionValue = (
    bool
    | Annotated[int, msgspec.Meta(ge=-MAX_INT64, le=MAX_INT64)]
    | Annotated[float, msgspec.Meta(ge=-MAX_INT64, le=MAX_INT64)]
    | Annotated[str, msgspec.Meta(max_length=MAX_OPTION_TEXT)]
)
#: Option → its value.
OptionValues = dict[str, OptionValue]
ReaderOptions = Annotated[dict[Name, OptionValue], msgspec.Meta(max_length=MAX_OPTIONS)]


class ReaderSpec(SitesSpec, kw_only=True):
    """Have an installed reader compute from rows at `hooks`, at `positions`; its arrays are in the
    result. No rows are stored.
    """

    name: Name
    positions: RequestedPositions = "last_prompt"
    at: At = "before"
    options: ReaderOptions = {}

    @property
    def references(self) -> list[NamedArtifact]:
        """The registered artifacts that it names beside those of `options`: none."""
        return []


ReaderList = Annotated[list[ReaderSpec], msgspec.Meta(max_length=MAX_READERS)]


class StoredReader(StoredReading, tag="reader", omit_defaults=True):
    """An installed reader after validation, see `schemas.extensions`.

    Ranks refuse it when they hold another version.
    """

    name: str
    digest: str  # of its package's files, as the ranks reported it when the job was accepted
    row_bytes: int  # of the answer, for each captured row, at most
    fixed_bytes: int = 0
    options: OptionValues = {}  # all that it declares
    # option → fields of the registered artifact that it names, as they were when the job was
    # accepted
    contents: dict[str, JsonObject] = {}

    def row_size(self) -> int:
        return self.row_bytes

    def size(self, positions: int, sites: int) -> int:
        return self.fixed_bytes + super().size(positions, sites)


#: dtypes of arrays that installed readers return, as numpy names them.
ArrayDType = Literal["float32", "float64", "int32", "int64", "uint8", "bool"]


class ReadArray(Record):
    """An array of numbers: little-endian, in C order; in JSON `data` is base64 text."""

    dtype: ArrayDType
    shape: list[int]
    data: bytes

    def __post_init__(self) -> None:
        if len(self.data) != math.prod(self.shape) * np.dtype(self.dtype).itemsize:
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
    options: OptionValues
    sites: StoredSites  # hook → layers that the stage holds
    of: int  # sites of the whole reading, over all stages
    positions: list[int]  # absolute token positions
    token_ids: list[int]  # the token at each position
    arrays: dict[str, ReadArray]

    @staticmethod
    def joined(request: int, parts: Sequence["ReaderPart"]) -> "ReaderReading | None":
        """Return the stages' parts in the order of their layers; None while a part is missing."""
        if sum(len(layers) for part in parts for layers in part.sites.values()) < parts[0].of:
            return None
        ordered = sorted(parts, key=lambda part: min(layers[0] for layers in part.sites.values()))
        return ReaderReading(
            request=request,
            parts=[ReaderResult(**fields_of(part, ReaderResult)) for part in ordered],
            **fields_of(parts[0], ReaderReading),
        )


class ReaderResult(Record):
    """Answer of a reader on the sites of one pipeline stage."""

    sites: StoredSites  # hook → layers
    positions: list[int]  # absolute token positions
    token_ids: list[int]  # the token at each position
    arrays: dict[str, ReadArray]


class ReaderReading(Record):
    """Answer of an installed reader on one prompt, and the code that gave it.

    An engine without pipeline stages has one part.
    """

    request: int  # index of the prompt
    name: str
    package: str
    version: str  # of the package
    digest: str  # SHA-256 of the package's files
    options: OptionValues
    parts: list[ReaderResult]


READERS = ReadingKind(ReaderList, [], StoredReader, ReaderPart)
