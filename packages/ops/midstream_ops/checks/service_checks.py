"""Checks of the service through its API: its parts, models and keys."""

import asyncio
import math
import time
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

from midstream.client.sdk import wire
from midstream.client.sdk.client import Client
from midstream.schemas.base.errors import STATUS_OF_KIND, MidstreamError
from midstream.schemas.jobs.models import WorkerInfo
from midstream.schemas.service.status import ServiceStatus
from midstream.schemas.settings.settings import Settings, is_loopback

from .finding import SKEW_WARN_S, CheckFinding, clock_finding, graded, version_finding
from .service import Service

#: Allowed difference from the API's clock: HTTP's `Date` has whole seconds, and servers may repeat
#: a value for another second.
DATE_SKEW_S = 3.0
OUTBOX_WARN = 10_000
OVERDUE_WARN_S = 300.0
DESYNC_WARN_S = 24 * 3600.0
MISDIRECTED = STATUS_OF_KIND["misdirected"]


def api(service: Service) -> Iterator[CheckFinding]:
    """Check that the API answers, its version and clock, whether a job would run, its models and
    keys. Raises MidstreamError if there is no answer.
    """
    answer = service.get("/healthz", keyed=False)
    version = answer.headers.get(wire.VERSION_HEADER)
    if version is None:
        yield CheckFinding(
            "fail", "api", f"the server at {service.url} is not Midstream", "give --url"
        )
        return
    if answer.status_code == MISDIRECTED:
        problem = answer.json()
        advice = f"give --url with one of: {problem['allowed']}"
        yield CheckFinding("fail", "api", problem["detail"], advice)
        return
    yield version_finding("api", version, f"at {service.url}")
    if date := answer.headers.get("date"):
        ahead = parsedate_to_datetime(date).timestamp() + 0.5 - time.time()
        yield clock_finding("api clock", ahead, DATE_SKEW_S)
    missing = "; ".join(service.missing)
    yield graded(
        "ready",
        bool(missing),
        f"no job would run now: {missing}" if missing else "a job would run now",
        "start a worker, and check its log"
        if any(what.startswith(("worker", "model")) for what in service.missing)
        else "mend that: no worker is at fault",
    )
    if service.without_redis:  # every other answer would be a time-out
        return
    listed = service.get("/v1/models")
    if listed.status_code == 200:
        for entry in listed.json()["data"]:
            yield from _model(service.get(f"/v1/models/{entry['id']}").json())
    yield _keys(service)


def parts(service: Service) -> Iterator[CheckFinding]:
    """Check workers, relay, callbacks, webhooks and queues, as the service reports them. Raises
    MidstreamError if neither the API nor Redis has the status.
    """
    try:
        if service.without_redis:  # no heartbeat is newer than the fault
            yield CheckFinding(
                "warn",
                "service",
                "not checked: without Redis no process reports",
                "mend Redis first",
            )
            return
        with Client(service.url, service.settings.api_key) as client:
            status = client.status()
    except MidstreamError:
        if not service.redis_url:
            raise
        status = asyncio.run(_from_redis(service.redis_url))
    yield from judged(status, service.settings)


async def _from_redis(redis_url: str) -> ServiceStatus:
    from midstream.broker.ledger.jobs.ledger import Ledger
    from midstream.broker.ledger.jobs.status import read_status

    ledger = Ledger.connect(Settings(redis_url=redis_url))
    try:
        return await read_status(ledger)
    finally:
        await ledger.close()


def judged(status: ServiceStatus, settings: Settings) -> Iterator[CheckFinding]:
    """Judge a status."""
    relay = status.relay
    callbacks = status.callbacks
    if not status.workers:
        yield CheckFinding(
            "fail",
            "workers",
            "none is running",
            "start one (`python -m midstream.workers`), and check its log",
        )
    for worker in status.workers:
        yield from _worker(worker, status.at, settings)
    yield (
        version_finding(
            "relay", relay.version, f"at {relay.url}, receipts accepted: {relay.received}"
        )
        if relay.alive
        else CheckFinding(
            "fail",
            "relay",
            "not seen for 15 s: captures and interventions wait for it, then time out",
            "start it (`python -m midstream.broker.relay`), and check its log",
        )
    )
    ago = max(0.0, status.at - (callbacks.last_sweep or 0.0))
    lost = (
        "the reaper has not completed a pass recently: lost messages and dead workers' jobs are "
        "not recovered, and webhooks are not sent"
    )
    found = f"alive, the reaper's last pass {ago:.1f} s ago" if callbacks.last_sweep else "alive"
    yield graded(
        "callbacks",
        not callbacks.alive,
        found if callbacks.alive else lost,
        "start it (`python -m midstream.broker.callbacks`), and check its log",
    )
    overdue = callbacks.webhooks_overdue_s
    more = f", the oldest overdue by {overdue:.0f} s" if overdue >= 1 else ""
    yield graded(
        "webhooks",
        overdue,
        f"{callbacks.webhooks_pending} pending{more}",
        "`midstream list webhooks --set state=pending` lists receivers that do not answer",
        OVERDUE_WARN_S,
        math.inf,
    )
    served = {worker.model for worker in status.workers if worker.healthy and not worker.queue}
    for queue in status.queues:
        if queue.model not in served:
            waiting = queue.sent + sum(queue.waiting.values())
            yield CheckFinding(
                "fail",
                "queue",
                f"no worker serves {queue.model}; jobs waiting: {waiting}",
                f"start a worker for {queue.model}",
            )


def _worker(worker: WorkerInfo, at: float, settings: Settings) -> Iterator[CheckFinding]:
    about = f"worker {worker.worker}"
    stats = worker.stats
    more = f"serves {worker.model} (TP {worker.tp}, PP {worker.pp}) on {worker.host}"
    yield (
        version_finding(about, worker.version, more)
        if worker.healthy
        else CheckFinding(
            "fail",
            about,
            f"{worker.model}: {worker.detail or 'unhealthy'}",
            "check its log; restarting it loses no jobs",
        )
    )
    if stats is None:
        return
    ahead = stats.at - at  # a heartbeat is at most a third of a lease old
    if ahead > SKEW_WARN_S or ahead < -(settings.lease_s + SKEW_WARN_S):
        yield clock_finding(f"{about} clock", ahead)
    if stats.last_desync_at is not None and at - stats.last_desync_at < DESYNC_WARN_S:
        yield CheckFinding(
            "warn",
            about,
            f"its ranks have disagreed (count: {stats.desyncs}), most recently "
            f"{(at - stats.last_desync_at) / 60:.0f} min ago: {stats.last_desync}",
            "the affected jobs were retried; if it recurs, suspect the hardware",
        )
    if stats.outbox > OUTBOX_WARN:
        yield CheckFinding(
            "warn",
            about,
            f"{stats.outbox} receipts wait for the relay",
            "check that the relay is running and reachable from the worker",
        )


def _model(card: dict[str, Any]) -> Iterator[CheckFinding]:
    """Yield the proven hook points of a model, and those that are not served."""
    about = f"model {card.get('id')}"
    certificate = card.get("certificate")
    absent = card.get("absent") or {}
    if why := card.get("dtype_reason"):
        yield CheckFinding("ok", about, f"computes in {card['dtype']}: {why}")
    for entry in card.get("extensions") or []:
        code = (
            f"{entry['kind']} {entry['name']} of {entry['package']} {entry['version']}, code "
            f"{entry['digest'][:12]}: {', '.join(entry['checked'])}"
        )
        yield CheckFinding("ok", about, code)
    if certificate is None:
        yield CheckFinding(
            "warn",
            about,
            "its hook points were not certified",
            "start the worker with the setting certify=true",
        )
        return
    proven = ", ".join(certificate["proven"]) or "no hook"
    text = f"certified in {certificate['seconds']:.1f} s: {proven}"
    if certificate.get("unproven"):
        text += f"; served unproven: {', '.join(certificate['unproven'])}"
    if absent:
        text += "; not served: " if certificate["absent"] else "; absent: "
        text += "; ".join(f"{hook}: {why}" for hook, why in absent.items())
    yield graded(
        about,
        bool(certificate["absent"]),
        text,
        "see docs/architectures.md, and the worker's log",
        fail=math.inf,
    )


def _keys(service: Service) -> CheckFinding:
    """Check whether the API requires keys, and accepts the configured one."""
    without_key, with_key = (
        service.get("/v1/tenant", keyed=keyed).status_code for keyed in (False, True)
    )
    if without_key == 401:
        valid = "missing or not valid" if with_key == 401 else "valid"
        found = f"required; the configured key is {valid}"
        return graded("keys", with_key == 401, found, "set MIDSTREAM_API_KEY", fail=math.inf)
    if is_loopback(urlsplit(service.url).hostname or ""):
        return CheckFinding("ok", "keys", "not required; the address is loopback")
    text = f"{service.url} requires no keys: anyone who can reach it has full access"
    return CheckFinding("fail", "keys", text, "`midstream create key`, then unset MIDSTREAM_AUTH")
