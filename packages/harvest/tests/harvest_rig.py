"""A harvest on a worker without its process: its parts are run as their messages would have them
run.
"""

import asyncio
from typing import Any

from ledger_kit import worker_info
from midstream_fake_engine.model import HIDDEN_SIZE, identity_of
from sweep_rig import Rig

from midstream.schemas.base.records import now
from midstream.schemas.jobs.models import WorkerInfo
from midstream.workers.serving.attempts import Attempts
from midstream_harvest.ledger.harvests import LedgerHarvests, new_harvest_id
from midstream_harvest.names import OVER
from midstream_harvest.records.harvests import HarvestSource, HarvestView, StoredHarvest


def stored(
    rig: Rig, documents: list[Any], sites: dict[str, list[int]], **changes: Any
) -> StoredHarvest:
    harvest_id = new_harvest_id()
    fields: dict[str, Any] = {
        "id": harvest_id,
        "model": "fake-model",
        "created": now(),
        "uri": f"{rig.settings.data_dir}/harvests/{harvest_id}",
        "sites": sites,
        "source": HarvestSource(lines=documents),
        "max_length": 4095,
        "row_bytes": 4 * HIDDEN_SIZE * sum(map(len, sites.values())),
        "steering": "",
        "identity": identity_of(rig.settings),
    }
    return StoredHarvest(**(fields | changes))


async def work(rig: Rig, runs: Attempts, harvest_id: str, parts: int = 10_000) -> HarvestView:
    """Run jobs of the harvest, one after the other, until it is over or so many were run."""
    harvests = LedgerHarvests(rig.ledger)
    done: set[str] = set()
    while len(done) < parts:
        view = await harvests.view(harvest_id)
        if view.state in OVER:
            break
        waiting = [job for job in view.jobs if job not in done]
        if not waiting:
            await harvests.advance(harvest_id)
            await asyncio.sleep(0.01)
            continue
        done.add(waiting[0])
        await asyncio.gather(runs.run(waiting[0], "harvest"), return_exceptions=True)
    return await harvests.view(harvest_id)


def live(rig: Rig) -> WorkerInfo:
    return worker_info(model="fake-model", boot="boot", identity=identity_of(rig.settings))
