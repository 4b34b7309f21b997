"""Has what the page's calls take and give: its session, its feed (jobs for its table, and the
service's state for its top bar), and the norms of a capture.
"""

from typing import Annotated, Literal

import msgspec

from midstream.schemas.access.keys import Scope, TenantView
from midstream.schemas.base.records import Published, Record
from midstream.schemas.jobs.jobs import ListedJob

#: The longest key that a login accepts, in characters; real keys have at most 272.
MAX_LOGIN_KEY = 512
#: The most jobs that a feed begins with.
MAX_FEED = 5000


class SessionRequest(Record):
    """Body of `POST /session`."""

    key: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_LOGIN_KEY)]


class SessionView(Published, kw_only=True):
    """Answer of `GET /session` and `POST /session`: who is logged in, and with which scopes."""

    version: str
    auth: Literal["keys", "open"]  # `open`: no login is needed
    signed_in: bool
    csrf: str = ""
    tenant: str | None = None
    key: str = ""  # its id
    key_name: str = ""
    scopes: list[Scope] = []
    expires: float | None = None  # of the session
    links: dict[str, str] = {}  # name → URL of related pages: docs, Flower, Grafana


class FeedJob(ListedJob, omit_defaults=True, kw_only=True):
    """A job of the feed."""

    tags: list[str] = []  # of its captures that are stored as files
    output: str = ""  # the beginning of its first output


class FeedJobs(Published, omit_defaults=True):
    """Event `jobs`: jobs that are new or have changed; a lower `version` of a known job should be
    ignored.
    """

    jobs: list[FeedJob]
    first: bool = False  # begins a new list of the newest jobs: discard the previous list
    more: bool = False  # more of that list follows


class FeedModel(Published):
    """A served model."""

    name: str
    workers: int
    healthy: int  # of those
    steered: bool  # global steering is on: every request to it is edited
    steering_entries: int
    steering_version: int


class FeedService(Published, omit_defaults=True):
    """Event `service`, every few seconds.

    Null: the key lacks the scope `observe`, or the figure is unknown.
    """

    at: float
    models: list[FeedModel]
    tenant: TenantView
    tokens_s: float | None = None  # generated per second, by all workers
    queued: int | None = None  # jobs that no worker has begun
    live: int | None = None  # jobs that have not ended
    # bytes on the disk with captures, if that is on this machine
    disk_free: int | None = None
    disk_total: int | None = None
    quota_left: int | None = None  # bytes of the captures' quota
    troubles: list[str] = []  # problems that keep the service from working


class FeedHistory(Published):
    """Event `history`, once, for keys with the scope `observe`: the figures of the last hour, as
    this API process has seen them.
    """

    points: list[tuple[float, float, int]]  # `at`, `tokens_s` and `queued`, oldest first


class CaptureNorms(Record):
    """Answer of `GET /v1/captures/{id}/norms`: a number for each layer and position, computed in
    float32 from the stored rows.

    `norms[l][p]` is the Euclidean norm of the row at `layers[l]` and `positions[p]`;
    `cosines[l][p]` is its cosine to the module's vector. Null if the number is not finite: the row
    is zero or not finite, or its norm overflows float32.
    """

    job: str
    model: str
    request: int
    tag: str
    hook: str
    at: str
    dtype: str  # of the stored rows
    width: int  # elements of a row
    hooks: list[str]  # captured hooks
    requests: list[int]  # prompts with rows under this tag
    prompt_tokens: int
    rows: int  # number of captured positions, of which `positions` lists a part
    start: int  # index of the first listed position among all captured positions
    positions: list[int]
    token_ids: list[int]
    tokens: list[str] | None  # the text of each token; null: the model is no longer served
    layers: list[int]
    norms: list[list[float | None]]
    module: str | None = None
    # null for a layer for which the module has no vector
    cosines: list[list[float | None] | None] | None = None
