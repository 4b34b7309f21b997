"""Hands the plane's configuration from the worker to the followers of an engine on several machines, through Redis.

A follower's ranks need what the worker generates at each start (its boot, the buffers' sizes). Paths, cores and keys are those of each
machine. A follower joins the start that it was told of, and no other: `ms:node:{worker}`, JSON of a `PlaneConfig`.
"""

import logging
import os
import time
from pathlib import Path

import msgspec

from ...broker.ops import redis_open
from ...schemas.base import from_json, to_json
from ...schemas.settings import Settings
from ..runner.config import PlaneConfig

log = logging.getLogger(__name__)

POLL_S, TIMEOUT_S = 0.5, 5.0
#: A worker that has been seen alive counts as gone after so many leases without its sign of life.
LEASES_GONE = 2.0


def _key(worker: str) -> str:
    return f"ms:node:{worker}"


def publish(settings: Settings, plane: PlaneConfig) -> None:
    """Tell the followers of this start. Raises redis.RedisError."""
    with redis_open.client(settings.redis_url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S) as client:
        client.set(_key(settings.worker_id), to_json(plane))
    log.warning("waiting for %d more machines: python -m midstream.workers.follower", settings.nodes - 1)


class Worker:
    """The worker as a follower sees it."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._client = redis_open.client(settings.redis_url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S)
        self._alive = float("-inf")  # when it was last seen (monotonic); it is not before its engine is ready

    def start(self) -> PlaneConfig | None:
        """The configuration of the last start, as it holds on this machine; None before the first. Raises redis.RedisError."""
        raw = self._client.get(_key(self._settings.worker_id))
        if raw is None:
            return None
        data = Path(self._settings.data_dir).resolve()
        return msgspec.structs.replace(
            from_json(raw, PlaneConfig),
            relay_url=self._settings.relay_url,
            outbox_dir=str(data / "outbox"),
            spill_dir=str(data / "spill"),
            capture_root=str(self._settings.capture_root),
            lens_dir=self._settings.lens_dir,
            cores=sorted(os.sched_getaffinity(0)),
            curve_secret_file=self._settings.curve_secret_file,
            curve_server_key=self._settings.curve_server_key,
        )

    def await_start(self, after: str) -> PlaneConfig:
        """The first start whose boot is not `after`."""
        while True:
            found = self.start()
            if found is not None and found.boot != after:
                return found
            time.sleep(POLL_S)

    def is_over(self, boot: str) -> bool:
        """Whether that start has ended: another one began, or its sign of life is gone."""
        found = self.start()
        if found is None or found.boot != boot:
            return True
        now = time.monotonic()
        if self._client.get(f"ms:alive:{self._settings.worker_id}") == boot.encode():
            self._alive = now
        return 0 < self._alive < now - LEASES_GONE * self._settings.lease_s
