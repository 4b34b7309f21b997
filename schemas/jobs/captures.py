"""The capture manifest, as stored in each capture file and as returned by `GET
/v1/captures/{id}`.
"""

from pathlib import PurePosixPath

import msgspec

from ..artifacts.loras import LoraUse
from ..base.records import Record
from ..model.attention import AttentionKind
from ..model.banks import RowShape
from ..model.routing import RoutingKind
from ..prompts.images import ImageSpan
from ..requests.specs import CaptureStatus

#: `format` of the manifest in a blob's safetensors metadata.
FORMAT = "midstream.capture.2"
#: Folder of a tag that holds its segments: `<tag>/segments/<writer>.<n>.seg`, each with a `.jsonl`
#: of `BlobEntry` next to it.
SEGMENTS = "segments"
SEGMENT_SUFFIX = ".seg"


def index_of(key: str) -> str:
    """The JSON Lines of `BlobEntry` next to a capture file: `.jsonl` next to a segment, `.json`
    next to the file of one capture.
    """
    return (
        key.removesuffix(SEGMENT_SUFFIX) + ".jsonl"
        if key.endswith(SEGMENT_SUFFIX)
        else key.rpartition(".")[0] + ".json"
    )


def path_fault(path: str, job: str) -> str | None:
    """Return what is wrong with the path of a capture file as a receipt of `job` names it, relative
    to the capture root; None for nothing.

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
    """In every blob, as JSON under `manifest` of the safetensors `__metadata__`; writers may add
    members.

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
    stages: int  # how many there are: that many parts make the whole
    sites: dict[str, list[int]]  # hook → layers in this blob
    stage_sites: dict[str, list[int]]  # hook → layers of this stage, over all its blobs
    at: str  # before | after the site's interventions
    dtype: str
    hidden_size: int
    prompt_tokens: int
    positions: list[int]  # absolute token positions, in the order of the rows
    token_ids: list[int]
    reused: int = 0
    dropped: list[int] = []
    tag: str = ""
    all_sites: dict[
        str, list[int]
    ] = {}  # hook → layers over all stages: a capture is whole when its blobs hold these
    requests: int = 0  # how many of the job's prompts have a capture under this tag; 0: unknown
    num_layers: int = 0  # of the whole model, for negative layers; 0: written by an older version
    caveats: list[
        str
    ] = []  # in what rows of this model, as it was served, may differ from transformers'
    images: list[ImageSpan] = []  # of the prompt: positions `[start, stop)` of each, in order
    # rows of this blob with values that are not finite: the model gave them, or `dtype` does not
    # hold them
    non_finite: int = 0
    lora: LoraUse | None = None  # adapter that the rows were computed with
    attention: list[AttentionKind] = []  # of the layers of which `sites` has queries or keys
    routing: list[RoutingKind] = []  # of the layers of which `sites` has the router's logits
    row: RowShape | None = None  # of the whole row, where it is not of the model's hidden size
    columns: list[
        int
    ] = []  # `[start, stop)` of the whole row that this blob holds; empty: all, or `heads`
    widths: dict[
        str, int
        # hook → elements of a row, where files of several widths or ranks were joined; else
        # `hidden_size`
    ] = {}
    heads: list[int] = []  # that were asked for, over all ranks, where those are not all
    identity: str = ""  # of the model, see `ModelInfo`; empty: written by an older version


class BlobEntry(msgspec.Struct):
    """A line of the JSON Lines file next to capture files: `<stem>.json` next to its own file,
    `.jsonl` next to a segment.
    """

    file: str  # name of the file that this describes
    offset: int  # of the blob in the file
    bytes: int  # of the blob
    crc32: int  # of the blob
    manifest: Manifest


class ManifestFile(Record):
    """One durable blob: rows of `sites` × `positions`, `[hidden_size]` of `dtype` each."""

    name: str  # names the blob within the job
    url: str  # the blob's bytes
    path: str  # of the file, relative to the capture root
    offset: int  # of the blob in the file
    request: int  # index of the prompt
    rank: int
    pp: int
    bytes: int
    crc32: int  # of the blob
    rows: int
    sites: dict[str, list[int]]
    at: str
    dtype: str
    layout: str
    positions: list[int]  # absolute token positions, in the order of the rows
    token_ids: list[int]  # the token at each position
    reused: int = 0
    dropped: list[int] = []
    images: list[ImageSpan] = []  # of the prompt: positions `[start, stop)` of each, in order
    non_finite: int = 0  # rows with values that are not finite
    link: str | None = (
        # the blob's bytes from the store itself, for some minutes and any caller that has it; null:
        # through the API alone
        None
    )


class CaptureManifest(Record):
    """Answer of `GET /v1/captures/{id}`."""

    job: str
    status: CaptureStatus
    root: (
        str | None
    )  # the artifact store: a folder, for readers on the same machine, or a URI without credentials
    bytes: int
    rows: int
    files: list[ManifestFile]
    detail: str = ""
    caveats: list[
        str
    ] = []  # in what rows of this model, as it was served, may differ from transformers'
    lora: LoraUse | None = None  # adapter that the rows were computed with
    identity: str = ""  # of the model that computed them; empty: written by an older version


class CaptureEntry(Record):
    """One job's captures in the listing.

    `bytes` and `rows` count the receipts that have arrived.
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


class CaptureNorms(Record):
    """Answer of `GET /v1/captures/{id}/norms`: a number for each layer and row, computed in float32
    from the stored rows.

    `norms[l][p]` is the Euclidean norm of the row of `layers[l]` and `positions[p]`;
    `cosines[l][p]` its cosine to the module's vector. Null where there is no finite number: the row
    is zero, or not finite, or its norm overflows float32.
    """

    job: str
    model: str
    request: int
    tag: str
    hook: str
    at: str
    dtype: str  # of the stored rows
    width: int  # elements of a row
    hooks: list[str]  # that were captured
    requests: list[int]  # prompts with rows under this tag
    prompt_tokens: int
    rows: int  # positions that were captured, of which `positions` lists a part
    start: int  # place of the first listed position among them
    positions: list[int]
    token_ids: list[int]
    tokens: list[str] | None  # how each reads; null: the model is no longer served
    layers: list[int]
    norms: list[list[float | None]]
    module: str | None = None
    cosines: list[list[float | None] | None] | None = (
        None  # null for a layer of which the module has no vector
    )
