"""A harvest survives a kill at every point where something has just become durable: each row once,
in the same order.

Into a folder, and into a bucket that answers 503, cuts uploads and goes away.
"""

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
import s3_kit
from harvest_kit import check_equal, check_rows, checked, texts
from s3_kit import FaultProxy
from stack import Stack
from tree import ROOT
from wait_kit import wait_until

from midstream.client import Client
from midstream.schemas.settings.faults import CRASH_POINTS, FOLDER
from midstream_harvest.reader import Harvest
from midstream_harvest.records.harvests import HarvestView

DOCUMENTS = texts(100, 1600)
WAIT_S = 120.0
#: Point → which process comes to it.
POINTS = {
    **{
        name: "worker"
        for name in CRASH_POINTS
        if name.startswith(("harvest.", "receipt.")) and name != "harvest.surveyed"
    },
    **dict.fromkeys(
        (
            "worker.claimed",
            "worker.generated",
            "worker.stored",
            "capture.written",
            "capture.renamed",
        ),
        "worker",
    ),
    "relay.received": "relay",
    "relay.committed": "relay",
}
#: Those of them that CI tries; the others are rows of the matrix.
FEW = ("harvest.part", "relay.committed")
#: Those where files matter; a minute each.
OF_BUCKETS = [name for name in POINTS if name.startswith(("harvest.", "receipt."))]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, proxy: FaultProxy) -> Iterator[Stack]:
    directory = tmp_path_factory.mktemp("kills")
    access = {"artifact_access_key": s3_kit.ACCESS_KEY, "artifact_secret_key": s3_kit.SECRET_KEY}
    stores = f"{directory}/rows, {s3_kit.uri(proxy, prefix='rows')}"
    shutil.copytree(ROOT / "tests" / "data" / "saes", directory / "saes")
    access["artifacts_dir"] = str(directory)
    with Stack(directory, api=True, max_attempts=20, harvest_stores=stores, **access) as running:
        with Client(running.url) as client:
            client.saes.put("tiny", "standard")
        yield running


@pytest.fixture(scope="module")
def whole(stack: Stack) -> Harvest:
    """Undisturbed."""
    with Client(stack.url) as client:
        made = checked(client.harvests.wait(submitted(stack, client), timeout=WAIT_S).uri)
    check_rows(made, DOCUMENTS, [("post_block", 1), ("post_block", 3)])
    return made


def submitted(stack: Stack, client: Client, bucket: bool = False) -> HarvestView:
    return client.harvests.submit(
        model="fake-model",
        source={"lines": DOCUMENTS},
        layers=[1, 3],
        shards={"mib": 1},
        store=stack.settings.harvest_stores.split(", ")[bucket],
    )


def check_kill(stack: Stack, whole: Harvest, point: str, bucket: bool) -> None:
    name = POINTS[point]
    died = Path(stack.settings.data_dir) / FOLDER / point
    died.unlink(missing_ok=True)
    stack.crash(name, fault=f"crash:at={point}")
    with Client(stack.url) as client:
        view = submitted(stack, client, bucket)
        assert stack.processes[name].wait(WAIT_S) == -9
        stack.restart(name)
        view = client.harvests.wait(view, timeout=WAIT_S)
        check_equal(checked(view.uri), whole)
        client.harvests.delete(view)
    assert died.exists()


@pytest.mark.parametrize(
    "point",
    [
        pytest.param(point, marks=pytest.mark.long if point in FEW else pytest.mark.matrix)
        for point in POINTS
    ],
)
def test_a_harvest_survives_a_kill_at(stack: Stack, whole: Harvest, point: str) -> None:
    check_kill(stack, whole, point, bucket=False)


@pytest.mark.matrix
def test_a_survey_is_the_same_after_its_worker_was_killed(stack: Stack, whole: Harvest) -> None:
    """In the middle, and when its file is durable and not recorded; the file is the same."""
    path = f"/v1/harvests/{whole.manifest.id}/surveys"
    died = Path(stack.settings.data_dir) / FOLDER / "harvest.surveyed"
    with Client(stack.url) as client, httpx2.Client(base_url=stack.url, timeout=60) as http:
        jobs = [http.post(path, json={"sae": "tiny"}).json()["id"]]
        wait_until(lambda: client.jobs.get(jobs[0]).state == "running")
        stack.crash("worker", fault="crash:at=harvest.surveyed")
        assert stack.processes["worker"].wait(WAIT_S) == -9  # of the second attempt
        stack.restart("worker")
        jobs.append(http.post(path, json={"sae": "tiny"}).json()["id"])
        assert [client.jobs.wait(job, WAIT_S).state for job in jobs] == ["succeeded"] * 2
        assert client.jobs.get(jobs[0]).attempt == 3
        first, second = client.harvests.get(whole.manifest.id).surveys
        assert first.crc32 == second.crc32
        assert first.rows == len(whole)
        files = {f"surveys/{job}.safetensors" for job in jobs}
        assert set(whole.store.children("surveys/")) == files
    assert died.exists()


@pytest.mark.matrix
@pytest.mark.parametrize("point", OF_BUCKETS)
def test_a_harvest_into_a_busy_bucket_survives_a_kill_at(
    stack: Stack, whole: Harvest, proxy: FaultProxy, point: str
) -> None:
    """The first uploads are answered 503 or cut, so that some of them fail for good and are made
    again.
    """
    faults = [
        proxy.fault("503", "PUT .*shards", times=25),
        proxy.fault("cut", "PUT .*shards", times=3),
    ]
    check_kill(stack, whole, point, bucket=True)
    assert [fault.times for fault in faults] == [0, 0]


@pytest.mark.long
def test_a_harvest_waits_for_a_bucket_that_is_away_and_goes_on(
    stack: Stack, whole: Harvest, proxy: FaultProxy
) -> None:
    with Client(stack.url) as client:
        view = submitted(stack, client, bucket=True)
        wait_until(lambda: client.harvests.get(view).units_done > 0)
        proxy.stop()
        try:
            wait_until(lambda: client.harvests.get(view).state == "paused", WAIT_S)
            assert client.harvests.get(view).reason
            stack.crash("worker")
            time.sleep(2)
            assert client.harvests.get(view).state != "succeeded"
        finally:
            proxy.start()
        view = client.harvests.wait(view, timeout=WAIT_S)
        assert view.reason == ""
        check_equal(checked(view.uri), whole)


@pytest.mark.long
def test_a_harvest_survives_a_restart_of_redis(stack: Stack, whole: Harvest) -> None:
    with Client(stack.url) as client:
        view = submitted(stack, client)
        wait_until(lambda: client.harvests.get(view).units_done > 0)
        stack.crash("redis")
        view = client.harvests.wait(view, timeout=WAIT_S)
        check_equal(checked(view.uri), whole)
