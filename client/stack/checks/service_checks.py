"""Checks of the service through its API: its parts, models and keys."""

import asyncio
import time
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit

import httpx2

from ....schemas.base.errors import STATUS_OF_KIND, MidstreamError
from ....schemas.base.settings import Settings, is_loopback
from ....schemas.service.status import Status
from ...sdk import wire
from ...sdk.client import Client
from .finding import SKEW_WARN_S, TIMEOUT_S, Finding, clock_finding, version_finding

#: Allowed difference from the API's clock: HTTP's `Date` has whole seconds, and servers may repeat
#: a value for another second.
DATE_SKEW_S = 3.0
OUTBOX_WARN = 10_000
OVERDUE_WARN_S = 300.0
DESYNC_WARN_S = 24 * 3600.0
MISDIRECTED = STATUS_OF_KIND["misdirected"]


def api(url: str, headers: dict[str, str]) -> Iterator[Finding]:
    """Check that the API answers, its version and clock, and whether a job would run."""
    try:
        answer = httpx2.get(f"{url}/healthz", timeout=TIMEOUT_S)
        ready = httpx2.get(f"{url}/readyz", headers=headers, timeout=TIMEOUT_S)
    except httpx2.HTTPError as error:
        yield Finding(
            "fail",
            "api",
            f"no answer from {url}: {error}",
            "start the API (`midstream up`, or `python -m midstream.api`), or give --url",
        )
        return
    version = answer.headers.get(wire.VERSION_HEADER)
    if version is None:
        yield Finding("fail", "api", f"the server at {url} is not Midstream", "give --url")
        return
    if answer.status_code == MISDIRECTED:
        problem = answer.json()
        yield Finding(
            "fail", "api", problem["detail"], f"give --url with one of: {problem['allowed']}"
        )
        return
    yield version_finding("api", version, f"at {url}")
    if date := answer.headers.get("date"):
        yield clock_finding(
            "api clock", parsedate_to_datetime(date).timestamp() + 0.5 - time.time(), DATE_SKEW_S
        )
    if ready.status_code == 200:
        yield Finding("ok", "ready", "a job would run now")
    else:
        missing = (
            "; ".join(ready.json().get("missing", [])) or f"/readyz answers {ready.status_code}"
        )
        yield Finding(
            "fail", "ready", f"no job would run now: {missing}", "start a worker, and check its log"
        )


def status_of(redis_url: str, url: str, api_key: str) -> Status | str:
    """Return the status from the API, otherwise from Redis; an error message if both fail."""
    try:
        with Client(url, api_key) as client:
            return client.status()
    except MidstreamError as error:
        if not redis_url:
            return str(error)
    try:
        return asyncio.run(_from_redis(redis_url))
    except MidstreamError as error:
        return str(error)


async def _from_redis(redis_url: str) -> Status:
    from ....broker.ledger.jobs.ledger import Ledger
    from ....broker.ledger.jobs.status import read_status

    ledger = Ledger.connect(Settings(redis_url=redis_url))
    try:
        return await read_status(ledger)
    finally:
        await ledger.close()


def parts(status: Status, settings: Settings) -> Iterator[Finding]:
    """Check workers, relay, callbacks, webhooks and queues, as the service reports them."""
    yield from _workers(status, settings)
    if status.relay.alive:
        yield version_finding(
            "relay",
            status.relay.version,
            f"at {status.relay.url}, receipts accepted: {status.relay.received}",
        )
    else:
        result = "not seen for 15 s: captures and interventions wait for it, then time out"
        yield Finding(
            "fail",
            "relay",
            result,
            "start it (`python -m midstream.broker.relay`), and check its log",
        )
    if status.callbacks.alive:
        ago = (
            (
                ", the reaper's last pass "
                f"{max(0.0, status.at - status.callbacks.last_sweep):.1f} s ago"
            )
            if status.callbacks.last_sweep
            else ""
        )
        yield Finding("ok", "callbacks", f"alive{ago}")
    else:
        result = (
            "the reaper has not completed a pass recently: lost messages and dead workers' "
            "jobs are not recovered, "
            "and webhooks are not sent"
        )
        yield Finding(
            "fail",
            "callbacks",
            result,
            "start it (`python -m midstream.broker.callbacks`), and check its log",
        )
    pending, overdue = status.callbacks.webhooks_pending, status.callbacks.webhooks_overdue_s
    late = overdue > OVERDUE_WARN_S
    advice = (
        "`midstream webhooks list --state pending` lists receivers that do not answer"
        if late
        else ""
    )
    more = f", the oldest overdue by {overdue:.0f} s" if overdue >= 1 else ""
    yield Finding("warn" if late else "ok", "webhooks", f"{pending} pending{more}", advice)
    served = {worker.model for worker in status.workers if worker.healthy and not worker.queue}
    for queue in status.queues:
        if queue.model not in served:
            waiting = queue.sent + sum(queue.waiting.values())
            yield Finding(
                "fail",
                "queue",
                f"no worker serves {queue.model}; jobs waiting: {waiting}",
                f"start a worker for {queue.model}",
            )


def _workers(status: Status, settings: Settings) -> Iterator[Finding]:
    if not status.workers:
        yield Finding(
            "fail",
            "workers",
            "none is running",
            "start one (`python -m midstream.workers`), and check its log",
        )
    for worker in status.workers:
        about, stats = f"worker {worker.worker}", worker.stats
        if not worker.healthy:
            yield Finding(
                "fail",
                about,
                f"{worker.model}: {worker.detail or 'unhealthy'}",
                "check its log; restarting it loses no jobs",
            )
        else:
            more = f"serves {worker.model} (TP {worker.tp}, PP {worker.pp}) on {worker.host}"
            yield version_finding(about, worker.version, more)
        if stats is None:
            continue
        ahead = stats.at - status.at  # a heartbeat is at most a third of a lease old
        if ahead > SKEW_WARN_S or ahead < -(settings.lease_s + SKEW_WARN_S):
            yield clock_finding(f"{about} clock", ahead)
        if stats.last_desync_at is not None and status.at - stats.last_desync_at < DESYNC_WARN_S:
            text = (
                f"its ranks have disagreed (count: {stats.desyncs}), most recently "
                f"{(status.at - stats.last_desync_at) / 60:.0f} min ago"
            )
            yield Finding(
                "warn",
                about,
                f"{text}: {stats.last_desync}",
                "the affected jobs were retried; if it recurs, suspect the hardware",
            )
        if stats.outbox > OUTBOX_WARN:
            yield Finding(
                "warn",
                about,
                f"{stats.outbox} receipts wait for the relay",
                "check that the relay is running and reachable from the worker",
            )


def models(url: str, headers: dict[str, str]) -> Iterator[Finding]:
    """Yield the proven hook points of each model, and those that are not served."""
    try:
        listed = httpx2.get(f"{url}/v1/models", headers=headers, timeout=TIMEOUT_S)
        names = (
            [entry["id"] for entry in listed.json()["data"]] if listed.status_code == 200 else []
        )
        cards = [
            httpx2.get(f"{url}/v1/models/{name}", headers=headers, timeout=TIMEOUT_S).json()
            for name in names
        ]
    except (httpx2.HTTPError, ValueError, KeyError):
        return  # reported by an earlier check
    for card in cards:
        if why := card.get("dtype_reason"):
            yield Finding("ok", f"model {card.get('id')}", f"computes in {card['dtype']}: {why}")
        for entry in card.get("extensions") or []:
            code = (
                f"{entry['kind']} {entry['name']} of {entry['package']} {entry['version']}, code "
                f"{entry['digest'][:12]}"
            )
            checks = ", ".join(entry["checked"])
            yield Finding("ok", f"model {card.get('id')}", f"{code}: {checks}")
        about, certificate, absent = (
            f"model {card.get('id')}",
            card.get("certificate"),
            card.get("absent") or {},
        )
        reasons = "; ".join(f"{hook}: {why}" for hook, why in absent.items())
        if certificate is None:
            yield Finding(
                "warn",
                about,
                "its hook points were not certified",
                "start the worker with the setting certify=true",
            )
            continue
        proven = ", ".join(certificate["proven"]) or "no hook"
        text = f"certified in {certificate['seconds']:.1f} s: {proven}"
        if certificate.get("unproven"):
            text += f"; served unproven: {', '.join(certificate['unproven'])}"
        if certificate["absent"]:
            yield Finding(
                "warn",
                about,
                f"{text}; not served: {reasons}",
                "see docs/architectures.md, and the worker's log",
            )
        else:
            yield Finding("ok", about, f"{text}; absent: {reasons}" if reasons else text)


def keys(url: str, headers: dict[str, str]) -> Iterator[Finding]:
    """Check whether the API requires keys, and accepts the configured one."""
    try:
        without_key, with_key = (
            httpx2.get(f"{url}/v1/tenant", headers=sent, timeout=TIMEOUT_S).status_code
            for sent in ({}, headers)
        )
    except httpx2.HTTPError:
        return  # reported by an earlier check
    if without_key == MISDIRECTED:
        return  # reported by an earlier check
    if without_key != 401:
        if is_loopback(urlsplit(url).hostname or ""):
            yield Finding("ok", "keys", "not required; the address is loopback")
        else:
            text = f"{url} requires no keys: anyone who can reach it has full access"
            yield Finding(
                "fail", "keys", text, "`midstream keys create`, then unset MIDSTREAM_AUTH"
            )
    elif with_key == 401:
        yield Finding(
            "warn",
            "keys",
            "required; the configured key is missing or not valid",
            "set MIDSTREAM_API_KEY",
        )
    else:
        yield Finding("ok", "keys", "required; the configured key is valid")
