"""More rows than the writers take: captures wait while others run, or spilled rows are all there
and dropped ones are named.

fp32, a queue of 1 MiB.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from host import Host, capture_of, prompt_of, relative_error
from nursery import Nursery
from probe_kit import Weights
from reference import Reference
from rows_kit import check_rows
from tiny import LAYERS
from tolerances import FP32_ROWS

from midstream.client.captures.reader import CaptureReader
from midstream.schemas.prompts.selectors import HOOKS

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
        reader, wanted = CaptureReader(flooded.root, job.id), reference.rows(tokens[:-1])
        assert reader.positions() == [
            position for position in range(len(tokens) - 1) if position not in dropped
        ]
        for hook, layers in EVERYTHING.items() if reader.positions() else ():
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
    (hold := Path(held.settings.data_dir) / "hold").touch()
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
