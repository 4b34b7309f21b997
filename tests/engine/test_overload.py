"""More rows than fit: beyond the queue of writers captures wait, or spilled rows are all there and
dropped ones are named; beyond a ring they take no more steps; beyond the window they are written
while their requests run.

fp32; the queue and the window have 1 MiB.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from host import Host, capture_of, prompt_of, relative_error
from mixed_kit import check_mixed
from nursery import Nursery
from probe_kit import Weights
from reference import Reference
from rows_kit import check_rows
from tiny import HIDDEN, LAYERS
from tolerances import FP32_ROWS

from midstream.client.captures.reader import CaptureReader
from midstream.schemas.jobs.jobs import Job
from midstream.schemas.prompts.selectors import HOOKS, PositionSelector
from midstream.schemas.requests.specs import StoredCapture

EVERYTHING = {hook: list(range(LAYERS)) for hook in HOOKS}
PROMPT = 200  # tokens: 1.2 MiB of rows


@pytest.fixture(scope="module", params=["spill", "drop"])
def flooded(
    request: pytest.FixtureRequest,
    llama: Path,
    nursery: Nursery,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Host]:
    host = nursery.host(
        tmp_path_factory.mktemp(request.param) / "engine",
        llama,
        capture_overload=request.param,
        **{"tuning.capture_queue_mib": 1},
        **{"engine.max_num_batched_tokens": 64, "engine.enable_prefix_caching": False},
        fault="slow_write,rpc",
    )
    yield host
    host.close()


@pytest.mark.long
def test_rows_beyond_the_queue_are_whole_on_disk_or_named_as_dropped(
    flooded: Host, reference: Reference
) -> None:
    """The first to finish fills the queue of writers that take a second for each group."""
    spills = flooded.settings.capture_overload == "spill"
    jobs = [
        flooded.job(
            prompt_of(PROMPT + n, seed=n),
            max_tokens=3,
            capture=capture_of([], "all", sites=EVERYTHING),
        )
        for n in range(6)
    ]
    answers = flooded.run(*jobs)
    lost = 0
    for job in jobs:
        tokens = job.prompts[0].token_ids + answers[job.id][0].token_ids
        (receipt,) = flooded.receipts(job)
        dropped = sorted({position for file in receipt.files for position in file.dropped})
        lost += len(dropped)
        assert receipt.status == ("partial" if dropped else "ok")  # field case 19
        assert not dropped or str(dropped[0]) in receipt.message
        reader = CaptureReader(flooded.root, job.id)
        wanted = reference.rows(tokens[:-1])
        assert reader.positions() == [
            position for position in range(len(tokens) - 1) if position not in dropped
        ]
        if not reader.positions():
            continue
        for hook, layers in EVERYTHING.items():
            for layer in layers:
                assert (
                    relative_error(
                        reader.array(layer, hook), wanted[hook, layer][reader.positions()]
                    )
                    <= FP32_ROWS
                )
    assert (lost > 0) == (not spills)
    assert (flooded.call("midstream_status")[0]["spilled_bytes"] > 0) == spills
    flooded.call("midstream_fault", "")
    again = flooded.job(prompt_of(9), max_tokens=2, capture=capture_of([1], "all"))
    flooded.run(again)
    # the rows of before are written: there is room again
    assert flooded.receipts(again)[0].status == "ok"


@pytest.fixture(scope="module", params=["v1", pytest.param("v2", marks=pytest.mark.long)])
def held(
    request: pytest.FixtureRequest,
    llama: Path,
    nurseries: Callable[[str], Nursery],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Host]:
    """With drafts, and scheduler and rank in processes of their own; or with steps ahead."""
    v2 = request.param == "v2"
    host = Host(
        tmp_path_factory.mktemp(request.param),
        llama,
        {"OVERLAP_STEPS": "1"} if v2 else {},
        nurseries("v2") if v2 else None,
        runner=request.param,
        speculative_tokens=0 if v2 else 3,
        **{"tuning.capture_queue_mib": 1},
        **{"engine.max_num_seqs": 3},
        fault="hold_write",
    )
    yield host
    host.close()


@pytest.mark.parametrize("held", ["v1"], indirect=True)  # the other has no drafts
def test_among_drafts_sampled_requests_leave_greedy_ones_alone(
    held: Host, reference: Reference
) -> None:
    """Here, as the fast tests have no other engine with drafts; all drafters: test_drafters.py."""
    check_mixed(held, reference)


def test_while_nothing_is_written_captures_wait_and_others_run(
    held: Host, reference: Reference
) -> None:
    """The first job fills the queue when it ends; one that captures is then half done, one has
    begun in its place, and one is at the head of vLLM's queue when the next place is free.
    """
    everything = capture_of([], "all", sites=EVERYTHING)
    first, running, *waiting = (
        held.job(prompt_of(length) * 3, max_tokens=tokens, capture=everything)
        for length, tokens in ((PROMPT // 3, 2), (9, 60), (8, 4), (7, 4))
    )
    beside = held.job(prompt_of(30), max_tokens=12)
    scored = held.job(prompt_of(12), max_tokens=8, probes=[Weights(1).probe(held, 0)])
    hold = Path(held.settings.data_dir) / "hold"
    hold.touch()
    with ThreadPoolExecutor() as pool:
        run = pool.submit(held.run_together, first, running, beside, *waiting, scored)
        try:
            assert held.receipts(scored)[0].status == "ok"
            time.sleep(1)
            assert [receipt.job for receipt in held.all_receipts()] == [scored.id]
            assert not run.done()
        finally:
            hold.unlink()
        answers = run.result()
    for job in (first, running, *waiting):
        assert check_rows(held, reference, job, answers[job.id])


# --- Compiled engines, with more rows in a step than a ring of 1 MiB would hold (a CPU has none) --


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


@pytest.mark.long
def test_a_capture_of_everything_takes_no_more_steps(small: Host, reference: Reference) -> None:
    """Rows stay where they are recorded; `test_ring_budget` has the steps of a ring."""
    assert small.info["capture_row_limit"] == 0
    before = steps(small)
    job = small.job(prompt_of(900, seed=1), max_tokens=3, capture=everything())
    check_rows(small, reference, job, small.run(job)[job.id])
    assert 900 * len(HOOKS) * LAYERS > 5 * ROOM
    assert steps(small) - before <= 4, "one for the prompt"


@pytest.mark.long
def test_many_captures_and_plain_requests_share_steps_and_all_end(
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


@pytest.mark.long
def test_rows_of_cached_blocks_are_not_computed_again(small: Host, reference: Reference) -> None:
    prompt = prompt_of(600, seed=3)
    first, second = (small.job(prompt, max_tokens=2, capture=everything()) for _ in range(2))
    small.run(first)
    before = steps(small)
    output = small.run(second)[second.id][0]
    assert output.cached_tokens == 512
    assert steps(small) - before <= 3
    check_rows(small, reference, second, [output])


@pytest.mark.long
@pytest.mark.matrix
def test_drafts_and_prompts_are_captured_together(
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


# --- A window of 1 MiB, smaller than each capture -------------------------------------------------


@pytest.fixture(scope="module", params=[1, 2], ids=["runner-1", "runner-2"])
def long(
    request: pytest.FixtureRequest,
    llama: Path,
    nurseries: Callable[[str], Nursery],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Host]:
    runner = f"v{request.param}"
    host = nurseries(runner).host(
        tmp_path_factory.mktemp(runner) / "engine",
        llama,
        runner=runner,
        **{"tuning.capture_window_mib": 1},
        **{"engine.max_num_batched_tokens": 96, "engine.block_size": 32},
        fault="rpc",
    )
    yield host
    host.close()


def wide(host: Host, number: int, prompt: int, tokens: int, **options) -> Job:
    return host.job(
        prompt_of(prompt, seed=number),
        max_tokens=tokens,
        capture=capture_of([], "all", sites=EVERYTHING, **options),
    )


@pytest.mark.long
def test_long_captures_side_by_side_equal_the_reference(long: Host, reference: Reference) -> None:
    """In steps of 96 tokens, generated tokens beside prompts; every layout; one as scratch rows
    that are converted.
    """
    layouts = ["auto", "packed", "per_file", "segment", "auto", "auto"]
    jobs = [wide(long, n, 200 + 7 * n, 12 + n, layout=layout) for n, layout in enumerate(layouts)]
    answers = long.run(*jobs)
    for job in jobs:
        check_rows(long, reference, job, answers[job.id])


@pytest.mark.long
def test_one_that_ends_early_is_moved_together(long: Host, reference: Reference) -> None:
    probe = wide(long, 60, 190, 40)
    tokens = long.run(probe)[probe.id][0].token_ids
    stop = tokens[5]
    job = long.job(
        prompt_of(190, seed=60),
        max_tokens=40,
        capture=capture_of([], "all", sites=EVERYTHING),
        stop_token_ids=[stop],
    )
    outputs = long.run(job)[job.id]
    assert len(outputs[0].token_ids) == tokens.index(stop) + 1
    check_rows(long, reference, job, outputs)
