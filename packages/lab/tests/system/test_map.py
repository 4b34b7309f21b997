"""`map` against the real stack: killed, resumed, and with an API that goes away, every prompt is
computed exactly once.
"""

import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from midstream_fake_engine.model import residual_rows
from stack import Stack

from midstream import Client

pytest_plugins = ["shared_stack"]
pytestmark = pytest.mark.xdist_group("shared_stack")

#: Maps prompts with a cache; after `pause` results it says so and waits for its end.
PROGRAM = """
import sys
from midstream import Client
url, cache, tag = sys.argv[1:4]
count, pause = int(sys.argv[4]), int(sys.argv[5])
with Client(url) as client:
    prompts = (f"{tag} {number}" for number in range(count))
    capture = {"layers": [0, 2], "positions": "all_prompt", "tag": tag}
    options = dict(keep_captures=True, capture=capture, job_prompts=5, in_flight=3, max_tokens=2)
    for item in client.map(prompts, cache=cache, **options):
        assert item.prompt == f"{tag} {item.index}"
        print(item.index, item.cached, item.text, flush=True)
        if item.index + 1 == pause:
            print("paused", flush=True)
            sys.stdin.read()
"""


def start(client: Client, cache: Path, tag: str, count: int, pause: int) -> "subprocess.Popen[str]":
    arguments = [sys.executable, "-c", PROGRAM, client.url, str(cache), tag, str(count), str(pause)]
    return subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def computed(client: Client, before: set[str]) -> int:
    """Prompts of the jobs that were submitted since."""
    return sum(job.prompts for job in client.jobs.list(limit=200).jobs if job.id not in before)


def known(client: Client) -> set[str]:
    return {job.id for job in client.jobs.list(limit=200).jobs}


def test_a_killed_map_is_resumed_with_nothing_twice_and_nothing_missing(
    client: Client, tmp_path: Path
) -> None:
    before = known(client)
    for pause in (7, 16):  # within a job that was collected, with others in flight
        process = start(client, tmp_path / "cache", "killed", 30, pause)
        assert process.stdout is not None
        for line in process.stdout:
            if line == "paused\n":
                break
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
    process = start(client, tmp_path / "cache", "killed", 30, 0)
    lines = process.communicate(timeout=300)[0].splitlines()
    assert process.returncode == 0
    assert [int(line.split()[0]) for line in lines] == list(range(30))
    assert [line.split()[1] for line in lines[:15]] == ["True"] * 15
    assert computed(client, before) == 30

    capture = {"layers": [0, 2], "positions": "all_prompt", "tag": "killed"}
    prompts = [f"killed {number}" for number in range(30)]
    items = list(
        client.map(
            prompts, cache=tmp_path / "cache", keep_captures=True, capture=capture, max_tokens=2
        )
    )
    assert all(item.cached for item in items)
    assert computed(client, before) == 30
    for item in (items[0], items[17], items[29]):
        tokens = np.array(item.reader.token_ids(item.request))
        np.testing.assert_array_equal(
            item.array(2), residual_rows(2, np.arange(len(tokens)), tokens)
        )
    assert not list((tmp_path / "cache" / "captures").glob(".part-*"))


def test_a_map_goes_on_when_the_api_went_away(stack: Stack, client: Client, tmp_path: Path) -> None:
    before = known(client)
    items = client.map(
        [f"away {number}" for number in range(12)],
        job_prompts=2,
        in_flight=2,
        max_tokens=2,
        cache=tmp_path / "cache",
    )
    found = [next(items).index]
    stack.kill("api")
    stack.spawn("api")
    found += [item.index for item in items]
    assert found == list(range(12))
    assert computed(client, before) == 12
