"""Probes over HTTP: registration, requests, results, all traffic and what is refused.

The engine is a fake: a score is its position.
"""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from refusal_kit import refuses

from midstream.client import Client, MidstreamError
from midstream.schemas.artifacts.probes import ProbeResult
from midstream.schemas.jobs.results import JobResult

pytest_plugins = ["shared_stack"]
pytestmark = pytest.mark.xdist_group("shared_stack")

HIDDEN = 8


def of_all(probe: str, *actions: Any, **fields: Any) -> dict[str, Any]:
    """The fields of a policy of all traffic that acts on the prompt's tokens too."""
    condition = {"at_least": 5.0, "label": "angry", "schedule": {"tokens": "all"}}
    all_ = {"actions": list(actions), "mode": "active", "all_traffic": True}
    return {"probe": probe, "condition": condition, **all_, **fields}


@pytest.fixture(scope="module")
def calm(client: Client) -> str:
    """Two labels, of which the second crosses at position 4."""
    fields: dict[str, Any] = {
        "weight": np.ones((2, HIDDEN)),
        "layer": -1,
        "labels": ["calm", "angry"],
        "thresholds": [None, 5.0],
    }
    made = client.probes.put("calm", **fields | {"bias": [1, 2]})
    assert made.content.layer == 3
    assert made.content.labels == ["calm", "angry"]
    return "calm"


def test_a_job_returns_the_scores_of_its_probes(client: Client, calm: str) -> None:
    result = client.run(
        prompts=["hello there", "you"],
        probes=[{"probe": calm, "action": "flag", "tokens": True}],
        max_tokens=3,
        model="fake-model",
    )
    first, second = result.probes
    assert first.request == 0
    assert second.request == 1
    assert first.probe == "calm"
    positions = result.outputs[0].prompt_tokens + 2
    assert first.positions == positions
    assert first.scores == {"calm": positions - 1, "angry": positions}
    assert first.crossed == {"angry": 4}
    assert first.flagged
    assert not first.stopped
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
            delivery.event for delivery in client.webhooks.list(job=result.id).deliveries
        )
    assert events == {"none": ["job.succeeded"], "flag": ["job.flagged", "job.succeeded"]}


def chunks_of(answer: httpx2.Response) -> list[dict[str, Any]]:
    """The data of a stream."""
    lines = answer.text.splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


def test_completions_carry_the_scores(client: Client, calm: str) -> None:
    """Of what they name; those of the operator's policies are in the job's result alone."""
    client.policies.put("watcher", **of_all(calm, "flag"))
    asked = {"model": "fake-model", "prompt": "hello there", "max_tokens": 2, "probes": [calm]}
    answer = client.completion(**asked)
    (scores,) = answer.probes
    assert scores.probe == "calm"
    assert scores.crossed == {"angry": 4}
    assert answer.finish_reasons == ["length"]
    streamed = httpx2.post(f"{client.url}/v1/completions", json=asked | {"stream": True})
    (last,) = chunks_of(streamed)[-1]["probes"]
    assert last["probe"] == "calm"
    assert last["crossed"] == {"angry": 4}
    named = client.completion(**asked | {"policies": ["watcher"]}).probes
    client.policies.delete("watcher")
    assert [each.probe for each in named] == ["calm", "policy:watcher"]
    assert len(client.result(answer.job).probes) == 2


def test_a_policy_of_all_traffic_reads_every_request(client: Client, calm: str) -> None:
    client.policies.put("watcher", **of_all(calm, "flag"))
    mapped = client.map(["hello there"], model="fake-model", max_tokens=2, progress=False)
    assert list(client.jobs.get(next(iter(mapped)).result.id).contents) == ["policy/watcher"]
    result = client.run(prompts=["hello there"], max_tokens=2, model="fake-model")
    assert client.jobs.get(result.id).probed
    assert result.determinism is not None
    assert [(probe.probe, probe.flagged) for probe in result.probes] == [("policy:watcher", True)]
    answer = client.completion(model="fake-model", prompt="hello there", max_tokens=2)
    assert answer.probes == []
    assert answer.determinism is None
    assert client.jobs.get(answer).state == "succeeded", (
        "held until the ranks have reported that they scored it"
    )
    client.policies.delete("watcher")
    assert client.run(prompts=["hello there"], max_tokens=2, model="fake-model").determinism is None
    with pytest.raises(MidstreamError, match="unknown policy 'watcher'"):
        client.policies.get("watcher")


WEIGHT = np.ones((2, HIDDEN)).tolist()
CURVE = {"fpr": [0, 1], "tpr": [0, 1], "auc": 0.5}
BINS = {"edges": [0, 1, 2], "negative": [3, 1], "positive": [0, 2]}
HELD_OUT = {"roc": CURVE, "histogram": BINS}


def test_a_probe_keeps_what_its_training_measured(client: Client) -> None:
    fields: Any = {"weight": WEIGHT, "layer": 0, "thresholds": 1.0}
    unmeasured = client.probes.put("trained", **fields)
    client.probes.put("trained", **fields, held_out=[HELD_OUT, HELD_OUT])
    found = client.probes.get("trained")
    assert found.digest == unmeasured.digest
    assert found.held_out[1].roc.auc == 0.5
    assert found.held_out[1].histogram.positive == [0, 2]
    assert len(found.plot(label=1).axes) == 2
    with refuses("0 has no scores of held-out rows", field="label"):
        unmeasured.plot()
    client.probes.delete("trained")


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
        ({"held_out": [HELD_OUT]}, "held_out", "has 1 entries (allowed: 2"),
        (
            {"held_out": [HELD_OUT | {"roc": CURVE | {"tpr": [1, 0]}}] * 2},
            "held_out[0].roc",
            "ascend",
        ),
        ({"held_out": [HELD_OUT | {"roc": CURVE | {"tpr": [1]}}]}, "held_out[0].roc.tpr", ">= 2"),
        (
            {"held_out": [HELD_OUT | {"histogram": BINS | {"edges": [0]}}]},
            "held_out[0].histogram",
            "edges one more",
        ),
        (
            {"held_out": [HELD_OUT | {"histogram": BINS | {"edges": [0, 0, 1]}}]},
            "held_out[0].histogram",
            "edges must ascend",
        ),
    ],
)
def test_a_probe_that_does_not_fit_is_refused_by_field(
    client: Client, change: dict[str, Any], field: str, words: str
) -> None:
    with refuses(words, field=field):
        client.probes.put("wrong", **{"weight": WEIGHT, "layer": 0} | change)


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
    client.probes.put("plain", weight=np.ones(HIDDEN), layer=0)
    with refuses(words, field=field):
        client.submit(model="fake-model", prompts=["hello"], probes=probes)


def test_a_module_steers_while_the_score_is_above_the_threshold(
    client: Client, midstream: Callable[..., str], calm: str
) -> None:
    """The fake's score is the position: above 12 it stays above."""
    client.modules.put("joy", [{"layers": [1, 2], "vector": np.ones(HIDDEN)}])
    client.probes.put("late", weight=np.ones(HIDDEN), layer=0, labels=["x"], thresholds=12)
    asked = {"probe": "late", "action": "steer", "module": "joy", "scale": 2.0}
    result = client.run(
        model="fake-model", prompts=["hello", "there"], probes=[asked, calm], max_tokens=12
    )
    late, calm, other, _ = result.probes
    first = max(13, result.outputs[0].prompt_tokens)
    last = late.positions - 1
    assert late.gate == [(first, last)]
    assert late.gated == last - first + 1
    assert late.crossed == {"x": 12}
    assert calm.gate is None
    assert calm.gated == 0
    assert other.gate == [(13, other.positions - 1)]
    assert client.jobs.get(result.id).modules.keys() == {"joy"}
    shown = midstream(
        "submit", "hello", "--set", f"probes={json.dumps(asked)}", "--max-tokens", "12"
    )
    assert f"13-{last}" in shown
    answer = client.completion(model="fake-model", prompt="hello", max_tokens=12, probes=[asked])
    assert answer.probes[0].gate == [(13, last)]
    assert answer.determinism is not None


def test_tokens_beyond_the_limit_are_refused(client: Client, calm: str) -> None:
    with pytest.raises(MidstreamError, match="up to 262144"):
        client.submit(
            model="fake-model",
            prompts=["hello"] * 4096,
            probes=[{"probe": calm, "tokens": True}],
            max_tokens=64,
        )


def test_the_command_line_takes_the_weights_of_a_file(
    midstream: Callable[..., str], tmp_path: Path
) -> None:
    np.savez(tmp_path / "probe.npz", weight=np.ones((1, HIDDEN), np.float32))
    of_file = ["--set", "layer=1", "--set", "labels=x", "--set", "thresholds=1.5"]
    assert "x ≥ 1.5" in midstream("put", "probe", "cli", str(tmp_path / "probe.npz"), *of_file)


def test_the_command_line_fits_a_probe_on_turns_of_conversations(
    midstream: Callable[..., str], tmp_path: Path
) -> None:
    chats = [[{"role": "user", "content": "hi"}, {"role": "assistant", "content": w}] for w in "ab"]
    lines = [json.dumps({"messages": chats[n % 2], "label": n % 2}) for n in range(16)]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    file = f"{tmp_path}/chats.jsonl:messages,label"
    positions = 'positions={"role": "assistant"}'
    options = ["--set", "layer=1", "--set", "rows=all", "--set", positions]
    shown = midstream("fit", "probe", "cli", file, *options)
    assert "0: 6, 1: 6" in shown, shown
    assert "0: 2, 1: 2" in shown, shown


def test_streams_carry_the_scores_of_each_token(client: Client, calm: str) -> None:
    """In the chunks of a completion, and as events of its job; those of policies are not among
    them.
    """
    client.policies.put("watching", **of_all(calm, "flag"))
    body = {
        "model": "fake-model",
        "prompt": "hello there",
        "max_tokens": 4,
        "probes": [calm],
        "stream": True,
    }
    answer = httpx2.post(f"{client.url}/v1/completions", json=body, timeout=60)
    client.policies.delete("watching")
    told = [scores for chunk in chunks_of(answer) for scores in chunk.get("scores", [])]
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


# --- Policies
# ------------------------------------------------------------------------------------------------


def run(client: Client, *policies: str, **fields: Any) -> JobResult:
    fields = {"max_tokens": 3, "model": "fake-model", **fields}
    return client.run(prompts=["hello there"], policies=list(policies), **fields)


def decided(result: JobResult) -> dict[str, ProbeResult]:
    return {probe.policy.name: probe for probe in result.probes if probe.policy is not None}


def test_a_policy_of_all_traffic_has_versions_and_modes(client: Client, calm: str) -> None:
    """A version in shadow mode records, one that acts stops, and both can be restored; all in the
    job's result.
    """
    first = client.policies.put("guard", **of_all(calm, "stop", mode="shadow"))
    digest = first.digest
    tokens = run(client).outputs[0].token_ids
    assert run(client).outputs[0].finish_reason == "length"
    active = client.policies.change("guard", mode="active")
    assert active.current.version == 2
    assert active.replaced == ""
    with refuses("version 2 is active: give mode", field="mode"):
        client.policies.put("guard", **of_all(calm, "stop", mode=None))
    stopped = run(client)
    assert stopped.outputs[0].finish_reason == "policy:guard"
    assert stopped.outputs[0].token_ids == tokens[: len(stopped.outputs[0].token_ids)]
    guard = decided(stopped)["guard"]
    assert guard.policy.version == 2
    assert guard.policy.mode == "active"
    assert guard.policy.acts
    assert [(each.position, each.event, each.score) for each in guard.decisions] == [
        (4, "trigger", 5.0)
    ]
    third = client.policies.change("guard", version=1)
    assert third.digest == digest
    assert third.current.version == 3
    guard = decided(run(client))["guard"]
    assert not guard.policy.acts
    assert guard.policy.version == 3
    assert guard.decisions[0].position == 4
    # the probe's name may change: the policy keeps what it was registered with
    client.probes.put("other", weight=np.ones((2, HIDDEN)), layer=0, labels=["calm", "angry"])
    client.policies.put("guard", **of_all("other", "stop"))
    with refuses("'other': guard", kind="conflict", field="name"):
        client.probes.delete("other")
    client.probes.put("other", weight=np.ones((2, HIDDEN)), layer=0, labels=["a", "b"])
    assert run(client).outputs[0].finish_reason == "policy:guard"
    job = client.submit(prompts=["hello"], model="fake-model", sampling={"max_tokens": 3})
    assert client.wait(job).contents["policy/guard"] == client.policies.get("guard").digest
    client.policies.delete("guard")
    client.probes.delete("other")
    assert run(client).probes == []


def test_a_dose_runs_under_what_the_operator_has_set(client: Client, calm: str) -> None:
    """Under global steering, and cells whose texts a policy has cut are not called safe."""
    version = client.global_steering.put([{"layers": 0, "vector": [1.0] * HIDDEN}]).version
    dose: dict[str, Any] = {
        "model": "fake-model",
        "prompts": ["hello there", "you"],
        "steering": [{"vector": [1.0] * HIDDEN, "layers": 1}],
        "scales": [-1.0, 1.0],
        "effect": {"probe": calm},
        "held_out": ["hello there"],
        "max_tokens": 4,
    }
    free = client.dose(**dose)
    assert [(cell.scale, cell.stopped) for cell in free.dose.safe] == [(-1.0, 0), (1.0, 0)]
    assert free.determinism.consistent
    assert free.determinism.global_version == version
    client.policies.put("guard", **of_all(calm, "stop", edits="allow"))
    cut = client.dose(**dose)
    client.policies.delete("guard")
    client.global_steering.delete()
    stopped = [cell.stopped for cell in (cut.dose.unsteered, *cut.dose.cells)]
    assert stopped == [2, 2, 2]
    assert cut.dose.safe == []
    assert [cell.loss for cell in cut.dose.cells] == [cell.loss for cell in free.dose.cells]


def test_a_latch_turns_the_next_requests_of_a_conversation_on(client: Client, calm: str) -> None:
    """Of this conversation and this tenant alone, and only where the policy acts."""
    condition = {"at_least": 5.0, "label": "angry", "latch": "conversation"}
    fields = of_all(calm, "flag", condition=condition, all_traffic=False)
    client.policies.put("latch", **fields)
    client.policies.put("shadow", **fields | {"mode": "shadow"})
    first = run(client, "latch", "shadow", conversation="c1")
    assert decided(first)["latch"].policy.inherited == ""
    later = decided(run(client, "latch", "shadow", conversation="c1"))
    assert later["latch"].policy.inherited == first.id
    assert later["latch"].triggers == 0
    assert later["latch"].flagged
    assert later["latch"].decisions == []
    assert later["shadow"].policy.inherited == ""
    for other in ({"conversation": "c2"}, {}):
        assert decided(run(client, "latch", **other))["latch"].policy.inherited == ""


def test_a_decision_is_sent_to_the_policys_webhook(client: Client, calm: str) -> None:
    """Once, with the decision; also to the job's own, if it lists the event."""
    hook = {"action": "webhook", "url": "http://127.0.0.1:9/policy"}
    client.policies.put("hook", **of_all(calm, hook, all_traffic=False))
    own = {"callback_url": "http://127.0.0.1:9/job", "callback_events": ["job.decided"]}
    sent = client.webhooks.list(job=run(client, "hook", **own).id).deliveries
    assert sorted((each.event, each.url) for each in sent) == [
        ("job.decided", "http://127.0.0.1:9/job"),
        ("job.decided", "http://127.0.0.1:9/policy"),
    ]
    client.policies.change("hook", mode="shadow")
    assert client.webhooks.list(job=run(client, "hook", **own).id).deliveries == []


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"probe": "none"}, "probe"),
        ({"condition": {"at_least": 5.0}}, "condition.label"),
        ({"condition": {"at_least": 1.0, "aggregation": "mean"}}, "condition"),
        ({"condition": {"at_least": 1.0, "release_below": 2.0}}, "condition"),
        ({"actions": [{"action": "steer", "module": "none"}]}, "actions[0].module"),
        ({"actions": [{"action": "capture", "layers": 0}]}, None),
        ({"actions": [{"action": "webhook", "url": "ftp://a"}]}, "actions[0].url"),
        ({"actions": ["flag", "flag"]}, None),
        ({"mode": "canary"}, None),
    ],
)
def test_policies_that_are_refused(
    client: Client, calm: str, fields: dict[str, Any], field: str | None
) -> None:
    with refuses(kind="invalid_request") as refused:
        client.policies.put("bad", **of_all(calm, "flag") | fields)
    assert refused.value.field == field or field in (None, "condition")


def test_requests_and_changes_that_are_refused(client: Client, calm: str) -> None:
    client.policies.put("real", **of_all(calm, "flag", all_traffic=False))
    for policies, field in ((["none"], "policies[0]"), (["real", "real"], "policies[1]")):
        with refuses(kind="invalid_request", field=field):
            run(client, *policies)
    with refuses(field="version", allowed="1"):
        client.policies.change("real", version=9)


def changed_to(client: Client, name: str, fields: dict[str, Any]) -> str:
    """Change a policy; return the field for which that is refused, if it is."""
    try:
        client.policies.change(name, **fields)
    except MidstreamError as error:
        return str(error.field)
    return "made"


def test_of_changes_at_once_those_that_fit_together_are_made(client: Client, calm: str) -> None:
    """Four of eight policies of all traffic, each with a row; no request is refused for them."""
    client.modules.put("joy", steering=[{"layers": 2, "op": "ablate", "vector": [1.0] * HIDDEN}])
    steer = {"action": "steer", "module": "joy"}
    names = [f"at-once-{number}" for number in range(8)]
    for name in names:
        client.policies.put(name, **of_all(calm, steer, mode="shadow", edits="allow"))
    with ThreadPoolExecutor(8) as threads:
        made = threads.map(lambda name: changed_to(client, name, {"mode": "active"}), names)
    assert sorted(made) == ["all_traffic"] * 4 + ["made"] * 4
    own = {"layers": 1, "op": "ablate", "vector": [1.0] * HIDDEN}
    assert run(client, steering=[own] * 4).outputs
    for name in names:
        client.policies.delete(name)


def test_a_policy_captures_the_window_around_its_trigger(client: Client, calm: str) -> None:
    window = {"action": "capture", "layers": 0, "before": 1}
    client.policies.put("window", **of_all(calm, window, all_traffic=False))
    result = run(client, "window")
    assert result.capture_results.status == "ok"
    assert [file.tag for file in result.capture_results.files] == ["policy-window"]
    with pytest.raises(MidstreamError, match="'policy-window', which another capture has"):
        run(client, "window", capture={"layers": 0, "tag": "policy-window"})


def test_the_command_line_changes_and_uses_a_policy(
    client: Client, midstream: Callable[..., str], calm: str
) -> None:
    client.policies.put("cli", **of_all(calm, "flag", all_traffic=False))
    assert "shadow" in midstream("change", "policy", "cli", "--set", "mode=shadow")
    assert client.policies.change("cli", mode="shadow").current.version == 2, "nothing changed"
    midstream("change", "policy", "cli", "--set", "condition.at_least=4.5")
    assert client.policies.get("cli").current.content.condition.at_least == 4.5
    shown = midstream("submit", "hello there", "--set=policies=cli", "--set=conversation=c9")
    assert "only recorded" in shown
    assert "triggered cli (only recorded)" in midstream("list", "jobs", "--set=policy=cli")
    assert [hit.triggered for hit in client.jobs.list(policy="cli").jobs] == [{"cli": False}]
    assert client.jobs.list(policy="none").jobs == []


def asked(client: Client, path: str, **body: Any) -> httpx2.Response:
    body = {"model": "fake-model", "max_tokens": 3, "policies": ["told", "quiet", "shade"]} | body
    answer = httpx2.post(f"{client.url}/v1/{path}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer


def test_answers_tell_what_policies_decided_that_are_told(client: Client, calm: str) -> None:
    """And nothing of others, in the answer and in its header, or at the end of a stream."""
    fields = of_all(calm, "flag", all_traffic=False)
    client.policies.put("told", **fields, told=True)
    client.policies.put("quiet", **fields)
    high = fields["condition"] | {"at_least": 1e6}
    client.policies.put("shade", **fields | {"condition": high, "mode": "shadow"}, told=True)
    verdicts = [
        {"policy": "told", "triggered": [0], "acted": [0]},
        {"policy": "shade", "triggered": [], "acted": []},
    ]
    messages = [{"role": "user", "content": "hello there"}]
    for path, prompt in (
        ("chat/completions", {"messages": messages}),
        ("completions", {"prompt": "hello there"}),
    ):
        answer = asked(client, path, **prompt)
        assert answer.json()["verdicts"] == verdicts
        assert answer.headers["x-midstream-policies"] == "told=acted, shade=clear"
        *chunks, last = chunks_of(asked(client, path, **prompt, stream=True))
        assert last["verdicts"] == verdicts
        assert not [chunk for chunk in chunks if "verdicts" in chunk]
    both = asked(client, "completions", prompt=["you", "hello there"]).json()["verdicts"]
    assert both[0]["triggered"] == [0, 1]
    plain = asked(client, "completions", prompt="hello there", policies=["quiet"])
    assert "verdicts" not in plain.json()
    assert "x-midstream-policies" not in plain.headers
    client.policies.change("told", told=False)
    answer = asked(client, "completions", prompt="hello there")
    assert [each["policy"] for each in answer.json()["verdicts"]] == ["shade"]


def test_a_policy_reads_the_content_of_chats_and_the_whole_of_other_prompts(
    client: Client, calm: str
) -> None:
    fields = of_all(calm, "flag", all_traffic=False)
    for name, schedule in (("content", {}), ("user", {"tokens": [{"role": "user"}]})):
        condition = fields["condition"] | {"at_least": 1.0, "schedule": schedule}
        client.policies.put(name, **fields | {"condition": condition})
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "you"}]
    chat = client.submit(
        model="fake-model", messages=[messages], policies=["content", "user"], max_tokens=2
    )
    client.wait(chat)
    result = client.result(chat.id)
    found = decided(result)
    for name, looks in (("content", [0, 1]), ("user", [0])):
        sight = found[name].policy.sight
        turns = [client.positions(messages, {"turn": turn}, model="fake-model") for turn in looks]
        runs = [(turn[0].position, turn[-1].position + 1) for turn in turns]
        assert sight.runs == runs
        assert found[name].decisions[0].position == runs[0][0]
    raw = decided(run(client, "content", "user"))
    assert {each.policy.sight.whole for each in raw.values()} == {"the prompt has no turns"}
    assert raw["content"].decisions[0].position == 0


def test_jobs_are_found_by_policy_and_by_flag(
    client: Client, midstream: Callable[..., str], calm: str
) -> None:
    fields = of_all(calm, "flag", all_traffic=False)
    client.policies.put("finds", **fields)
    client.policies.put("notes", **fields | {"actions": []})
    flagged = run(client, "finds").id
    noted = run(client, "notes").id
    assert [job.id for job in client.jobs.list(policy="finds").jobs] == [flagged]
    ids = {
        known: [job.id for job in client.jobs.list(flagged=known).jobs] for known in (True, False)
    }
    assert flagged in ids[True]
    assert noted not in ids[True]
    assert noted in ids[False]
    assert flagged not in ids[False]
    assert flagged in midstream("list", "jobs", "--policy", "finds")
    assert noted not in midstream("list", "jobs", "--flagged")
