"""Passes the plane's configuration from the worker to the followers of an engine on several
machines, and lets worker and followers detect each other's end.

A follower's ranks need what the worker generates at each start (its boot, the buffers' sizes);
paths, cores and keys are each machine's own. A follower joins only the start that is published in
`ms:node:{worker}` (JSON of a `PlaneConfig`).

The ranks alone would notice a loss late: vLLM waits 300 s for a missing rank, and longer on a
connection whose packets are dropped. So a follower renews `ms:node-alive:{worker}:{rank}`, as long
as it also reaches the worker's machine.
"""

import contextlib
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import redis

from ...broker.redis_service import opening as redis_open
from ...broker.redis_service.availability import await_writes, is_redis_unavailable
from ...schemas.base import MidstreamError, from_json, to_json
from ...schemas.jobs.models import SHOWN_IDENTITY
from ...schemas.settings.settings import Settings
from ..runner.base.config import PlaneConfig

log = logging.getLogger(__name__)

POLL_S, TIMEOUT_S = 0.5, 5.0
#: A worker that was seen alive counts as gone after this many leases without its sign of life.
LEASES_GONE = 2.0


def _key(worker: str) -> str:
    return f"ms:node:{worker}"


def _sign(worker: str, rank: int) -> str:
    return f"ms:node-alive:{worker}:{rank}"


def _connect(settings: Settings) -> "redis.Redis":
    return redis_open.client(
        settings.redis_url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S
    )


def publish(settings: Settings, plane: PlaneConfig) -> None:
    """Publish this start to the followers, once Redis accepts writes. Raises redis.RedisError."""
    await_writes(settings.redis_url)
    with _connect(settings) as client:
        client.set(_key(settings.worker_id), to_json(plane))
    log.warning(
        "waiting for %d more machines: run `python -m midstream.workers.follower` on each",
        settings.nodes - 1,
    )


def check_identity(plane: PlaneConfig, identity: str) -> None:
    """Raises MidstreamError if this machine's model is not the worker's: their ranks would compute
    two models.
    """
    if plane.identity != identity:
        raise MidstreamError(
            "model_changed",
            f"the model on this machine has the identity {identity[:SHOWN_IDENTITY]}, but the "
            f"model of worker {plane.worker!r} has {plane.identity[:SHOWN_IDENTITY]}",
            field="model",
            allowed="the worker's checkpoint, dtype and engine options on every machine",
        )


class Worker:
    """The worker as a follower sees it."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._client = _connect(settings)
        # distinguishes this process from an earlier follower of the machine, whose ranks are gone
        self._self = secrets.token_hex(4)
        self._next = float("-inf")  # when the sign of life is due (monotonic)
        # when the worker's machine was last reached (monotonic); its port opens when the engine's
        # ranks connect to each other
        self._reached = float("-inf")
        # when the worker was last seen alive (monotonic); -inf until its engine is ready
        self._alive = float("-inf")

    def start(self) -> PlaneConfig | None:
        """Return the configuration of the last start, with this machine's paths, cores and keys;
        None before the first start.

        Raises redis.RedisError.
        """
        if (raw := self._client.get(_key(self._settings.worker_id))) is None:
            return None
        data = Path(self._settings.data_dir).resolve()
        return msgspec.structs.replace(
            from_json(raw, PlaneConfig),
            relay_url=self._settings.relay_url,
            outbox_dir=str(data / "outbox"),
            spill_dir=str(data / "spill"),
            capture_root=self._settings.artifacts,
            lens_dir=self._settings.artifacts_of("lenses"),
            cores=sorted(os.sched_getaffinity(0)),
            curve_secret_file=self._settings.curve_secret_file,
            curve_server_key=self._settings.curve_server_key,
        )

    def await_start(self, after: str) -> PlaneConfig:
        """Wait for and return the first start whose boot is not `after`.

        Waits while Redis is unreachable or loads its log. Raises other redis.RedisErrors.
        """
        logged = False
        while True:
            try:
                plane = self.start()
                if plane is not None and plane.boot != after:
                    return plane
            except redis.RedisError as error:
                if not is_redis_unavailable(error):
                    raise
                if not logged:
                    log.warning("waiting for Redis: %s", error)
                logged = True
            time.sleep(POLL_S)

    def is_over(self, boot: str) -> bool:
        """Return whether the start `boot` has ended: another one began, or its sign is gone.

        Raises redis.RedisError.
        """
        plane = self.start()
        if plane is None or plane.boot != boot:
            return True
        now = time.monotonic()
        if self._client.get(f"ms:alive:{self._settings.worker_id}") == boot.encode():
            self._alive = now
        return 0 < self._alive < now - LEASES_GONE * self._settings.lease_s

    def renew(self, boot: str) -> bool:
        """Renew this machine's sign of life, four times per lease.

        Returns False if the worker's machine was unreachable for `lease_s`. Raises
        redis.RedisError.
        """
        lease, now = self._settings.lease_s, time.monotonic()
        if now < self._next:
            return True
        self._next = now + lease / 4
        host, _, port = self._settings.node_master.rpartition(":")
        with (
            contextlib.suppress(OSError),
            socket.create_connection((host.strip("[]"), int(port)), lease / 4),
        ):
            self._reached = time.monotonic()
        if 0 < self._reached < now - lease:
            return False
        self._client.set(
            _sign(self._settings.worker_id, self._settings.node_rank),
            f"{boot}:{self._self}",
            px=int(lease * 1000),
        )
        return True

    def leave(self) -> None:
        """Remove the sign of life, if Redis is reachable."""
        with contextlib.suppress(redis.RedisError):
            self._client.delete(_sign(self._settings.worker_id, self._settings.node_rank))


class Followers:
    """The other machines as the worker sees them.

    Calls `on_loss` once, with the reason, on its own thread, when it has lost a machine.
    """

    def __init__(self, settings: Settings, boot: str, on_loss: Callable[[str], object]) -> None:
        self._settings, self._boot, self._on_loss = settings, boot, on_loss
        self._client = _connect(settings)
        self._ranks = range(1, settings.nodes)
        self._joined: dict[int, bytes] = {}  # node_rank → sign of life
        self._until: dict[int, float] = {}  # node_rank → when it counts as lost (monotonic)
        self._over = threading.Event()
        threading.Thread(target=self._watch, name="followers", daemon=True).start()

    def stop(self) -> None:
        """Stop watching: from now on the end of a follower is not a loss."""
        self._over.set()

    def _watch(self) -> None:
        while not self._over.wait(POLL_S):
            lost = self.lost(time.monotonic())
            if lost is not None and not self._over.is_set():
                self._on_loss(
                    f"machine {lost} of the engine is lost: its follower has ended, or given no "
                    f"sign of life for {self._settings.lease_s} s"
                )
                return

    def lost(self, now: float) -> int | None:
        """Return the `node_rank` of a machine that joined this start and then ended or was started
        again; None if there is none. `now` is monotonic.
        """
        try:
            signs: Any = self._client.mget(
                [_sign(self._settings.worker_id, rank) for rank in self._ranks]
            )
        except redis.RedisError as error:
            log.info("cannot check on followers, Redis unreachable: %s", error)
            # followers may not have reached Redis either
            self._until = dict.fromkeys(self._until, now + self._settings.lease_s)
            return None
        for rank, sign in zip(self._ranks, signs, strict=True):
            if sign is not None and sign.startswith(self._boot.encode()):
                if self._joined.setdefault(rank, sign) != sign:
                    return rank
                self._until[rank] = now + 2 * POLL_S
            elif self._until.get(rank, now) < now:
                return rank
        return None
