"""Does a sweep give the right number in every cell or none at all, whatever happens while it runs? Everything real but the model."""

import itertools
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from stack import Stack

from midstream.broker.celery_app import enqueue
from midstream.broker.ledger import new_job_id
from midstream.broker.sweeps import Sweeps
from midstream.schemas.base import now
from midstream.schemas.jobs import Event, Job, Sampling, State
from midstream.schemas.specs import StoredCapture
from midstream.schemas.sweep_units import Units
from midstream.schemas.sweeps import Column, PatchWindow, StoredPair, StoredSweep, SweepResult
from midstream.workers.fake_grades import Edit, expected_divergence, expected_logprob, own_row, replaced
from midstream.workers.fake_model import NUM_LAYERS, make_tokenizer

CLEAN, CORRUPT = "The Eiffel Tower is in", "The Colosseum  is now in"
LAYERS = list(range(NUM_LAYERS))
TOLERANCE = 1e-9


def tokens(text: str) -> list[int]:
    return list(make_tokenizer().encode(text).ids)


def columns(base: list[int], source: list[int], skipped: int = 3) -> list[Column]:
    """One for each of the first positions; one of them is skipped."""
    return [
        Column(label=f"t{place}", places=[], reason="it stands alone")
        if place == skipped
        else Column(label=f"t{place}", places=[(place, place)])
        for place in range(min(len(base), len(source)))
    ]


def pair(clean: str = CLEAN, corrupt: str = CORRUPT, answer: str = "P", foil: str = "R", **changes: Any) -> StoredPair:
    base, source = tokens(corrupt), tokens(clean)
    fields: dict[str, Any] = {
        "base": base, "source": source, "columns": columns(base, source), "answer": tokens(answer), "foil": tokens(foil),
    }  # fmt: skip
    return StoredPair(**(fields | changes))


def sweep(*pairs: StoredPair, **changes: Any) -> StoredSweep:
    fields: dict[str, Any] = {
        "pairs": list(pairs) or [pair()], "hooks": ["post_block"], "layers": LAYERS, "metric": "logit_diff", "direction": "denoise",
        "noise": 3,
    }  # fmt: skip
    return StoredSweep(**(fields | changes))


def submit(stack: Stack, asked: StoredSweep) -> str:
    job = Job(
        id=new_job_id(),
        kind="sweep",
        model=stack.settings.served_model,
        prompts=[],
        sampling=Sampling(max_tokens=1),
        created=now(),
        sweep=asked,
    )
    stack.do(lambda ledger: ledger.submit(job, {}))
    enqueue(stack.app, job.id, job.kind, job.model)
    return job.id


def result_of(stack: Stack, job_id: str) -> SweepResult:
    result = stack.result(job_id).sweep
    assert result is not None
    return result


def events_of(stack: Stack, job_id: str) -> list[Event]:
    return stack.do(lambda ledger: ledger.events(job_id, count=100_000))


def attempts_of(stack: Stack, job_id: str, units: Units) -> Counter[int]:
    records = stack.do(lambda ledger: Sweeps(ledger).records(job_id))
    return Counter(record.attempt for number, record in records.items() if number >= units.first_cell)


def cell_edits(asked: StoredSweep, units: Units, number: int) -> list[Edit]:
    """What the patches of a cell write, worked out here."""
    unit = units.cell(number)
    assert unit is not None
    stored, hook = asked.pairs[unit.pair], asked.hooks[unit.hook]
    layers, places = units.patched(unit)
    found = []
    for layer, (to, of) in itertools.product(layers, places):
        if asked.ablation == "zeros":
            row = own_row(hook, layer, to, stored.base) * 0
        elif asked.ablation == "mean":
            rows = [own_row(hook, layer, position, stored.base).astype("float64") for position in range(len(stored.base))]
            row = (sum(rows) / len(rows)).astype("float32")
        else:
            row = own_row(hook, layer, of, stored.source)
        found += replaced(hook, layer, to, stored.base, row, asked.alpha)
    return found


def answer_logprob(token_ids: list[int], edits: list[Edit], answer: list[int]) -> float:
    return sum(expected_logprob([*token_ids, *answer[:place]], edits, token) for place, token in enumerate(answer))


def difference(token_ids: list[int], edits: list[Edit], stored: StoredPair) -> float:
    return answer_logprob(token_ids, edits, stored.answer) - answer_logprob(token_ids, edits, stored.foil)


def check_grid(asked: StoredSweep, result: SweepResult, lost: dict[int, str] | None = None) -> None:
    """Every cell has the value that its patches give, or none and the reason: those of `lost`, and skipped columns."""
    units, lost = Units(asked), lost or {}
    skipped = {(s.pair, s.hook, layer, s.column): s.reason for s in result.skipped for layer in s.layers}
    for number in range(units.first_cell, units.first_cell + asked.num_cells):
        unit = units.cell(number)
        assert unit is not None
        stored, hook = asked.pairs[unit.pair], asked.hooks[unit.hook]
        value = result.pairs[unit.pair].grids[hook][unit.layer][unit.column]
        place = unit.pair, hook, asked.layers[unit.layer], unit.column
        if not stored.columns[unit.column].places:
            assert (value, skipped.pop(place)) == (None, stored.columns[unit.column].reason)
            continue
        if number in lost:
            assert value is None
            assert lost[number] in skipped.pop(place)
            continue
        edits = cell_edits(asked, units, number)
        if asked.metric == "kl":
            clean = stored.source if asked.direction == "denoise" and asked.ablation is None else stored.base
            expected = expected_divergence((clean, []), (stored.base, edits))
        elif asked.metric == "logprob":
            expected = answer_logprob(stored.base, edits, stored.answer)
        else:
            expected = difference(stored.base, edits, stored)
        if asked.metric == "recovered":
            base, source = difference(stored.base, [], stored), difference(stored.source, [], stored)
            expected = (expected - base) / (source - base)
        assert value == pytest.approx(expected, abs=TOLERANCE), unit
    assert not skipped
    assert result.summary.cells + result.summary.skipped == result.summary.total == asked.num_cells


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two stages of two ranks."""
    with Stack(tmp_path_factory.mktemp("sweeps"), tensor_parallel_size=2, pipeline_parallel_size=2) as running:
        yield running


def test_every_cell_of_a_sweep_has_the_value_that_its_patch_gives(stack: Stack) -> None:
    asked = sweep(
        pair(),
        pair(CLEAN + "!", CORRUPT + "?"),
        hooks=["pre_attn", "mlp_out"],
        metric="recovered",
        window=PatchWindow(layers=2, positions=3),
    )
    job_id = submit(stack, asked)
    view = stack.wait(job_id)
    assert (view.state, view.error) == (State.SUCCEEDED, None)
    assert (view.cells, view.cells_expected, view.capture_status) == (asked.num_cells, asked.num_cells, "ok")
    result = result_of(stack, job_id)
    check_grid(asked, result)
    assert [of.noise_floor for of in result.pairs] == [0.0, 0.0]
    first, second = (of.grids["mlp_out"][1][0] for of in result.pairs)
    assert first is not None
    assert second is not None
    assert result.mean["mlp_out"][1][0] == pytest.approx((first + second) / 2)
    assert result.spread["mlp_out"][1][0] == pytest.approx(abs(first - second) / 2**0.5)
    told = stack.result(job_id)
    assert told.outputs == []
    assert told.determinism is not None
    assert told.determinism.consistent
    assert {file.tag for file in told.capture_results.files} == {"base", "source"}


def test_a_sweep_tells_its_start_every_cell_once_and_its_end(stack: Stack) -> None:
    asked = sweep()
    job_id = submit(stack, asked)
    stack.wait(job_id)
    events = events_of(stack, job_id)
    kinds = Counter(event.event for event in events)
    assert (kinds["start"], kinds["cell"], kinds["summary"], kinds["done"], kinds["receipt"], kinds["output"]) == (
        1,
        asked.num_cells,
        1,
        1,
        0,
        0,
    )
    assert [event.event for event in events if event.event not in ("state", "cell")] == ["start", "summary", "done"]
    result = result_of(stack, job_id)
    for event in events:
        if event.event == "cell":
            cell = event.data
            assert result.pairs[0].grids[cell["hook"]][cell["layer"]][cell["column"]] == cell["value"]
    summary = next(event.data for event in events if event.event == "summary")
    assert {**summary, "seconds": None} == msgspec.to_builtins(msgspec.structs.replace(result.summary, seconds=None))


@pytest.mark.parametrize(
    "changes",
    [
        {"metric": "kl"},
        {"metric": "kl", "direction": "noise", "alpha": 0.5},
        {"metric": "logprob", "ablation": "zeros"},
        {"metric": "kl", "ablation": "mean", "hooks": ["attn_out"]},
    ],
    ids=["kl", "kl, noise, half", "zeros", "mean"],
)
def test_metrics_directions_and_ablations_give_their_values(stack: Stack, changes: dict[str, Any]) -> None:
    stored = pair()
    if "ablation" in changes:
        ablated = [
            Column(label=column.label, places=[(to, -1) for to, _ in column.places], reason=column.reason) for column in stored.columns
        ]
        stored = msgspec.structs.replace(stored, source=[], columns=ablated)
    asked = sweep(stored, **changes)
    job_id = submit(stack, asked)
    assert stack.wait(job_id).state is State.SUCCEEDED
    check_grid(asked, result_of(stack, job_id))


def test_an_answer_of_several_tokens_is_asked_token_by_token(stack: Stack) -> None:
    asked = sweep(pair(answer="Paris", foil="Pisa"), metric="recovered", layers=[1, 3])
    job_id = submit(stack, asked)
    assert stack.wait(job_id).state is State.SUCCEEDED
    check_grid(asked, result_of(stack, job_id))


# field case 35
def test_two_prompts_that_do_not_differ_are_refused_as_a_baseline(stack: Stack) -> None:
    asked = sweep(pair(CLEAN, CLEAN), metric="recovered")
    view = stack.wait(submit(stack, asked))
    assert view.state is State.FAILED
    assert view.error is not None
    assert view.error.type == "urn:midstream:useless_baseline"
    assert "a difference of 0.0000 nats where 0.1000 are needed" in view.error.detail


# field case 35
def test_of_several_pairs_only_the_useless_one_has_no_values(stack: Stack) -> None:
    asked = sweep(pair(CLEAN, CLEAN), pair(), metric="recovered")
    job_id = submit(stack, asked)
    assert stack.wait(job_id).state is State.SUCCEEDED
    first = len(asked.layers) * asked.num_columns
    units = Units(asked)
    check_grid(asked, result_of(stack, job_id), {units.first_cell + number: "differ too little" for number in range(first)})


def test_two_sweeps_at_once_and_ordinary_jobs_are_all_served(stack: Stack) -> None:
    # Each is far more than the cells in flight: the second's first cell comes long before the first's last.
    asked = sweep(pair(CLEAN * 6, CORRUPT * 6), hooks=["post_block", "attn_out"])
    first, second = submit(stack, asked), submit(stack, asked)
    capture = StoredCapture(sites={"post_block": [0]}, positions="last_prompt", tag="t")
    stack.wait(second, until=lambda view: view.cells > 100)
    assert stack.view(first).state is State.RUNNING
    ordinary = stack.submit(["beside it"], max_tokens=4, capture=capture)
    assert stack.wait(ordinary).state is State.SUCCEEDED
    for job_id in (first, second):
        assert stack.wait(job_id).state is State.SUCCEEDED
        check_grid(asked, result_of(stack, job_id))


# field case 36
def test_a_sweep_survives_its_workers_death_with_the_finished_cells_kept(tmp_path: Path) -> None:
    asked = sweep(pair(CLEAN * 4, CORRUPT * 4), metric="kl")
    units = Units(asked)
    with Stack(tmp_path, tensor_parallel_size=2, fake_token_s=0.02, sweep_cells_in_flight=4, lease_s=10) as stack:
        job_id = submit(stack, asked)
        known = stack.wait(job_id, until=lambda view: view.cells >= 100).cells
        stack.kill("worker")
        kept = attempts_of(stack, job_id, units)
        assert kept[1] >= known
        stack.restart("worker")
        view = stack.wait(job_id)
        assert (view.state, view.attempt, view.cells) == (State.SUCCEEDED, 2, asked.num_cells)
        assert attempts_of(stack, job_id, units) == {1: kept[1], 2: asked.num_cells - kept[1]}
        check_grid(asked, result_of(stack, job_id))
        kinds = Counter(event.event for event in events_of(stack, job_id))
        assert (kinds["start"], kinds["cell"], kinds["summary"]) == (1, asked.num_cells, 1)


def test_a_cancelled_sweep_stops_at_once_and_keeps_what_it_has(tmp_path: Path) -> None:
    asked = sweep(pair(CLEAN * 6, CORRUPT * 6))
    with Stack(tmp_path, fake_token_s=0.02, sweep_cells_in_flight=2, callbacks=False, lease_s=1.5) as stack:
        job_id = submit(stack, asked)
        stack.wait(job_id, until=lambda view: view.cells > 20)
        asked_at = time.monotonic()
        stack.do(lambda ledger: ledger.request_cancel(job_id))
        view = stack.wait(job_id)
        assert view.state is State.CANCELLED
        assert time.monotonic() - asked_at < 2, "a heartbeat, not the rest of the sweep"
        assert 20 < view.cells < asked.num_cells
        after = stack.submit(["next"], max_tokens=2)
        assert stack.wait(after).state is State.SUCCEEDED


# field case 36
# field case 32
def test_one_cell_that_the_engine_refuses_and_one_that_the_ranks_fail_are_the_only_ones_without_a_value(tmp_path: Path) -> None:
    asked = sweep()
    units = Units(asked)
    refused, failed = units.first_cell + 2, units.first_cell + asked.num_columns + 5
    with Stack(tmp_path, callbacks=False, fault=f"generate:request={refused};refuse:request={failed}") as stack:
        job_id = submit(stack, asked)
        assert stack.wait(job_id).state is State.SUCCEEDED
        result = result_of(stack, job_id)
        check_grid(asked, result, {refused: "rank 0 refused prompt", failed: "rank 0 (stage 0): injected fault"})
        assert result.summary.skipped == len(LAYERS) + 2


# field case 31
def test_cells_whose_source_run_is_not_there_when_they_need_it_have_no_value(tmp_path: Path) -> None:
    asked = sweep()
    with Stack(tmp_path, callbacks=False, fault="lose_run:rank=0,after=30") as stack:
        job_id = submit(stack, asked)
        assert stack.wait(job_id).state is State.SUCCEEDED
        result = result_of(stack, job_id)
        units = Units(asked)
        records = stack.do(lambda ledger: Sweeps(ledger).records(job_id))
        lost = {number: "is not on this rank" for number, record in records.items() if "is not on this rank" in record.reason}
        assert len(lost) > 20
        check_grid(asked, result, {number: why for number, why in lost.items() if number >= units.first_cell})


# field case 31
def test_files_of_a_source_run_that_are_gone_when_a_sweep_resumes_leave_its_cells_without_values(tmp_path: Path) -> None:
    asked = sweep(pair(CLEAN * 3, CORRUPT * 3))
    units = Units(asked)
    with Stack(tmp_path, fake_token_s=0.02, sweep_cells_in_flight=4, callbacks=False) as stack:
        job_id = submit(stack, asked)
        stack.wait(job_id, until=lambda view: view.cells >= 40)
        stack.kill("worker")
        kept = stack.do(lambda ledger: Sweeps(ledger).records(job_id))
        shutil.rmtree(stack.settings.capture_root)
        stack.restart("worker", fake_token_s=0.0)
        assert stack.wait(job_id).state is State.SUCCEEDED
        records = stack.do(lambda ledger: Sweeps(ledger).records(job_id))
        lost = {number: "cannot be read" for number in records.keys() - kept.keys() if number >= units.first_cell}
        assert lost
        check_grid(asked, result_of(stack, job_id), lost)


def test_ranks_that_disagree_in_the_middle_put_a_sweep_back_and_no_cell_is_of_that_attempt_after_it(tmp_path: Path) -> None:
    asked = sweep(pair(CLEAN * 2, CORRUPT * 2))
    units = Units(asked)
    with Stack(tmp_path, tensor_parallel_size=2, fault="disagree:rank=1,after=60,times=1") as stack:
        job_id = submit(stack, asked)
        view = stack.wait(job_id)
        assert (view.state, view.attempt) == (State.SUCCEEDED, 2)
        assert sum(attempts_of(stack, job_id, units).values()) == asked.num_cells
        check_grid(asked, result_of(stack, job_id))
        determinism = stack.result(job_id).determinism
        assert determinism is not None
        assert "rank 1 reports checksum" in determinism.retried[0]


def test_cells_of_which_a_rank_never_reports_have_no_value(tmp_path: Path) -> None:
    asked = sweep(layers=[1], hooks=["attn_out"])
    with Stack(tmp_path, tensor_parallel_size=2, callbacks=False, capture_timeout_s=1, fault="silent:rank=1") as stack:
        job_id = submit(stack, asked)
        assert stack.wait(job_id).state is State.SUCCEEDED
        records = stack.do(lambda ledger: Sweeps(ledger).records(job_id))
        assert all(record.value is None for record in records.values())
        base = records[Units(asked).base(0).number]
        assert base.reason == "1 of 2 receipts arrived within 1 s of the engine's answer"
        assert result_of(stack, job_id).skipped[-1].reason.endswith(base.reason)
