"""Metrics of the sender, in the process that imports it."""

from prometheus_client import Counter, Gauge

WEBHOOK_ATTEMPTS = Counter(
    "midstream_webhook_attempts_total", "Webhook attempts, by outcome", ["outcome"]
)
WEBHOOK_DEPTH = Gauge("midstream_webhook_outbox_depth", "Pending deliveries, over all senders")
WEBHOOK_OLDEST = Gauge("midstream_webhook_oldest_due_seconds", "Age of the most overdue delivery")
WEBHOOK_DROPPED = Gauge(
    "midstream_webhook_dropped_decisions",
    "Decisions of policies that got no webhook, since the first start",
)

#: Created now, so that a scrape right after the start shows zeros instead of nothing.
for _outcome in ("delivered", "retried", "failed", "refused"):
    WEBHOOK_ATTEMPTS.labels(_outcome)
