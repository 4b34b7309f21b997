"""Does a harvest outlast a time in which its package is not installed?"""

import asyncio
import json
import subprocess
import sys

from harvest_kit import texts
from harvest_rig import stored, work
from sweep_rig import Rig

from midstream.broker.ledger.recovery.reaper import Reaper
from midstream_harvest.ledger.harvests import LedgerHarvests

#: As where the packages beside the core are not installed: a sweep of the reaper, and what the
#: ledger says of a job.
ALONE = """
import asyncio, importlib.metadata as m, json, sys
m.entry_points = lambda **asked: m.EntryPoints([])
from midstream.broker.ledger.jobs.ledger import Ledger
from midstream.broker.ledger.recovery.reaper import Reaper
from midstream.schemas.settings.settings import Settings

async def main(url, job):
    settings = Settings(redis_url=url)
    ledger = Ledger.connect(settings)
    report = await Reaper(ledger).sweep()
    view = await ledger.view(job)
    print(json.dumps([report.failed, view.kind, view.state]))
    await ledger.close()

asyncio.run(main(*sys.argv[1:]))
"""


async def test_a_harvest_goes_on_once_its_package_is_back(rig: Rig) -> None:
    harvests = LedgerHarvests(rig.ledger)
    harvest = stored(rig, texts(4, 40), {"post_block": [1]})
    await harvests.submit(harvest)
    async with rig.worker() as runs:
        await harvests.advance(harvest.id)
        before = await harvests.view(harvest.id)
        (job,) = before.jobs
        program = [sys.executable, "-c", ALONE, rig.settings.redis_url, job]
        done = await asyncio.to_thread(
            subprocess.run, program, capture_output=True, text=True, timeout=120
        )
        assert json.loads(done.stdout or done.stderr) == [[], "harvest", "queued"]
        assert await harvests.view(harvest.id) == before
        await Reaper(rig.ledger).sweep()
        view = await work(rig, runs, harvest.id)
    assert view.state == "succeeded"
    assert view.documents == 4
