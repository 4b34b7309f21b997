"""Captures larger than the window are written while their requests run, and equal the reference's
rows. fp32, a window of 1 MiB.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from host import Host, capture_of, prompt_of
from nursery import Nursery
from reference import Reference
from rows_kit import check_rows
from tiny import LAYERS

from midstream.schemas.jobs.jobs import Job
from midstream.schemas.prompts.selectors import HOOKS

pytestmark = pytest.mark.long

EVERYTHING = {hook: list(range(LAYERS)) for hook in HOOKS}  # 6 KiB a position


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


def test_long_captures_side_by_side_equal_the_reference(long: Host, reference: Reference) -> None:
    """In steps of 96 tokens, generated tokens beside prompts; every layout; one as scratch rows
    that are converted.
    """
    layouts = ["auto", "packed", "per_file", "segment", "auto", "auto"]
    jobs = [wide(long, n, 200 + 7 * n, 12 + n, layout=layout) for n, layout in enumerate(layouts)]
    answers = long.run(*jobs)
    for job in jobs:
        check_rows(long, reference, job, answers[job.id])


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
