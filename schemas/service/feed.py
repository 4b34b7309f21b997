"""The page's feed: jobs for its table, and the service's state for its top bar."""

from ..access.keys import TenantView
from ..base import Published
from ..jobs.jobs import JobView

#: The most jobs that a feed begins with.
MAX_FEED = 5000


class FeedJob(JobView, omit_defaults=True, kw_only=True):
    """A job of the feed."""

    tags: list[str] = []  # of its captures that are stored as files
    # the beginning of its first prompt (of a chat: the last message; of a sweep: both prompts)
    prompt: str = ""
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
