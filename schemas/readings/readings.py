"""Readings: what ranks compute from captured rows instead of storing them.

A reading is attached to a capture (`StoredCapture.reading`). The capture's rows go to the rank's
readers, which return one part per rank. Parts travel in the receipt, and `joined` makes one
result of those of a prompt.

Each kind has a file here with its four forms: the request, the instruction to a rank, the rank's
part, and the result. A new kind is a field of `ReadingResults` with its row, rules in
`api/resolve/readings/readings.py`, a reader of the ranks in `workers/runner/readings/readers.py`,
and a field in `client/sdk/fields.py`.
"""

from typing import TYPE_CHECKING, Annotated, Any, Union, get_args

import msgspec

from ..artifacts.loras import Adapted
from ..base.records import Record
from .features import FEATURES, FeaturesReading
from .installed import READERS, ReaderReading
from .lens import LENS, LensReading
from .stored import ReadingKind, StoredReading


class ReadingResults(Record, kw_only=True):
    """Readings in a result or in an OpenAI-style answer: one for each prompt and spec, in the
    request's order; null: not asked for. Each field is annotated with the row of its kind.
    """

    lens: Annotated[list[LensReading] | None, LENS] = None
    features: Annotated[list[FeaturesReading] | None, FEATURES] = None
    readers: Annotated[list[ReaderReading] | None, READERS] = None


#: Field of requests and results → its kind of reading.
READINGS: dict[str, ReadingKind] = {
    field: get_args(annotation)[1] for field, annotation in ReadingResults.__annotations__.items()
}
_KINDS = tuple(READINGS.values())
#: Decodes a part of any kind.
part_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(
    Union[tuple(kind.part for kind in _KINDS)]  # noqa: UP007 (of a tuple)
)
if TYPE_CHECKING:
    AnyStoredReading = StoredReading
    ReadingRequest = Adapted
else:
    #: A reading of any kind, as a job stores it.
    AnyStoredReading = Union[tuple(kind.stored for kind in _KINDS)]  # noqa: UP007
    #: A request that may ask for readings. OpenAI-style answers are held until they are there.
    ReadingRequest = msgspec.defstruct(
        "ReadingRequest",
        [(field, kind.request, kind.default) for field, kind in READINGS.items()],
        bases=(Adapted,),
        module=__name__,
        kw_only=True,
    )
