"""The capture manifest, as stored in each capture file and as returned by `GET
/v1/captures/{id}`.
"""

from pathlib import PurePosixPath

import msgspec
from msgspec import UNSET, UnsetType

from ..artifacts.loras import LoraUse
from ..base.records import Record
from ..model.attention import AttentionKind
from ..model.banks import RowShape
from ..model.routing import RoutingKind
from ..prompts.images import ImageSpan
from ..prompts.selectors import Hook, HookName, StoredSites
from ..requests.specs import CaptureStatus

#: `format` of the manifest in a blob's safetensors metadata.
FORMAT = "midstream.capture.2"
#: Folder of a tag that holds its segments: `<tag>/segments/<writer>.<n>.seg`, each with a `.jsonl`
#: of `BlobEntry` next to it.
SEGMENTS = "segments"
SEGMENT_SUFFIX = ".seg"


def index_of(key: str) -> str:
    """Return the key of the JSON Lines file of `BlobEntry` next to a capture file: `.jsonl` next to
    a segment, `.json` next to the file of one capture.
    """
    return (
        key.removesuffix(SEGMENT_SUFFIX) + ".jsonl"
        if key.endswith(SEGMENT_SUFFIX)
        else key.rpartition(".")[0] + ".json"
    )


def path_fault(path: str, job: str) -> str | None:
    """Return an error message for an invalid path of a capture file in a receipt of `job`, relative
    to the capture root; None if the path is valid.

    A job's files are in `<tag>/<job>/` and in shared segments: any other path is invalid.
    """
    parts = PurePosixPath(path).parts
    if (
        len(parts) == 3
        and ".." not in parts
        and path[0] not in "/."
        and parts[1] in (job, SEGMENTS)
    ):
        return None
    return (
        f"{path[:200]!r} is not a capture file of job {job}: those are in TAG/{job} and "
        f"TAG/{SEGMENTS}"
    )


class Manifest(msgspec.Struct):
    """The manifest in every blob: JSON under `manifest` of the safetensors `__metadata__`; writers
    may add fields.

    Tensors of the blob: `<hook>.<layer>` `[positions, hidden_size]` of `dtype`, and int64
    `positions` and `token_ids`.
    """

    format: str
    version: str  # Midstream's
    job: str
    request: int  # index of the prompt
    attempt: int
    worker: str
    rank: int
    pp: int  # pipeline stage that wrote it
    stages: int  # number of pipeline stages: the capture consists of the parts of all
    sites: StoredSites  # hook → layers in this blob
    stage_sites: StoredSites  # hook → layers of this stage, over all its blobs
    at: str  # before | after the site's interventions
    dtype: str
    hidden_size: int
    prompt_tokens: int
    positions: list[int]  # absolute token positions, in the order of the rows
    token_ids: list[int]
    reused: int = 0
    dropped: list[int] = []
    tag: str = ""
    # hook → layers over all stages: a capture is complete when its blobs hold all of these
    all_sites: StoredSites = {}
    requests: int = 0  # how many of the job's prompts have a capture under this tag; 0: unknown
    num_layers: int = 0  # of the whole model, for negative layers; 0: written by an older version
    # ways in which rows of this model, as it was served, may differ from transformers'
    caveats: list[str] = []
    images: list[ImageSpan] = []  # of the prompt: positions `[start, stop)` of each, in order
    # rows of this blob with values that are not finite: the model computed them, or they overflow
    # `dtype`
    non_finite: int = 0
    lora: LoraUse | None = None  # the adapter with which the rows were computed
    attention: list[AttentionKind] = []  # of the layers whose queries or keys are in `sites`
    routing: list[RoutingKind] = []  # of the layers whose router logits are in `sites`
    row: RowShape | None = None  # of the whole row, if its size is not the model's hidden size
    # `[start, stop)`: the columns of the whole row in this blob; empty: all, or those of `heads`
    columns: list[int] = []
    # hook → elements of a row, if files of several widths or ranks were joined; otherwise
    # `hidden_size`
    widths: dict[str, int] = {}
    heads: list[int] = []  # the requested heads, over all ranks, if not all were requested
    identity: str = ""  # of the model, see `ModelInfo`; empty: written by an older version


class BlobEntry(msgspec.Struct):
    """A line of the JSON Lines file next to a capture file: `<stem>.json` next to the file of one
    capture, `.jsonl` next to a segment.
    """

    file: str  # name of the described file
    offset: int  # of the blob in the file
    bytes: int  # of the blob
    crc32: int  # of the blob
    manifest: Manifest


class CaptureBlob(Record, kw_only=True):
    """One durable blob of captured rows: a file, or with `offset` and `bytes` a part of one."""

    path: str  # of the file, relative to the capture root
    offset: int = 0
    bytes: int
    crc32: int
    request: int  # index of the prompt
    rank: int
    pp: int
    rows: int
    sites: StoredSites  # hook → layers
    layout: str = "packed"
    # rows served from the store of earlier rows (a prefix cache hit skipped their computation)
    reused: int = 0
    dropped: list[int] = []  # positions dropped under overload
    non_finite: int = 0  # rows of it with values that are not finite


class ManifestFile(CaptureBlob, kw_only=True):
    """One durable blob: rows of `sites` × `positions`, `[hidden_size]` of `dtype` each."""

    name: str  # of the blob within the job
    url: str  # of the blob's bytes
    at: str
    dtype: str
    positions: list[int]  # absolute token positions, in the order of the rows
    token_ids: list[int]  # the token at each position
    images: list[ImageSpan] = []  # of the prompt: positions `[start, stop)` of each, in order
    # a temporary link to the blob's bytes in the store, which needs no key; null: use the API
    link: str | None = None


class CaptureState(Record, kw_only=True):
    """Has what is known of a job's captures."""

    job: str
    status: CaptureStatus
    # the artifact store: a folder, for readers on the same machine, or a URI without credentials
    root: str | None = None
    bytes: int = 0
    rows: int = 0
    detail: str = ""
    #: Hook point → the name that the request gave it, if that is TransformerLens'.
    hook_names: dict[Hook, HookName] | UnsetType = UNSET


class CaptureManifest(CaptureState, kw_only=True):
    """Answer of `GET /v1/captures/{id}`."""

    files: list[ManifestFile]
    # ways in which rows of this model, as it was served, may differ from transformers'
    caveats: list[str] = []
    lora: LoraUse | None = None  # the adapter with which the rows were computed
    identity: str = ""  # of the model that computed the rows; empty: written by an older version


class CaptureEntry(Record):
    """One job's captures in the listing.

    `bytes` and `rows` are sums over the receipts that have arrived.
    """

    job: str
    tags: list[str]
    created: float  # when the job was accepted, seconds since the epoch
    status: CaptureStatus
    bytes: int
    rows: int


class CapturePage(Record):
    """Answer of `GET /v1/captures`, newest first."""

    captures: list[CaptureEntry]
    next: str | None = None  # pass as `?cursor=`
