"""Scores of probes on real engines equal numpy's on the captured rows, whatever happens to the request."""

import msgspec
import numpy as np
import pytest
from host import Host, capture_of, prompt_of, steer
from probe_kit import Weights, check, new_maximum, scores_of, tokens_of

AGGREGATIONS = (("last", 0.0), ("max", 0.0), ("mean", 0.0), ("exponential", 0.9))


@pytest.mark.parametrize("engine", ["v1", "v2", "compiled", "tp2", "pp2"])
def test_scores_equal_numpy_on_captured_rows(engine: str, request: pytest.FixtureRequest) -> None:
    """Prompt and generated tokens, chunked prefill, probes at several sites, aggregations, beside a plain and a steered request."""
    host: Host = request.getfixturevalue(engine)
    layers, first, second = [0, host.info["num_layers"] - 1], Weights(1), Weights(2, k=3)
    probes = [
        first.probe(host, layers[number % 2], name=kind, aggregation=kind, decay=decay) for number, (kind, decay) in enumerate(AGGREGATIONS)
    ] + [second.probe(host, layers[1], name="after", at="after")]
    steering = [steer(host.vector(np.ones(64)), [layers[1]], 0.5)]
    jobs = []
    for number, length in enumerate((5, 100, 20)):
        captures = [capture_of(layers, "all", at=at, tag=at) for at in ("before", "after")]
        job = host.job(
            prompt_of(length, seed=number), max_tokens=6, capture=captures, steering=steering if number == 2 else None, probes=probes
        )
        jobs.append(job)
    host.run(*jobs, host.job(prompt_of(9), max_tokens=6))
    for job in jobs:
        scores = scores_of(host, job)
        rows = {(at, layer): host.capture(job, number).array(layer) for number, at in enumerate(("before", "after")) for layer in layers}
        assert len(rows["before", 0]) == len(job.prompts[0].token_ids) + 5
        for number, (kind, decay) in enumerate(AGGREGATIONS):
            check(scores[kind], first.of(rows["before", layers[number % 2]]), kind, decay)
        check(scores["after"], second.of(rows["after", layers[1]]))
    assert not np.allclose(tokens_of(scores_of(host, jobs[2])["after"])[:, 0], second.of(host.capture(jobs[2], 0).array(layers[1]))[:, 0])


@pytest.mark.parametrize("engine", ["v1", "v2", "compiled", "overlapped"])
def test_a_request_ends_at_the_token_that_crosses(engine: str, request: pytest.FixtureRequest) -> None:
    """Tokens computed behind it, by steps under way too, are dropped; its captures end there; the rest of the batch goes on."""
    host: Host = request.getfixturevalue(engine)
    last, weights, prompt = host.info["num_layers"] - 1, Weights(3, k=16), prompt_of(20, seed=5)
    free = host.job(prompt, max_tokens=12, probes=[weights.probe(host, last)])
    tokens = host.run(free)[free.id][0].token_ids
    label, position, threshold = new_maximum(tokens_of(scores_of(host, free)["p"]), 22, 30)
    thresholds = [threshold if number == label else None for number in range(16)]
    stopping = weights.probe(host, last, "stop", thresholds=thresholds)
    stopped = host.job(prompt, max_tokens=12, probes=[stopping], capture=capture_of([last], "all"))
    other = host.job(prompt_of(30, seed=6), max_tokens=12, probes=[weights.probe(host, 0, name="other")])
    outputs = host.run(stopped, other, host.job(prompt_of(7), max_tokens=12))
    (output,) = outputs[stopped.id]
    assert (output.finish_reason, output.token_ids) == ("probe:p", tokens[: position - 20 + 1])
    score = scores_of(host, stopped)["p"]
    assert (score.stopped, score.positions, score.crossed[label]) == (True, position + 1, position)
    assert host.capture(stopped).positions(0) == list(range(position + 1))
    check(score, weights.of(host.capture(stopped).array(last)))
    assert len(outputs[other.id][0].token_ids) == 12
    assert host.call("midstream_status")[0]["requests"] == 0


def test_a_prompt_that_crosses_generates_nothing(v1: Host) -> None:
    stopping = Weights(4, k=1).probe(v1, 0, "stop", thresholds=[-1e6])
    job = v1.job(prompt_of(100), max_tokens=5, probes=[stopping], capture=capture_of([0], "last_prompt"))
    (output,) = v1.run(job)[job.id]
    assert (output.finish_reason, output.token_ids, output.text) == ("probe:p", [], "")
    score = scores_of(v1, job)["p"]
    assert (score.stopped, score.positions, score.crossed) == (True, 100, [0])
    assert v1.capture(job).positions(0) == [99]


def test_tokens_of_the_prefix_cache_are_scored(cached: Host) -> None:
    """From kept rows where there are any; those that nobody kept are computed again."""
    weights, prompt = Weights(5), prompt_of(300, seed=71)
    jobs = [
        cached.job(prompt, max_tokens=2, probes=probes)
        for probes in (None, [weights.probe(cached, 0)], [weights.probe(cached, 0)], [weights.probe(cached, 1)])
    ]
    hits = [cached.run(job)[job.id][0].cached_tokens for job in jobs]
    assert hits == [0, 0, 256, 0]
    first, second = (scores_of(cached, job)["p"] for job in jobs[1:3])
    assert (first.positions, second.positions) == (301, 301)
    np.testing.assert_allclose(tokens_of(second), tokens_of(first), atol=1e-5)


def test_probes_change_no_bit(v1: Host) -> None:
    """Neither of their own request nor of others in its steps."""
    capture, weights = capture_of([0, 1], "all"), Weights(6)

    def rows(probes: list | None) -> list[bytes]:
        jobs = [v1.job(prompt_of(30, seed=n), max_tokens=5, capture=capture, probes=probes if n else None) for n in range(3)]
        v1.run_together(*jobs)
        return [v1.capture(job).array(layer).tobytes() for job in jobs for layer in (0, 1)]

    assert rows(None) == rows([weights.probe(v1, 0), weights.probe(v1, 1, name="q")])


@pytest.mark.parametrize("fault", ["alter_score", "lose_score"])
def test_a_rank_whose_scores_are_wrong_is_found(tp2: Host, fault: str) -> None:
    """Scores that differ from the other rank's are a disagreement; those that a rank cannot compute fail the request."""
    job = tp2.job(prompt_of(20), max_tokens=3, probes=[Weights(7).probe(tp2, 0)])
    tp2.call("midstream_fault", f"{fault}:rank=1")
    tp2.run_any(job)
    first, second = tp2.receipts(job)
    tp2.call("midstream_fault", "")
    if fault == "alter_score":
        assert (first.status, second.status, first.checksum == second.checksum) == ("ok", "ok", False)
    else:
        assert (first.status, second.status, second.kind) == ("ok", "error", "probe_failed")
    tp2.call("restart_ledgers")
    honest = tp2.job(prompt_of(20), max_tokens=3, probes=[Weights(7).probe(tp2, 0)])
    tp2.run(honest)
    first, second = tp2.receipts(honest)
    assert (first.status, first.checksum, bool(first.scores), second.scores) == ("ok", second.checksum, True, [])


def test_scores_travel_with_streamed_tokens(v1: Host) -> None:
    """One for each token whose row is known: the prompt's last, and every generated one except the last."""
    weights, prompt = Weights(8), prompt_of(90, seed=9)
    job = v1.job(prompt, max_tokens=6, probes=[weights.probe(v1, 1, aggregation="mean")])
    answer = v1.run_any(msgspec.structs.replace(job, stream=True))
    assert not answer.errors
    told = answer.scores[job.id]
    score = scores_of(v1, job)["p"]
    assert [each.position for each in told] == list(range(89, 95))
    np.testing.assert_array_equal([each.scores for each in told], tokens_of(score)[89:95])
    assert told[-1].aggregates == score.score
