"""Receipts: a rank's report on a finished request, and its form on the wire to the relay."""

import msgspec

from ..artifacts.probes import ProbeScore
from ..base.edit_sizes import EditSizes
from ..base.records import Wire
from ..prompts.selectors import StoredSites

#: Version of the frames between ranks and relay: `[PROTOCOL, kind, epoch, seq u64be, payload]`.
PROTOCOL = 1
#: `Receipt.kind` of captures that could not be stored because the artifact store is unavailable;
#: the job waits for the store.
STORE_UNAVAILABLE = "store_away"
#: `CapturedFile.layout` of what a package's consumer has written, which the package counts.
PLACED = "shard"
#: `Receipt.kind` of a failure that concerns the request as a whole: the kind of the error follows
#: from what the job requested.
BY_REQUEST = ""
#: Message of a rank that cannot load a source run because the artifact store is unavailable.
READ_LATER = "the artifact store cannot be read now"


class CapturedFile(Wire):
    """One durable safetensors blob: content and directory entry were fsynced before the receipt was
    written.

    Most blobs are a file of their own; in a segment, the blob begins at `offset`.
    """

    path: str  # of the file, relative to the capture root
    bytes: int  # of the blob
    crc32: int  # of the blob
    rows: int  # (hook, layer, position) triples in it
    # layers of `post_block`, in receipts of the first version, which had no `sites`
    layers: list[int] = []
    positions: int = 0  # number of token positions
    sites: StoredSites = {}  # hook → ascending layers
    offset: int = 0
    layout: str = "packed"
    tag: str = ""
    # rows from an earlier request's forward passes, which this request did not compute
    reused: int = 0
    dropped: list[int] = []  # requested positions dropped under overload
    non_finite: int = 0  # rows with values that are not finite


class Consumed(Wire):
    """The result of one consumer (such as `filesystem`) of one request's captured rows."""

    name: str
    ok: bool = True
    message: str = ""
    # `memory`: the rows as a safetensors blob; `reading`: a part, see `schemas.readings`
    rows: bytes = b""


class Receipt(Wire):
    """A rank's report on one request, sent for every request with an intervention or a capture."""

    version: str  # Midstream's version on the rank
    worker: str
    boot: str  # identifies the start of the worker
    job: str
    request: int
    attempt: int
    rank: int  # global rank
    world: int  # number of ranks: this many receipts settle the request
    tp: int  # index of the rank in the pipeline stage
    pp: int  # pipeline stage
    step: int  # engine step in which the request finished here
    actions: int  # actions in this rank's ledger so far
    checksum: str  # the ledger's u64 as 16 hex digits
    status: str  # ok | partial | error
    message: str = ""
    applied: int = 0  # token rows that an intervention changed, over all layers
    files: list[CapturedFile] = []
    # with `error`: capture_failed | reading_failed | intervention_failed | edit_too_large |
    # STORE_UNAVAILABLE | BY_REQUEST
    kind: str = BY_REQUEST
    consumed: list[Consumed] = []
    global_version: int = 0  # of the global steering with which the request began
    # how often this rank's action ledger was reset: checksums are compared within one epoch
    epoch: int = 0
    graded: list[float] = []  # results of `RankSpec.grade`, from the last stage's first rank
    trace: str = ""  # W3C traceparent of the attempt, as in `RankSpec.trace`
    scores: list[ProbeScore] = []  # of the probes in the stage's layers, from its first rank
    identity: str = ""  # of the model that the rank has loaded
    sizes: list[EditSizes] = []  # of its edits, from the stage's first rank
    # layers, counted from the first, after which its forward passes could end, on whatever stage
    # they are; 0: they computed all
    depth: int = 0

    @property
    def attempt_id(self) -> str:
        """`JOB.ATTEMPT`, which an outbox records for each receipt to be able to name lost ones."""
        return f"{self.job}.{self.attempt}"

    @property
    def account(self) -> tuple[str, int, int, int]:
        """Return what all ranks of a pipeline stage must report alike."""
        return self.checksum, self.actions, self.epoch, self.applied

    @property
    def verdict(self) -> str:
        """`status`, but `partial` instead of `ok` if rows were dropped or a consumer failed."""
        incomplete = any(file.dropped for file in self.files) or not all(
            consumed.ok for consumed in self.consumed
        )
        return "partial" if incomplete and self.status == "ok" else self.status


#: A receipt, after its sequence number in its outbox.
NumberedReceipt = tuple[int, Receipt]


class LostRange(Wire):
    """The sender no longer has receipts `first..last` of this epoch (its outbox was damaged)."""

    first: int
    last: int
    jobs: list[str] = []  # `Receipt.attempt_id` of the lost receipts
    message: str = ""


receipt_decoder = msgspec.msgpack.Decoder(Receipt)
