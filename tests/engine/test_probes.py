"""Scores of probes on real engines equal numpy's on the captured rows, whatever happens to the
request.
"""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from host import Host, capture_of, prompt_of, relative_error, steer
from msgspec import UNSET
from probe_kit import (
    EDGE,
    Weights,
    check,
    flapping,
    new_maximum,
    positions_of,
    scores_of,
    tokens_of,
)
from reference import Reference
from tolerances import FP32_ROWS

from midstream.schemas.artifacts.conditions import Condition, Schedule, StoredPolicy
from midstream.schemas.artifacts.hits import text_of
from midstream.schemas.artifacts.probes import ProbeScore, StoredProbe
from midstream.schemas.jobs.jobs import Job
from midstream.schemas.prompts.selectors import Span
from midstream.schemas.prompts.sight import Sight, TurnLook, TurnMap, TurnPiece
from midstream.schemas.prompts.windows import When
from midstream.workers.runner.probes.deciders import seen_by

AGGREGATIONS = (("last", 0.0), ("max", 0.0), ("mean", 0.0), ("exponential", 0.9))


@pytest.mark.parametrize("engine", ["v1", "v2", "compiled", "tp2", "pp2"])
def test_scores_equal_numpy_on_captured_rows(engine: str, request: pytest.FixtureRequest) -> None:
    """Prompt and generated tokens, chunked prefill, probes at several sites, aggregations, beside a
    plain and a steered request.
    """
    host: Host = request.getfixturevalue(engine)
    layers = [0, host.info["num_layers"] - 1]
    first = Weights(1)
    second = Weights(2, k=3)
    probes = [
        first.probe(host, layers[number % 2], name=kind, aggregation=kind, decay=decay)
        for number, (kind, decay) in enumerate(AGGREGATIONS)
    ] + [second.probe(host, layers[1], name="after", at="after")]
    steering = [steer(host.vector(np.ones(64)), [layers[1]], 0.5)]
    jobs = []
    for number, length in enumerate((5, 100, 20)):
        captures = [capture_of(layers, "all", at=at, tag=at) for at in ("before", "after")]
        job = host.job(
            prompt_of(length, seed=number),
            max_tokens=6,
            capture=captures,
            steering=steering if number == 2 else None,
            probes=probes,
        )
        jobs.append(job)
    host.run(*jobs, host.job(prompt_of(9), max_tokens=6))
    for job in jobs:
        scores = scores_of(host, job)
        rows = {
            (at, layer): host.capture(job, number).array(layer)
            for number, at in enumerate(("before", "after"))
            for layer in layers
        }
        assert len(rows["before", 0]) == len(job.prompts[0].token_ids) + 5
        for number, (kind, decay) in enumerate(AGGREGATIONS):
            check(scores[kind], first.of(rows["before", layers[number % 2]]), kind, decay)
        check(scores["after"], second.of(rows["after", layers[1]]))
    assert not np.allclose(
        tokens_of(scores_of(host, jobs[2])["after"])[:, 0],
        second.of(host.capture(jobs[2], 0).array(layers[1]))[:, 0],
    )


@pytest.mark.parametrize("engine", ["v1", "v2", "compiled", "overlapped"])
def test_a_request_ends_at_the_token_that_crosses(
    engine: str, request: pytest.FixtureRequest
) -> None:
    """Tokens computed behind it, by steps under way too, are dropped; its captures end there; the
    rest of the batch goes on.
    """
    host: Host = request.getfixturevalue(engine)
    last = host.info["num_layers"] - 1
    weights = Weights(3, k=16)
    prompt = prompt_of(20, seed=5)
    free = host.job(prompt, max_tokens=12, probes=[weights.probe(host, last)])
    tokens = host.run(free)[free.id][0].token_ids
    label, position, threshold = new_maximum(tokens_of(scores_of(host, free)["p"]), 22, 30)
    thresholds = [threshold if number == label else None for number in range(16)]
    stopping = weights.probe(host, last, "stop", thresholds=thresholds)
    stopped = host.job(prompt, max_tokens=12, probes=[stopping], capture=capture_of([last], "all"))
    other = host.job(
        prompt_of(30, seed=6), max_tokens=12, probes=[weights.probe(host, 0, name="other")]
    )
    outputs = host.run(stopped, other, host.job(prompt_of(7), max_tokens=12))
    (output,) = outputs[stopped.id]
    assert output.finish_reason == "probe:p"
    assert output.token_ids == tokens[: position - 20 + 1]
    score = scores_of(host, stopped)["p"]
    assert score.stopped
    assert score.positions == position + 1
    assert score.crossed[label] == position
    assert host.capture(stopped).positions(0) == list(range(position + 1))
    check(score, weights.of(host.capture(stopped).array(last)))
    assert len(outputs[other.id][0].token_ids) == 12
    assert host.call("midstream_status")[0]["requests"] == 0


def test_a_prompt_that_crosses_generates_nothing(v1: Host) -> None:
    stopping = Weights(4, k=1).probe(v1, 0, "stop", thresholds=[-1e6])
    job = v1.job(
        prompt_of(100), max_tokens=5, probes=[stopping], capture=capture_of([0], "last_prompt")
    )
    (output,) = v1.run(job)[job.id]
    assert output.finish_reason == "probe:p"
    assert output.token_ids == []
    assert output.text == ""
    score = scores_of(v1, job)["p"]
    assert score.stopped
    assert score.positions == 100
    assert score.crossed == [0]
    assert v1.capture(job).positions(0) == [99]


def test_a_stop_string_that_reads_like_a_probe_is_the_users() -> None:
    from vllm.outputs import CompletionOutput, RequestOutput

    from midstream.workers.engine.requests import trial_request
    from midstream.workers.engine.vllm_output import OutputJoiner
    from midstream.workers.runner.probes.probe_news import STOPPED_BY

    def finished(stop_reason: str | None, more: dict[str, str] | None) -> tuple[object, ...]:
        part = CompletionOutput(
            0, "text", [5], None, None, finish_reason="stop", stop_reason=stop_reason
        )
        output = RequestOutput("r", "", [1, 2], None, [part], True, kv_transfer_params=more)
        progress = OutputJoiner(trial_request("j", 0, [1, 2], 1)).add(output)
        assert progress is not None
        assert progress.finished is not None
        return progress.finished.finish_reason, progress.finished.stop_reason, progress.stopped_by

    assert finished("probe:x", None) == ("stop", "probe:x", "")
    assert finished("probe:x", {STOPPED_BY: "guard"}) == ("probe:guard", UNSET, "guard")


def test_tokens_of_the_prefix_cache_are_scored(cached: Host) -> None:
    """From kept rows where there are any; those that nobody kept are computed again."""
    weights = Weights(5)
    prompt = prompt_of(300, seed=71)
    jobs = [
        cached.job(prompt, max_tokens=2, probes=probes)
        for probes in (
            None,
            [weights.probe(cached, 0)],
            [weights.probe(cached, 0)],
            [weights.probe(cached, 1)],
        )
    ]
    assert [cached.run(job)[job.id][0].cached_tokens for job in jobs] == [0, 0, 256, 0]
    first, second = (scores_of(cached, job)["p"] for job in jobs[1:3])
    assert first.positions == 301
    assert second.positions == 301
    np.testing.assert_allclose(tokens_of(second), tokens_of(first), atol=1e-5)


def test_probes_change_no_bit(v1: Host) -> None:
    """Neither of their own request nor of others in its steps."""
    capture = capture_of([0, 1], "all")
    weights = Weights(6)

    def rows(probes: list | None) -> list[bytes]:
        jobs = [
            v1.job(
                prompt_of(30, seed=n), max_tokens=5, capture=capture, probes=probes if n else None
            )
            for n in range(3)
        ]
        v1.run_together(*jobs)
        return [v1.capture(job).array(layer).tobytes() for job in jobs for layer in (0, 1)]

    assert rows(None) == rows([weights.probe(v1, 0), weights.probe(v1, 1, name="q")])


@pytest.mark.parametrize("fault", ["alter_score", "lose_score"])
def test_a_rank_whose_scores_are_wrong_is_found(tp2: Host, fault: str) -> None:
    """Scores that differ from the other rank's are a disagreement; those that a rank cannot compute
    fail the request.
    """
    job = tp2.job(prompt_of(20), max_tokens=3, probes=[Weights(7).probe(tp2, 0)])
    tp2.call("midstream_fault", f"{fault}:rank=1")
    tp2.run_any(job)
    first, second = tp2.receipts(job)
    tp2.call("midstream_fault", "")
    if fault == "alter_score":
        assert first.status == "ok"
        assert second.status == "ok"
        assert first.checksum != second.checksum
    else:
        assert first.status == "ok"
        assert second.status == "error"
        assert second.kind == "probe_failed"
    tp2.call("restart_ledgers")
    honest = tp2.job(prompt_of(20), max_tokens=3, probes=[Weights(7).probe(tp2, 0)])
    tp2.run(honest)
    first, second = tp2.receipts(honest)
    assert first.status == "ok"
    assert first.checksum == second.checksum
    assert bool(first.scores)
    assert second.scores == []


def test_scores_travel_with_streamed_tokens(v1: Host) -> None:
    """One for each token whose row is known: the prompt's last, and every generated one except the
    last.
    """
    weights = Weights(8)
    prompt = prompt_of(90, seed=9)
    job = v1.job(prompt, max_tokens=6, probes=[weights.probe(v1, 1, aggregation="mean")])
    answer = v1.run_any(msgspec.structs.replace(job, stream=True))
    assert not answer.errors
    told = answer.scores[job.id]
    score = scores_of(v1, job)["p"]
    assert [each.position for each in told] == list(range(89, 95))
    np.testing.assert_array_equal([each.scores for each in told], tokens_of(score)[89:95])
    assert told[-1].aggregates == score.score


# --- Steering by a probe
# ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "model"), [("v1", "llama"), ("compiled", "llama"), ("v2", "llama"), ("tp2", "qwen3")]
)
def test_gated_steering_equals_transformers_step_by_step(
    engine: str, model: str, request: pytest.FixtureRequest
) -> None:
    """Edits on exactly the generated tokens before which the score was above the threshold; prompts
    in one step and in several.
    """
    host: Host = request.getfixturevalue(engine)
    path: Path = request.getfixturevalue(model)
    reference = Reference(path)
    last = host.info["num_layers"] - 1
    jobs = []
    wanted = []
    for number, (length, content) in enumerate(
        ((12, {}), (100, {"aggregation": "exponential", "decay": 0.5}))
    ):
        prompt = prompt_of(length, seed=60 + number)
        gate, expected = flapping(reference, prompt, 14, last, 20 + number, layer=number, **content)
        jobs.append(
            host.job(
                prompt,
                max_tokens=14,
                capture=capture_of([0, last], "all"),
                steering=gate.steering(host),
                probes=[gate.probe(host)],
            )
        )
        wanted.append(expected)
    outputs = host.run(*jobs, host.job(prompt_of(9), max_tokens=14))
    for job, (tokens, is_open, rows) in zip(jobs, wanted, strict=True):
        assert outputs[job.id][0].token_ids == tokens
        assert positions_of(scores_of(host, job)["p"]) == is_open
        assert [receipt.applied for receipt in host.receipts(job)] == [len(is_open)] * len(
            host.receipts(job)
        )
        for layer in (0, last):
            assert (
                relative_error(host.capture(job).array(layer), rows["post_block", layer])
                <= FP32_ROWS
            )


@pytest.mark.slow("requests preempt one another")
def test_preempted_requests_are_edited_where_their_gate_was_open(
    cached: Host, reference: Reference
) -> None:
    """Seven blocks for six requests of up to three: what was computed is computed again, with the
    edits of before.
    """
    last = cached.info["num_layers"] - 1
    gate, _ = flapping(reference, prompt_of(110, seed=500), 14, last, 40)
    before = cached.call("midstream_status")[0]["preemptions"]
    watcher = guard(cached, gate.weights, last, "flag", at_least=gate.threshold)
    jobs = [
        cached.job(
            prompt_of(110, seed=500 + number),
            max_tokens=180,
            capture=capture_of([last], "all"),
            steering=gate.steering(cached),
            probes=[gate.probe(cached), watcher],
        )
        for number in range(6)
    ]
    answers = cached.run_together(*jobs)
    assert cached.call("midstream_status")[0]["preemptions"] > before
    for job in jobs:
        tokens = job.prompts[0].token_ids + answers[job.id][0].token_ids
        is_open = positions_of(scores_of(cached, job)["p"])
        rows = reference.rows(tokens[:-1], gate.edits(is_open))["post_block", last]
        assert relative_error(cached.capture(job).array(last), rows) <= FP32_ROWS
        decides = gate.aggregates(rows)[109:-1]
        clear = np.abs(decides - gate.threshold) > EDGE
        np.testing.assert_array_equal(
            np.isin(np.arange(110, 289), is_open)[clear], (decides >= gate.threshold)[clear]
        )
        assert 0 < len(is_open) < 179
        # of a policy, each score is read once, as it was computed first
        assert decisions(scores_of(cached, job)["policy:guard"], gate.threshold)


# --- Policies
# ------------------------------------------------------------------------------------------------


def guard(
    host: Host, weights: Weights, site: int, *actions: str, acts: bool = True, **condition: Any
) -> StoredProbe:
    """The scores of the first label, read by a policy; by default those of generated tokens."""
    condition = {"schedule": Schedule(tokens="generated")} | condition
    read = StoredPolicy(
        name="guard",
        version=1,
        digest="d",
        condition=Condition(label="label0", **condition),
        actions=list(actions),
        mode="active" if acts else "shadow",
        acts=acts,
    )
    probe = weights.probe(host, site, name="policy:guard")
    return msgspec.structs.replace(probe, policy=read, actions=list(actions) if acts else [])


def decisions(score: ProbeScore, at_least: float, below: float | None = None) -> list[int]:
    """Check that the decisions are those that the reported scores of the tokens give which the
    policy reads, and return those at which it was on.
    """
    scores = tokens_of(score)[:, 0]
    wanted = []
    on = []
    assert score.policy is not None
    read = [*seen_by(score.policy, PROMPT).tolist(), *range(PROMPT, len(scores))]
    last = -1
    for position in read:
        value = float(scores[position])
        was = bool(on) and on[-1] == last
        last = position
        least = below if was and below is not None else at_least
        if value >= least:
            on.append(position)
        if (position in on) != was:
            wanted.append((position, "release" if was else "trigger", value))
    assert [(each.position, each.event, each.score) for each in score.decisions] == wanted
    assert score.triggers == sum(event == "trigger" for _, event, _ in wanted)
    return on


#: Tokens of the prompts below.
PROMPT = 110


def test_policies_decide_in_token_order_and_act_on_the_next_token(v1: Host) -> None:
    """Steering begins at the token after the decision; a policy that only records, and neighbours
    of one that acts, keep every bit.
    """
    last = v1.info["num_layers"] - 1
    weights = Weights(41, k=1)
    prompt = prompt_of(PROMPT, seed=41)
    free = v1.job(prompt, max_tokens=40, probes=[weights.probe(v1, last)])
    other = prompt_of(50, seed=42)
    tokens = v1.run(free)[free.id][0].token_ids
    generated = np.sort(tokens_of(scores_of(v1, free)["p"])[PROMPT:, 0])
    # between two scores, so that rounding decides nothing
    high, low = (float(generated[at : at + 2].mean()) for at in (30, 15))
    entry = steer(v1.vector(np.full(64, 3.0)), [0], positions="all_generated")
    entry = msgspec.structs.replace(entry, gate="policy:guard")

    def run(*actions: str, acts: bool) -> tuple[list[int], ProbeScore, list[bytes], Job]:
        probe = guard(v1, weights, last, *actions, acts=acts, at_least=high, release_below=low)
        window = Span(when=When(probe="policy:guard", at_least=0, before=2, after=1))
        captures = [capture_of([last], "all"), capture_of([0], "all", tag="w", window=window)]
        steering = [entry] if acts and "steer" in actions else None
        job = v1.job(prompt, max_tokens=40, capture=captures, probes=[probe], steering=steering)
        near = v1.job(other, max_tokens=40, capture=capture_of([last], "all"))
        output = v1.run_together(job, near)[job.id][0]
        rows = [v1.capture(each, 0).array(last).tobytes() for each in (job, near)]
        return output.token_ids, scores_of(v1, job)["policy:guard"], rows, job

    plain, shadow, rows, job = run("steer", "stop", "flag", acts=False)
    assert plain == tokens
    on = decisions(shadow, high, low)
    triggers = [each.position for each in shadow.decisions if each.event == "trigger"]
    assert 1 < len(triggers) < len(on) < 39
    assert not shadow.flagged
    assert shadow.gate is None
    assert v1.receipts(job)[0].applied == 0
    wanted = {at for trigger in triggers for at in range(trigger - 2, trigger + 2)}
    assert v1.capture(job, 1).positions() == sorted(wanted & set(range(PROMPT + 39)))

    steered, score, changed, job = run("steer", "flag", acts=True)
    on = decisions(score, high, low)
    first = triggers[0]
    # the token of the decision's row, and the next one, which that row gives, are those of before
    assert steered[: first + 2 - PROMPT] == tokens[: first + 2 - PROMPT]
    assert steered != tokens
    assert score.flagged
    assert on[0] == first
    assert positions_of(score) == [at + 1 for at in on if at + 1 < PROMPT + 39]
    assert v1.receipts(job)[0].applied == len(positions_of(score))
    assert changed[1] == rows[1]  # the neighbour's
    stopped, score, cut, _ = run("stop", acts=True)
    assert stopped == tokens[: first + 1 - PROMPT]
    assert score.stopped
    assert decisions(score, high, low) == [first]
    assert cut[1] == rows[1]


def test_a_policy_reads_what_its_sender_wrote_in_every_batch(v1: Host) -> None:
    """Alone and beside others; from what it read last on, it steers what is generated."""
    last = v1.info["num_layers"] - 1
    weights = Weights(47, k=1)
    prompt = prompt_of(PROMPT, seed=47)
    free = v1.job(prompt, max_tokens=20, probes=[weights.probe(v1, last)])
    v1.run(free)
    scores = tokens_of(scores_of(v1, free)["p"])[:, 0]
    runs = [(8, 30), (57, 58), (70, 104)]
    seen = np.concatenate([scores[start:stop] for start, stop in runs])
    level = float(np.sort(seen)[20:22].mean())
    entry = steer(v1.vector(np.full(64, 3.0)), [0], positions="all_generated")
    entry = msgspec.structs.replace(entry, gate="policy:guard")
    found = []
    for tokens in ("content", [TurnLook(role="user")]):
        probe = guard(v1, weights, last, "steer", at_least=level, schedule=Schedule(tokens=tokens))
        # ranks know a policy's content by its digest
        own = msgspec.structs.replace(probe.policy, digest=f"of {tokens}")
        probe = msgspec.structs.replace(probe, policy=own)
        turns = TurnMap(
            roles=["system", "user", "user"],
            pieces=[
                TurnPiece(start=start, stop=stop, part="content", messages=[number])
                for number, (start, stop) in enumerate(runs)
            ],
        )
        for beside in (0, 3):
            job = v1.job(prompt, max_tokens=20, probes=[probe], steering=[entry])
            (written,) = job.prompts
            written = msgspec.structs.replace(written, turns=turns)
            job = msgspec.structs.replace(job, prompts=[written])
            near = [v1.job(prompt_of(40, seed=number), max_tokens=9) for number in range(beside)]
            v1.run_together(job, *near)
            score = scores_of(v1, job)["policy:guard"]
            assert score.policy.sight == Sight(runs=runs if tokens == "content" else runs[1:])
            found.append([(each.position, each.event) for each in score.decisions])
            if tokens == "content":
                decisions(score, level)
            else:
                assert {each.position for each in score.decisions} <= {57, *range(70, 104)}
                on = bool(score.decisions) and score.decisions[-1].event == "trigger"
                wanted = list(range(PROMPT, PROMPT + 19)) if on else []
                assert positions_of(score) == wanted
    assert found[0] == found[1] != found[2] == found[3]


def test_a_latch_of_a_conversation_steers_from_the_first_token(v1: Host) -> None:
    """And ends a request that it stops before the first token."""
    last = v1.info["num_layers"] - 1
    weights = Weights(43, k=1)
    prompt = prompt_of(9, seed=43)
    for action, applied, tokens in (("steer", 5, 6), ("stop", 0, 0)):
        probe = guard(v1, weights, last, action, at_least=1e9, latch="conversation")
        latched = msgspec.structs.replace(probe.policy, inherited="job_1")
        entry = steer(v1.vector(np.ones(64)), [0], positions="all_generated")
        job = v1.job(
            prompt,
            max_tokens=6,
            probes=[msgspec.structs.replace(probe, policy=latched)],
            steering=[msgspec.structs.replace(entry, gate="policy:guard")],
        )
        (output,) = v1.run(job)[job.id]
        assert len(output.token_ids) == tokens
        assert v1.receipts(job)[0].applied == applied
        assert scores_of(v1, job)["policy:guard"].decisions == []
        if action == "stop":
            assert output.finish_reason == "policy:guard"


@pytest.mark.parametrize("engine", ["v1", "v2", "tp2"])
def test_a_hit_keeps_the_tokens_of_its_own_request(
    engine: str, request: pytest.FixtureRequest
) -> None:
    """Also with neighbours, where the policy ends the request, and only where it keeps texts."""
    host: Host = request.getfixturevalue(engine)
    last = host.info["num_layers"] - 1
    weights = Weights(44, k=1)
    prompts = [prompt_of(length, seed=length) for length in (PROMPT, 30)]
    free = [
        host.job(prompt, max_tokens=8, probes=[weights.probe(host, last)]) for prompt in prompts
    ]
    outputs = host.run(*free)
    scores = [tokens_of(scores_of(host, job)["p"])[:, 0] for job in free]
    high = float(np.sort(np.concatenate([each[-6:] for each in scores]))[-3:-1].mean())
    jobs = []
    for actions in ((), ("stop",)):
        probe = guard(host, weights, last, *actions, acts=bool(actions), at_least=high)
        keeps = msgspec.structs.replace(probe.policy, keep_texts=True)
        keeping = msgspec.structs.replace(probe, policy=keeps)
        jobs += [host.job(prompt, max_tokens=8, probes=[keeping]) for prompt in prompts]
        jobs.append(host.job(prompts[0], max_tokens=8, probes=[probe]))
    host.run_together(*jobs)
    found = 0
    for job in jobs:
        score = scores_of(host, job)["policy:guard"]
        number = prompts.index(job.prompts[0].token_ids)
        text = text_of(score)
        assert score.policy is not None
        if not score.decisions or not score.policy.keep_texts:
            assert text is None
            continue
        whole = [*prompts[number], *outputs[free[number].id][0].token_ids]
        end = score.decisions[0].position + 1
        kept = np.frombuffer(text.token_ids, "<i4").tolist() if text is not None else []
        assert kept[:end] == whole[:end]
        assert kept == whole[: len(kept)]
        found += 1
    assert found >= 2
