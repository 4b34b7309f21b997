"""Registered probes of a ledger, per model and for all tenants.

The ledger's side of `schemas.probes`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ....schemas.artifacts.probes import Probe, StoredProbe
from ....schemas.base.errors import MidstreamError, invalid
from ....schemas.base.limits import MAX_PROBES, MAX_WATCHING
from ....schemas.base.records import from_msgpack
from ....schemas.base.version import __version__
from ....schemas.jobs.models import ModelInfo
from ..core import scripts
from ..jobs.ledger import Ledger, reachable


class Probes:
    """Belongs to the ledger's event loop.

    All calls raise MidstreamError("unavailable") while Redis is unreachable.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._redis: Any = ledger.redis
        self._scripts = scripts.Scripts(ledger.redis)

    @reachable
    async def put(self, probe: Probe, blobs: Mapping[str, bytes]) -> Probe | None:
        """Point the name at this content; returns what it pointed at before.

        Accepted jobs keep what they have.

        `blobs`: content hash → packed tensor, of those that may not be stored yet. Raises a 400
        where the model has `MAX_PROBES` others, or `MAX_WATCHING` others that watch all traffic,
        and `conflict` when another change came in between.
        """
        packed = await self._redis.hget(_key(probe.model), probe.name)
        await self._ledger.check_room(sum(map(len, blobs.values())))
        arguments = scripts.put_probe(self._ledger.settings, probe, packed, blobs)
        outcome, *detail = scripts.text(await self._scripts.put_probe(args=arguments))
        if outcome == "full":
            raise invalid(
                "name",
                f"{probe.model!r} has {detail[0]} probes",
                allowed=f"up to {MAX_PROBES}: delete one first",
            )
        if outcome == "crowded":
            raise invalid(
                "name",
                f"{detail[0]} probes watch all traffic of {probe.model!r}",
                allowed=f"up to {MAX_WATCHING}",
            )
        if outcome != "stored":
            raise MidstreamError(
                "conflict", f"the probe {probe.name!r} was changed or deleted meanwhile: try again"
            )
        return None if packed is None else _read(packed, probe.name)

    @reachable
    async def get(self, model: str, name: str) -> Probe | None:
        packed = await self._redis.hget(_key(model), name)
        return None if packed is None else _read(packed, name)

    @reachable
    async def of_model(self, model: str) -> list[Probe]:
        """By name."""
        return [
            _read(packed, name.decode())
            for name, packed in sorted((await self._redis.hgetall(_key(model))).items())
        ]

    @reachable
    async def named(self, model: str, names: Sequence[bytes]) -> list[Probe]:
        """Return those of these names that exist, in this order."""
        result = await self._redis.hmget(_key(model), names) if names else []
        return [
            _read(packed, name.decode())
            for name, packed in zip(names, result, strict=True)
            if packed is not None
        ]

    async def watching(self, model: ModelInfo, names: Sequence[bytes]) -> list[StoredProbe]:
        """Return the probes that score all traffic of the model, by their `names` as of
        `Ledger.watched_model`.

        Raises MidstreamError("unavailable") for one that does not fit the model that is served now:
        no traffic may pass it unseen.
        """
        result = await self.named(model.name, names)
        for probe in result:
            if (why := misfit(probe, model)) is not None:
                detail = (
                    f"the probe {probe.name!r}, which watches all traffic, {why}: delete it or "
                    "register it again"
                )
                raise MidstreamError("unavailable", detail)
        return [probe.stored(probe.watch or "none", watching=True) for probe in result]

    @reachable
    async def names(self, model: str) -> list[str]:
        return sorted(name.decode() for name in await self._redis.hkeys(_key(model)))

    @reachable
    async def delete(self, model: str, name: str) -> bool:
        """Return whether there was one. Accepted jobs keep it."""
        return bool(
            await self._scripts.delete_probe(
                args=scripts.pack(self._ledger.settings, model=model, name=name)
            )
        )


def misfit(probe: Probe, model: ModelInfo) -> str | None:
    """Return why the probe cannot score rows of this model, which may have been restarted since;
    None: it can.
    """
    content = probe.content
    if probe.hidden_size != model.hidden_size:
        return (
            f"reads rows of width {probe.hidden_size}; the model has rows of width "
            f"{model.hidden_size}"
        )
    if content.layer >= model.num_layers:
        return f"reads layer {content.layer}; the model has layers 0 to {model.num_layers - 1}"
    if content.hook not in model.hooks:
        return f"reads hook {content.hook}; the model has {', '.join(model.hooks)}"
    return None


def _key(model: str) -> str:
    return f"ms:probes:{model}"


def _read(packed: bytes, name: str) -> Probe:
    try:
        return from_msgpack(packed, Probe)
    except msgspec.DecodeError as error:
        detail = (
            f"the probe {name!r} was stored by another version of midstream; midstream "
            f"{__version__} cannot read it: {error}"
        )
        raise MidstreamError("version_mismatch", f"{detail}; register it again") from error
