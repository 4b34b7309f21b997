"""A harvest survives a kill at every point where something has just become durable: each row once, in the same order."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harvest_kit import check_equal, check_rows, checked, texts
from stack import Stack

from midstream.client import Client
from midstream.client.harvest import Harvest
from midstream.schemas.faults import CRASH_POINTS, FOLDER
from midstream.schemas.harvests import HarvestView

DOCUMENTS = texts(1500, 100)
WAIT_S = 120.0
#: Point → which process comes to it.
POINTS = {
    **{name: "worker" for name in CRASH_POINTS if name.startswith(("harvest.", "receipt."))},
    **dict.fromkeys(("worker.claimed", "worker.generated", "worker.stored", "capture.written", "capture.renamed"), "worker"),
    "relay.received": "relay",
    "relay.committed": "relay",
}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("kills"), api=True, max_attempts=20) as running:
        yield running


@pytest.fixture(scope="module")
def whole(stack: Stack) -> Harvest:
    """Undisturbed."""
    with Client(stack.url) as client:
        made = checked(client.wait_harvest(submitted(client), timeout=WAIT_S).uri)
    check_rows(made, DOCUMENTS, [("post_block", 1), ("post_block", 3)])
    return made


def submitted(client: Client) -> HarvestView:
    return client.submit_harvest(model="fake-model", source={"lines": DOCUMENTS}, layers=[1, 3], shards={"mib": 1})


@pytest.mark.parametrize("point", POINTS)
def test_a_harvest_survives_a_kill_at(stack: Stack, whole: Harvest, point: str) -> None:
    name = POINTS[point]
    stack.kill(name)
    stack.restart(name, fault=f"crash:at={point}")
    with Client(stack.url) as client:
        view = submitted(client)
        assert stack.processes[name].wait(WAIT_S) == -9
        stack.restart(name)
        view = client.wait_harvest(view, timeout=WAIT_S)
        check_equal(checked(view.uri), whole)
        client.delete_harvest(view)
    assert (Path(stack.settings.data_dir) / FOLDER / point).exists()


def test_a_harvest_survives_a_restart_of_redis(stack: Stack, whole: Harvest) -> None:
    with Client(stack.url) as client:
        view = submitted(client)
        while client.harvest(view).units_done < 1:
            time.sleep(0.02)
        stack.kill("redis")
        stack.restart("redis")
        view = client.wait_harvest(view, timeout=WAIT_S)
        check_equal(checked(view.uri), whole)
