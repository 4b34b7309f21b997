"""More rows than the writers take: spilled ones are all there, dropped ones are named.

v1 runner, fp32, a queue of 1 MiB.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from host import Host, capture_of, prompt_of, relative_error
from nursery import Nursery
from reference import Reference
from tiny import LAYERS
from tolerances import FP32_ROWS

from midstream.client.captures.reader import CaptureReader
from midstream.schemas.prompts.selectors import HOOKS

pytestmark = pytest.mark.long

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
        capture_queue_mib=1,
        max_num_batched_tokens=64,
        enable_prefix_caching=False,
        fault="slow_write,rpc",
    )
    yield host
    host.close()


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
