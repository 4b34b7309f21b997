"""Every request that asked for something gets one receipt, whatever happens to it; nothing that
goes wrong leaves the rank.
"""

import functools
import itertools
import operator
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pytest
import torch
from capture_kit import source_run, values
from line_kit import python_lines
from lora_kit import ADAPTER, holding_adapter
from plane_kit import VECTOR, WEIGHT, Adapters, Rig, capturing, probed, run, spec_of, steered
from rank_kit import HIDDEN, Request, steering, stream_of

from midstream import __version__
from midstream.schemas.artifacts.conditions import Condition, Schedule, StoredPolicy
from midstream.schemas.artifacts.probes import ProbeAction
from midstream.schemas.base.records import to_msgpack
from midstream.schemas.base.tensors import content_hash, from_numpy
from midstream.schemas.prompts.selectors import PositionSelector, PositionWindow, select
from midstream.schemas.readings.lens import StoredLens
from midstream.schemas.readings.stored import READER
from midstream.schemas.requests.source_runs import RunRow, row_name
from midstream.workers.runner.base.engine_step import NewRequest
from midstream.workers.runner.base.packed_spec import unpack
from midstream.workers.runner.base.row_index import Keeping, KeptBlock
from midstream.workers.runner.base.shared_memory import HostMemoryError
from midstream.workers.runner.plane.requests import WrongAdapterError
from midstream.workers.runner.rows import finite_check, overload
from midstream.workers.runner.rows.arena import BankRows
from midstream.workers.runner.rows.buffers import Staging
from midstream.workers.runner.rows.capture import SPAN, Recording
from midstream.workers.runner.rows.overload import Overload
from midstream.workers.runner.rows.step_places import Places


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path, loras=Adapters())


def test_a_request_that_is_removed_and_added_again_while_it_lives_is_recorded_once(
    rig: Rig,
) -> None:
    # field case 6
    """As the v2 runner tells of resumed requests, and vLLM of streamed input: a live id, as new."""
    request = capturing(1)
    rig.step((request, 0, 6), new=[request])
    rig.step((request, 0, 6), new=[request])
    rig.step((request, 6, 1), new=[request])
    receipt = rig.ended(request)
    assert [file.rows for file in receipt.files] == [14]
    assert rig.reader(request).positions() == list(range(7))


def test_a_cancelled_request_is_not_reported_and_leaves_nothing(rig: Rig) -> None:
    request = steered(1, captures=capturing(1).captures)
    rig.step((request, 0, 6), new=[request])
    rig.plane._requests.end("j1.0.1", -1)
    rig.step(aborted=[request])
    status = rig.plane.status()
    assert status["requests"] == 0
    assert status["rows_used"] == 0
    assert status["entries_used"] == 0
    assert rig.receipts() == []


def test_an_end_that_the_worker_reports_looks_at_no_other_request(tmp_path: Path) -> None:
    lines = []
    for many in (2, 20):
        rig = Rig(tmp_path / str(many))
        live = [steered(number) for number in range(many)]
        rig.step(*[(each, 0, 6) for each in live], new=live)
        requests = rig.plane._requests
        last = live[-1].tracked.spec.key
        lines.append(python_lines(functools.partial(requests.end, last, 6)))
        assert requests.ends == {last: 6}
        requests.end("of none", 6)
        assert requests.ends == {last: 6}
    assert lines[0] == lines[1]


@pytest.mark.parametrize("positions", ["all", "all_generated", PositionWindow(start=6), [0, 5]])
def test_rows_beyond_the_end_are_not_counted_as_applied(
    rig: Rig, positions: PositionSelector
) -> None:
    # field case 9
    """Drafts that were rejected, or a step that had begun when the end was found."""
    request = Request(1, 6, 9, (), [steering(rig.vector(1.0), [0, 1], "pre_attn", positions)])
    rig.step((request, 0, 6), new=[request])
    rig.step((request, 6, 4))
    rig.step((request, 7, 4))
    assert rig.ended(request).applied == 2 * len(select(positions, 0, 8, 6))


def test_sites_the_model_lacks_fail_the_request(rig: Rig) -> None:
    """Accepted by what the last worker published; this one has fewer layers, or other hooks."""
    edits = steered(1)
    records = steered(2, captures=capturing(2).captures)
    edits.steer(steering(content_hash(VECTOR), [0, 9], "pre_attn"))
    records.tracked.spec.captures[0].sites["post_block"].append(7)
    rig.step((edits, 0, 6), (records, 0, 6), new=[edits, records])
    status = rig.plane.status()
    assert status["rows_used"] == 1
    assert status["tainted"] == 1, (
        "who only records nothing fills no block with other content than it says"
    )
    rig.step(finished=[edits, records])
    first, second = rig.receipts()
    assert first.status == "error"
    assert first.kind == "intervention_failed"
    assert "layer 9 is out of range: the model has layers 0 to 1" in first.message
    assert second.status == "error"
    assert second.kind == "capture_failed"
    assert second.files == []
    assert "layer 7 is out of range" in second.message


def test_a_spec_of_another_version_or_shape_is_refused_with_both_named(rig: Rig) -> None:
    other = msgspec.structs.replace(spec_of(capturing(1)), version="0.0.0")
    spec, unreadable = unpack(to_msgpack({"job": "j2", "captures": 3}))
    rig.plane.begin(
        [
            NewRequest("1", other, 0),
            NewRequest("2", spec, 0, unreadable=unreadable),
        ],
        {},
        0,
    )
    first, second = rig.receipts()
    # field case 43
    assert first.status == "error"
    assert first.message == f"the worker runs Midstream 0.0.0, but rank 0 runs {__version__}"
    assert second.status == "error"
    assert f"rank 0 (Midstream {__version__}) cannot read the request" in second.message


def test_rows_dropped_under_overload_make_the_capture_partial_and_are_named(tmp_path: Path) -> None:
    rig = Rig(tmp_path, capture_overload="drop")
    request = capturing(1)
    rig.step((request, 0, 4), new=[request])
    rig.writer.backlog.send(2 << 20)  # the writers are behind by more than the queue holds
    rig.step((request, 4, 2))
    rig.step((request, 6, 1))
    rig.writer.backlog.free(2 << 20)
    receipt = rig.ended(request)  # field case 19
    assert receipt.status == "partial"
    assert [file.dropped for file in receipt.files] == [[4, 5, 6]]
    assert "4" in receipt.message
    reader = rig.reader(request)
    assert reader.positions() == [0, 1, 2, 3]
    assert reader.dropped() == [4, 5, 6]


def test_readings_that_are_behind_fail_no_capture_of_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overload, "PATIENCE_S", -1.0)
    rig = Rig(tmp_path)
    files = capturing(1)
    reading = capturing(2, consumers=[READER], reading=StoredLens(top_k=1))
    rig.writer.backlog.send(2 << 20, "reading")
    rig.step((files, 0, 6), (reading, 0, 6), new=[files, reading])
    rig.step((files, 6, 1), (reading, 6, 1))
    assert rig.plane.status()["behind"] == ["reading"]
    rig.step(finished=[files, reading])
    told = rig.told()
    assert "the writers did not catch up" in told["j2"].message
    assert told["j1"].status == "ok"


def test_readings_that_are_behind_drop_no_rows_of_files(tmp_path: Path) -> None:
    rig = Rig(tmp_path, capture_overload="drop")
    files = capturing(1)
    rig.writer.backlog.send(2 << 20, "reading")
    rig.step((files, 0, 6), new=[files])
    rig.step((files, 6, 1))
    assert rig.ended(files).status == "ok"


def test_where_rows_cannot_be_spilled_the_request_fails_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "spill").write_text("a file where a folder is needed")
    rig = Rig(tmp_path, capture_overload="spill")
    rig.writer.backlog.send(2 << 20)
    request = capturing(1)
    beside = steered(2)
    rig.step((request, 0, 6), (beside, 0, 6), new=[request, beside])
    rig.step(finished=[request, beside])
    told = rig.told()
    assert told["j1"].status == "error"
    assert told["j1"].kind == "capture_failed"
    assert "spill" in told["j1"].message
    assert told["j2"].status == "ok"
    assert told["j2"].applied == 6


def test_rows_missing_from_a_failed_request_are_reported_and_fail_dependent_ones(rig: Rig) -> None:
    """The scheduler promised them; the worker then has it forget all promises."""
    first = capturing(1)
    second = capturing(2)
    rig.faults.switch("plan")
    rig.step((first, 0, 6), new=[first], keeping=Keeping(keep=[KeptBlock("1", 0, 0, 4, 77)]))
    rig.faults.switch("")
    failed_at = rig.plane.status()["step"]
    assert rig.plane.status()["unkept"] == failed_at
    rig.step((second, 4, 2), new=[second], keeping=Keeping(serve=[KeptBlock("2", 0, 0, 4, 77)]))
    rig.plane.forget_failures([failed_at - 1])
    # what failed since the prefix cache began anew still counts
    assert rig.plane.status()["unkept"] == failed_at
    rig.plane.forget_failures([failed_at])
    assert rig.plane.status()["unkept"] == 0
    told = rig.receipts()
    assert [(receipt.job, receipt.status, receipt.kind) for receipt in told] == [
        ("j1", "error", "capture_failed"),
        ("j2", "error", "capture_failed"),
    ]
    assert "served by the prefix cache, are not available" in told[1].message


def test_after_a_failed_intervention_its_digest_reads_no_block_until_a_cache_reset(
    rig: Rig,
) -> None:
    # field case 13
    """New requests and preempted ones alike; nor while a request that failed still fills blocks."""
    resumed = steered(1)
    rig.step((resumed, 0, 6), new=[resumed])
    rig.faults.switch("admit")
    failed = steered(2)
    rig.step((failed, 0, 6), new=[failed])
    rig.faults.switch("")
    assert rig.plane.status()["tainted"] == 1

    def arrives(number: int) -> None:
        rig.plane.begin([NewRequest(str(number), spec_of(steered(number)), 4)], {}, 0)

    rig.plane.begin([], {}, 0, None, {"1": 4})  # preempted, and goes on with four cached tokens
    arrives(3)
    rig.plane.forget_failures([rig.plane.status()["step"]])
    arrives(4)  # the others are still running
    anew = rig.plane.status()["step"]
    rig.step(aborted=[steered(number) for number in (1, 2, 3, 4)])
    rig.plane.forget_failures([anew])
    assert rig.plane.status()["tainted"] == 1, "they ran for a step longer than the cache of before"
    rig.plane.forget_failures([anew + 1])
    arrives(5)
    told = {receipt.job: (receipt.status, receipt.kind) for receipt in rig.receipts()}
    assert told == dict.fromkeys(("j1", "j2", "j3", "j4"), ("error", "intervention_failed"))


def patched(number: int, *places: tuple[int, int]) -> Request:
    """Rows of the source run `job_s` at (layer, position), where they are in it."""
    edits = [
        steering(
            row_name(RunRow("job_s.0.tag", "pre_attn", layer, position)),
            [layer],
            "pre_attn",
            [position],
            "replace",
        )
        for layer, position in places
    ]
    return Request(number, 6, 8, (), edits)


# field case 31
@pytest.mark.parametrize("lost", ["never put", "dropped", "lost once", "dropped for a restart"])
def test_a_missing_source_run_fails_the_request_and_taints_the_blocks_it_fills(
    rig: Rig, lost: str
) -> None:
    run_files = source_run(rig.directory / "captures", {"pre_attn": [0, 1]}, range(6))
    if lost != "never put":
        rig.plane.runs.put(run_files)
    if lost == "dropped":
        rig.plane.runs.drop([run_files.key])
    elif lost == "lost once":
        rig.faults.switch("lose_run")
    elif lost == "dropped for a restart":
        rig.plane.restart()
    request = patched(1, (0, 2), (1, 3))
    beside = Request(2, 6, 8, (), [])
    rig.step((request, 0, 6), (beside, 0, 6), new=[request, beside])
    assert (
        rig.left("pre_attn", 0)
        == np.concatenate([stream_of(n, "pre_attn", 0, 0, 6) for n in (1, 2)])
    ).all()
    status = rig.plane.status()
    assert status["tainted"] == 1
    assert status["rows_used"] == 0
    assert status["entries_used"] == 0
    # a cell that comes with the same patch is not served what this one fills
    rig.plane.runs.put(run_files)
    rig.plane.begin([NewRequest("3", spec_of(patched(3, (0, 2), (1, 3))), 4)], {}, 0)
    later = patched(4, (1, 3))
    rig.step((later, 0, 6), new=[later])
    assert rig.left("pre_attn", 1)[3].tolist() == values("pre_attn", 1, [3])[0].tolist()
    rig.step(finished=[later, beside], aborted=[request, patched(3)])
    told = rig.told()
    assert {job: receipt.status for job, receipt in told.items()} == {
        "j1": "error",
        "j2": "ok",
        "j3": "error",
        "j4": "ok",
    }
    assert told["j1"].kind == "intervention_failed"
    assert told["j1"].message == "source run job_s.0.tag is not on this rank"
    assert "cached prefix was computed by a request whose intervention failed" in told["j3"].message


def test_checksums_differ_when_ranks_hold_other_source_runs(rig: Rig) -> None:
    nothing = rig.plane.fingerprint()
    run_files = source_run(rig.directory / "captures", {"pre_attn": [0, 1]}, range(6))
    rig.plane.runs.put(run_files)
    held = rig.plane.fingerprint()
    rig.plane.runs.drop([run_files.key])
    assert held != nothing == rig.plane.fingerprint()


def test_vectors_that_add_up_to_what_the_dtype_cannot_hold_fail_the_request(rig: Rig) -> None:
    huge = from_numpy(np.full(HIDDEN, 3e38, dtype=np.float32))
    rig.plane.rank_state.vectors.put({content_hash(huge): huge})
    entry = steered(1, vector=content_hash(huge)).steering[0]
    request = Request(1, 6, 8, (), [entry, entry])
    rig.step((request, 0, 6), new=[request])
    (receipt,) = rig.receipts()
    assert receipt.status == "error"
    assert receipt.kind == "intervention_failed"
    assert "exceeds the range of torch.float32" in receipt.message


@pytest.mark.parametrize(("threads", "nice"), [(1, 10), (0, 0)])
def test_writers_give_way_where_the_model_uses_all_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int, nice: int
) -> None:
    # the rig's rank may use one core
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    before = {thread.native_id for thread in threading.enumerate()}
    rig = Rig(tmp_path)
    begun = threading.Event()
    rig.writer.stream(begun.set, 0)  # a writer begins before it writes
    assert begun.wait(10)
    found = {
        thread.name: os.getpriority(os.PRIO_PROCESS, thread.native_id or 0)
        for thread in threading.enumerate()
        if thread.native_id not in before and thread.name.startswith("midstream-writer")
    }
    lowest = min(19, os.getpriority(os.PRIO_PROCESS, 0) + nice)
    assert found == {"midstream-writer-0": lowest}


def test_a_reading_is_submitted_as_its_tenants(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[Any] = []
    monkeypatch.setattr(rig.writer, "submit", jobs.append)
    request = capturing(1, consumers=[READER], reading=StoredLens(top_k=1))
    request.tracked.spec = msgspec.structs.replace(request.tracked.spec, tenant="a")
    rig.step((request, 0, 6), new=[request])
    rig.step(finished=[request])
    assert [(job.work, job.tenant) for job in jobs] == [("reading", "a")]


# --- Failures inside the data plane


#: What of the data plane fails, in which object or class, and the kind that the request's receipt
#: then has.
FAILURES: list[tuple[str | type, str, str]] = [
    ("banks.first.finite", "settle", ""),
    (finite_check, "_flat", ""),
    (Overload, "check", "capture_failed"),
    ("_rows.streams", "prepare", "capture_failed"),
    ("loras", "account", ""),
    ("_arena", "take", "capture_failed"),
    (BankRows, "take", "capture_failed"),
    (Recording, "block_of", "capture_failed"),
    (Recording, "leave", "capture_failed"),
    (Places, "move_to", "capture_failed"),
    (Places, "drain", "capture_failed"),
    (Staging, "place", "capture_failed"),
    (Staging, "commit", ""),
    (Staging, "take", "capture_failed"),
]


@pytest.mark.parametrize(
    ("owner", "name", "kind"), FAILURES, ids=lambda each: getattr(each, "__name__", each)
)
def test_a_failure_of_the_data_plane_fails_its_requests_only(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, owner: str | type, name: str, kind: str
) -> None:
    """The engine calls `begin`, `plan` and `drain` outside any guard of its own: what they raise
    would end it.
    """
    first = steered(1, captures=capturing(1).captures)
    if name != "prepare":  # called when a request begins
        rig.step((first, 0, 6), new=[first])
    with monkeypatch.context() as broken:
        broken.setattr(
            operator.attrgetter(owner)(rig.plane) if isinstance(owner, str) else owner,
            name,
            mock.Mock(side_effect=HostMemoryError("no 16384 bytes of page-locked memory")),
        )
        # the first generated token, whose row needs new memory
        rig.step((first, 6, 1), new=[first] if name == "prepare" else [])
    rig.step(finished=[first])
    later = capturing(2)
    run(rig, later)
    told = rig.told()
    assert told["j1"].status == "error"
    assert told["j1"].kind == kind
    assert "no 16384 bytes of page-locked memory" in told["j1"].message
    assert told["j2"].status == "ok"
    assert (rig.reader(later).array(1) == stream_of(2, "post_block", 1, 0, 7)).all()


def test_a_plan_that_cannot_be_committed_does_nothing(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of it may be on the device: the forward that follows edits and records nothing."""
    request = steered(1, captures=capturing(1).captures)
    staging = rig.plane.banks.first.planner._staging
    commit = staging.commit

    def half(plan: np.ndarray, lists: Sequence[np.ndarray]) -> None:
        commit(plan, lists)
        raise HostMemoryError("no 64 bytes of page-locked memory")

    with monkeypatch.context() as broken:
        broken.setattr(staging, "commit", half)
        rig.step((request, 0, 6), new=[request])
    assert (rig.left("pre_attn", 0) == stream_of(1, "pre_attn", 0, 0, 6)).all()
    assert rig.plane.banks.first.planner.due is None
    assert not bool(rig._rank.buffers.plan.any())
    receipt = rig.ended(request)
    assert receipt.status == "error"
    assert receipt.files == []


def short_of_memory(monkeypatch: pytest.MonkeyPatch, rig: Rig) -> None:
    """There is no memory when it is asked for next."""
    answers = itertools.chain([HostMemoryError("no memory")], itertools.repeat(mock.DEFAULT))
    taking = mock.Mock(wraps=rig.plane._arena.take, side_effect=answers)
    monkeypatch.setattr(rig.plane._arena, "take", taking)


@pytest.mark.parametrize("at", [0, 6])
def test_a_capture_without_memory_fails_alone(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """At the first row, or at the first of a new block."""
    first = capturing(1)
    beside = capturing(2)
    for position, count in ((0, 6), (6, 1)):
        if position == at:
            short_of_memory(monkeypatch, rig)
        new = [] if position else [first, beside]
        rig.step((first, position, count), (beside, position, count), new=new)
    rig.step(finished=[first, beside])
    told = rig.told()
    assert told["j1"].status == "error"
    assert told["j1"].kind == "capture_failed"
    assert "no memory" in told["j1"].message
    assert told["j2"].status == "ok"
    assert (rig.reader(beside).array(1) == stream_of(2, "post_block", 1, 0, 7)).all()


def test_rows_that_were_not_recorded_are_not_served(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = capturing(1)
    second = capturing(2)
    block = KeptBlock("1", 0, 0, 4, 7)
    short_of_memory(monkeypatch, rig)
    rig.step((first, 0, 6), new=[first], keeping=Keeping(keep=[block]))
    serve = Keeping(serve=[block._replace(request_id="2")])
    rig.step((second, 4, 2), new=[second], keeping=serve, cached=4)
    rig.step((second, 6, 1), (first, 6, 1))
    rig.step(finished=[first, second])
    told = rig.told()
    assert [told[job].status for job in ("j1", "j2")] == ["error", "error"]
    assert "no memory" in told["j1"].message
    assert "served by the prefix cache, are not available" in told["j2"].message


def test_a_request_that_resumes_where_its_last_step_began_changes_no_kept_row(rig: Rig) -> None:
    rig.plane.block_size = 4
    request = capturing(1)
    keeping = Keeping(keep=[KeptBlock("1", 0, 0, 4, 7)])
    rig.step((request, 0, 4), new=[request], keeping=keeping)
    recording = rig.plane._tracked["1"].recordings[0]
    kept = recording.held
    rig.step((request, 0, 4), new=[request])  # as the v2 runner tells of a preempted request
    assert kept[0] not in recording._blocks.values()


def test_rows_stay_where_they_are_recorded(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = rig.plane.banks.first.planner._lanes.memory
    taken = mock.Mock(wraps=memory.take)
    monkeypatch.setattr(memory, "take", taken)
    rig.plane.block_size = 4
    first = capturing(1)
    second = capturing(2)
    block = KeptBlock("1", 0, 0, 4, 7)
    rig.step((first, 0, 6), new=[first], keeping=Keeping(keep=[block]))
    for at in range(6, 10):
        rig.step((first, at, 1))
    rig.step(
        (second, 4, 2),
        new=[second],
        keeping=Keeping(serve=[block._replace(request_id="2")]),
        cached=4,
    )
    rig.step((second, 6, 1))
    first.total = 11
    rig.step(finished=[first, second])
    assert [receipt.status for receipt in rig.receipts()] == ["ok", "ok"]
    # of the first request two blocks of its prompt, and one of generated tokens; of the second, to
    # which a block of the first is lent, one of each
    row = HIDDEN * 4
    assert [each.args for each in taken.call_args_list] == [
        ((2 * positions + -(-positions // row)) * row,) for positions in (4, 2, SPAN, 2, SPAN)
    ]
    assert (rig.reader(second).array(1)[:4] == stream_of(1, "post_block", 1, 0, 4)).all()


def test_writers_wait_for_rows_that_have_not_landed_and_steps_do_not(rig: Rig) -> None:
    """As on an accelerator, whose copy is stuck for longer than the steps take."""
    go = threading.Event()
    rig.plane._arena.landing = SimpleNamespace(number=1, done=go.is_set)
    for number in (1, 2):
        run(rig, capturing(number))
    assert rig.writer.backlog.size
    go.set()
    rig.plane._arena.memory.landed[0] = 1
    assert [receipt.status for receipt in rig.receipts()] == ["ok", "ok"]
    for number in (1, 2):
        rows = stream_of(number, "post_block", 1, 0, 7)
        assert (rig.reader(capturing(number)).array(1) == rows).all()


def test_rows_of_another_adapter_end_the_engine(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    request = capturing(1)
    monkeypatch.setattr(rig.plane.loras, "account", mock.Mock(side_effect=WrongAdapterError))
    with pytest.raises(WrongAdapterError):
        rig.step((request, 0, 4), new=[request])


@pytest.mark.parametrize(
    "change",
    [
        lambda manager: setattr(manager._last_mapping, "index_mapping", (1, 2)),
        lambda manager: setattr(manager._last_mapping, "index_mapping", (0, 1)),
        lambda manager: setattr(manager, "_last_mapping", None),
        lambda manager: manager.lora_index_to_id.clear(),
    ],
)
def test_another_adapter_is_found_in_a_step_that_repeats(
    change: Callable[[Any], None], tmp_path: Path
) -> None:
    loras, manager = holding_adapter(12)
    rig = Rig(tmp_path, loras=loras)
    requests = [steered(number) for number in (1, 2)]
    for request in requests:
        request.tracked.spec = msgspec.structs.replace(request.tracked.spec, lora=ADAPTER)
    rig.step(*((request, 0, 6) for request in requests), new=requests)
    for position in (6, 7, 8):
        rig.step(*((request, position, 1) for request in requests))
    assert rig.plane.banks.first.planner.repeats
    change(manager)
    with pytest.raises(WrongAdapterError):
        rig.step(*((request, 9, 1) for request in requests))


@pytest.mark.parametrize("action", ["flag", "stop"])
def test_an_ended_request_has_the_scores_of_all_its_tokens(rig: Rig, action: ProbeAction) -> None:
    request = probed(rig, action)
    other = probed(rig, action, number=2)
    rig.step((request, 0, 6), (other, 0, 6), new=[request, other])
    rows = [rig.left("post_block", 1)[:6]]
    rig.step((request, 6, 1), (other, 6, 1))
    rows.append(rig.left("post_block", 1)[:1])
    for each in rig.plane._tracked.values():
        for recording in each.recordings.values():
            (block,) = recording.held
            assert block.span.start == 6, "rows of complete blocks are held only to be scored"
    rig.step((other, 7, 1), finished=[request])
    receipt = next(each for each in rig.receipts() if each.job == "j1")
    assert receipt.status == "ok"
    assert receipt.message == ""
    found = np.frombuffer(receipt.scores[0].tokens, dtype="<f4")
    np.testing.assert_allclose(found, np.concatenate(rows) @ WEIGHT[0] + 0.5, rtol=1e-5)


@pytest.mark.parametrize("action", ["flag", "stop"])  # scored lazily, and at each step
@pytest.mark.parametrize("late", [7, 8, 9])  # an edit that fails it; 8: as it ends; 9: none
def test_a_failed_request_reports_what_its_policies_decided_so_far(
    tmp_path: Path, action: ProbeAction, late: int
) -> None:
    """Even on a rank that reports no scores otherwise: only the first failure counts."""
    rig = Rig(tmp_path, rank=1, world=2)
    first = float(stream_of(1, "post_block", 1, 0, 1)[0, 0])  # at position p it is larger by p
    weight = np.full((1, HIDDEN), 1 / HIDDEN, dtype=np.float32)
    request = probed(rig, "none", weight=weight, total=10)
    (plain,) = request.tracked.spec.probes
    condition = Condition(at_least=first + 4, schedule=Schedule(tokens="all"))
    policy = StoredPolicy("guard", 1, "d", condition, [action], mode="active", acts=True)
    read = msgspec.structs.replace(plain, name="policy:guard", actions=[action], policy=policy)
    request.tracked.spec.probes.append(read)
    edit = steering(rig.vector(1e3), [1], "post_block", [late])
    request.steer(msgspec.structs.replace(edit, limit=-0.01))
    rig.step((request, 0, 6), new=[request])
    for position in (6, 7, 8):
        rig.step((request, position, 1))
    if late == 9:
        rig.plane._requests.fail(rig.plane._tracked["1"], "no room", "capture_failed")
    receipt = rig.ended(request)
    assert receipt.status == "error"
    (score,) = receipt.scores
    assert [(item.position, item.event) for item in score.decisions] == [(4, "trigger")]
    assert score.flagged == (action == "flag")
    assert score.triggers == 1


@pytest.mark.parametrize("dose_first", [False, True])
def test_a_probe_and_its_mean_do_not_share_what_a_rank_keeps(rig: Rig, dose_first: bool) -> None:
    requests = [probed(rig, "none"), probed(rig, "none", number=2)]
    of_dose = requests[not dose_first].tracked.spec.probes
    of_dose[0] = of_dose[0].averaged()
    run(rig, *requests)
    scores = [receipt.scores[0] for receipt in rig.receipts()]
    values = [np.frombuffer(score.tokens, dtype="<f4") for score in scores]
    wanted = [each.mean() if n != dose_first else each[-1] for n, each in enumerate(values)]
    assert [score.score[0] for score in scores] == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_gate_opens_or_closes_among_steps_that_repeat(rig: Rig, sign: int) -> None:
    first = float(stream_of(1, "post_block", 1, 0, 1)[0, 0])  # at position p it is larger by p
    weight = np.full((1, HIDDEN), sign / HIDDEN, dtype=np.float32)
    request = probed(rig, "steer", weight=weight, threshold=sign * (first + 8), total=15)
    gate = request.tracked.spec.probes[0].name
    gated = msgspec.structs.replace(steering(content_hash(VECTOR), [0], "pre_attn"), gate=gate)
    request.steer(gated)
    other = steered(2)
    other.total = request.total
    rig.step((request, 0, 6), (other, 0, 6), new=[request, other])
    edited = {}
    planned = 0
    for position in range(6, 14):
        rig.step((request, position, 1), (other, position, 1))
        found = rig.left("pre_attn", 0) != [
            stream_of(number, "pre_attn", 0, position, 1)[0] for number in (1, 2)
        ]
        assert found[1].all()
        edited[position] = bool(found[0].all())
        if not rig.plane.banks.first.planner.repeats:
            planned += 1
    # the score of the position before decides
    assert edited == {
        position: (position > 8) == (sign > 0) or position == 9 for position in edited
    }
    assert planned == 2, "only the first step, and the decision that differs"
    rig.step(finished=[request, other])
    receipt = rig.told()["j1"]
    assert receipt.scores[0].gated == receipt.applied == sum(edited.values())


def test_rows_of_requests_that_are_forgotten_are_let_go(rig: Rig) -> None:
    request = probed(rig, "flag")
    rig.step((request, 0, 6), new=[request])
    assert rig.plane.probes.pending
    rig.plane.restart()
    assert not rig.plane.probes.pending
