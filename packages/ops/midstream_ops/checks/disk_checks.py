"""Checks of the disks and the bucket that hold captures and receipts."""

import math
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import get_args
from urllib.parse import parse_qsl, urlsplit

from midstream.schemas.settings.settings import ArtifactFolder, is_loopback
from midstream.storage.disk import probe
from midstream.storage.store import Demanding, committed, open_store

from .finding import CheckFinding, graded, timed
from .service import Service

#: Milliseconds of a write with fsync; every group of capture files and receipts waits for several.
FSYNC_WARN_MS = 20.0
FSYNC_FAIL_MS = 200.0
#: Milliseconds to write a small object to a bucket.
STORE_WARN_MS = 2000.0
DISK_WARN = 10 << 30
DISK_FAIL = 1 << 30
#: The largest queue between two processes of an engine: with less room for it vLLM does not start.
SHARED_FAIL = 240 << 20
FSYNCS = 20
#: While nothing can be written, Redis rejects every call that deletes something.
BY_HAND = (
    "until some MiB are free, nothing can be deleted over HTTP: first remove by hand what "
    "docs/operations.md#full-and-read-only-disks lists; then `midstream delete capture`"
)


def data_disk(service: Service) -> Iterator[CheckFinding]:
    """Name the folders that artifacts are registered from, and check the data directory's disk, if
    they are on this machine. Raises OSError.
    """
    settings = service.settings
    if Path(settings.data_dir).is_dir():
        whose = (
            "by the settings of the running stack"
            if service.is_of_stack
            else "by the settings of this command (those of the server may differ)"
        )
        folders = ", ".join(map(settings.artifacts_of, get_args(ArtifactFolder)))
        text = f"{whose}, artifacts are registered from {folders}"
        yield CheckFinding("ok", "folders", text)
        free = shutil.disk_usage("/dev/shm").free
        found = f"{free >> 20} MiB free in /dev/shm"
        advice = "an engine needs 240 MiB: give the container more (docker run --shm-size=1g)"
        yield graded("shared memory", free < SHARED_FAIL, found, advice)
    yield from _disk(Path(settings.data_dir).expanduser().resolve())


def _disk(data: Path) -> Iterator[CheckFinding]:
    """Check the disk's free space, and how long it takes to write with fsync. Raises OSError."""
    if not data.is_dir():
        yield CheckFinding("ok", "disk", f"{data} is not on this machine: not checked")
        return
    free = shutil.disk_usage(data).free
    yield graded(
        "disk space",
        -free,
        f"{free / 2**30:.1f} GiB free in {data}",
        BY_HAND
        if probe(data)
        else "delete captures: `midstream delete capture`, capture_ttl_s or capture_quota_mib",
        -DISK_WARN,
        -DISK_FAIL,
    )
    with tempfile.NamedTemporaryFile(dir=data, prefix=".doctor-") as file:

        def write() -> None:
            os.pwrite(file.fileno(), bytes(4096), 0)
            os.fsync(file.fileno())

        middle, found = timed(FSYNCS, write)
    advice = "receipts and captures wait for the disk: use a local SSD for data_dir"
    yield graded("disk fsync", middle, f"{found} writes", advice, FSYNC_WARN_MS, FSYNC_FAIL_MS)
    yield from _memory(data, Path("/proc/mounts"))


def _memory(data: Path, mounts: Path) -> Iterator[CheckFinding]:
    """Say which pages a folder in memory has. Raises OSError."""
    entries = [line.split(" ")[1:4] for line in mounts.read_text().splitlines()]
    within = [entry for entry in entries if data.is_relative_to(entry[0])]
    folder, kind, options = max(within, key=lambda entry: len(entry[0]), default=("", "", ""))
    if kind == "tmpfs":
        huge = {"huge=always", "huge=within_size"} & set(options.split(","))
        slow = (
            "pages of 4 KiB: with the mount option huge=always captures are written twice as fast"
        )
        yield CheckFinding("ok", "memory", f"{folder} has {'huge pages' if huge else slow}")


def store(service: Service) -> Iterator[CheckFinding]:
    """Write, read and delete a small object in the bucket; for a folder outside `data_dir`, check
    its disk. Raises OSError, ValueError and MidstreamError.
    """
    settings = service.settings
    if "://" not in settings.artifact_store:
        if settings.artifact_store:
            yield from _disk(Path(settings.artifact_store))
        return
    key = f".doctor/{secrets.token_hex(8)}"
    store = open_store(settings.artifacts)
    store.prepare()

    def write() -> None:
        with committed(store) as writer:
            writer.append(key, [b"midstream"])

    took, _ = timed(1, write)
    with store.open(key) as handle:
        read = handle.read(0, 100)
    store.delete(key)
    wrong = f"{settings.artifacts} returned other bytes than were written"
    unfit = store.unfit() if isinstance(store, Demanding) else ""
    if trouble := wrong if read != b"midstream" else unfit:
        advice = "use another server: docs/machines.md lists tested servers"
        yield CheckFinding("fail", "artifact store", trouble, advice)
        return
    endpoint = dict(parse_qsl(urlsplit(settings.artifacts).query)).get("endpoint", "")
    address = urlsplit(endpoint)
    if address.scheme == "http" and not is_loopback(address.hostname or ""):
        yield CheckFinding(
            "warn",
            "artifact store",
            f"{endpoint} is not encrypted",
            "use https:// outside a private network",
        )
    yield graded(
        "artifact store",
        took,
        f"{settings.artifacts} stored an object in {took:.0f} ms",
        "receipts of captures wait for the store: use a nearer one",
        STORE_WARN_MS,
        math.inf,
    )
