"""Has what a request, a stored job and a result say of an echo."""

from midstream.schemas.access.handling import Handling
from midstream.schemas.base.limits import Metadata, Name, Text
from midstream.schemas.base.records import Record, from_msgpack
from midstream.schemas.jobs.receipts import Receipt
from midstream.schemas.jobs.works import Work


class EchoRequest(Handling, kw_only=True):
    """Body of `POST /v1/echoes`."""

    model: Name
    prompts: list[Text]
    layer: int  # whose rows are captured
    metadata: Metadata = {}


class EchoWork(Work, tag="echo"):
    """Has what the job needs in addition to its prompts and its capture."""

    layer: int


class EchoResult(Record):
    """The field `echo` of a result."""

    layer: int
    texts: list[str]


def outcome(stored: bytes, ticket: list[Receipt]) -> EchoResult:
    return from_msgpack(stored, EchoResult)
