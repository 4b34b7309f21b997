"""Every request that asked for something gets one receipt, whatever happens to it; nothing that
goes wrong leaves the rank.
"""

import contextlib
import os
import threading
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from capture_kit import source_run, values
from plane_kit import VECTOR, Rig, capturing, for_everyone, run, spec_of, steered, template
from rank_kit import HIDDEN, Request, steering, stream_of

from midstream import __version__
from midstream.client.captures.reader import CaptureReader
from midstream.schemas.base.records import to_msgpack
from midstream.schemas.base.tensors import content_hash, from_numpy
from midstream.schemas.prompts.selectors import HOOKS, PositionSelector, Window, select
from midstream.schemas.requests.source_runs import RunRow, row_name
from midstream.schemas.requests.specs import StoredCapture
from midstream.workers.runner.base.engine_step import Finish, NewRequest
from midstream.workers.runner.base.packed_spec import unpack
from midstream.workers.runner.base.row_index import Keeping, KeptBlock


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def test_a_captured_request_gets_one_receipt_and_its_rows_are_on_disk(rig: Rig) -> None:
    request = capturing(1)
    run(rig, request)
    (receipt,) = rig.receipts()
    assert (receipt.status, receipt.job, [file.rows for file in receipt.files]) == (
        "ok",
        "j1",
        [14],
    )
    reader = rig.reader(request)
    assert reader.positions() == list(range(7))
    for layer in (0, 1):
        assert (reader.array(layer) == stream_of(1, "post_block", layer, 0, 7)).all()


def test_a_request_that_is_removed_and_added_again_while_it_lives_is_recorded_once(
    rig: Rig,
) -> None:
    # field case 6
    """As the v2 runner tells of resumed requests, and vLLM of streamed input: a live id, as new."""
    request = capturing(1)
    rig.step((request, 0, 6), new=[request])
    rig.step((request, 0, 6), new=[request])
    rig.step((request, 6, 1), new=[request])
    rig.step(finished=[request])
    (receipt,) = rig.receipts()
    assert [file.rows for file in receipt.files] == [14]
    assert rig.reader(request).positions() == list(range(7))


def test_a_cancelled_request_is_not_reported_and_leaves_nothing(rig: Rig) -> None:
    request = steered(1, captures=capturing(1).captures)
    rig.step((request, 0, 6), new=[request])
    rig.plane.end("j1.0.1", -1)
    rig.step(aborted=[request])
    status = rig.plane.status()
    assert (status["requests"], status["rows_used"], status["entries_used"]) == (0, 0, 0)
    assert rig.receipts() == []


def test_a_request_cut_by_a_stop_string_is_reported_as_far_as_it_went(rig: Rig) -> None:
    """The engine calls it aborted, and computed more; the worker says where it ends, before or
    after.
    """
    early, late = capturing(1), capturing(2)
    rig.step((early, 0, 6), (late, 0, 6), new=[early, late])
    rig.step((early, 6, 1), (late, 6, 1))
    rig.plane.end("j1.0.1", 7)
    rig.step(aborted=[early, late])
    rig.plane.end("j2.0.1", 7)
    assert [(receipt.job, receipt.status) for receipt in rig.receipts()] == [
        ("j1", "ok"),
        ("j2", "ok"),
    ]
    assert rig.reader(early).positions() == rig.reader(late).positions() == list(range(6))


@pytest.mark.parametrize("positions", ["all", "all_generated", Window(start=6), [0, 5]])
def test_rows_beyond_the_end_are_not_counted_as_applied(
    rig: Rig, positions: PositionSelector
) -> None:
    # field case 9
    """Drafts that were rejected, or a step that had begun when the end was found."""
    edit = steering(rig.vector(1.0), [0, 1], "pre_attn", positions)
    request = Request(1, 6, 9, (), [edit])
    rig.step((request, 0, 6), new=[request])
    rig.step((request, 6, 4))
    rig.step((request, 7, 4))
    rig.step(finished=[request])
    (receipt,) = rig.receipts()
    assert receipt.applied == 2 * len(select(positions, 0, 8, 6))


def test_an_unknown_vector_fails_its_request_at_once_and_no_other(rig: Rig) -> None:
    lost, fine = steered(1, vector="0" * 64), steered(2)
    rig.step((lost, 0, 6), (fine, 0, 6), new=[lost, fine])
    rig.step(finished=[lost, fine])
    first, second = rig.receipts()
    assert (first.job, first.status, first.kind) == ("j1", "error", "intervention_failed")
    assert "vector 000000000000 is not on this rank" in first.message
    assert (second.job, second.status, second.applied) == ("j2", "ok", 6)


def test_sites_the_model_lacks_fail_the_request(rig: Rig) -> None:
    """Accepted by what the last worker published; this one has fewer layers, or other hooks."""
    edits, records = steered(1), steered(2, captures=capturing(2).captures)
    edits.tracked.spec.steering.append(steering(content_hash(VECTOR), [0, 9], "pre_attn"))
    records.tracked.spec.captures[0].sites["post_block"].append(7)
    rig.step((edits, 0, 6), (records, 0, 6), new=[edits, records])
    status = rig.plane.status()
    assert (status["rows_used"], status["tainted"]) == (1, 1), (
        "who only records nothing fills no block with other content than it says"
    )
    rig.step(finished=[edits, records])
    first, second = rig.receipts()
    assert (first.status, first.kind) == ("error", "intervention_failed")
    assert "layer 9 is out of range: the model has layers 0 to 1" in first.message
    assert (second.status, second.kind, second.files) == ("error", "capture_failed", [])
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
    assert (first.status, first.message) == (
        "error",
        f"the worker runs Midstream 0.0.0, but rank 0 runs {__version__}",
    )
    assert second.status == "error"
    assert f"rank 0 (Midstream {__version__}) cannot read the request" in second.message


def test_rows_dropped_under_overload_make_the_capture_partial_and_are_named(tmp_path: Path) -> None:
    rig = Rig(tmp_path, capture_overload="drop")
    request = capturing(1)
    rig.step((request, 0, 4), new=[request])
    rig.plane._writer.backlog = 2 << 20  # the writers are behind by more than the queue holds
    rig.step((request, 4, 2))
    rig.step((request, 6, 1))
    rig.plane._writer.backlog = 0
    rig.step(finished=[request])
    (receipt,) = rig.receipts()  # field case 19
    assert receipt.status == "partial"
    assert [file.dropped for file in receipt.files] == [[4, 5, 6]]
    assert "4" in receipt.message
    reader = CaptureReader(tmp_path / "captures", "j1")
    assert (reader.positions(), reader.dropped()) == ([0, 1, 2, 3], [4, 5, 6])


def test_where_rows_cannot_be_spilled_the_request_fails_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "spill").write_text("a file where a folder is needed")
    rig = Rig(tmp_path, capture_overload="spill")
    rig.plane._writer.backlog = 2 << 20
    request, beside = capturing(1), steered(2)
    rig.step((request, 0, 6), (beside, 0, 6), new=[request, beside])
    rig.step(finished=[request, beside])
    first, second = sorted(rig.receipts(), key=lambda receipt: receipt.job)
    assert (first.job, first.status, first.kind) == ("j1", "error", "capture_failed")
    assert "spill" in first.message
    assert (second.status, second.applied) == ("ok", 6)


def test_rows_missing_from_a_failed_request_are_reported_and_fail_dependent_ones(rig: Rig) -> None:
    """The scheduler promised them; the worker then has it forget all promises."""
    first, second = capturing(1), capturing(2)
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


@pytest.mark.matrix
def test_ten_thousand_requests_leave_no_state_behind(tmp_path: Path) -> None:
    """Distinct configurations come, end, are cancelled and preempted, while modules and global
    steering change under them.
    """
    rig, rng = Rig(tmp_path, steering_rows=24, steering_entries=64), np.random.default_rng(0)
    rank_state = rig.plane.rank_state
    live: list[Request] = []
    everyone, version, checksums = for_everyone(0), 0, set()
    for number in range(10_000):
        if number % 50 == 0:
            version += 1
            vector = rig.vector(float(version))
            rank_state.set_module(
                f"m{version % 5}",
                f"{version:064x}" if version % 7 else "",
                [vector] if version % 7 else [],
            )
            former, everyone = (
                everyone,
                for_everyone(version, *([template(vector, scale=0.5)] if version % 3 else [])),
            )
            rank_state.prepare_global(everyone)
            rank_state.commit_global(everyone)
            if version % 4 == 0:
                rank_state.rollback_global(version)
                everyone = former
            for name in rank_state.vectors.names():
                with contextlib.suppress(RuntimeError):  # a module or global steering needs it
                    rank_state.drop_vectors([name])
            rank_state.put_vectors({content_hash(VECTOR): VECTOR})
        asks = (
            [StoredCapture(sites={"post_block": [1]}, positions="all_prompt", tag="t")]
            if rng.random() < 0.05
            else []
        )
        request = steered(
            number,
            scale=1.0 + number / 7,
            captures=asks,
            everyone=everyone if everyone.entries else None,
        )
        ending = [r for r in live if rng.random() < 0.4]
        live = [r for r in live if r not in ending]
        # preempted: in the v2 runner it comes again as new
        again = [r for r in live if rng.random() < 0.1]
        rig.step(
            (request, 0, 6),
            *((r, 0, 6) for r in again),
            new=[request, *again],
            finished=ending[::2],
            aborted=ending[1::2],
        )
        for gone in ending[1::2]:
            rig.plane.end(f"j{gone.number}.0.1", -1)
        live.append(request)
        checksums.add(rig.plane.actions.checksum)
    rig.step(finished=live)
    for name in list(rank_state.modules):
        rank_state.set_module(name, "", [])
    rank_state.commit_global(for_everyone(version + 1))
    rank_state.drop_vectors(rank_state.vectors.names())
    status = rig.plane.status()
    zero = (
        "requests",
        "rows_used",
        "entries_used",
        "vectors",
        "tainted",
        "kept_row_bytes",
        "spilled_bytes",
        "unkept",
    )
    assert {name: status[name] for name in zero} == dict.fromkeys(zero, 0)
    assert status["modules"] == {}
    assert not any(
        tensor.any()
        for tensor in (
            rig._rank.buffers.pool,
            rig._rank.buffers.scalars,
            rig._rank.buffers.site_rows,
        )
    )
    requests = rig.plane._requests
    assert not any((requests.tracked, requests.live, requests.ends, requests.finished))
    assert len(checksums) == 10_000
    told = rig.receipts()
    rig.plane._mover.close()
    for memory in (rig.plane._slabs, rig.plane._pieces):
        memory.collect()
        assert memory.alive == 0
    assert {receipt.status for receipt in told} == {"ok"}, [
        receipt.message for receipt in told if receipt.status != "ok"
    ][:3]


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


def patched(number: int, *places: tuple[int, int], prompt: int = 6) -> Request:
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
    return Request(number, prompt, prompt + 2, (), edits)


def test_a_request_may_patch_every_position_of_its_prompt(tmp_path: Path) -> None:
    rig = Rig(tmp_path, steering_rows=40, steering_entries=80)
    rig.plane.runs.put(source_run(tmp_path / "captures", {"pre_attn": [0, 1]}, range(30)))
    request = patched(
        1, *((layer, position) for position in range(30) for layer in (0, 1)), prompt=30
    )
    beside = steered(2)
    rig.step((beside, 0, 6), (request, 0, 12), new=[request, beside])
    rig.step((request, 12, 18), (beside, 6, 1))
    for layer in (0, 1):
        assert (
            rig.left("pre_attn", layer)[:18].tolist()
            == values("pre_attn", layer, range(12, 30)).tolist()
        )
    status = rig.plane.status()
    assert (status["rows_used"], status["entries_used"], status["runs"], status["run_bytes"]) == (
        31,
        61,
        1,
        2 * 30 * HIDDEN * 4,
    )
    rig.step((request, 30, 1))
    rig.step(finished=[request, beside])
    assert rig.plane.status()["rows_used"] == 0
    first, second = sorted(rig.receipts(), key=lambda receipt: receipt.job)
    assert (first.status, first.applied) == ("ok", 60)
    assert second.status == "ok"


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
    request, beside = patched(1, (0, 2), (1, 3)), Request(2, 6, 8, (), [])
    rig.step((request, 0, 6), (beside, 0, 6), new=[request, beside])
    assert (
        rig.left("pre_attn", 0)
        == np.concatenate([stream_of(n, "pre_attn", 0, 0, 6) for n in (1, 2)])
    ).all()
    status = rig.plane.status()
    assert (status["tainted"], status["rows_used"], status["entries_used"]) == (1, 0, 0)
    # a cell that comes with the same patch is not served what this one fills
    rig.plane.runs.put(run_files)
    rig.plane.begin([NewRequest("3", spec_of(patched(3, (0, 2), (1, 3))), 4)], {}, 0)
    later = patched(4, (1, 3))
    rig.step((later, 0, 6), new=[later])
    assert rig.left("pre_attn", 1)[3].tolist() == values("pre_attn", 1, [3])[0].tolist()
    rig.step(finished=[later, beside], aborted=[request, patched(3)])
    told = {receipt.job: receipt for receipt in rig.receipts()}
    assert {job: receipt.status for job, receipt in told.items()} == {
        "j1": "error",
        "j2": "ok",
        "j3": "error",
        "j4": "ok",
    }
    assert (told["j1"].kind, told["j1"].message) == (
        "intervention_failed",
        "source run job_s.0.tag is not on this rank",
    )
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
    rig.plane.rank_state.put_vectors({content_hash(huge): huge})
    entry = steered(1, vector=content_hash(huge)).steering[0]
    request = Request(1, 6, 8, (), [entry, entry])
    rig.step((request, 0, 6), new=[request])
    (receipt,) = rig.receipts()
    assert (receipt.status, receipt.kind) == ("error", "intervention_failed")
    assert "exceeds the range of torch.float32" in receipt.message


def test_a_long_capture_does_not_retain_others_slabs(tmp_path: Path) -> None:
    """Its few rows lie among theirs, and are copied from there."""
    rig = Rig(tmp_path)
    long = Request(0, 2, 400, [StoredCapture(sites={"post_block": [1]}, positions="all", tag="t")])
    rig.step((long, 0, 2), new=[long])
    peak = 0
    wide = StoredCapture(sites={hook: [0, 1] for hook in HOOKS}, positions="all_prompt", tag="u")
    for at in range(2, 399):
        other = Request(at, 50, 51, [wide])
        rig.step((long, at, 1), (other, 0, 50), new=[other])
        rig.plane.begin([], {str(at): Finish(list(range(51)), True)}, 0)
        rig.plane.end(f"j{at}.0.1", -1)
        rig.plane._mover.submit(lambda: None).result()
        peak = max(peak, rig.plane._slabs.alive + rig.plane._pieces.alive)
    assert peak <= 1 << 18  # 397 slabs of 16 KiB are 6 MiB
    rig.step(finished=[long])
    assert [receipt.status for receipt in rig.receipts()] == ["ok"]
    assert (rig.reader(long).array(1) == stream_of(0, "post_block", 1, 0, 399)).all()


@pytest.mark.parametrize(("threads", "nice"), [(1, 10), (0, 0)])
def test_writers_and_mover_give_way_where_the_model_uses_all_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int, nice: int
) -> None:
    # the rig's rank may use one core
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    before = {thread.native_id for thread in threading.enumerate()}
    rig = Rig(tmp_path)
    begun = threading.Event()
    rig.plane._writer.stream(begun.set, 0)  # a writer begins before it writes
    assert begun.wait(10)
    assert rig.plane._mover.submit(lambda: True).result(10)
    found = {
        thread.name: os.getpriority(os.PRIO_PROCESS, thread.native_id or 0)
        for thread in threading.enumerate()
        if thread.native_id not in before
        and thread.name.startswith(("midstream-writer", "midstream-mover"))
    }
    assert found == dict.fromkeys(
        ("midstream-writer-0", "midstream-mover"), os.getpriority(os.PRIO_PROCESS, 0) + nice
    )
