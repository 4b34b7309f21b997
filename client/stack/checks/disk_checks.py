"""Checks of the disks and the bucket that hold captures and receipts."""

import os
import secrets
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from ....schemas.base.errors import MidstreamError
from ....schemas.base.settings import Settings, is_loopback
from ....storage.store import Demanding, open_store
from .finding import Finding, Level

#: Milliseconds of a write with fsync; every group of capture files and receipts waits for several.
FSYNC_WARN_MS, FSYNC_FAIL_MS = 20.0, 200.0
#: Milliseconds to write a small object to a bucket.
STORE_WARN_MS = 2000.0
DISK_WARN, DISK_FAIL = 10 << 30, 1 << 30
FSYNCS = 20


def folders(settings: Settings) -> Iterator[Finding]:
    """Yield the folders that artifacts are registered from, where the data directory is on this
    machine.
    """
    if Path(settings.data_dir).is_dir():
        text = (
            f"autoencoders are registered from {settings.sae_root}, tuned lenses from "
            f"{settings.lens_root}, adapters from {settings.lora_dir or 'nowhere (set lora_dir)'}"
        )
        yield Finding("ok", "folders", text)


def disk(data: Path) -> Iterator[Finding]:
    """Check the disk's free space, and how long it takes to write with fsync."""
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


def store(settings: Settings) -> Iterator[Finding]:
    """Write, read and delete a small object in the bucket; for a folder outside `data_dir`, check
    its disk.
    """
    if "://" not in settings.artifact_store:
        if settings.artifact_store:
            yield from disk(Path(settings.artifact_store))
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
