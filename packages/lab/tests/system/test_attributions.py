"""Does an attribution pass from its gradient worker to a vLLM worker, whoever is killed, and does
it compare its estimates with the exact values?

Everything real but the model.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from edge import refused
from midstream_fake_engine.grades import own_row
from midstream_fake_engine.gradients import ERROR, estimate_of, is_off
from midstream_fake_engine.model import HIDDEN_SIZE
from msgspec.structs import replace
from safetensors.numpy import save_file
from stack import Stack, stack_with
from sweep_rig import (
    CLEAN,
    CORRUPT,
    TOLERANCE,
    check_attribution,
    difference,
    pair,
    sweep,
    sweep_job,
)

from midstream.client import Client
from midstream.schemas.base.records import to_msgpack
from midstream.schemas.base.tensors import content_hash, from_numpy
from midstream.schemas.jobs.jobs import Event, JobView, State
from midstream.schemas.jobs.queues import GRADIENTS
from midstream.schemas.settings.faults import FOLDER
from midstream_lab.records.attributions import AttributionResult
from midstream_lab.records.estimates import EstimateMethod, StoredAttribution, Verify
from midstream_lab.records.sweep_units import SweepWork, Units
from midstream_lab.records.sweeps import StoredPair, StoredSweep

TOP = 4
RANDOM = 6
DOUBTFUL = 2
BOTH = [pair(), pair(CLEAN.replace("The", "Our"), CORRUPT.replace("The", "Our"))]
DEADLINE_S = 180.0
GRADIENT = {"engine": "gradients-fake"}
#: Of the autoencoder; the rows are wider.
FEATURES = 6
BODY = {
    "pairs": [{"clean": CLEAN, "corrupt": CORRUPT, "answer": "P", "foil": "R"}],
    "alignment": "left",
    "metric": "logit_diff",
    "seed": 3,
    "verify": {"top": 2, "random": 3, "doubtful": 0},
}


def attribution(
    method: EstimateMethod = "attribution",
    verify: Verify | None = None,
    budget: int = 0,
    **changes: Any,
) -> StoredSweep:
    how = StoredAttribution(method=method, steps=1, seed=7, keep=10, verify=verify, budget=budget)
    return sweep(*BOTH, attribution=how, **changes)


VERIFIED = attribution(verify=Verify(top=TOP, random=RANDOM, doubtful=DOUBTFUL, tolerance=0.5))


def submit(stack: Stack, asked: StoredSweep, **changes: Any) -> str:
    job = sweep_job(asked, stack.settings.served_model)
    job = replace(job, kind="attribution", queue=GRADIENTS, **changes)
    stack.do(lambda ledger: ledger.submit(job, {}))
    return job.id


def asked(stack: Stack, **fields: Any) -> str:
    """The job of an attribution that the API has accepted."""
    body = BODY | {"model": stack.settings.served_model} | fields
    answer = httpx2.post(f"{stack.url}/v1/attributions", json=body, timeout=DEADLINE_S)
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


def until(stack: Stack, job_id: str, holds: Callable[[JobView], bool]) -> JobView:
    return stack.wait(job_id, DEADLINE_S, until=holds)


def succeeded(stack: Stack, job_id: str) -> JobView:
    view = stack.wait(job_id, DEADLINE_S)
    assert view.state is State.SUCCEEDED, view.error
    return view


def result_of(stack: Stack, job_id: str) -> AttributionResult:
    result = stack.result(job_id).attribution
    assert isinstance(result, AttributionResult)
    return result


def events_of(stack: Stack, job_id: str) -> list[Event]:
    return stack.do(lambda ledger: ledger.events(job_id, count=100_000))


# A vLLM worker and a gradient worker.
stack = stack_with({"worker-g": GRADIENT}, api=True, callbacks=False)


@pytest.fixture
def restarted(stack: Stack) -> Iterator[Callable[..., None]]:
    """Restart a worker with other settings; as it was at the end."""
    changed: set[str] = set()

    def restart(name: str, **settings: Any) -> None:
        changed.add(name)
        stack.replace(name, **(GRADIENT if name == "worker-g" else {}), **settings)

    yield restart
    for name in changed:
        if stack.processes[name].poll() is None:
            stack.replace(name, **(GRADIENT if name == "worker-g" else {}))


@pytest.fixture(scope="module")
def features(stack: Stack) -> str:
    """The name of a registered autoencoder."""
    dictionary(Path(stack.settings.artifacts_of("saes")))
    with httpx2.Client(base_url=stack.url, timeout=DEADLINE_S) as http:
        made = http.put("/v1/artifacts/saes/first", json={"path": "first"})
    assert made.status_code == 201, made.text
    return "first"


def test_estimates_are_verified_by_exact_cells_in_the_same_job(stack: Stack) -> None:
    job_id = submit(stack, VERIFIED)
    view = succeeded(stack, job_id)
    assert view.queue == ""
    assert view.attempt == 2
    assert view.cells == view.cells_expected
    result = result_of(stack, job_id)
    check_attribution(result, VERIFIED)
    for found in result.estimated:
        whys = [why for cell in found.checked for why in cell.why]
        assert whys.count("top") == TOP
        assert whys.count("random") == RANDOM
        assert whys.count("doubtful") <= DOUBTFUL
        assert found.all is not None
        assert found.all.cells == len(found.checked)
        assert found.random is not None
        assert found.random.cells == RANDOM
        assert found.recall is not None
        assert found.recall.known == len(found.checked)
    kinds = [event.event for event in events_of(stack, job_id)]
    assert [kinds.count(kind) for kind in ("start", "estimate", "summary")] == [1, 2, 1]
    assert kinds.index("cell") > kinds.index("estimate")
    assert kinds.count("cell") == view.cells
    ranks = stack.result(job_id).determinism
    assert ranks.consistent
    estimates = [Units(VERIFIED).estimate(number).number for number in range(2)]
    reported = {rank.request for stage in ranks.stages for rank in stage.ranks}
    assert {number * Units(VERIFIED).width for number in estimates} <= reported


def test_without_verify_the_gradient_worker_ends_the_job(stack: Stack) -> None:
    job_id = submit(stack, attribution())
    view = succeeded(stack, job_id)
    assert view.queue == GRADIENTS
    assert view.attempt == 1
    assert view.cells_expected == 0
    result = result_of(stack, job_id)
    assert [found.checked for found in result.estimated] == [[], []]
    assert result.summary.cells == 0


def test_adaptive_finds_the_top_cells_and_says_what_it_left(stack: Stack) -> None:
    asked = attribution("adaptive", Verify(top=3), budget=40)
    job_id = submit(stack, asked)
    succeeded(stack, job_id)
    for number, found in enumerate(result_of(stack, job_id).estimated):
        left = found.not_looked_at
        assert left is not None
        assert left.cells > 0
        estimate = estimate_of(asked, number)
        sizes = {
            place: abs(value - ERROR * is_off(place) - estimate.base)
            for place, value in enumerate(estimate.values)
            if value is not None
        }
        best = sorted(sizes, key=lambda place: -sizes[place])[:3]
        looked = {cell.layer * asked.num_columns + cell.column for cell in found.checked}
        assert len(looked) == len(sizes) - left.cells
        assert left.settled or len(looked) == 40, "the budget"
        if left.settled:
            assert {*best} <= looked


@pytest.mark.parametrize("verify", [BODY["verify"], None])
def test_a_pair_that_a_policy_stops_has_no_estimates(stack: Stack, verify: Any) -> None:
    """Policies read both prompts as in a sweep, also where no cell is computed."""
    pairs = [BODY["pairs"][0] | {"clean": CLEAN + end} for end in ("", ", and it stays there")]
    at_least = len(pair().base) + 2.0  # the fake engine's scores are positions
    fields = {"mode": "active", "all_traffic": True, "actions": ["stop"]}
    fields["condition"] = {"at_least": at_least, "schedule": {"tokens": "all"}}
    with Client(stack.url) as client:
        client.probes.put("p", weight=np.ones(HIDDEN_SIZE), layer=1, thresholds=[at_least])
        client.policies.put("guard", probe="p", **fields)
        job_id = asked(stack, pairs=pairs, verify=verify)
        client.policies.delete("guard")
    succeeded(stack, job_id)
    first, second = result_of(stack, job_id).estimated
    assert first.base is not None
    assert "prompt: failed: the probe 'policy:guard' ended it" in second.reason
    assert {value for row in second.estimates["post_block"] for value in row} == {second.base}
    early = [event.data for event in events_of(stack, job_id) if event.event == "estimate"]
    assert [each["attribution"]["base"] for each in early] == [None, second.base], "not read yet"


def test_a_pair_that_cannot_be_estimated_fails_alone(stack: Stack, restarted: Any) -> None:
    restarted("worker-g", fault="estimate:pair=1")
    job_id = submit(stack, VERIFIED)
    succeeded(stack, job_id)
    first, second = result_of(stack, job_id).estimated
    assert len(first.checked) > 0
    assert second.reason == "the gradients are not finite"
    assert second.checked == []


@pytest.mark.parametrize(
    "point",
    [
        "attribution.estimated",
        *(
            pytest.param(point, marks=pytest.mark.matrix)
            for point in ("worker.claimed", "attribution.kept", "attribution.handed")
        ),
    ],
)
def test_a_killed_gradient_worker_loses_no_estimate(
    stack: Stack, restarted: Any, point: str
) -> None:
    restarted("worker-g", fault=f"crash:at={point}")
    job_id = submit(stack, VERIFIED)
    stack.exit_code("worker-g")
    assert (stack.directory / FOLDER / point).exists()
    stack.restart("worker-g", **GRADIENT)
    succeeded(stack, job_id)
    check_attribution(result_of(stack, job_id), VERIFIED)
    kinds = [event.event for event in events_of(stack, job_id)]
    assert kinds.count("estimate") == 2
    assert kinds.count("done") == 1


@pytest.fixture
def dying(stack: Stack, restarted: Any) -> None:
    """The vLLM worker dies once it has kept a cell; also in a test that comes later."""
    (stack.directory / FOLDER / "sweep.kept").unlink(missing_ok=True)
    restarted("worker", fault="crash:at=sweep.kept")


def test_a_killed_vllm_worker_loses_no_cell(stack: Stack, dying: None) -> None:
    job_id = submit(stack, VERIFIED)
    stack.exit_code("worker")
    stack.restart("worker")
    view = succeeded(stack, job_id)
    check_attribution(result_of(stack, job_id), VERIFIED)
    kinds = [event.event for event in events_of(stack, job_id)]
    assert kinds.count("estimate") == 2
    assert kinds.count("cell") == view.cells


@pytest.mark.matrix
def test_a_killed_vllm_worker_loses_no_feature(stack: Stack, features: str, dying: None) -> None:
    job_id = asked(stack, sae=features, verify={"top": 6, "random": 2, "doubtful": 0})
    stack.exit_code("worker")
    stack.restart("worker")
    view = succeeded(stack, job_id)
    (found,) = result_of(stack, job_id).estimated
    assert len(found.checked) == 8
    assert all(cell.exact is not None for cell in found.checked)
    kinds = [event.event for event in events_of(stack, job_id)]
    assert kinds.count("estimate") == 1
    assert kinds.count("cell") == 8
    assert view.cells == 8


@pytest.mark.slow("two workers run two jobs")
def test_a_job_is_cancelled_in_both_phases(stack: Stack, restarted: Any) -> None:
    for name in ("worker-g", "worker"):
        restarted(name, engine_options={"token_s": 1.0})
    first = submit(stack, VERIFIED)
    second = submit(stack, VERIFIED)
    stack.wait_running(first)
    stack.do(lambda ledger: ledger.request_cancel(first))
    assert stack.wait(first).state is State.CANCELLED
    phase = until(stack, second, lambda view: view.queue == "" and view.attempt == 2)
    assert phase.state is State.RUNNING
    stack.do(lambda ledger: ledger.request_cancel(second))
    assert stack.wait(second).state is State.CANCELLED


def test_global_steering_fails_an_attribution_that_it_would_falsify(stack: Stack) -> None:
    """It is applied without waiting for the gradient worker, which follows it."""
    entry = {"op": "add", "layers": [1], "vector": [1.0] * HIDDEN_SIZE}
    with httpx2.Client(base_url=stack.url, timeout=DEADLINE_S) as http:
        applied = http.put("/v1/steering/global", json={"steering": [entry]})
        assert applied.status_code == 200, applied.text
        refused(
            http.post("/v1/attributions", json=BODY | {"model": stack.settings.served_model}),
            409,
            kind="conflict",
        )
        # accepted before, as if it had waited in the queue until now
        view = stack.wait(submit(stack, VERIFIED), DEADLINE_S)
        assert "global steering version" in view.error.detail
        assert http.delete("/v1/steering/global").status_code == 200


def test_the_api_takes_an_attribution_and_shows_it(stack: Stack) -> None:
    body = BODY | {"model": stack.settings.served_model}
    with httpx2.Client(base_url=stack.url, timeout=DEADLINE_S) as http:
        planned = http.post("/v1/attributions?dry_run=true", json=body)
        assert planned.status_code == 200
        assert planned.json()["cells"] > 5
        done = http.post("/v1/attributions", json=body, headers={"Prefer": "wait=50"})
        assert done.status_code == 200, done.text
        result = done.json()["attribution"]
        assert result["method"] == "attribution"
        assert result["seed"] == 3
        assert result["steps"] == 1
        assert "attribution" not in http.get("/v1/jobs").json()["jobs"][0]
        shown = http.get(f"/v1/attributions/{done.json()['id']}").json()
        assert shown["result"]["estimated"] == result["estimated"]
        assert shown["request"]["verify"]["top"] == 2
        assert http.get(f"/v1/sweeps/{done.json()['id']}").status_code == 404


def written(feature: int, to: int, of: int, stored: StoredPair) -> str:
    """The name of the row that an exact patch of a feature of `dictionary` writes, in numpy."""
    ours = own_row("post_block", 1, to, stored.base)
    theirs = own_row("post_block", 1, of, stored.source)
    dims = slice(feature, feature + 1) if feature >= 0 else slice(FEATURES, None)
    row = ours.copy()
    row[dims] += theirs[dims] - ours[dims]
    return content_hash(from_numpy(row))


def dictionary(root: Path) -> None:
    """Files of an autoencoder whose features are the first dimensions of a row, exactly; the others
    are its error.
    """
    folder = root / "first"
    folder.mkdir(parents=True)
    tensors = {
        "W_enc": 2 * np.eye(HIDDEN_SIZE, FEATURES, dtype=np.float32),
        "W_dec": np.eye(FEATURES, HIDDEN_SIZE, dtype=np.float32) / 2,
        "b_enc": np.zeros(FEATURES, np.float32),
        "b_dec": np.zeros(HIDDEN_SIZE, np.float32),
    }
    save_file(tensors, folder / "sae_weights.safetensors")
    form = {"architecture": "standard", "d_in": HIDDEN_SIZE, "d_sae": FEATURES}
    hook = {"hook_name": "blocks.1.hook_resid_post"}
    (folder / "cfg.json").write_text(json.dumps(form | {"metadata": hook}))


@pytest.mark.parametrize("metric", ["logit_diff", "recovered"])
def test_features_are_verified_by_the_rows_that_they_give(
    stack: Stack, features: str, metric: str
) -> None:
    """The exact values are those of rows computed here, in the metric's units; an estimate is off
    where the fake gradient worker made it so.
    """
    verify = {"top": 12, "random": 6, "tolerance": 0.5 if metric == "logit_diff" else 0.05}
    job_id = asked(stack, metric=metric, sae=features, verify=verify, keep=20)
    view = succeeded(stack, job_id)
    job = stack.do(lambda ledger: ledger.job(job_id))
    (stored,) = job.work_as(SweepWork).sweep.pairs
    result = result_of(stack, job_id)
    (found,) = result.estimated
    (pair_result,) = result.pairs
    assert len(found.features) == 20
    assert pair_result.grids == {"post_block": [[None] * len(stored.columns)]}
    assert view.cells == view.cells_expected == len(found.checked) == 18
    base, source = (difference(prompt, [], stored) for prompt in (stored.base, stored.source))
    span = source - base if metric == "recovered" else 1.0
    offs = 0
    for cell in found.checked:
        ((to, of),) = stored.columns[cell.column].places
        assert cell.feature is not None
        edit = to_msgpack(("replace", [written(cell.feature, to, of, stored)], [1.0], 1.0))
        value = difference(stored.base, [("post_block", 1, to, edit)], stored)
        exact = (value - base) / span if metric == "recovered" else value
        assert cell.exact == pytest.approx(exact, abs=TOLERANCE)
        if metric == "logit_diff":
            offs += cell.off
            assert cell.off == (abs((cell.estimate or 0.0) - exact) > 1)
    assert offs or metric == "recovered"
    assert -1 in {cell.feature for cell in found.checked}
    assert [why for cell in found.checked for why in cell.why].count("top") == 12
    assert found.all is not None
    assert found.random is not None
    assert found.all.cells == 18
    assert found.random.cells == 6
    assert found.recall is not None
    assert found.recall.known == 18
    events = [event.data for event in events_of(stack, job_id) if event.event == "cell"]
    assert {(event["column"], event["feature"]) for event in events} == {
        (cell.column, cell.feature) for cell in found.checked
    }
