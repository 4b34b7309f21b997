"""Tensors and global steering: what is on a rank changes as a whole or not at all, and ranks that
differ in it are told apart.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from capture_kit import source_run
from midstream_fake_engine.rank_faults import CALLS, faulty
from plane_kit import VECTOR, Rig, capturing, for_everyone, run, spec_of, steered, template
from rank_kit import HIDDEN, Request, steering, stream_of

from midstream.schemas.base.tensors import content_hash, from_numpy
from midstream.schemas.requests.specs import ONES
from midstream.schemas.requests.steering import GlobalSteering, RankSteering
from midstream.workers.runner.base.engine_step import NewRequest
from midstream.workers.runner.plane.data_plane import answer

NAME = content_hash(VECTOR)
OTHER = from_numpy(np.full(HIDDEN, 5.0, dtype=np.float32))


def state(rig: Rig) -> tuple[Any, ...]:
    """All that a refused call must leave alone."""
    status = rig.plane.status()
    return rig.plane.fingerprint(), *(
        status[name] for name in ("checksum", "actions", "epoch", "vectors", "runs")
    )


def edit(rig: Rig, number: int, layer: int = 0) -> np.ndarray:
    """What the last forward, of request `number`'s first rows, added to the stream at `pre_attn`:
    one number for each row.
    """
    left = rig.left("pre_attn", layer)
    return (left - stream_of(number, "pre_attn", layer, 0, len(left)))[:, 0]


# -- global steering
# --------------------------------------------------------------------------------------------------


def test_requests_share_the_rows_of_global_steering_which_go_with_the_last(rig: Rig) -> None:
    everyone = for_everyone(1, template(), template(positions=[1, -1], scale=4.0))
    rig.plane.rank_state.check_global(everyone)
    assert rig.plane.status()["rows_used"] == 0
    request, beside = (Request(number, 6, 8, (), (), everyone) for number in (1, 2))
    rig.step((request, 0, 6), (beside, 0, 6), new=[request, beside])
    assert edit(rig, 1)[:6].tolist() == [2, 10, 2, 2, 2, 10]
    assert rig.plane.status()["rows_used"] == 2
    rig.step((beside, 6, 1), finished=[request])
    assert rig.plane.status()["rows_used"] == 2
    rig.step(finished=[beside])
    assert rig.plane.status()["rows_used"] == 0
    receipt, _ = rig.receipts()
    assert receipt.status == "ok"
    assert receipt.global_version == 1
    assert receipt.epoch == 0
    assert receipt.applied == 8


def test_a_request_keeps_the_global_steering_that_it_began_under(rig: Rig) -> None:
    first = for_everyone(1, template())
    second = for_everyone(2, template(scale=3.0))
    old = steered(1, everyone=first)
    new = steered(2, everyone=second)
    rig.step((old, 0, 6), new=[old])
    rig.step((old, 6, 1), (new, 0, 6), new=[new])
    left = rig.left("pre_attn", 0)
    assert (left[:1] - stream_of(1, "pre_attn", 0, 6, 1) == 2 + 2).all(), "everyone's, then its own"
    assert (left[1:] - stream_of(2, "pre_attn", 0, 0, 6) == 6 + 2).all()
    rig.step((old, 7, 1), (new, 6, 1))
    assert (
        rig.left("pre_attn", 0)[:, 0]
        - [stream_of(n, "pre_attn", 0, p, 1)[0, 0] for n, p in ((1, 7), (2, 6))]
        == [4, 8]
    ).all()
    rig.step(finished=[old, new])
    assert rig.plane.status()["rows_used"] == 0
    assert [(receipt.status, receipt.global_version) for receipt in rig.receipts()] == [
        ("ok", 1),
        ("ok", 2),
    ]


@pytest.mark.parametrize("masked", [False, True])
def test_global_entries_precede_request_entries(rig: Rig, masked: bool) -> None:
    """Also a masked replacement, which the ranks would apply after a full one."""
    theirs, mine = (
        msgspec.structs.replace(template(rig.vector(n)), family="replace", numbers=[1.0])
        for n in (7.0, 8.0)
    )
    if masked:
        tensors = [*theirs.tensors, ONES]
        theirs = msgspec.structs.replace(theirs, family="replace_masked", tensors=tensors)
    # as many as a request may have: to the ranks they are one, after a masked one as well
    own = [mine.stored([2])] * 20
    request = Request(1, 6, 8, (), own, for_everyone(1, theirs))
    rig.step((request, 0, 6), new=[request])
    assert rig.left("pre_attn", 0)[:, 0].tolist() == [7, 7, 8, 7, 7, 7]


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (lambda rig: template("0" * 64), "vector 000000000000 is not on this rank"),
        (lambda rig: template("0" * 64, positions=[3]), "vector 000000000000 is not on this rank"),
        (lambda rig: template(rig.vector(3e38), scale=2.0), "exceeds the range of torch.float32"),
        (lambda rig: template(layers=[2]), "layer 2 is out of range: the model has layers 0 to 1"),
        (
            lambda rig: msgspec.structs.replace(
                template(), rank=3, family="lowrank", tensors=[NAME] * 3, numbers=[1.0]
            ),
            "its shape is",
        ),
    ],
)
def test_invalid_global_steering_is_refused_before_any_change(
    rig: Rig, entry: Callable[[Rig], Any], words: str
) -> None:
    wanted = for_everyone(4, template(), entry(rig))
    before = state(rig)
    with pytest.raises((LookupError, ValueError), match=words):
        rig.plane.rank_state.check_global(wanted)
    assert state(rig) == before


def test_global_steering_that_takes_more_than_its_share_of_rows_is_refused(rig: Rig) -> None:
    entries = [
        template(positions=name) for name in ("all", "all_prompt", "all_generated", "last_prompt")
    ]
    ablated = msgspec.structs.replace(template(positions="all"), family="ablate", numbers=[1.0])
    rig.plane.rank_state.check_global(for_everyone(1, *entries))
    with pytest.raises(ValueError, match="takes 5 rows of the steering table; the limit is 4"):
        rig.plane.rank_state.check_global(for_everyone(1, *entries, ablated, ablated))


def test_a_hook_that_the_worker_was_not_given_is_refused(rig: Rig) -> None:
    rig.plane.rank_state._hooks.remove("mlp_in")
    with pytest.raises(ValueError, match="unknown hook mlp_in; valid: pre_attn, attn_out"):
        rig.plane.rank_state.check_global(
            for_everyone(1, msgspec.structs.replace(template(), hook="mlp_in"))
        )


# -- tensors
# --------------------------------------------------------------------------------------------------


# field case 26
def test_a_tensor_can_be_dropped_while_a_request_uses_it(rig: Rig) -> None:
    admitted = steered(1)
    rig.step((admitted, 0, 4), new=[admitted])
    rig.plane.rank_state.vectors.drop([NAME])
    rig.step((admitted, 4, 2))
    assert (rig.left("pre_attn", 0) - stream_of(1, "pre_attn", 0, 4, 2) == 2).all()
    rig.plane.begin([], {}, 1, None, {"1": 0})  # preempted, computed again
    rig.step((admitted, 0, 6))
    assert edit(rig, 1).tolist() == [2] * 6
    rig.step((admitted, 6, 1), finished=[])
    rig.step(finished=[admitted])
    late = steered(2)
    rig.step((late, 0, 6), new=[late])
    assert rig.plane.status()["rows_used"] == 0
    told = {receipt.job: (receipt.status, receipt.message) for receipt in rig.receipts()}
    assert told == {"j1": ("ok", ""), "j2": ("error", f"vector {NAME[:12]} is not on this rank")}


# field case 25
@pytest.mark.parametrize("chunks", [[6], [2, 3, 1]])
@pytest.mark.parametrize(
    ("positions", "edited"),
    [("all_generated", [0, 0, 0, 0, 0, 0, 2, 2]), ("all_prompt", [2, 2, 2, 2, 2, 2, 0, 0])],
)
def test_steering_of_one_phase_is_there_from_the_first_chunk_to_the_last_token(
    rig: Rig, positions: str, edited: list[int], chunks: list[int]
) -> None:
    """Its row is taken once, when the request comes, whichever phase will use it; the tensor may be
    gone by then.
    """
    request = Request(1, 6, 9, (), [template(positions=positions).stored(positions)])
    found: list[int] = []
    for number, count in enumerate([*chunks, 1, 1]):
        rig.step((request, len(found), count), new=[request] if not number else [])
        found += (rig.left("pre_attn", 0) - stream_of(1, "pre_attn", 0, len(found), count))[
            :, 0
        ].tolist()
        if not number:
            assert rig.plane.status()["rows_used"] == 1
            rig.plane.rank_state.vectors.drop([NAME])
    assert found == edited
    receipt = rig.ended(request)
    assert receipt.status == "ok"
    assert receipt.applied == np.count_nonzero(edited)


# -- what a rank refuses
# --------------------------------------------------------------------------------------------------

ACTIONS: dict[str, Callable[[Rig], None]] = {
    "put_vectors": lambda rig: rig.plane.rank_state.vectors.put({content_hash(OTHER): OTHER}),
    "drop_vectors": lambda rig: rig.plane.rank_state.vectors.drop([rig.vector(5.0)]),
    "put_run": lambda rig: rig.plane.runs.put(
        source_run(rig.directory / "captures", {"pre_attn": [0]}, [0, 1], job="job_other")
    ),
    "drop_runs": lambda rig: rig.plane.runs.drop(["job_s.0.tag"]),
    "put_lora": lambda rig: None,  # vLLM's part: with a real one in `tests/engine/test_lora.py`
    "drop_loras": lambda rig: None,
    "put_sae": lambda rig: None,  # a reader's part: in `tests/engine/test_features.py`
    "drop_saes": lambda rig: None,
    "check_global": lambda rig: rig.plane.rank_state.check_global(for_everyone(2, template())),
    "restart_ledger": lambda rig: rig.plane.restart(),
    "forget_failures": lambda rig: rig.plane.forget_failures([0]),
}


# field case 29
@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_fails_on_this_rank_says_why_and_has_changed_nothing(
    rig: Rig, call: str
) -> None:
    rig.plane.runs.put(source_run(rig.directory / "captures", {"pre_attn": [0]}, [0, 1]))
    before = state(rig)
    method = f"midstream_{call}"
    rank = faulty(type("Rank", (), {method: lambda _: answer(lambda: ACTIONS[call](rig))}))()
    rank.midstream_faults = rig.faults
    ask = getattr(rank, method)
    rig.faults.switch(call)
    assert ask() == (False, f"fault injected: {call}")
    assert state(rig) == before
    rig.faults.switch("")
    assert ask() == (True, "")


@pytest.mark.parametrize("error", [LookupError("gone"), ValueError("gone"), RuntimeError("gone")])
def test_refusals_are_returned_and_bugs_are_raised(rig: Rig, error: Exception) -> None:
    def refuse() -> None:
        raise error

    def bug() -> None:
        raise TypeError("a bug")

    assert answer(refuse) == (False, "gone")
    with pytest.raises(TypeError):
        answer(bug)


# -- two ranks
# --------------------------------------------------------------------------------------------------


def stage(tmp_path: Path) -> list[Rig]:
    """Two ranks of one stage."""
    return [Rig(tmp_path / str(rank), rank=rank, world=2) for rank in range(2)]


Act = Callable[[Rig], object]


def fault(text: str) -> Act:
    return lambda rig: rig.faults.switch(text)


#: Difference between two ranks → what the first does, and what the second does instead.
BLIND_SPOTS: dict[str, tuple[list[Act], list[Act]]] = {
    "other bytes in the table": ([], [fault("alter_action:rank=1")]),
    "a row that one did not write": ([], [fault("skip_action:rank=1")]),
    "another row": (
        [lambda rig: run(rig, steered(1))],
        [lambda rig: run(rig, steered(1, scale=2.0))],
    ),
    "a row admitted later": (
        [lambda rig: run(rig, steered(1))],
        [lambda rig: rig.step(), lambda rig: run(rig, steered(1))],
    ),
}


# field case 30
@pytest.mark.parametrize("difference", BLIND_SPOTS)
def test_the_first_receipt_after_any_difference_tells_the_ranks_apart(
    tmp_path: Path, difference: str
) -> None:
    ranks = stage(tmp_path)
    for rig, acts in zip(ranks, BLIND_SPOTS[difference], strict=True):
        for act in acts:
            act(rig)
        run(rig, steered(9, scale=0.5))
    first, second = (rig.receipts()[-1] for rig in ranks)
    assert first.job == "j9"
    assert second.job == "j9"
    assert first.checksum != second.checksum


@pytest.mark.parametrize(
    ("buffer", "place"),
    [("pool", (1, 0)), ("scalars", (1, 0)), ("site_rows", (0, slice(None), 1))],
)
def test_corrupted_device_rows_change_the_fingerprint(rig: Rig, buffer: str, place: Any) -> None:
    request = steered(1)
    rig.step((request, 0, 6), new=[request])
    before = rig.plane.fingerprint()
    getattr(rig._rank.buffers, buffer)[place] += 1
    assert rig.plane.fingerprint() != before


# -- beginning anew
# --------------------------------------------------------------------------------------------------


def test_desynced_ranks_agree_after_a_reset(tmp_path: Path) -> None:
    ranks = stage(tmp_path)
    everyone = for_everyone(3, template())
    live = steered(7)
    for rig in ranks:
        rig.faults.switch("alter_action:rank=1")
        rig.step((live, 0, 6), new=[live])
    assert ranks[0].plane.fingerprint() != ranks[1].plane.fingerprint()
    for rig in ranks:
        rig.step(finished=[live])
        rig.plane.restart()
        status = rig.plane.status()
        zero = ("rows_used", "entries_used", "vectors", "actions")
        assert [status[name] for name in zero] == [0] * len(zero)
        assert status["checksum"] == "0" * 16
        assert status["epoch"] == 1
        assert not any(
            tensor.any()
            for tensor in (
                rig._rank.buffers.pool,
                rig._rank.buffers.scalars,
                rig._rank.buffers.site_rows,
            )
        )
        rig.faults.switch("")
        rig.plane.rank_state.vectors.put({NAME: VECTOR})
        run(rig, steered(2, scale=2.0, everyone=everyone))
    assert ranks[0].plane.fingerprint() == ranks[1].plane.fingerprint()
    receipts = [rig.told() for rig in ranks]
    before, after = ([told[job] for told in receipts] for job in ("j7", "j2"))
    assert before[0].checksum != before[1].checksum
    assert before[0].epoch == 0
    assert after[0].checksum == after[1].checksum
    assert after[0].epoch == 1
    assert after[1].epoch == 1


def test_requests_present_when_a_rank_restarts_fail_with_the_reason(rig: Rig) -> None:
    live = steered(1)
    plain = capturing(2)
    over = steered(3)
    over_spec = msgspec.structs.replace(spec_of(over), worker_reports_end=True)
    rig.step((live, 0, 6), (plain, 0, 6), new=[live, plain])
    rig.plane.begin([NewRequest("3", over_spec, 0)], {}, 0)
    rig.step(finished=[over])  # the worker has not said where it ends
    assert rig.plane.status()["requests"] == 3
    rig.plane.restart()
    rig.plane.rank_state.vectors.put({NAME: VECTOR})
    rig.step((live, 6, 1), (plain, 6, 1))
    assert (rig.left("pre_attn", 0)[:1] == stream_of(1, "pre_attn", 0, 6, 1)).all()
    rig.step((live, 0, 6), new=[live])  # as the v2 runner tells of a preempted request that goes on
    assert edit(rig, 1).tolist() == [0] * 6, "not half of it"
    assert rig.plane.status()["actions"] == 0
    assert rig.plane.status()["tainted"] == 1, "it fills blocks that claim its edit"
    rig.plane._requests.end("j1.0.1", -1)
    rig.step(finished=[plain], aborted=[live])
    rig.plane._requests.end("j3.0.1", 8)
    assert rig.plane.status()["requests"] == 0
    told = rig.told()
    assert {job: (receipt.status, receipt.epoch) for job, receipt in told.items()} == dict.fromkeys(
        ("j1", "j2", "j3"), ("error", 0)
    )
    assert "were resynced while the request ran" in told["j1"].message


def test_a_restarted_ranks_table_is_complete_and_free_of_former_rows(rig: Rig) -> None:
    old = [steered(number, scale=float(number)) for number in (1, 2, 3)]
    rig.step(*((request, 0, 6) for request in old), new=old)
    rig.plane.restart()
    rig.plane.rank_state.vectors.put({NAME: VECTOR})
    new = [steered(number, scale=float(number - 3)) for number in (4, 5, 6)]
    rig.step(*((request, 0, 6) for request in new), new=new)
    assert rig.plane.status()["rows_used"] == 3
    rig.step(*((request, 6, 1) for request in new), finished=old)
    assert rig.left("pre_attn", 0)[:, 0].tolist() == [
        stream_of(n, "pre_attn", 0, 6, 1)[0, 0] + 2 * (n - 3) for n in (4, 5, 6)
    ]
    rig.step(finished=new)
    status = rig.plane.status()
    assert status["rows_used"] == 0
    assert status["requests"] == 0
    assert [receipt.status for receipt in rig.receipts()] == ["error"] * 3 + ["ok"] * 3


# -- what is told
# --------------------------------------------------------------------------------------------------


def test_a_ranks_status_has_every_field_of_its_report(rig: Rig) -> None:
    assert rig.plane.status().keys() >= set(RankSteering.__struct_fields__)


def test_more_rows_than_a_token_has_columns_fail_the_request(rig: Rig) -> None:
    edit = steering(NAME, [0], "pre_attn", [5])
    edits = [msgspec.structs.replace(edit, limit=1.0 + number) for number in range(13)]
    everyone = GlobalSteering(
        version=1, entries=[template(positions=[position, 5]) for position in range(4)]
    )
    request = Request(1, 6, 8, (), edits, everyone)
    rig.step((request, 0, 6), new=[request])
    (receipt,) = rig.receipts()
    assert receipt.status == "error"
    assert (
        receipt.message
        == "its steering takes 17 rows of the table at one token; at most 16 are allowed"
    )
