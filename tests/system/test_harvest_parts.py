"""Parts of a harvest on a worker without its process."""

from pathlib import Path

from harvest_kit import check_rows, checked, texts
from harvest_rig import stored, work
from sweep_rig import Rig

from midstream.broker.ledger.harvests import Harvests
from midstream.schemas.harvests import HarvestShards


def test_a_harvest_is_planned_computed_and_sealed(redis_url: str, tmp_path: Path) -> None:
    documents = texts(300, 200)

    async def scenario(rig: Rig) -> None:
        harvest = stored(rig, documents, {"post_block": [1, 3]}, row_bytes=8192, shards=HarvestShards(mib=2))
        harvests = Harvests(rig.ledger)
        async with rig.worker() as runs:
            await harvests.submit(harvest)
            await harvests.advance(harvest.id)
            view = await work(rig, runs, harvest.id)
        assert (view.state, view.error) == ("succeeded", None)
        made = checked(harvest.uri)
        assert len(made.units) > 3
        assert len(made.shards) > 3
        check_rows(made, documents, [("post_block", 1), ("post_block", 3)])

    Rig(redis_url, tmp_path)(scenario)
