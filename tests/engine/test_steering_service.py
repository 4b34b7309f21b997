"""Two real ranks behind the service: what is steered for everyone, and ranks that are out of step
until they are made equal again.
"""

import base64
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from host import prompt_of
from stack import Stack

from midstream.schemas.base.records import from_json
from midstream.schemas.jobs.jobs import JobView, State
from midstream.schemas.jobs.results import JobResult
from midstream.schemas.requests.steering import Dynamic, GlobalView

pytestmark = pytest.mark.long

# less than a block of the KV cache, and more than two
SHORT = prompt_of(9)
LONG = prompt_of(300, seed=1)


def push(layer: int, seed: int = 3) -> dict[str, Any]:
    values = (4 * np.random.default_rng(seed).normal(size=64)).astype("<f4")
    return {
        "layers": [layer],
        "vector": {
            "dtype": "float32",
            "shape": [64],
            "data": base64.b64encode(values.tobytes()).decode(),
        },
    }


#: Several tiers and families at once.
STEERING = [
    push(1),
    push(2, 4) | {"positions": "all_generated"},
    push(0, 5) | {"op": "ablate", "hook": "pre_attn", "positions": {"start": 4}},
]


class Service:
    """One worker of two tensor-parallel ranks, over HTTP.

    Rank 1 leaves out the first action that it should apply.
    """

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.http = httpx2.Client(base_url=stack.url, timeout=90)

    def begin(self, prompt: list[int], max_tokens: int = 6, **asked: Any) -> str:
        sampling = {"max_tokens": max_tokens, "logprobs": 3, "ignore_eos": True}
        answer = self.http.post(
            "/v1/jobs", json={"model": "tiny", "prompts": [prompt], "sampling": sampling, **asked}
        )
        assert answer.status_code == 202, answer.text
        return str(answer.json()["id"])

    def view(self, job_id: str, wait: int = 0) -> JobView:
        return from_json(
            self.http.get(f"/v1/jobs/{job_id}", params={"wait": wait} if wait else {}).content,
            JobView,
        )

    def result(self, job_id: str) -> JobResult:
        while (view := self.view(job_id, wait=30)).state in (State.QUEUED, State.RUNNING):
            time.sleep(0.01)
        assert view.state is State.SUCCEEDED, view.error
        return from_json(self.http.get(f"/v1/jobs/{job_id}/result").content, JobResult)

    def run(self, prompt: list[int], max_tokens: int = 6, **asked: Any) -> JobResult:
        return self.result(self.begin(prompt, max_tokens, **asked))

    def set_global(self, steering: list[dict[str, Any]]) -> GlobalView:
        answer = self.http.put("/v1/steering/global", json={"steering": steering})
        assert answer.status_code == 200, answer.text
        return from_json(answer.content, GlobalView)

    def clear_global(self) -> GlobalView:
        answer = self.http.delete("/v1/steering/global")
        assert answer.status_code == 200, answer.text
        return from_json(answer.content, GlobalView)

    def dynamic(self) -> Dynamic:
        """Once the worker answers in time: a machine may stall for longer than the API waits for
        it.
        """
        for _ in range(30):
            told = from_json(self.http.get("/v1/steering/dynamic").content, Dynamic)
            if "did not answer" not in told.determinism.detail:
                break
        return told


@pytest.fixture(scope="module")
def service(
    qwen3: Path, two_ranks: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    options = {
        "engine": "vllm",
        "model": str(qwen3),
        "model_name": "tiny",
        "engine.max_model_len": 2048,
        "kv_cache_gib": 0.1,
    }
    directory = tmp_path_factory.mktemp("steering")
    with Stack(
        directory,
        api=True,
        **{"engine.tensor_parallel_size": 2},
        fault="skip_action:rank=1",
        certify=False,
        **options,
        lease_s=15.0,
        **{"tuning.visibility_timeout_s": 30},
        steering_wait_s=60.0,
        start_timeout_s=400,
    ) as stack:
        yield Service(stack)


@pytest.fixture(scope="module")
def aligned(service: Service) -> Service:
    """After the change that a rank skips: a job finds out, and the ranks are aligned anew, which
    empties the prefix cache.
    """
    service.set_global([push(1)])
    service.run(SHORT)
    service.clear_global()
    service.run(SHORT)
    return service


def test_ranks_with_different_actions_are_detected_at_the_first_result_and_aligned(
    service: Service,
) -> None:
    # field case 30
    """Nobody polls.

    The job is run once more, the engine lives on, and everybody can see what happened.
    """
    service.run(SHORT)
    affected = service.begin(SHORT, steering=STEERING)
    result = service.result(affected)
    assert result.determinism is not None
    assert service.view(affected).attempt == 2
    assert result.determinism.consistent
    (reason,) = result.determinism.retried
    # by the receipts, or by the worker's own look at its ranks, whichever comes first
    assert "rank 0 reports checksum" in reason or "disagree on the actions" in reason
    assert "rank 1" in reason

    dynamic = service.dynamic()
    (worker,) = dynamic.workers
    assert dynamic.determinism.consistent, dynamic.determinism.detail
    assert worker.state == "serving"
    assert worker.desyncs == 1
    assert worker.resyncs == 1
    assert [rank.epoch for rank in worker.ranks] == [1, 1]
    assert service.stack.log("worker").count("ranks diverged") == 1
    assert service.stack.processes["worker"].poll() is None

    again = service.run(SHORT, steering=STEERING)
    assert again.determinism is not None
    assert again.outputs == result.outputs, "the second attempt was steered on both ranks"
    assert again.determinism.retried == []


def test_global_steering_equals_steering_every_request_and_leaves_no_trace(
    aligned: Service,
) -> None:
    plain = aligned.run(SHORT).outputs
    own = aligned.run(SHORT, steering=STEERING).outputs
    assert plain[0].logprobs != own[0].logprobs
    version = aligned.set_global(STEERING).version
    steered = aligned.run(SHORT)
    assert steered.outputs == own, "bit for bit"
    assert steered.determinism is not None
    assert steered.determinism.consistent
    assert steered.determinism.global_version == version
    assert {rank.applied > 0 for stage in steered.determinism.stages for rank in stage.ranks} == {
        True
    }
    assert aligned.run(SHORT, steering=[push(3, 9)]).outputs[0].logprobs not in (
        own[0].logprobs,
        aligned.run(SHORT, steering=[push(3, 8)]).outputs[0].logprobs,
    )
    assert aligned.clear_global().version > version
    assert aligned.run(SHORT).outputs == plain, "bit for bit"
    assert [rank.rows_used for worker in aligned.dynamic().workers for rank in worker.ranks] == [
        0,
        0,
    ]


def test_the_prefix_cache_is_not_shared_across_global_steerings(aligned: Service) -> None:
    def cached() -> tuple[list[int], int]:
        (output,) = aligned.run(LONG).outputs
        return output.token_ids, output.cached_tokens

    plain, none = cached()
    assert none == 0
    aligned.set_global([push(1)])
    steered, foreign = cached()  # field case 13
    assert foreign == 0
    again, shared = cached()
    assert again == steered
    assert shared > 0
    aligned.clear_global()
    after, kept = cached()
    assert after == plain
    assert kept > 0
