"""Which figures does a process give to Prometheus, and where? The counters and histograms of every stage of a job.

All are named here, but for what the API and the workers read when they are asked
(`api.operations.ledger_metrics`, `api.operations.steering_metrics`, `workers.serving.metrics`);
docs/observability.md lists them all. A process exposes what it has counted itself: add them up.
"""

import logging
import threading
from wsgiref.simple_server import WSGIServer

from prometheus_client import Counter, Gauge, Histogram, disable_created_metrics, start_http_server

from ...schemas.settings import Settings, SettingsError
from ...schemas.version import __version__

log = logging.getLogger(__name__)

disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series beside every counter, which nobody asks for

#: Upper bounds in seconds: from an answer without a model to a job that waited for a day.
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800, 7200, 86400)

BUILD = Gauge("midstream_build_info", "1; which process this is and what it runs", ["process", "version"])

# A job's stages, each observed where it ends
QUEUE_WAIT = Histogram(
    "midstream_queue_wait_seconds", "From acceptance (or its return to the queue) to a claim", ["model"], buckets=SECONDS
)
FIRST_TOKEN = Histogram("midstream_first_token_seconds", "From the claim to a prompt's first token", ["model"], buckets=SECONDS)
GENERATION = Histogram("midstream_generation_seconds", "From the claim until all outputs are stored", ["model"], buckets=SECONDS)
DURABLE = Histogram(
    "midstream_durable_seconds", "From stored outputs to the last receipt, of jobs that have any", ["model"], buckets=SECONDS
)
JOB = Histogram("midstream_job_seconds", "From acceptance to success", ["model"], buckets=SECONDS)
RELEASE = Histogram("midstream_release_seconds", "From POST to the answer, of held responses", ["route"], buckets=SECONDS)

# What workers do
ATTEMPTS = Counter("midstream_attempts_total", "Attempts of this worker that are over", ["model", "outcome"])

# What the relay does
RECEIPTS = Counter("midstream_receipts_total", "Receipts by what became of them", ["status"])
LOST = Counter("midstream_receipts_lost_jobs_total", "Jobs failed because an outbox lost their receipts", ["worker"])
DISAGREEMENTS = Counter("midstream_disagreements_total", "Requests whose ranks told different actions", ["worker"])
REFUSED_FRAMES = Counter("midstream_relay_refused_frames_total", "Frames that the relay refused", ["reason"])

# What the callbacks worker does
SWEPT = Counter("midstream_swept_total", "What the sweeper has done, by kind", ["action"])
WEBHOOK_ATTEMPTS = Counter("midstream_webhook_attempts_total", "Webhooks sent, by what came of it", ["outcome"])
WEBHOOK_DEPTH = Gauge("midstream_webhook_outbox_depth", "Deliveries that are pending, over all senders")
WEBHOOK_OLDEST = Gauge("midstream_webhook_oldest_due_seconds", "For how long the most overdue delivery has been due")

# What the API does
REFUSALS = Counter("midstream_refusals_total", "Calls refused for a limit, a quota or an overload", ["kind"])

#: In one statement each, so that a scrape right after the start shows zeros instead of nothing.
for _status in ("ok", "partial", "error", "duplicate", "stale", "unknown", "beyond_gap"):
    RECEIPTS.labels(_status)
for _outcome in ("delivered", "retried", "failed", "disabled", "refused"):
    WEBHOOK_ATTEMPTS.labels(_outcome)


class MetricsServer:
    """This process's metrics over HTTP on a thread of their own; `close` ends it."""

    def __init__(self, server: WSGIServer, thread: threading.Thread):
        self._server, self._thread = server, thread

    @property
    def port(self) -> int:
        return int(self._server.server_port)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def start(settings: Settings, process: str) -> MetricsServer | None:
    """Serve this process's metrics at `metrics_host:metrics_port`; None when no port is set.

    Raises SettingsError when the port cannot be used.
    """
    identify(process)
    if not settings.metrics_port:
        return None
    try:
        server, thread = start_http_server(settings.metrics_port, settings.metrics_host)
    except OSError as error:
        where = f"MIDSTREAM_METRICS_HOST={settings.metrics_host}, MIDSTREAM_METRICS_PORT={settings.metrics_port}"
        raise SettingsError(f"{where}: {error.strerror or error}") from error
    log.info("metrics of %s at http://%s:%d/metrics", process, settings.metrics_host, server.server_port)
    return MetricsServer(server, thread)


def identify(process: str) -> None:
    """Say which process's metrics these are."""
    BUILD.labels(process, __version__).set(1)
