"""Is every captured row of the demo model whole and right, and is nothing left on the machine,
after its worker, its engine, its rank, the process that writes the files of the rank, and the start
of a worker were killed twelve times? Real vLLM.
"""

import random
import time
from pathlib import Path

import numpy as np
import pytest
from leftovers import Census, own_temporary_folder
from stack import Stack
from test_worker_processes import engine_of, require_gone
from tolerances import FP32_ROWS_30_LAYERS

from midstream.client.captures.reader import CaptureReader
from midstream.schemas.jobs.jobs import State
from midstream.schemas.requests.specs import StoredCapture
from midstream.workers.app import EXIT_ENGINE_DIED
from midstream_ops.demo_model import fetch_demo_model

#: Who is killed; names of processes as Linux keeps them, 15 characters; psutil may give more.
VICTIMS = [
    *["worker"] * 4,
    *["VLLM::EngineCor"] * 2,
    *["VLLM::Worker"] * 2,
    *["midstream-rowd"] * 2,
    *["start"] * 2,
]
#: A start is killed within so many seconds; loading the engine takes longer.
START_S = 12.0
#: Layouts in turn: rows of small jobs in segments, and files of their own.
CAPTURES = [
    StoredCapture(
        sites={"post_block": list(range(30)), "pre_attn": [0, 15]},
        positions="all_prompt",
        tag="gate",
        layout=layout,
    )
    for layout in ("segment", "packed", "auto")
]
JOBS = 6
TOKENS = 48
TEXT = (
    "The Eiffel Tower is located in the city of Paris, and the Colosseum is "
    "located in the city of Rome. "
)


def submit(stack: Stack, number: int) -> str:
    return stack.submit(
        [f"{number}. {TEXT * 2}"[: 30 + 20 * number], f"{number}: {TEXT}"[: 12 + 5 * number]],
        max_tokens=TOKENS,
        capture=CAPTURES[number % len(CAPTURES)],
    )


def rows(stack: Stack, job_id: str) -> list[dict[str, np.ndarray]]:
    """Of each prompt: `<hook>.<layer>` → `[positions, hidden]`."""
    with CaptureReader(stack.settings.capture_root, job_id) as reader:
        return [
            {
                f"{hook}.{layer}": reader.array(layer, hook, number)
                for hook in reader.hooks(number)
                for layer in reader.layers(number, hook)
            }
            for number in reader.requests()
        ]


def check(stack: Stack, job_id: str, reference: list[dict[str, np.ndarray]]) -> None:
    """Everything about one job's captures."""
    view = stack.view(job_id)
    result = stack.result(job_id)
    assert view.state is State.SUCCEEDED, view
    assert view.receipts == view.receipts_expected == 2
    with CaptureReader(stack.settings.capture_root, job_id) as reader:
        assert [reader.manifest(request).attempt for request in reader.requests()] == [
            view.attempt
        ] * 2
        checks = reader.verify()
        assert all(found.ok for found in checks), checks
        observed = {(file.path, file.offset): file.crc32 for file in result.capture_results.files}
        there = {
            (str(found.path.relative_to(stack.settings.capture_root)), found.offset): found.crc32
            for found in checks
        }
    assert observed.items() <= there.items(), "what the receipts say is what the disk holds"
    assert sorted(file.request for file in result.capture_results.files) == [0, 1], (
        "one blob of each prompt, of one attempt"
    )
    for mine, theirs in zip(rows(stack, job_id), reference, strict=True):
        assert mine.keys() == theirs.keys()
        for site, wanted in theirs.items():
            worst = np.max(
                np.linalg.norm(mine[site] - wanted, axis=1) / np.linalg.norm(wanted, axis=1)
            )
            assert worst < FP32_ROWS_30_LAYERS, f"{job_id} {site}: {worst}"


def strike(stack: Stack, victim: str, rng: random.Random) -> None:
    """`kill -9`, and no process of the worker is left."""
    engine = engine_of(stack)
    if victim == "start":
        stack.kill("worker")
        stack.spawn("worker")
        time.sleep(rng.uniform(0.0, START_S))
        engine += engine_of(stack)
    if victim in ("worker", "start"):
        stack.kill("worker")
    else:
        next(each for each in engine if each.name().startswith(victim)).kill()
        assert stack.exit_code("worker") == EXIT_ENGINE_DIED
    require_gone(engine)


@pytest.mark.timeout(3600)
# field case 37
def test_captures_are_right_and_nothing_is_left_after_engine_kills(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(10**9)
    print(f"\nreal engine with seed {seed}")
    rng = random.Random(seed)
    settings = {
        "engine": "vllm",
        "model": str(fetch_demo_model()),
        "model_name": "demo",
        "engine.dtype": "float32",
        "engine.max_model_len": 512,
    }
    jobs: list[tuple[int, str]] = []
    with (
        own_temporary_folder() as temporary,
        Stack(
            tmp_path,
            start_timeout_s=900,
            lease_s=30,
            kv_cache_gib=0.25,
            max_attempts=20,
            **settings,
        ) as stack,
    ):
        calm = [submit(stack, number) for number in range(JOBS)]
        for job_id in calm:
            stack.wait(job_id)
        reference = [rows(stack, job_id) for job_id in calm]
        census = Census(stack, temporary)
        for victim in rng.sample(VICTIMS, len(VICTIMS)):
            jobs += [(number, submit(stack, number)) for number in range(JOBS)]
            stack.wait_running(jobs[-JOBS][1])
            time.sleep(rng.random() * 3)
            began = time.monotonic()
            strike(stack, victim, rng)
            stack.restart("worker")
            print(f"{victim} killed: ready after {time.monotonic() - began:.1f} s", flush=True)
        for number, job_id in jobs:
            stack.wait(job_id)
            check(stack, job_id, reference[number])
        again = sum(stack.view(job_id).attempt > 1 for _, job_id in jobs)
        print(census.figures())
        assert census.left() == []
        stack.stop()
        assert census.left() == []
    assert again > 0, "some jobs were in the engine when it was killed"
