"""Harvests from submission to files, over HTTP, with the fake engine: rows, kills, pauses, full disks, bad input."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harvest_kit import check_rows, checked, texts
from stack import Stack

from midstream.client import Client
from midstream.schemas.harvests import HarvestView

WAIT_S = 120.0
SMALL = {"mib": 1}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two workers of two stages."""
    corpora = tmp_path_factory.mktemp("corpora")
    directory = tmp_path_factory.mktemp("harvests")
    with Stack(
        directory, api=True, workers=2, pipeline_parallel_size=2, harvest_sources=str(corpora), harvest_stores=str(directory / "rows")
    ) as running:
        yield running


@pytest.fixture
def client(stack: Stack) -> Iterator[Client]:
    with Client(stack.url) as made:
        yield made


def corpus(stack: Stack, name: str, documents: list[str]) -> str:
    path = Path(stack.settings.harvest_sources) / name
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return name


def until(client: Client, view: HarvestView, condition: Callable[[HarvestView], bool], seconds: float = WAIT_S) -> HarvestView:
    deadline = time.monotonic() + seconds
    while not condition(view := client.harvest(view)):
        assert time.monotonic() < deadline, view
        assert view.state not in ("failed", "cancelled"), view
        time.sleep(0.05)
    return view


def test_lines_of_a_request_become_shards_with_every_row(client: Client) -> None:
    documents = texts(20)
    view = client.submit_harvest(model="fake-model", source={"lines": documents}, hooks={"post_block": [1, 3], "mlp_out": [0]})
    done = client.wait_harvest(view, timeout=WAIT_S)
    check_rows(checked(done.uri), documents, [("mlp_out", 0), ("post_block", 1), ("post_block", 3)])
    assert (done.documents, done.share, done.state) == (20, 1.0, "succeeded")
    assert done.rows == sum(map(len, documents))
    assert [each.id for each in client.harvests().harvests][0] == view.id
