"""The checks of `midstream doctor`, each with advice.

Redis is queried directly, all other parts through the API. The checks remove everything they
create.
"""

import asyncio
import os
import secrets
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

import httpx2

from ...schemas.base.errors import STATUS_OF_KIND, MidstreamError
from ...schemas.base.settings import Settings, SettingsError, is_loopback
from ...schemas.base.version import __version__
from ...schemas.service.status import Status
from ...storage.store import Demanding, open_store
from ..sdk import wire
from ..sdk.client import Client

Level = Literal["ok", "warn", "fail"]

LEAST_REDIS = (6, 2)
#: Milliseconds of a round trip to Redis: above the first, held responses and receipts are slow;
#: above the second, everything is slow.
PING_WARN_MS, PING_FAIL_MS = 5.0, 50.0
#: Share of Redis' memory limit in use that causes a warning.
MEMORY_WARN = 0.7
#: Differences of two clocks in seconds: above the first, leases and deadlines are noticeably wrong;
#: above the second, they are useless.
SKEW_WARN_S, SKEW_FAIL_S = 0.5, 5.0
#: Allowed difference from the API's clock: HTTP's `Date` has whole seconds, and servers may repeat
#: a value for another second.
DATE_SKEW_S = 3.0
#: Milliseconds of a write with fsync; every group of capture files and receipts waits for several.
FSYNC_WARN_MS, FSYNC_FAIL_MS = 20.0, 200.0
#: Milliseconds to write a small object to a bucket.
STORE_WARN_MS = 2000.0
FSYNCS, PINGS = 20, 20
DISK_WARN, DISK_FAIL = 10 << 30, 1 << 30
OUTBOX_WARN = 10_000
OVERDUE_WARN_S = 300.0
DESYNC_WARN_S = 24 * 3600.0
TIMEOUT_S = 5.0
MISDIRECTED = STATUS_OF_KIND["misdirected"]


class Finding(NamedTuple):
    level: Level
    about: str
    found: str
    advice: str = ""  # what to do about it


def examine(settings: Settings, redis_url: str, url: str) -> Iterator[Finding]:
    """Run all checks, in order of dependency. `redis_url`: empty if not configured."""
    if redis_url:
        yield from _redis(redis_url, settings)
    else:
        yield Finding(
            "warn",
            "redis",
            "Redis URL not configured, and no `midstream up` is running on the data directory",
            (
                "set MIDSTREAM_REDIS_URL, or set MIDSTREAM_DATA_DIR to the data directory of a "
                "running `midstream up`"
            ),
        )
    headers = wire.headers(settings.api_key)
    yield from _api(url, headers)
    status = _status(redis_url, url, settings.api_key)
    if isinstance(status, Status):
        yield from _parts(status, settings)
    else:
        yield Finding(
            "fail",
            "service",
            f"cannot read the service's status: {status}",
            "fix the problems above, or use a key with scope observe",
        )
    yield from _models(url, headers)
    yield from _vllm(settings)
    yield from _extensions(settings)
    yield from _folders(settings)
    yield from _disk(Path(settings.data_dir).expanduser().resolve())
    yield from _store(settings)
    yield from _keys(url, headers)


# --- Redis


def _redis(url: str, settings: Settings) -> Iterator[Finding]:
    import redis

    from ...broker.ops import redis_open

    client = redis_open.client(url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S)
    try:
        info: dict[str, Any] = client.info()
    except redis.AuthenticationError as error:
        yield Finding(
            "fail",
            "redis",
            f"access denied: {error}",
            "set MIDSTREAM_REDIS_PASSWORD, or the user in MIDSTREAM_REDIS_URL",
        )
        return
    except (redis.RedisError, OSError) as error:
        yield Finding(
            "fail",
            "redis",
            f"does not answer: {error}",
            "start Redis, and check MIDSTREAM_REDIS_URL and the network",
        )
        return
    version = str(info["redis_version"])
    known = tuple(int(part) for part in version.split(".")[:2])
    if known < LEAST_REDIS:
        yield Finding("fail", "redis", f"version {version}", "6.2 or later is required")
    else:
        valkey = f" (Valkey {info['valkey_version']})" if "valkey_version" in info else ""
        clients = info["connected_clients"]
        yield Finding("ok", "redis", f"version {version}{valkey}, clients: {clients}")
    yield from _latency(client)
    yield from _memory(info, settings)
    yield from _durability(info, _config(client, "appendfsync"))
    yield from default_user(client, known)
    seconds, micros = client.time()
    yield _clock("redis clock", seconds + micros / 1e6 - time.time())


def _latency(client: Any) -> Iterator[Finding]:
    took = []
    for _ in range(PINGS):
        began = time.perf_counter()
        client.ping()
        took.append((time.perf_counter() - began) * 1000)
    middle = statistics.median(took)
    level: Level = "fail" if middle > PING_FAIL_MS else "warn" if middle > PING_WARN_MS else "ok"
    advice = (
        ""
        if level == "ok"
        else "move Redis closer, and check for slow commands: `redis-cli slowlog get`"
    )
    yield Finding(
        level,
        "redis latency",
        f"median {middle:.2f} ms, maximum {max(took):.2f} ms in {PINGS} pings",
        advice,
    )


def _memory(info: dict[str, Any], settings: Settings) -> Iterator[Finding]:
    policy, used, limit = (
        str(info["maxmemory_policy"]),
        int(info["used_memory"]),
        int(info["maxmemory"]),
    )
    if policy != "noeviction":
        advice = "`CONFIG SET maxmemory-policy noeviction`, and the same in Redis' configuration"
        yield Finding(
            "fail",
            "redis eviction",
            f"maxmemory-policy is {policy}: accepted jobs are lost when memory is full",
            advice,
        )
    else:
        yield Finding("ok", "redis eviction", "maxmemory-policy is noeviction")
    if removed := int(info["evicted_keys"]):
        yield Finding(
            "fail",
            "redis eviction",
            f"keys evicted since Redis started: {removed}; jobs are lost",
            "resubmit the missing jobs",
        )
    if not limit:
        yield Finding("ok", "redis memory", f"{used / 2**20:.0f} MiB used, no limit (maxmemory 0)")
        return
    share = used / limit
    text = f"{used / 2**20:.0f} of {limit / 2**20:.0f} MiB used ({share:.0%})"
    if share >= settings.redis_fill_limit:
        yield Finding(
            "fail",
            "redis memory",
            f"{text}: submissions are answered with 503",
            "raise maxmemory, or let results expire sooner (result_ttl_s)",
        )
    elif share >= MEMORY_WARN:
        yield Finding(
            "warn",
            "redis memory",
            text,
            f"submissions are rejected at {settings.redis_fill_limit:.0%}: raise maxmemory",
        )
    else:
        yield Finding("ok", "redis memory", text)


def default_user(client: Any, version: tuple[int, ...]) -> Iterator[Finding]:
    """Yield whether a restart would drop data for want of the default user's rights, see
    `broker.ops.acl`. Nothing if this user may not ask.
    """
    import redis

    try:
        user = client.acl_getuser("default")
    except redis.RedisError:
        return
    if version >= (7, 0) and "+@all" not in user["categories"]:
        yield Finding(
            "fail",
            "redis users",
            "the user default lacks rights with which Redis loads its AOF: a restart drops jobs",
            "`ACL SETUSER default off ~* &* +@all`, and the same in its aclfile, before a restart",
        )


def _durability(info: dict[str, Any], appendfsync: str | None) -> Iterator[Finding]:
    if int(info.get("loading", 0)):  # while loading, Redis reports the AOF as off
        yield Finding(
            "warn",
            "redis AOF",
            f"is being loaded: {info.get('loading_loaded_perc', 0)} %",
            "wait until it is loaded",
        )
        return
    if not int(info["aof_enabled"]):
        advice = "`CONFIG SET appendonly yes`, and the same in Redis' configuration"
        yield Finding(
            "fail",
            "redis AOF",
            "off: jobs accepted since the last snapshot are lost on restart",
            advice,
        )
        return
    if (
        info.get("aof_last_write_status", "ok") != "ok"
        or info.get("aof_last_bgrewrite_status", "ok") != "ok"
    ):
        yield Finding(
            "fail",
            "redis AOF",
            "the last write or rewrite failed",
            "check Redis' log and its free disk space",
        )
    if appendfsync is None:
        yield Finding("ok", "redis AOF", "on; this user is not allowed to read appendfsync")
    elif appendfsync == "no":
        yield Finding(
            "fail",
            "redis AOF",
            "appendfsync is no: the last 30 seconds may be lost",
            "`CONFIG SET appendfsync everysec`",
        )
    else:
        loss = (
            "nothing"
            if appendfsync == "always"
            else "up to a second of accepted jobs if its machine fails"
        )
        yield Finding("ok", "redis AOF", f"on, appendfsync {appendfsync}: may lose {loss}")


def _config(client: Any, name: str) -> str | None:
    """Return a configuration value of Redis; None if this user may not read it."""
    import redis

    try:
        result = client.config_get(name)
    except redis.ResponseError:  # ACL: no permission
        return None
    return str(result.get(name)) if name in result else None


def _clock(about: str, ahead: float, warn: float = SKEW_WARN_S) -> Finding:
    level: Level = "fail" if abs(ahead) > SKEW_FAIL_S else "warn" if abs(ahead) > warn else "ok"
    text = f"{abs(ahead):.2f} s {'ahead of' if ahead > 0 else 'behind'} this machine's"
    return Finding(
        level,
        about,
        text,
        "" if level == "ok" else "leases and deadlines depend on clocks: run NTP on both machines",
    )


# --- API


def _api(url: str, headers: dict[str, str]) -> Iterator[Finding]:
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
    yield _version("api", version, f"at {url}")
    if date := answer.headers.get("date"):
        yield _clock(
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


def _version(about: str, version: str, more: str = "") -> Finding:
    text = f"version {version}{' ' + more if more else ''}"
    if version == __version__:
        return Finding("ok", about, text)
    return Finding(
        "warn",
        about,
        f"{text}; this command's version is {__version__}",
        "run one version everywhere: see the notes on upgrades",
    )


# --- Status of the service


def _status(redis_url: str, url: str, api_key: str) -> Status | str:
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
    from ...broker.ledger.jobs.ledger import Ledger
    from ...broker.ledger.jobs.status import read_status

    ledger = Ledger.connect(Settings(redis_url=redis_url))
    try:
        return await read_status(ledger)
    finally:
        await ledger.close()


def _parts(status: Status, settings: Settings) -> Iterator[Finding]:
    yield from _workers(status, settings)
    if status.relay.alive:
        yield _version(
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
    served = {worker.model for worker in status.workers if worker.healthy}
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
            yield _version(about, worker.version, more)
        if stats is None:
            continue
        ahead = stats.at - status.at  # a heartbeat is at most a third of a lease old
        if ahead > SKEW_WARN_S or ahead < -(settings.lease_s + SKEW_WARN_S):
            yield _clock(f"{about} clock", ahead)
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


# --- vLLM


def _vllm(settings: Settings) -> Iterator[Finding]:
    """Check this environment's vLLM; yield nothing if it is not installed.

    Options are checked only if any are set, because the check imports vLLM.
    """
    from ...workers.engines import check_options
    from ...workers.runner.support.seams import WINDOW, SeamError, verify
    from ...workers.runner.support.vllm_source import installed

    try:
        source = installed()
    except ModuleNotFoundError:
        return
    try:
        caveats = verify(source, unproven=settings.engine_unproven)
        yield Finding(
            "warn" if caveats else "ok", "vllm", "; ".join(caveats) or f"version {source.version}"
        )
    except SeamError as error:
        yield Finding(
            "fail", "vllm", str(error), f"install an unchanged build of one of {', '.join(WINDOW)}"
        )
        return
    try:
        for caveat in check_options(settings):
            yield Finding(
                "warn",
                "vllm options",
                caveat,
                "remove it from the table [engine], or compare its rows yourself",
            )
    except SettingsError as error:
        yield Finding(
            "fail", "vllm options", str(error), "docs/engine-options.md lists what is accepted"
        )


def _extensions(settings: Settings) -> Iterator[Finding]:
    """Yield the extensions that packages of this environment offer, and whether the setting names
    them; does not import the packages.
    """
    from ...workers.runner.base.extensions import check_installed, named, offered

    try:
        check_installed(settings.extensions)
    except SettingsError as error:
        yield Finding(
            "fail",
            "extensions",
            str(error),
            "install the package where the worker runs, or remove it from the setting extensions",
        )
    for offer in offered():
        about = f"{offer.package} {offer.version} offers the {offer.kind} {offer.name}"
        if offer.package in named(settings.extensions):
            yield Finding("ok", "extensions", about)
        else:
            yield Finding(
                "ok",
                "extensions",
                (
                    f"{about}; a worker with these settings does not load it: extensions does not "
                    "name it"
                ),
            )


# --- This machine


def _models(url: str, headers: dict[str, str]) -> Iterator[Finding]:
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


def _folders(settings: Settings) -> Iterator[Finding]:
    """Yield the folders that artifacts are registered from, where the data directory is on this
    machine.
    """
    if Path(settings.data_dir).is_dir():
        text = (
            f"autoencoders are registered from {settings.sae_root}, tuned lenses from "
            f"{settings.lens_root}, adapters from {settings.lora_dir or 'nowhere (set lora_dir)'}"
        )
        yield Finding("ok", "folders", text)


def _disk(data: Path) -> Iterator[Finding]:
    if not data.is_dir():
        yield Finding("ok", "disk", f"{data} is not on this machine: not checked")
        return
    free = shutil.disk_usage(data).free
    level: Level = "fail" if free < DISK_FAIL else "warn" if free < DISK_WARN else "ok"
    advice = (
        ""
        if level == "ok"
        else (
            "delete captures (`midstream capture delete`, capture_ttl_s), or set capture_quota_mib"
        )
    )
    yield Finding(level, "disk space", f"{free / 2**30:.1f} GiB free in {data}", advice)
    try:
        took = _fsyncs(data)
    except OSError as error:
        yield Finding(
            "fail",
            "disk",
            f"{data} cannot be written: {error}",
            "make it writable by the worker's user",
        )
        return
    middle = statistics.median(took)
    level = "fail" if middle > FSYNC_FAIL_MS else "warn" if middle > FSYNC_WARN_MS else "ok"
    advice = (
        ""
        if level == "ok"
        else "receipts and captures wait for the disk: use a local SSD for data_dir"
    )
    yield Finding(
        level,
        "disk fsync",
        f"median {middle:.2f} ms, maximum {max(took):.2f} ms in {len(took)} writes",
        advice,
    )


def _store(settings: Settings) -> Iterator[Finding]:
    """Write, read and delete a small object in the bucket; for a folder outside `data_dir`, check
    its disk.
    """
    if "://" not in settings.artifact_store:
        if settings.artifact_store:
            yield from _disk(Path(settings.artifact_store))
        return
    key = f".doctor/{secrets.token_hex(8)}"
    try:
        store = open_store(settings.artifacts)
        store.prepare()
        began = time.perf_counter()
        writer = store.writer()
        writer.append(key, [b"midstream"])
        writer.commit()
        took = (time.perf_counter() - began) * 1000
        with store.open(key) as handle:
            read = handle.read(0, 100)
        store.delete(key)
        unfit = store.unfit() if isinstance(store, Demanding) else ""
    except (OSError, ValueError, MidstreamError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        yield Finding(
            "fail", "artifact store", reason, "docs/object-storage.md explains each reason"
        )
        return
    if read != b"midstream":
        yield Finding(
            "fail",
            "artifact store",
            f"{settings.artifacts} returned other bytes than were written",
            "use another store",
        )
        return
    if unfit:
        yield Finding(
            "fail",
            "artifact store",
            unfit,
            "use another server: docs/object-storage.md lists tested servers",
        )
        return
    if settings.artifact_endpoint.startswith("http://") and not is_loopback(
        urlsplit(settings.artifact_endpoint).hostname or ""
    ):
        yield Finding(
            "warn",
            "artifact store",
            f"{settings.artifact_endpoint} is not encrypted",
            "use https:// outside a private network",
        )
    level: Level = "warn" if took > STORE_WARN_MS else "ok"
    advice = "receipts of captures wait for the store: use a nearer one" if level == "warn" else ""
    yield Finding(
        level, "artifact store", f"{settings.artifacts} stored an object in {took:.0f} ms", advice
    )


def _fsyncs(folder: Path) -> list[float]:
    """Write 4 KiB with fsync several times; return the milliseconds of each."""
    took = []
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-") as file:
        for _ in range(FSYNCS):
            began = time.perf_counter()
            os.pwrite(file.fileno(), bytes(4096), 0)
            os.fsync(file.fileno())
            took.append((time.perf_counter() - began) * 1000)
    return took


# --- Keys


def _keys(url: str, headers: dict[str, str]) -> Iterator[Finding]:
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
