"""Probes over HTTP: registration, requests, results, all traffic and what is refused.

The engine is a fake: a score is its position.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from stack import Stack
from typer.testing import CliRunner

from midstream.client import Client, MidstreamError
from midstream.client.cli.main import app

HIDDEN = 8
TIMES = {"lease_s": 9.0, "visibility_timeout_s": 60}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(
        tmp_path_factory.mktemp("probes"),
        api=True,
        callbacks=False,
        tensor_parallel_size=2,
        webhook_allow_private=True,
        **TIMES,
    ) as running:
        yield running


@pytest.fixture(scope="module")
def client(stack: Stack) -> Iterator[Client]:
    with Client(stack.url) as connected:
        yield connected


@pytest.fixture(scope="module")
def calm(client: Client) -> str:
    """Two labels, of which the second crosses at position 4."""
    fields: dict[str, Any] = {
        "weight": np.ones((2, HIDDEN)),
        "layer": -1,
        "labels": ["calm", "angry"],
        "thresholds": [None, 5.0],
    }
    assert client.probes.register("calm", **fields).replaced == ""
    first = client.probes.get("calm")
    assert (first.content.layer, first.content.labels, first.watch) == (3, ["calm", "angry"], None)
    assert client.probes.register("calm", **fields | {"bias": [1, 2]}).replaced == first.digest
    assert [probe.name for probe in client.probes.list()] == ["calm"]
    return "calm"


def test_a_job_returns_the_scores_of_its_probes(client: Client, calm: str) -> None:
    result = client.run(
        prompts=["hello there", "you"],
        probes=[{"probe": calm, "action": "flag", "tokens": True}],
        max_tokens=3,
        model="fake-model",
    )
    first, second = result.probes
    assert (first.request, second.request, first.probe) == (0, 1, "calm")
    positions = result.outputs[0].prompt_tokens + 2
    assert (first.positions, first.scores) == (
        positions,
        {"calm": positions - 1, "angry": positions},
    )
    assert (first.crossed, first.flagged, first.stopped) == ({"angry": 4}, True, False)
    assert first.tokens == [[position, position + 1] for position in range(positions)]
    assert result.determinism is not None
    assert result.determinism.consistent
    assert client.run(prompts=["hello"], max_tokens=2, model="fake-model").probes == []


def test_a_flagged_job_is_reported_once_to_whoever_asked(client: Client, calm: str) -> None:
    events = {}
    for action in ("none", "flag"):
        result = client.run(
            prompts=["hello there", "hello again"],
            probes=[{"probe": calm, "action": action}],
            max_tokens=2,
            model="fake-model",
            callback_url="http://127.0.0.1:9/hook",
            callback_events=["job.flagged", "job.succeeded"],
        )
        events[action] = sorted(
            delivery.event for delivery in client.webhooks.deliveries(job=result.id).deliveries
        )
    assert events == {"none": ["job.succeeded"], "flag": ["job.flagged", "job.succeeded"]}


@pytest.mark.parametrize("stream", [False, True])
def test_completions_carry_the_scores(client: Client, calm: str, stream: bool) -> None:
    body = {
        "model": "fake-model",
        "prompt": "hello there",
        "max_tokens": 2,
        "probes": [calm],
        "stream": stream,
    }
    answer = httpx2.post(f"{client.url}/v1/completions", json=body, timeout=60)
    lines = (
        [
            line.removeprefix("data: ")
            for line in answer.text.splitlines()
            if line.startswith("data: {")
        ]
        if stream
        else [answer.text]
    )
    (scores,) = json.loads(lines[-1])["probes"]
    assert (scores["probe"], scores["crossed"]) == ("calm", {"angry": 4})


def test_a_probe_that_watches_scores_every_request_and_shows_in_metrics_only(
    stack: Stack, client: Client
) -> None:
    client.probes.register("watcher", weight=np.ones(HIDDEN), layer=0, thresholds=2, labels=["bad"])
    with pytest.raises(MidstreamError, match="'steer' is not valid for all traffic") as refused:
        client.probes.watch("watcher", "steer")
    assert (refused.value.field, refused.value.allowed) == ("action", "none, flag, stop")
    assert client.probes.watch("watcher").watch == "flag"
    mapped = client.map(["hello there"], model="fake-model", max_tokens=2, progress=False)
    assert list(client.jobs.get(next(iter(mapped)).result.id).contents) == ["watching/watcher"]
    result = client.run(prompts=["hello there"], max_tokens=2, model="fake-model")
    assert (result.probes, result.determinism is not None, client.jobs.get(result.id).probed) == (
        [],
        True,
        True,
    )
    answer = client.completion(model="fake-model", prompt="hello there", max_tokens=2)
    assert (answer.probes, answer.determinism) == ([], None)
    assert client.jobs.get(answer).state == "succeeded", (
        "held until the ranks have reported that they scored it"
    )
    assert (
        client.probes.register(
            "watcher", weight=np.zeros(HIDDEN), layer=0, thresholds=2, labels=["bad"]
        ).watch
        == "flag"
    )
    assert client.probes.unwatch("watcher").watch is None
    assert client.run(prompts=["hello there"], max_tokens=2, model="fake-model").determinism is None
    client.probes.delete("watcher")
    with pytest.raises(MidstreamError, match="unknown probe 'watcher'"):
        client.probes.get("watcher")


WEIGHT = np.ones((2, HIDDEN)).tolist()


@pytest.mark.parametrize(
    ("change", "field", "words"),
    [
        ({"weight": np.ones((2, 9))}, "weight", "has shape [2, 9]"),
        ({"weight": np.ones((65, HIDDEN))}, "weight", "k from 1 to 64"),
        (
            {"weight": [[np.nan] * HIDDEN, [0.0] * HIDDEN]},
            "weight.data",
            "element 0 is not finite (non-finite elements: 8 of 16)",
        ),
        ({"bias": [1.0]}, "bias", "has shape [1]"),
        ({"bias": [1.0, np.inf]}, "bias.data", "element 1 is not finite"),
        ({"layer": 4}, "layer", "layer 4"),
        ({"hook": "attn"}, "hook", "Invalid enum value"),
        ({"labels": ["a"]}, "labels", "has 1 entries"),
        ({"labels": ["a", "a"]}, "labels[1]", "listed twice"),
        ({"thresholds": [1.0]}, "thresholds", "has 1 entries"),
        ({"aggregation": "exponential"}, "decay", "is required"),
        ({"decay": 0.5}, "decay", "is not valid for aggregation 'last'"),
        ({"decay": 1.0, "aggregation": "exponential"}, "decay", "< 1"),
    ],
)
def test_a_probe_that_does_not_fit_is_refused_by_field(
    client: Client, change: dict[str, Any], field: str, words: str
) -> None:
    with pytest.raises(MidstreamError) as refused:
        client.probes.register("wrong", **{"weight": WEIGHT, "layer": 0} | change)
    assert refused.value.field == field, refused.value
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("probes", "field", "words"),
    [
        (["none"], "probes[0]", "unknown probe 'none'"),
        (["calm", "calm"], "probes[1]", "listed twice"),
        ([{"probe": "calm", "action": "run"}], "probes[0].action", "Invalid enum value"),
        ([{"probe": "plain", "action": "stop"}], "probes[0].action", "needs a threshold"),
        (
            [{"probe": "plain", "action": "steer", "module": "joy"}],
            "probes[0].action",
            "needs a threshold",
        ),
        ([{"probe": "calm", "action": "steer"}], "probes[0].module", "is required"),
        (
            [{"probe": "calm", "action": "steer", "module": "none"}],
            "probes[0].module",
            "unknown module 'none'",
        ),
        (
            [{"probe": "calm", "module": "joy"}],
            "probes[0].module",
            "is not valid for action 'none'",
        ),
        (["calm"] * 17, "probes", "length <= 16"),
    ],
)
def test_a_request_that_names_a_probe_wrongly_is_refused(
    client: Client, calm: str, probes: list[Any], field: str, words: str
) -> None:
    client.probes.register("plain", weight=np.ones(HIDDEN), layer=0)
    with pytest.raises(MidstreamError) as refused:
        client.submit(model="fake-model", prompts=["hello"], probes=probes)
    assert refused.value.field == field, refused.value
    assert words in str(refused.value)


def test_a_module_steers_while_the_score_is_above_the_threshold(client: Client, calm: str) -> None:
    """The fake's score is the position: above 12 it stays above."""
    client.modules.register("joy", [{"layers": [1, 2], "vector": np.ones(HIDDEN)}])
    client.probes.register("late", weight=np.ones(HIDDEN), layer=0, labels=["x"], thresholds=12)
    asked = {"probe": "late", "action": "steer", "module": "joy", "scale": 2.0}
    result = client.run(
        model="fake-model", prompts=["hello", "there"], probes=[asked, calm], max_tokens=12
    )
    late, calm, other, _ = result.probes
    first, last = max(13, result.outputs[0].prompt_tokens), late.positions - 1
    assert (late.gate, late.gated, late.crossed) == ([(first, last)], last - first + 1, {"x": 12})
    assert (calm.gate, calm.gated, other.gate) == (None, 0, [(13, other.positions - 1)])
    assert client.jobs.get(result.id).modules.keys() == {"joy"}
    shown = CliRunner().invoke(
        app,
        [
            "submit",
            "hello",
            "--probe",
            "late:steer:joy:2",
            "--max-tokens",
            "12",
            "--model",
            "fake-model",
            "--url",
            client.url,
        ],
    )
    assert f"13-{last}" in shown.output, shown.output
    answer = client.completion(model="fake-model", prompt="hello", max_tokens=12, probes=[asked])
    assert (answer.probes[0].gate, answer.determinism is not None) == ([(13, last)], True)


def test_tokens_beyond_the_limit_are_refused(client: Client, calm: str) -> None:
    with pytest.raises(MidstreamError, match="up to 262144"):
        client.submit(
            model="fake-model",
            prompts=["hello"] * 4096,
            probes=[{"probe": calm, "tokens": True}],
            max_tokens=64,
        )


def test_the_command_line_registers_lists_and_deletes(stack: Stack, tmp_path: Path) -> None:
    np.savez(tmp_path / "probe.npz", weight=np.ones((1, HIDDEN), np.float32))

    def ran(*arguments: str) -> str:
        done = CliRunner().invoke(app, ["probe", *arguments, "--url", stack.url])
        assert done.exit_code == 0, done.output
        return done.output

    ran(
        "register",
        "cli",
        str(tmp_path / "probe.npz"),
        "--layer",
        "1",
        "--label",
        "x",
        "--threshold",
        "1.5",
    )
    assert "cli" in ran("list")
    assert "x ≥ 1.5" in ran("show", "cli")
    assert "all traffic, flag" in ran("watch", "cli")
    refused = CliRunner().invoke(
        app, ["probe", "watch", "cli", "--action", "steer", "--url", stack.url]
    )
    assert isinstance(refused.exception, MidstreamError)
    assert (refused.exception.field, refused.exception.allowed) == ("action", "none, flag, stop")
    assert "all traffic" not in ran("watch", "cli", "--off")
    assert "removed" in ran("remove", "cli")


def test_streams_carry_the_scores_of_each_token(client: Client, calm: str) -> None:
    """In the chunks of a completion, and as events of its job; those of a probe that watches are
    not among them.
    """
    client.probes.register("watching", weight=np.ones(HIDDEN), layer=0)
    client.probes.watch("watching", action="none")
    body = {
        "model": "fake-model",
        "prompt": "hello there",
        "max_tokens": 4,
        "probes": [calm],
        "stream": True,
    }
    answer = httpx2.post(f"{client.url}/v1/completions", json=body, timeout=60)
    client.probes.delete("watching")
    chunks = [
        json.loads(line.removeprefix("data: "))
        for line in answer.text.splitlines()
        if line.startswith("data: {")
    ]
    told = [scores for chunk in chunks for scores in chunk.get("scores", [])]
    first = told[0]["position"]
    assert [scores["position"] for scores in told] == [first + number for number in range(4)]
    assert (
        told[1]["scores"]
        == told[1]["aggregates"]
        == {"calm": {"calm": first + 1.0, "angry": first + 2.0}}
    )
    events = [
        event
        for event in client.jobs.events(answer.headers["x-midstream-job"])
        if event.event == "score"
    ]
    assert [event.data for event in events] == told


def test_the_client_returns_scores_of_completions(client: Client, calm: str) -> None:
    answer = client.completion(model="fake-model", prompt="hello there", max_tokens=2, probes=calm)
    (scores,) = answer.probes
    assert (scores.probe, scores.crossed, answer.finish_reasons) == (
        "calm",
        {"angry": 4},
        ["length"],
    )
