"""Two ranks go through parts of the certification: what one of them alone fails at ends the run on
both, and neither waits for the other for long.
"""

import multiprocessing
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import distributed

from midstream.workers.runner.certificate import together
from midstream.workers.runner.certificate.together import FailedAloneError, Together

PATIENCE_S = 2.0


def _fail() -> None:
    raise ValueError("no such argument")


def _rank(rank: int, folder: Path, part: str, answers: "multiprocessing.Queue[tuple]") -> None:
    store = distributed.FileStore(str(folder / "store"), 2)
    distributed.init_process_group(
        "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    group = distributed.new_group([0, 1], backend="gloo")
    together.PATIENCE_S = PATIENCE_S
    ranks = Together(SimpleNamespace(world_size=2, rank_in_group=rank, cpu_group=group))
    act = {
        "all fail": _fail,
        "none fails": lambda: None,
        "one fails": _fail if rank else lambda: None,
        "one fails and the other is in a collective call": (
            _fail if rank else lambda: distributed.all_reduce(torch.ones(1))
        ),
    }[part]
    ranks.attempt("the part before", lambda: None)
    start = time.monotonic()
    try:
        answer = ranks.attempt(part, act)
    except FailedAloneError as error:
        answer = f"{type(error).__name__}: {error}"
    answers.put((rank, answer, time.monotonic() - start))
    answers.close()
    answers.join_thread()


ALONE = "FailedAloneError: the certification failed at one fails: rank 1: no such argument"


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ("all fail", ["no such argument"] * 2),
        ("none fails", ["", ""]),
        ("one fails", [ALONE] * 2),
        (
            "one fails and the other is in a collective call",
            [
                "NoAnswerError: the certification failed at one fails and the other is in a "
                "collective call on rank 1: no such argument"
            ],
        ),
    ],
)
def test_one_rank_that_fails_ends_a_part_on_both(
    tmp_path: Path, part: str, expected: list[str]
) -> None:
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    ranks = [context.Process(target=_rank, args=(n, tmp_path, part, queue)) for n in range(2)]
    for process in ranks:
        process.start()
    try:
        answers = {}
        while len(answers) < len(expected):
            rank, answer, seconds = queue.get(timeout=30)
            answers[rank] = answer
            assert seconds < PATIENCE_S + 8
        assert [answers[rank] for rank in sorted(answers)] == expected
    finally:
        for process in ranks:
            process.kill()
            process.join()


def test_a_part_that_is_needed_fails_the_run_of_a_single_rank() -> None:
    alone = Together(SimpleNamespace(world_size=1))
    assert alone.attempt("a law", _fail) == "no such argument"
    with pytest.raises(FailedAloneError, match="rank 0: no such argument"):
        alone.attempt("rows", _fail, needed=True)
