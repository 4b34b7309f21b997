"""Metrics that are updated where things happen: adding one means a line here, and
`python tools/pages/code_tables.py` for docs/reference/metrics.md. Those of `scraped_metrics` are
read at each scrape.

A process exposes only what it has counted itself: a gauge without labels is shown as 0 once it is
registered, so the process that measures it registers it.
"""

from prometheus_client import REGISTRY, Counter, Gauge, Histogram, disable_created_metrics

from .store_metrics import STORE

# `_created` would be an unused second series for every counter.
disable_created_metrics()  # type: ignore[no-untyped-call]

#: Upper bounds in seconds: from an answer without a model to a job that waited for a day.
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800, 7200, 86400)

#: Upper bounds of a probe's scores, which are log-odds where `midstream.probes.fit` made it.
SCORES = (-20, -10, -5, -3, -2, -1, -0.5, 0, 0.5, 1, 2, 3, 5, 10, 20)

BUILD = Gauge("midstream_build_info", "1; labels: process, version", ["process", "version"])

# A job's stages, each observed where it ends
QUEUE_WAIT = Histogram(
    "midstream_queue_wait_seconds",
    "From acceptance (or return to the queue) to the claim",
    ["model"],
    buckets=SECONDS,
)
FIRST_TOKEN = Histogram(
    "midstream_first_token_seconds",
    "From the claim to a prompt's first token",
    ["model"],
    buckets=SECONDS,
)
GENERATION = Histogram(
    "midstream_generation_seconds",
    "From the claim until all outputs are stored",
    ["model"],
    buckets=SECONDS,
)
DURABLE = Histogram(
    "midstream_durable_seconds",
    "From stored outputs to the last receipt, for jobs with receipts",
    ["model"],
    buckets=SECONDS,
)
JOB = Histogram("midstream_job_seconds", "From acceptance to success", ["model"], buckets=SECONDS)
RELEASE = Histogram(
    "midstream_release_seconds",
    "From POST to the response, for held responses",
    ["route"],
    buckets=SECONDS,
)

# What workers do
ATTEMPTS = Counter(
    "midstream_attempts_total", "Attempts that this worker has ended", ["model", "outcome"]
)
HARVESTED_TOKENS = Counter(
    "midstream_harvest_tokens_total", "Tokens of committed harvest units", ["model"]
)
HARVESTED_ROWS = Counter(
    "midstream_harvest_rows_total",
    "Positions whose rows are in committed harvest units",
    ["model"],
)
HARVESTED_BYTES = Counter(
    "midstream_harvest_bytes_total", "Bytes of shards of committed harvest units", ["model"]
)
HARVEST_WAITS = Counter(
    "midstream_harvest_store_failures_total",
    "Times that a harvest's store refused a write",
    ["model"],
)

# What the relay does
RECEIPTS = Counter("midstream_receipts_total", "Receipts, by outcome", ["status"])
LOST = Counter(
    "midstream_receipts_lost_jobs_total",
    "Jobs that failed because an outbox lost their receipts",
    ["worker"],
)
DISAGREEMENTS = Counter(
    "midstream_disagreements_total", "Requests whose ranks reported different actions", ["worker"]
)
REFUSED_FRAMES = Counter(
    "midstream_relay_refused_frames_total", "Frames rejected by the relay", ["reason"]
)

PROBED = Counter(
    "midstream_probed_prompts_total", "Prompts that a probe has scored", ["model", "probe"]
)
CROSSED = Counter(
    "midstream_probe_crossings_total",
    "Prompts whose aggregate reached a label's threshold",
    ["model", "probe", "label"],
)
PROBE_SCORE = Histogram(
    "midstream_probe_score",
    "A label's aggregate over a prompt and its generated tokens",
    ["model", "probe", "label"],
    buckets=SCORES,
)
#: Relative sizes; steered text usually breaks above 1.
EDIT_SIZES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 4, 8, 16)
EDIT_SIZE = Histogram(
    "midstream_edit_relative_size",
    "Largest edit of a prompt at a site, as a share of its row's norm",
    buckets=EDIT_SIZES,
)

# What the callbacks worker does
SWEPT = Counter("midstream_swept_total", "Actions of the reaper, by kind", ["action"])

# What the API does
GLOBAL_CAPTURE_SKIPPED = Counter(
    "midstream_global_captures_left_out_total",
    "Prompts for which global capture was skipped, by reason",
    ["reason"],
)
LEDGER_DURABLE = Gauge(
    "midstream_ledger_durable",
    "1 if Redis has an append-only file and evicts no keys, or redis_allow_lossy is set",
    registry=None,
)
LEDGER = Gauge(
    "midstream_ledger_reachable", "1 if the job ledger (Redis) answers this process", registry=None
)
READY = Gauge("midstream_ready", "1 if /readyz answers 200: a job would run now", registry=None)
HELD = Gauge(
    "midstream_held_responses", "Calls to this process waiting for a job to change", registry=None
)
REFUSALS = Counter(
    "midstream_refusals_total", "Calls rejected because of a limit, a quota or overload", ["kind"]
)

#: Created now, so that a scrape right after the start shows zeros instead of nothing.
for _status in ("ok", "partial", "error", "duplicate", "stale", "unknown", "beyond_gap"):
    RECEIPTS.labels(_status)

REGISTRY.register(STORE)
