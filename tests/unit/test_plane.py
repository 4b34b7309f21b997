"""Every request that asked for something gets one receipt, whatever happens to it; nothing that goes wrong leaves the rank."""

import contextlib
import sqlite3
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from rank_kit import HIDDEN, Rank, Request, make_buffers, steering, stream_of

from midstream import __version__
from midstream.client.reader import CaptureReader
from midstream.schemas.base import from_msgpack
from midstream.schemas.receipts import Receipt
from midstream.schemas.selectors import HOOKS
from midstream.schemas.specs import RankSpec, StoredCapture, steering_digest
from midstream.schemas.tensors import content_hash, from_numpy
from midstream.workers.runner.config import Place, PlaneConfig
from midstream.workers.runner.plane import DataPlane
from midstream.workers.runner.row_index import Keeping, KeptBlock
from midstream.workers.runner.step import Finish, NewRequest, RequestRows, StepView

CAPACITY = 64
VECTOR = from_numpy(np.full(HIDDEN, 2.0, dtype=np.float32))


class Rig:
    """One rank's data plane with real files and a real outbox; the forward only visits the sites."""

    def __init__(self, directory: Path, **options) -> None:
        self.directory = directory
        config = PlaneConfig(
            version=__version__,
            worker="w",
            boot="b",
            relay_url="tcp://127.0.0.1:9",
            outbox_dir=str(directory / "outbox"),
            capture_root=str(directory / "captures"),
            hooks=[],
            steering_rows=3,
            steering_entries=16,
            step_tokens=CAPACITY,
            capture_buffer_mib=1,
            capture_queue_mib=1,
            capture_overload="block",
            spill_dir=str(directory / "spill"),
            row_store_mib=1,
            writer_threads=1,
            segment_limit_kib=64,
            segment_mib=1,
            memory_limit_kib=64,
            capture_quota_mib=0,
            cores=[0],
            fault="rpc",
        )
        self._rank = Rank(capacity=CAPACITY)
        self._rank.buffers = make_buffers(len(self._rank.sites), capacity=CAPACITY, configurations=3, entries=16)
        place = Place(rank=0, world=1, tp=0, pp=0, stages=1)
        self.plane = DataPlane(
            msgspec.structs.replace(config, **options), place, self._rank.sites, self._rank.buffers, num_layers=2, traced=False
        )
        self.plane.standing.put_vectors({content_hash(VECTOR): VECTOR})

    def step(
        self,
        *windows: tuple[Request, int, int],
        new: Sequence[Request] = (),
        finished: Sequence[Request] = (),
        aborted: Sequence[Request] = (),
        keeping: Keeping | None = None,
    ) -> None:
        ends = {str(r.number): Finish(list(range(1000, 1000 + r.total)), r in aborted) for r in (*finished, *aborted)}
        arrived = [NewRequest(str(r.number), msgspec.to_builtins(spec_of(r)), 0) for r in new]
        self.plane.begin(arrived, ends, 0, keeping)
        rows, row = [], 0
        for request, first, count in windows:
            rows.append(RequestRows(str(request.number), row, count, first))
            row += count
        self.plane.plan(StepView(rows, row))
        if windows:
            self._rank.forward(*windows)
        self.plane.drain()

    def receipts(self) -> list[Receipt]:
        """All so far; closes the plane."""
        self.plane._writer.close()
        self.plane._outbox.close()
        (file,) = (self.directory / "outbox").glob("*.sqlite")
        with contextlib.closing(sqlite3.connect(file)) as database:
            return [from_msgpack(row[0], Receipt) for row in database.execute("SELECT payload FROM receipts ORDER BY seq")]

    def reader(self, request: Request) -> CaptureReader:
        return CaptureReader(self.directory / "captures", f"j{request.number}")


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def spec_of(request: Request) -> RankSpec:
    steering = list(request.steering)
    return msgspec.structs.replace(
        request.tracked.spec,
        version=__version__,
        steering=steering,
        captures=list(request.captures),
        digest=steering_digest(steering),
        first_affected=0 if steering else -1,
    )


def capturing(number: int, prompt: int = 6, total: int = 8, **options) -> Request:
    return Request(number, prompt, total, [StoredCapture(sites={"post_block": [0, 1]}, positions="all", tag="t", **options)])


def steered(number: int, scale: float = 1.0, captures: Sequence[StoredCapture] = (), vector: str = content_hash(VECTOR)) -> Request:
    return Request(number, 6, 8, captures, [steering(vector, [0], "pre_attn", scale=scale)])


def run(rig: Rig, request: Request) -> None:
    rig.step((request, 0, 6), new=[request])
    rig.step((request, 6, 1))
    rig.step(finished=[request])


def test_a_captured_request_gets_one_receipt_and_its_rows_are_on_disk(rig: Rig) -> None:
    request = capturing(1)
    run(rig, request)
    (receipt,) = rig.receipts()
    assert (receipt.status, receipt.job, [file.rows for file in receipt.files]) == ("ok", "j1", [14])
    reader = rig.reader(request)
    assert reader.positions() == list(range(7))
    for layer in (0, 1):
        assert (reader.array(layer) == stream_of(1, "post_block", layer, 0, 7)).all()


def test_a_request_that_is_removed_and_added_again_while_it_lives_is_recorded_once(rig: Rig) -> None:
    """As the v2 runner tells of resumed requests, and vLLM of streamed input: a live id, as new."""  # field case 6
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
    """The engine calls it aborted, and computed more; the worker says where it ends, before or after."""
    early, late = capturing(1), capturing(2)
    rig.step((early, 0, 6), (late, 0, 6), new=[early, late])
    rig.step((early, 6, 1), (late, 6, 1))
    rig.plane.end("j1.0.1", 7)
    rig.step(aborted=[early, late])
    rig.plane.end("j2.0.1", 7)
    assert [(receipt.job, receipt.status) for receipt in rig.receipts()] == [("j1", "ok"), ("j2", "ok")]
    assert rig.reader(early).positions() == rig.reader(late).positions() == list(range(6))


def test_an_unknown_vector_fails_its_request_at_once_and_no_other(rig: Rig) -> None:
    lost, fine = steered(1, vector="0" * 64), steered(2)
    rig.step((lost, 0, 6), (fine, 0, 6), new=[lost, fine])
    rig.step(finished=[lost, fine])
    first, second = rig.receipts()
    assert (first.job, first.status, first.kind) == ("j1", "error", "intervention_failed")
    assert "vector 000000000000 is not on this rank" in first.message
    assert (second.job, second.status, second.applied) == ("j2", "ok", 6)


def test_a_spec_of_another_version_or_shape_is_refused_with_both_named(rig: Rig) -> None:
    other = msgspec.structs.replace(spec_of(capturing(1)), version="0.0.0")
    rig.plane.begin([NewRequest("1", msgspec.to_builtins(other), 0), NewRequest("2", {"job": "j2", "captures": 3}, 0)], {}, 0)
    first, second = rig.receipts()
    assert (first.status, first.message) == ("error", f"the worker runs Midstream 0.0.0, rank 0 runs {__version__}")  # field case 43
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
    first, second = rig.receipts()
    assert (first.job, first.status, first.kind) == ("j1", "error", "capture_failed")
    assert "spill" in first.message
    assert (second.status, second.applied) == ("ok", 6)


def test_rows_that_a_failed_request_should_have_left_are_told_of_and_fail_whoever_needs_them(rig: Rig) -> None:
    """The scheduler promised them; the worker then has it forget all promises."""
    first, second = capturing(1), capturing(2)
    rig.plane.faults.switch("plan")
    rig.step((first, 0, 6), new=[first], keeping=Keeping(keep=[KeptBlock("1", 0, 0, 4, 77)]))
    rig.plane.faults.switch("")
    failed_at = rig.plane.status()["step"]
    assert rig.plane.status()["unkept"] == failed_at
    rig.step((second, 4, 2), new=[second], keeping=Keeping(serve=[KeptBlock("2", 0, 0, 4, 77)]))
    rig.plane.cleanse([failed_at - 1])
    assert rig.plane.status()["unkept"] == failed_at  # what failed since the prefix cache began anew still counts
    rig.plane.cleanse([failed_at])
    assert rig.plane.status()["unkept"] == 0
    told = rig.receipts()
    assert [(receipt.job, receipt.status, receipt.kind) for receipt in told] == [
        ("j1", "error", "capture_failed"),
        ("j2", "error", "capture_failed"),
    ]
    assert "which the prefix cache serves, are no longer kept" in told[1].message


def test_ten_thousand_requests_leave_no_row_entry_or_request_behind(rig: Rig) -> None:
    rng = np.random.default_rng(0)
    live: list[Request] = []
    for number in range(10_000):
        request = steered(number, scale=float(rng.integers(1, 3)), captures=[] if rng.random() < 0.9 else capturing(0).captures)
        ending = [r for r in live if rng.random() < 0.4]
        live = [r for r in live if r not in ending]
        rig.step((request, 0, 6), new=[request], finished=ending[::2], aborted=ending[1::2])
        for gone in ending[1::2]:
            rig.plane.end(f"j{gone.number}.0.1", -1)
        live.append(request)
    rig.step(finished=live)
    status = rig.plane.status()
    assert (status["requests"], status["rows_used"], status["entries_used"]) == (0, 0, 0)
    assert not rig._rank.buffers.pool.any()
    rig.receipts()


def test_after_a_failed_intervention_its_digest_reads_no_cached_block_until_the_cache_began_anew(rig: Rig) -> None:
    """New requests and preempted ones alike; nor while a request that failed still fills blocks."""  # field case 13
    resumed = steered(1)
    rig.step((resumed, 0, 6), new=[resumed])
    rig.plane.faults.switch("admit")
    failed = steered(2)
    rig.step((failed, 0, 6), new=[failed])
    rig.plane.faults.switch("")
    assert rig.plane.status()["tainted"] == 1

    def arrives(number: int, finished: Sequence[int] = ()) -> None:
        spec = msgspec.to_builtins(spec_of(steered(number)))
        rig.plane.begin([NewRequest(str(number), spec, 4)], {str(n): Finish([], True) for n in finished}, 0)

    rig.plane.begin([], {}, 0, None, {"1": 4})  # preempted, and goes on with four cached tokens
    arrives(3)
    rig.plane.cleanse([rig.plane.status()["step"]])
    arrives(4)  # the others are still running
    anew = [rig.plane.status()["step"]]
    arrives(5, finished=[1, 2, 3, 4])
    rig.plane.cleanse(anew)
    arrives(6, finished=[5])  # they ran for a step longer than the cache of before
    rig.plane.cleanse([rig.plane.status()["step"]])
    assert rig.plane.status()["tainted"] == 1, "the last of them still runs"
    rig.step(finished=[steered(6)])
    rig.plane.cleanse([rig.plane.status()["step"]])
    arrives(7)
    told = {receipt.job: (receipt.status, receipt.kind) for receipt in rig.receipts()}
    assert told == dict.fromkeys(("j1", "j2", "j3", "j4", "j5", "j6"), ("error", "intervention_failed"))


def test_vectors_that_add_up_to_what_the_dtype_cannot_hold_fail_the_request(rig: Rig) -> None:
    huge = from_numpy(np.full(HIDDEN, 3e38, dtype=np.float32))
    rig.plane.standing.put_vectors({content_hash(huge): huge})
    entry = steered(1, vector=content_hash(huge)).steering[0]
    request = Request(1, 6, 8, (), [entry, entry])
    rig.step((request, 0, 6), new=[request])
    (receipt,) = rig.receipts()
    assert (receipt.status, receipt.kind) == ("error", "intervention_failed")
    assert "add up to more than torch.float32 holds" in receipt.message


def test_a_long_capture_does_not_hold_the_rows_of_all_who_came_and_went(tmp_path: Path) -> None:
    """Its few rows lie among theirs; when that adds up to the queue's size they are moved."""
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
        peak = max(peak, rig.plane._slabs.alive)
    assert peak <= 2 << 20  # 397 slabs of 16 KiB are 6 MiB
    rig.step(finished=[long])
    assert [receipt.status for receipt in rig.receipts()] == ["ok"]
    assert (rig.reader(long).array(1) == stream_of(0, "post_block", 1, 0, 399)).all()
