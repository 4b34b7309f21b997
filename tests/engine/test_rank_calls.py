"""What the worker asks of real ranks: all do it, or all are as before; ranks out of step begin anew
and are equal again.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from host import Host, capture_of, prompt_of, relative_error, steer
from patching_kit import for_everyone
from reference import Reference
from rows_kit import direction
from tolerances import FP32_ROWS

from midstream.broker.processes.leftovers import FOLDER
from midstream.schemas.jobs.jobs import Job
from midstream.schemas.requests.steering import GlobalSteering


def send_vector(host: Host, seed: int) -> str:
    """The name of a vector that is on the ranks: a request used it."""
    name = host.vector(direction(seed))
    host.run(host.job(prompt_of(3), max_tokens=1, steering=[steer(name, [0])]))
    return name


def run_under(host: Host, steering: GlobalSteering, job: Job) -> None:
    answer = host.run_any(job, everyone=steering)
    assert not answer.errors, answer.errors


def rank_state(host: Host) -> list[tuple[Any, ...]]:
    names = ("actions", "rows_used", "entries_used", "vectors")
    return [tuple(rank[name] for name in names) for rank in host.call("midstream_status")]


def agree(host: Host) -> bool:
    return (
        len(
            {
                (rank["epoch"], rank["checksum"], rank["actions"])
                for rank in host.call("midstream_status")
            }
        )
        == 1
    )


@pytest.fixture
def anew(tp2: Host) -> Iterator[Host]:
    """Two ranks in step, with nothing on them; afterwards again."""
    tp2.call("restart_ledgers")
    yield tp2
    tp2.call("midstream_fault", "")
    tp2.call("restart_ledgers")


# field case 29
def test_what_one_rank_refuses_shows_until_it_has_done_it_too(anew: Host) -> None:
    name = send_vector(anew, 61)
    steering = msgspec.to_builtins(for_everyone(1, steer(name, [1], 2.0)))
    assert agree(anew)
    before = rank_state(anew)
    content = anew.call("midstream_fingerprint")
    anew.call("midstream_fault", "check_global:rank=1")
    assert anew.call("midstream_check_global", steering) == [
        [True, ""],
        [False, "fault injected: check_global"],
    ]
    anew.call("midstream_fault", "")
    assert anew.call("midstream_check_global", steering) == [[True, ""], [True, ""]]
    assert rank_state(anew) == before, "a check changes nothing"
    assert anew.call("midstream_fingerprint") == content, "a check changes nothing"
    anew.call("midstream_fault", "drop_vectors:rank=1")
    assert anew.call("midstream_drop_vectors", [name]) == [
        [True, ""],
        [False, "fault injected: drop_vectors"],
    ]
    assert not anew.call("same_content")
    anew.call("midstream_fault", "")
    anew.call("midstream_drop_vectors", [name])
    assert anew.call("same_content")
    (first, why), second = anew.call("midstream_check_global", steering)
    assert first is False
    assert why.endswith("is not on this rank")
    assert second == [False, why]


@pytest.mark.parametrize("way", ["compiled", "pp2"])
def test_global_steering_is_applied_before_and_after_a_resync(
    way: str, request: pytest.FixtureRequest
) -> None:
    """In a compiled forward, which reads the tables where they are written, moved and zeroed; on
    two stages, each with its layers.
    """
    host: Host = request.getfixturevalue(way)
    reference = (
        Reference(request.getfixturevalue("qwen3"))
        if way == "pp2"
        else request.getfixturevalue("reference")
    )
    mine = direction(64)
    theirs = direction(65)

    def check(host: Host, version: int, scale: float) -> None:
        steering = for_everyone(version, steer(host.vector(theirs), [1], scale))
        own = [steer(host.vector(mine), [0])]
        job = host.job(
            prompt_of(9), max_tokens=2, steering=own, capture=capture_of([3], "all_prompt")
        )
        run_under(host, steering, job)
        wanted = reference.post_block(prompt_of(9), [(0, mine, None), (1, scale * theirs, None)])
        assert relative_error(host.capture(job).array(3), wanted[3]) <= FP32_ROWS

    check(host, 1, 2.0)
    check(host, 2, 0.5)
    host.call("restart_ledgers")
    plain = host.job(prompt_of(9), max_tokens=2, capture=capture_of([3], "all_prompt"))
    host.run(plain)
    assert (
        relative_error(host.capture(plain).array(3), reference.post_block(prompt_of(9), [])[3])
        <= FP32_ROWS
    )
    check(host, 3, 3.0)
    host.call("restart_ledgers")


@pytest.mark.parametrize("way", ["tp2", "pp2"])
def test_all_ranks_learn_in_one_step_where_requests_end(
    way: str, request: pytest.FixtureRequest
) -> None:
    """Stop strings and a cancelled request beside one that goes on, then one when nothing else
    runs: no rank is called for them.
    """
    host: Host = request.getfixturevalue(way)
    everywhere = list(range(host.info["num_layers"]))
    own = [steer(send_vector(host, 66), [0])]
    prompt = prompt_of(20, seed=5)
    job = host.job(prompt, max_tokens=12)
    free = host.run(job)[job.id][0].token_ids
    stopping = {"max_tokens": 12, "capture": capture_of(everywhere, "all"), "stop": [f"w{free[3]}"]}
    stopped = [
        host.job(prompt, steering=own if number == 1 else None, **stopping) for number in range(3)
    ]
    cancelled, other = (
        host.job(prompt_of(20, seed=n), max_tokens=40, capture=stopping["capture"], steering=own)
        for n in (6, 7)
    )
    answer = host.run_any(*stopped, cancelled, other, cancel_after={cancelled.id: 5})
    assert answer.errors == {}
    assert answer.rank_calls == 0
    alone = host.job(prompt, **stopping)
    last = host.run_any(alone)
    assert last.errors == {}
    assert last.rank_calls == 0
    for each in (*stopped, alone, other):
        first, second = host.receipts(each)
        assert first.status == "ok"
        assert second.status == "ok"
        assert first.step == second.step
        assert first.checksum == second.checksum or way == "pp2"
        (output,) = {**answer.outputs, **last.outputs}[each.id]
        assert host.capture(each).positions(0) == list(range(20 + len(output.token_ids) - 1)), (
            "what was computed beyond is cut"
        )
    assert not (host.root / "default" / cancelled.id).exists()
    assert {(rank["requests"], rank["rows_used"]) for rank in host.call("midstream_status")} == {
        (0, 0)
    }
    assert host.call("same_content")


def test_an_engine_that_is_closed_leaves_no_memory_that_its_ranks_shared(
    two_ranks: None, qwen3: Path, tmp_path: Path
) -> None:
    before = {*FOLDER.iterdir()}
    host = Host(tmp_path, qwen3, **{"engine.tensor_parallel_size": 2})
    try:
        shared = {*FOLDER.glob("vllm_dist_*")} - before
        assert shared
    finally:
        host.close()
    assert not [path for path in shared if path.exists()]
