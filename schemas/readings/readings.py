"""Readings: what ranks compute from captured rows instead of storing them.

A reading is attached to a capture (`StoredCapture.reading`). The capture's rows go to the rank's
readers, which return one part per rank. Parts travel in the receipt, and `joined` makes one
result of those of a prompt.

Each kind has a file here with its four forms: the request, the instruction to a rank, the rank's
part, and the result. A new kind is a member of each type in this file, a row in
`api/resolve/readings/readings.py`, a reader of the ranks in `workers/runner/readings/`, and a field
in `client/sdk/fields.py`.
"""

import msgspec
from msgspec import UNSET, UnsetType

from ..artifacts.loras import Adapted
from ..base.records import Record
from .features import FeatureList, FeaturesPart, FeaturesReading, StoredFeatures
from .installed import ReaderList, ReaderPart, ReaderReading, StoredReader
from .lens import LensPart, LensReading, LensSpec, StoredLens

#: A reading of any kind, as a job stores it.
AnyStoredReading = StoredLens | StoredFeatures | StoredReader
#: A part of any kind.
ReadingPart = LensPart | FeaturesPart | ReaderPart
part_decoder = msgspec.msgpack.Decoder(ReadingPart)


class ReadingRequest(Adapted, kw_only=True):
    """A request that may ask for readings. OpenAI-style answers are held until they are there."""

    lens: LensSpec | None = None
    features: FeatureList = []
    readers: ReaderList = []


class ReadingResults(Record, kw_only=True):
    """Readings in a job's result: one for each prompt and spec, in the request's order."""

    lens: list[LensReading] | None = None
    features: list[FeaturesReading] | None = None
    readers: list[ReaderReading] | None = None


class ReadingAnswers(Record, kw_only=True):
    """Readings in an OpenAI-style answer, where the request asked for them."""

    lens: list[LensReading] | UnsetType = UNSET
    features: list[FeaturesReading] | UnsetType = UNSET
    readers: list[ReaderReading] | UnsetType = UNSET


#: The fields of requests and results that hold readings.
FIELDS = tuple(ReadingRequest.__annotations__)
