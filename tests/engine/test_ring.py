"""Captures whose rows exceed the ring are split over steps, on compiled engines whose ring holds
170 tokens of all sites.
"""

from collections.abc import Callable, Iterator

import pytest
from host import Host, capture_of, prompt_of
from nursery import Nursery
from reference import Reference
from rows_kit import check_rows
from tiny import HIDDEN, LAYERS

from midstream.schemas.prompts.selectors import HOOKS, PositionSelector
from midstream.schemas.requests.specs import StoredCapture

pytestmark = pytest.mark.long

SITES = {hook: list(range(LAYERS)) for hook in HOOKS}
ROOM = (1 << 20) // (4 * HIDDEN)
STEP_TOKENS = 1024


def everything(positions: PositionSelector = "all") -> StoredCapture:
    return capture_of([], positions, sites=SITES)


@pytest.fixture(scope="module")
def engine(
    nurseries: Callable[[str], Nursery], llama, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Host]]:
    def start(name: str, **settings) -> Host:
        options = {
            "engine.enforce_eager": False,
            "tuning.capture_buffer_mib": 1,
            "engine.max_num_batched_tokens": STEP_TOKENS,
            "engine.max_model_len": STEP_TOKENS,
        }
        return nurseries("v1").host(
            tmp_path_factory.mktemp("ring") / name, llama, **(options | settings)
        )

    return start


@pytest.fixture(scope="module")
def small(engine: Callable[..., Host]) -> Iterator[Host]:
    """So few KV blocks that concurrent requests preempt one another."""
    host = engine(
        "small",
        **{"engine.num_gpu_blocks_override": 12, "engine.max_num_seqs": 16},
    )
    yield host
    host.close()


def steps(host: Host) -> int:
    return host.call("midstream_status")[0]["step"]


def test_one_capture_takes_several_steps_worth_of_the_ring(
    small: Host, reference: Reference
) -> None:
    assert small.info["capture_row_limit"] == ROOM
    before = steps(small)
    job = small.job(prompt_of(900, seed=1), max_tokens=3, capture=everything())
    check_rows(small, reference, job, small.run(job)[job.id])
    assert 900 * len(HOOKS) * LAYERS > 5 * ROOM
    assert steps(small) - before >= 8, "six for the prompt"


def test_many_captures_and_plain_requests_share_the_ring_and_all_end(
    small: Host, reference: Reference
) -> None:
    preempted = small.call("midstream_status")[0]["preemptions"]
    jobs = [
        small.job(prompt_of(118 + n, seed=10 + n), max_tokens=16, capture=everything())
        for n in range(12)
    ]
    plain = [small.job(prompt_of(200 + n, seed=40 + n), max_tokens=8) for n in range(12)]
    outputs = small.run(*[job for pair in zip(jobs, plain, strict=True) for job in pair])
    for job in jobs:
        check_rows(small, reference, job, outputs[job.id])
    assert all(len(outputs[job.id][0].token_ids) == 8 for job in plain)
    assert small.call("midstream_status")[0]["preemptions"] > preempted


def test_rows_of_cached_blocks_take_no_room_in_the_ring(small: Host, reference: Reference) -> None:
    prompt = prompt_of(600, seed=3)
    first, second = (small.job(prompt, max_tokens=2, capture=everything()) for _ in range(2))
    small.run(first)
    before = steps(small)
    output = small.run(second)[second.id][0]
    assert output.cached_tokens == 512
    assert steps(small) - before <= 3
    check_rows(small, reference, second, [output])


@pytest.mark.matrix
def test_drafts_and_prompts_fit_the_ring_together(
    engine: Callable[..., Host], reference: Reference
) -> None:
    host = engine("drafting", speculative_tokens=3, **{"engine.enable_prefix_caching": False})
    repeating = [(prompt_of(8, seed=60 + n) * 40)[: 250 + n] for n in range(10)]
    jobs = [host.job(prompt, max_tokens=12, capture=everything()) for prompt in repeating]
    outputs = host.run(*jobs)
    for job in jobs:
        check_rows(host, reference, job, outputs[job.id])
    assert host.call("midstream_status")[0]["token_rows"] > sum(map(len, repeating)) + 10 * 11, (
        "drafts were computed"
    )
    host.close()
