"""Control of all ranks of an engine: steering state and reports; every kind of engine uses it."""

import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from ....schemas.artifacts.loras import StoredLora
from ....schemas.artifacts.saes import StoredSae
from ....schemas.base.records import by_key
from ....schemas.jobs.models import ModelInfo
from ....schemas.requests.specs import RankSpec, SteeringRow, StoredSteering
from ....schemas.requests.steering import GlobalSteering, RankSteering
from ....schemas.settings.settings import Settings
from ....schemas.settings.tuning import global_share
from ..admission import RowAdmission, RowDemand
from ..protocol import Fetch, Locate, StoredArtifact
from .collective import RankCache, Ranks
from .loras import RankLoras
from .saes import RankSaes
from .source_runs import RankRuns
from .vectors import RankVectors

logger = logging.getLogger(__name__)


class RankControl(ABC):
    """The part of `workers.engine.protocol.Engine` that calls all ranks; a subclass adds `_call`
    and the generation.
    """

    info: ModelInfo
    on_quarantine: Callable[[str], None]

    def __init__(self, settings: Settings) -> None:
        self.world = settings.vllm.ranks
        self.on_quarantine = lambda reason: logger.error("the ranks may differ: %s", reason)
        self._ranks = Ranks(self._call, self.world, lambda reason: self.on_quarantine(reason))
        self._vectors = RankVectors(self._ranks, settings.tuning.vector_cache_mib << 20)
        self._runs = RankRuns(self._ranks, settings.tuning.run_cache_mib << 20)
        self._loras = RankLoras(
            self._ranks,
            settings.artifacts_of("loras"),
            settings.vllm.max_cpu_loras,
            lambda: self.info.lora,
        )
        self._artifacts: dict[type[StoredArtifact], RankCache[Any]] = {
            StoredLora: self._loras,
            StoredSae: RankSaes(
                self._ranks, settings.artifacts_of("saes"), settings.tuning.sae_cache_mib << 20
            ),
        }
        tuning = settings.tuning
        self._rows = RowAdmission(tuning.table_rows, tuning.table_entries)
        self._global_rows = RowAdmission(
            global_share(tuning.steering_rows), global_share(tuning.steering_entries)
        )

    @abstractmethod
    async def _call(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        """Call `method` on every rank; return the answers in rank order.

        Raises MidstreamError("engine_failed").
        """

    trouble = ""

    @property
    def waiting(self) -> int:
        return self._rows.waiting

    @asynccontextmanager
    async def holding_vectors(
        self,
        names: Sequence[str],
        fetch: Fetch,
        *,
        users: Sequence[list[StoredSteering]] = (),
    ) -> AsyncIterator[None]:
        if names:
            await self._vectors.hold(names, fetch, users=users)
        try:
            yield
        finally:
            self._vectors.release(names)

    @asynccontextmanager
    async def holding_runs(self, keys: Sequence[str], locate: Locate) -> AsyncIterator[None]:
        if keys:
            # locate loaded runs too: they may have been deleted since
            await self._runs.hold([await locate(key) for key in dict.fromkeys(keys)])
        try:
            yield
        finally:
            self._runs.release(keys)

    def held_runs(self) -> list[str]:
        return self._runs.names

    @asynccontextmanager
    async def holding_artifacts(self, artifacts: Sequence[StoredArtifact]) -> AsyncIterator[None]:
        cache = self._artifacts[type(artifacts[0])]
        await cache.hold(artifacts)
        try:
            yield
        finally:
            cache.release(artifact.digest for artifact in artifacts)

    async def check_global(self, steering: GlobalSteering, fetch: Fetch) -> None:
        self._global_rows.check(_demand(steering.most_rows()))
        async with self.holding_vectors(steering.tensors, fetch):
            await self._ranks.check(
                "the check", "midstream_check_global", msgspec.to_builtins(steering)
            )

    async def steering_status(self) -> list[RankSteering]:
        return [rank_steering(status) for status in await self._call("midstream_status", ())]

    async def restart_ledgers(self) -> None:
        await self._ranks.apply("resetting the ledgers", "midstream_restart_ledger")
        self._vectors.forget()
        self._runs.forget()

    async def same_content(self) -> bool:
        prints = await self._call("midstream_fingerprint", ())
        ranks = zip(await self.steering_status(), prints, strict=True)
        stages = by_key((status.pp, fingerprint) for status, fingerprint in ranks)
        return all(len(set(stage)) == 1 for stage in stages.values())


def rank_steering(status: dict[str, Any]) -> RankSteering:
    """Returns the steering part of `midstream_status`."""
    return msgspec.convert(
        {name: status[name] for name in RankSteering.__struct_fields__ if name in status},
        RankSteering,
    )


def row_demand(spec: RankSpec | None) -> frozenset[RowDemand]:
    """Returns the rows of the steering table that a request needs."""
    return _demand(spec.rows if spec is not None else [])


def _demand(rows: Sequence[SteeringRow]) -> frozenset[RowDemand]:
    return frozenset(RowDemand(row.key, row.num_vectors) for row in rows)


def disagreement(ranks: Sequence[RankSteering]) -> str:
    """Returns how ranks of one stage disagree; empty if the ranks of every stage agree."""
    for stage, members in by_key((rank.pp, rank) for rank in ranks).items():
        if len({(rank.epoch, rank.checksum, rank.actions) for rank in members}) > 1:
            listing = ", ".join(
                f"rank {rank.rank}: {rank.checksum} after {rank.actions} in epoch {rank.epoch}"
                for rank in members
            )
            return f"the ranks of stage {stage} disagree on the actions they applied: {listing}"
    return ""
