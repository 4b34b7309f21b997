"""Scores of probes on real engines equal numpy's on the captured rows, whatever happens to the request."""

import numpy as np
import pytest
from host import Host, capture_of, prompt_of, steer
from probe_kit import Weights, check, scores_of, tokens_of

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
