"""Has every cell the right number, and are finished cells kept when the worker dies?

Everything real but the model.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from stack import Stack
from sweep_rig import CLEAN, CORRUPT, check_grid, pair, sweep, sweep_job

from midstream.broker.ledger.jobs.sweeps import Sweeps
from midstream.schemas.jobs.jobs import Event, State
from midstream.schemas.jobs.sweep_units import Units
from midstream.schemas.jobs.sweeps import Column, PatchWindow, StoredSweep, SweepResult
from midstream.schemas.requests.specs import StoredCapture


def submit(stack: Stack, asked: StoredSweep) -> str:
    job = sweep_job(asked, stack.settings.served_model)
    stack.do(lambda ledger: ledger.submit(job, {}))
    return job.id


def result_of(stack: Stack, job_id: str) -> SweepResult:
    result = stack.result(job_id).sweep
    assert result is not None
    return result


def events_of(stack: Stack, job_id: str) -> list[Event]:
    return stack.do(lambda ledger: ledger.events(job_id, count=100_000))


def attempts_of(stack: Stack, job_id: str, units: Units) -> Counter[int]:
    records = stack.do(lambda ledger: Sweeps(ledger).records(job_id))
    return Counter(
        record.attempt for number, record in records.items() if number >= units.first_cell
    )


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two stages of two ranks."""
    with Stack(
        tmp_path_factory.mktemp("sweeps"),
        tensor_parallel_size=2,
        pipeline_parallel_size=2,
        lease_s=30,
    ) as running:
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
    assert (view.cells, view.cells_expected, view.capture_status) == (
        asked.num_cells,
        asked.num_cells,
        "ok",
    )
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


def test_sweep_events_are_start_each_cell_once_and_end(stack: Stack) -> None:
    asked = sweep()
    job_id = submit(stack, asked)
    stack.wait(job_id)
    events = events_of(stack, job_id)
    kinds = Counter(event.event for event in events)
    assert (
        kinds["start"],
        kinds["cell"],
        kinds["summary"],
        kinds["done"],
        kinds["receipt"],
        kinds["output"],
    ) == (
        1,
        asked.num_cells,
        1,
        1,
        0,
        0,
    )
    assert [event.event for event in events if event.event not in ("state", "cell")] == [
        "start",
        "summary",
        "done",
    ]
    result = result_of(stack, job_id)
    for event in events:
        if event.event == "cell":
            cell = event.data
            assert (
                result.pairs[0].grids[cell["hook"]][cell["layer"]][cell["column"]] == cell["value"]
            )
    summary = next(event.data for event in events if event.event == "summary")
    assert {**summary, "seconds": None} == msgspec.to_builtins(
        msgspec.structs.replace(result.summary, seconds=None)
    )


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
def test_metrics_directions_and_ablations_give_their_values(
    stack: Stack, changes: dict[str, Any]
) -> None:
    stored = pair()
    if "ablation" in changes:
        ablated = [
            Column(
                label=column.label,
                places=[(to, -1) for to, _ in column.places],
                reason=column.reason,
            )
            for column in stored.columns
        ]
        stored = msgspec.structs.replace(stored, source=[], columns=ablated)
    asked = sweep(stored, **changes)
    job_id = submit(stack, asked)
    assert stack.wait(job_id).state is State.SUCCEEDED
    check_grid(asked, result_of(stack, job_id))


def test_cells_by_neurons_write_those_in_which_the_prompts_differ_most(stack: Stack) -> None:
    """By rank and by name, and the result says which were chosen."""
    places = [(place, place) for place in range(4)]
    parts: list[dict[str, Any]] = [{"ranks": (0, 1)}, {"ranks": (0, 5)}, {"dims": "0-2, 7"}]
    made = pair(
        columns=[
            Column(label=f"c{number}", places=places, **part) for number, part in enumerate(parts)
        ]
    )
    asked = sweep(made, axis="neuron", hooks=["post_block", "mlp_out"])
    job_id = submit(stack, asked)
    assert stack.wait(job_id).error is None
    result = result_of(stack, job_id)
    check_grid(asked, result, job=job_id)
    assert result.axis == "neuron"
    for rows in result.pairs[0].neurons.values():
        assert [[len(chosen) for chosen in row] for row in rows] == [[1, 5, 0]] * len(asked.layers)
        assert all(row[0] == row[1][:1] for row in rows)


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
    assert "a difference of 0.0000; at least 0.1000 are needed" in view.error.detail


# field case 35
def test_only_the_pair_with_a_useless_baseline_has_no_values(stack: Stack) -> None:
    asked = sweep(pair(CLEAN, CLEAN), pair(), metric="recovered")
    job_id = submit(stack, asked)
    assert stack.wait(job_id).state is State.SUCCEEDED
    first = len(asked.layers) * asked.num_columns
    units = Units(asked)
    check_grid(
        asked,
        result_of(stack, job_id),
        {units.first_cell + number: "differ too little" for number in range(first)},
    )


@pytest.mark.long
def test_two_sweeps_at_once_and_ordinary_jobs_are_all_served(stack: Stack) -> None:
    # Each is far more than the cells in flight: the second's hundredth cell comes long before the
    # first's last.
    asked = sweep(pair(CLEAN * 6, CORRUPT * 6), hooks=["post_block", "attn_out"])
    first, second = submit(stack, asked), submit(stack, asked)
    capture = StoredCapture(sites={"post_block": [0]}, positions="last_prompt", tag="t")
    stack.wait(second, until=lambda view: view.cells > 100)
    ordinary = stack.submit(["beside it"], max_tokens=4, capture=capture)
    assert stack.wait(ordinary).state is State.SUCCEEDED
    for job_id in (first, second):
        assert stack.wait(job_id).state is State.SUCCEEDED
        check_grid(asked, result_of(stack, job_id))
    before, after = (
        [told_at(event) for event in events_of(stack, job_id) if event.event == "cell"]
        for job_id in (first, second)
    )
    assert after[99] < before[-1], "they take turns"


def told_at(event: Event) -> int:
    """By Redis' clock, in milliseconds."""
    return int(event.id.partition("-")[0])


# field case 36
def test_a_sweep_survives_its_workers_death_with_the_finished_cells_kept(stack: Stack) -> None:
    asked = sweep(pair(CLEAN * 4, CORRUPT * 4), metric="kl")
    units = Units(asked)
    stack.end("worker")
    stack.restart("worker", engine_options={"token_s": 0.02}, sweep_cells_in_flight=4)
    job_id = submit(stack, asked)
    known = stack.wait(job_id, until=lambda view: view.cells >= 100).cells
    stack.kill("worker")
    kept = attempts_of(stack, job_id, units)
    assert kept[1] >= known
    stack.restart("worker")
    view = stack.wait(job_id)
    assert (view.state, view.attempt, view.cells) == (State.SUCCEEDED, 2, asked.num_cells)
    assert attempts_of(stack, job_id, units) == {1: kept[1], 2: asked.num_cells - kept[1]}, (
        "what was known was not asked again"
    )
    check_grid(asked, result_of(stack, job_id))
    kinds = Counter(event.event for event in events_of(stack, job_id))
    assert (kinds["start"], kinds["cell"], kinds["summary"]) == (1, asked.num_cells, 1)
