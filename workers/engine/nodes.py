"""Hands the plane's configuration from the worker to the followers of an engine on several
machines, and lets each see the other's end.

A follower's ranks need what the worker generates at each start (its boot, the buffers' sizes).
Paths, cores and keys are those of each machine. A follower joins the published start, and
no other: `ms:node:{worker}`, JSON of a `PlaneConfig`.

The ranks alone would not notice a loss: vLLM waits 300 s for the last of them, and a connection
whose packets vanish for longer. So a follower renews `ms:node-alive:{worker}:{rank}`, as long as it
also reaches the worker's machine.
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

from ...broker.ops import redis_open
from ...broker.ops.redis_availability import await_writes, is_redis_unavailable
from ...schemas.base.errors import MidstreamError
from ...schemas.base.records import from_json, to_json
from ...schemas.base.settings import Settings
from ...schemas.jobs.models import SHOWN_IDENTITY
from ..runner.base.config import PlaneConfig

log = logging.getLogger(__name__)

POLL_S, TIMEOUT_S = 0.5, 5.0
#: A worker that has been seen alive counts as gone after that many leases without its sign of life.
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
        "waiting for %d more machines: python -m midstream.workers.follower", settings.nodes - 1
    )


def check_identity(plane: PlaneConfig, identity: str) -> None:
    """Raises MidstreamError where this machine's checkpoint is not that of the worker: their ranks
    would compute two models.
    """
    if plane.identity != identity:
        raise MidstreamError(
            "model_changed",
            f"the model here has the identity {identity[:SHOWN_IDENTITY]}, and that of "
            f"worker {plane.worker!r} has "
            f"{plane.identity[:SHOWN_IDENTITY]}",
            field="model",
            allowed="the worker's checkpoint, dtype and engine options on every machine",
        )


class Worker:
    """The worker as a follower sees it."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._client = _connect(settings)
        # a follower that is started again is not the one that has the ranks
        self._self = secrets.token_hex(4)
        self._next = float("-inf")  # when the sign of life is due (monotonic)
        # when its machine was last reached (monotonic); it is not before its ranks meet
        self._met = float("-inf")
        # when it was last seen (monotonic); it is not before its engine is ready
        self._alive = float("-inf")

    def start(self) -> PlaneConfig | None:
        """The configuration of the last start, as it holds on this machine; None before the first.

        Raises redis.RedisError.
        """
        raw = self._client.get(_key(self._settings.worker_id))
        if raw is None:
            return None
        data = Path(self._settings.data_dir).resolve()
        return msgspec.structs.replace(
            from_json(raw, PlaneConfig),
            relay_url=self._settings.relay_url,
            outbox_dir=str(data / "outbox"),
            spill_dir=str(data / "spill"),
            capture_root=self._settings.artifacts,
            lens_dir=self._settings.lens_dir,
            cores=sorted(os.sched_getaffinity(0)),
            curve_secret_file=self._settings.curve_secret_file,
            curve_server_key=self._settings.curve_server_key,
        )

    def await_start(self, after: str) -> PlaneConfig:
        """The first start whose boot is not `after`.

        A Redis that is unreachable, or loads its log, is waited for.

        Raises redis.RedisError.
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
        """Return whether that start has ended: another one began, or its sign of life is gone."""
        plane = self.start()
        if plane is None or plane.boot != boot:
            return True
        now = time.monotonic()
        if self._client.get(f"ms:alive:{self._settings.worker_id}") == boot.encode():
            self._alive = now
        return 0 < self._alive < now - LEASES_GONE * self._settings.lease_s

    def stay(self, boot: str) -> bool:
        """Renew this machine's sign of life, four times per lease.

        False: the worker's machine could not be reached for `lease_s`.

        Raises redis.RedisError.
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
            self._met = time.monotonic()
        if 0 < self._met < now - lease:
            return False
        self._client.set(
            _sign(self._settings.worker_id, self._settings.node_rank),
            f"{boot}:{self._self}",
            px=int(lease * 1000),
        )
        return True

    def leave(self) -> None:
        """Take the sign of life away, where Redis can be reached."""
        with contextlib.suppress(redis.RedisError):
            self._client.delete(_sign(self._settings.worker_id, self._settings.node_rank))


class Followers:
    """The other machines as the worker sees them.

    Calls `on_loss` with the reason, once, on its own thread.
    """

    def __init__(self, settings: Settings, boot: str, on_loss: Callable[[str], object]) -> None:
        self._settings, self._boot, self._on_loss = settings, boot, on_loss
        self._client = _connect(settings)
        self._ranks = range(1, settings.nodes)
        self._joined: dict[int, bytes] = {}  # each machine's sign
        self._until: dict[int, float] = {}  # when it counts as lost
        self._over = threading.Event()
        threading.Thread(target=self._watch, name="followers", daemon=True).start()

    def stop(self) -> None:
        """Their end is no loss from now on."""
        self._over.set()

    def _watch(self) -> None:
        lease = self._settings.lease_s
        while not self._over.wait(POLL_S):
            lost = self.lost(time.monotonic())
            if lost is not None and not self._over.is_set():
                self._on_loss(
                    f"machine {lost} of the engine is lost: its follower has ended, or given no "
                    f"sign of life for {lease} s"
                )
                return

    def lost(self, now: float) -> int | None:
        """The `node_rank` of a machine that has joined this start and is gone, or was started
        again; `now` is monotonic.
        """
        try:
            signs: Any = self._client.mget(
                [_sign(self._settings.worker_id, rank) for rank in self._ranks]
            )
        except redis.RedisError as error:
            log.info("cannot ask for followers: %s", error)
            # perhaps they could not say anything either
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
