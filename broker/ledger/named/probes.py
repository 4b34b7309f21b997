"""Registered probes of a ledger, per model and shared by all tenants.

The ledger's side of `schemas.artifacts.probes`.
"""

from collections.abc import Mapping, Sequence

from ....schemas.artifacts.probes import PROBES, Probe, StoredProbe
from ....schemas.base.errors import MidstreamError, invalid
from ....schemas.base.limits import MAX_PROBES, MAX_WATCHING
from ....schemas.jobs.models import ModelInfo
from ..core import scripts
from ..jobs.ledger import Ledger, reachable
from .registry import Names


class Probes(Names[Probe]):
    """Names of probes, whose tensors are stored with them."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger, PROBES)
        self._scripts = scripts.Scripts(ledger.redis)

    @reachable
    async def put(self, probe: Probe, blobs: Mapping[str, bytes]) -> Probe | None:
        """Point the name at this content; returns the probe that it replaces, or None.

        Accepted jobs keep the probe that they have.

        `blobs`: content hash → packed tensor, of all that might not be stored yet. Raises a 400
        if the model has `MAX_PROBES` others, or `MAX_WATCHING` others that watch all traffic, and
        `conflict` if another change came in between.
        """
        packed = await self._redis.hget(self._key(probe.model), probe.name)
        await self._ledger.check_room(sum(map(len, blobs.values())))
        arguments = scripts.put_probe(self._ledger.settings, probe, packed, blobs)
        outcome, *detail = scripts.text(await self._scripts.put_probe(args=arguments))
        if outcome == "full":
            raise invalid(
                "name",
                f"{probe.model!r} has {detail[0]} probes",
                allowed=f"up to {MAX_PROBES}",
                hint="delete one first",
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
        return None if packed is None else self._read(packed, probe.name)

    @reachable
    async def named(self, model: str, names: Sequence[bytes]) -> list[Probe]:
        """Return the probes with these names, in this order, without those that do not exist."""
        result = await self._redis.hmget(self._key(model), names) if names else []
        return [
            self._read(packed, name.decode())
            for name, packed in zip(names, result, strict=True)
            if packed is not None
        ]

    async def watching(self, model: ModelInfo, names: Sequence[bytes]) -> list[StoredProbe]:
        """Return the probes that score all traffic of the model. `names`: those that
        `Ledger.watched_model` returns.

        Raises MidstreamError("unavailable") for a probe that does not fit the model that is served
        now: no traffic may pass unscored.
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
    async def delete(self, model: str, name: str) -> bool:
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
