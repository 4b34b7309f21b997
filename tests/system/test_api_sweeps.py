"""Is a sweep accepted with exactly what was asked, held against its quotas, and followed, fetched
and cancelled as any job?
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from edge import HIDDEN, MODEL, Api, Hand, running
from stack import Stack
from test_api_events import parse

from midstream import Client, PatchStudy
from midstream.broker.ledger.jobs.sweeps import Sweeps
from midstream.broker.ledger.results.sweep_result import sweep_cell, sweep_start
from midstream.schemas.base.records import from_json, to_json
from midstream.schemas.base.tensors import to_numpy
from midstream.schemas.jobs.jobs import Event, JobResult, State
from midstream.schemas.jobs.sweep_units import Units
from midstream.schemas.jobs.sweep_views import SweepPlan, SweepView
from midstream.schemas.jobs.sweeps import SweepCell, SweepStart, UnitRecord
from midstream.schemas.requests.specs import CaptureSpec

PAIR = {"clean": "hello world a", "corrupt": "hello there a", "answer": " b", "foil": " c"}
BODY = {"model": MODEL, "pairs": [PAIR]}
CELLS = 4 * 4  # layers and tokens, <bos> among them


@pytest.fixture
def hand(api: Api) -> Iterator[Hand]:
    """A worker by hand, whose ranks say log-probabilities of single tokens."""
    worker = Hand(api.settings)
    worker.serve(grades=True)
    yield worker
    worker.close()


def swept(api: Api, **changes: Any) -> str:
    answer = api.http.post("/v1/sweeps", json=BODY | changes)
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


def test_a_sweep_is_accepted_as_a_job_and_located(api: Api, hand: Hand) -> None:
    answer = api.http.post("/v1/sweeps", json={**BODY, "metadata": {"who": "me"}})
    view = answer.json()
    assert (answer.status_code, view["kind"], view["state"]) == (202, "sweep", "queued")
    assert answer.headers["location"] == f"/v1/jobs/{view['id']}"
    assert answer.headers["etag"] == f'"{view["version"]}"'
    assert int(answer.headers["retry-after"]) >= 1
    assert view["cells_expected"] == CELLS
    assert view["metadata"] == {"who": "me"}
    assert [
        job["id"]
        for job in api.http.get("/v1/jobs", params={"state": "queued", "model": MODEL}).json()[
            "jobs"
        ]
    ] == [view["id"]]


def test_the_exact_token_ids_of_answer_and_foil_reach_the_job(api: Api, hand: Hand) -> None:
    # field case 33
    job = hand.job(swept(api))
    assert (job.kind, job.prompts) == ("sweep", [])
    assert job.sweep is not None
    assert (job.sweep.pairs[0].answer, job.sweep.pairs[0].foil) == ([10], [11])
    assert Units(job.sweep).nodes[0][0].token_ids == (10, 11), (
        "asked for by their ids, whatever is likely"
    )


def test_a_sweep_job_carries_what_applies_to_all_traffic(api: Api, hand: Hand) -> None:
    hand.serve(grades=True, global_captures=[CaptureSpec(layers=[0], tag="ops")])
    with Client(api.url) as client:
        client.probes.register("guard", weight=np.ones(HIDDEN), layer=0, thresholds=[1.0])
        condition = {"at_least": 1.0, "schedule": {"tokens": "all"}}
        fields = {"probe": "guard", "condition": condition, "mode": "active", "all_traffic": True}
        client.policies.register("guard", **fields, actions=["stop"])
    job = hand.job(swept(api))
    assert [(probe.name, probe.action) for probe in job.probes] == [("policy:guard", "stop")]
    assert [spec.tag for spec in job.global_captures] == ["ops"]
    for name in job.probes[0].content.tensors:
        assert hand.do(hand.ledger.get_tensor(name)).shape in ([1, HIDDEN], [1])


def test_a_sweep_job_carries_its_mask_tensor(api: Api, hand: Hand) -> None:
    job = hand.job(swept(api, mask=[0, -1]))
    assert job.sweep is not None
    mask = to_numpy(hand.do(hand.ledger.get_tensor(job.sweep.mask)))
    assert mask.tolist() == [1, *[0] * (HIDDEN - 2), 1]


def test_prompts_of_unequal_length_are_stored_with_every_row_at_its_counterpart(
    api: Api, hand: Hand
) -> None:
    # field case 34
    job = hand.job(swept(api, pairs=[PAIR | {"clean": "hello user world a"}]))
    assert job.sweep is not None
    assert [column.places for column in job.sweep.pairs[0].columns] == [
        [(0, 0)],
        [(1, 1)],
        [],
        [(3, 4)],
    ]
    assert "2 tokens and 'there', which takes its place" in job.sweep.pairs[0].columns[2].reason


def test_a_repeated_submission_is_the_same_sweep(api: Api, hand: Hand) -> None:
    key = {"Idempotency-Key": "once"}
    first, again = (
        api.http.post("/v1/sweeps", json=BODY, headers=key).json()["id"] for _ in range(2)
    )
    assert first == again
    other = api.http.post("/v1/sweeps", json=BODY | {"noise": 1}, headers=key)
    assert (other.status_code, other.json()["field"]) == (422, "Idempotency-Key")
    assert hand.count_jobs() == 1


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({"metric": "accuracy"}, "metric", "Invalid enum value"),
        ({"pairs": []}, "pairs", "length >= 1"),
        ({"pairs": [PAIR | {"answers": " b"}]}, "pairs[0].answers", "unknown field"),
        ({"window": {"layers": 0}}, "window.layers", ">= 1"),
        (
            {"pairs": [PAIR | {"positions": [4]}]},
            "pairs[0].positions[0]",
            "out of range: the prompt has",
        ),
        ({"hooks": ["resid_mid"]}, "hooks[0]", "unknown hook"),
        ({"layers": 4}, "layers", "out of range"),
        ({"pairs": [PAIR | {"answer": "b"}]}, "pairs[0].answer", "changes the tokens before it"),
    ],
)
def test_an_invalid_sweep_is_a_400_naming_the_field(
    api: Api, hand: Hand, changes: dict[str, Any], field: str, words: str
) -> None:
    # field case 34
    answer = api.http.post("/v1/sweeps", json=BODY | changes)
    assert (answer.status_code, answer.json()["field"]) == (400, field)
    assert words in answer.json()["detail"]
    assert hand.count_jobs() == 0


def test_a_wrong_name_is_answered_with_the_right_ones(api: Api, hand: Hand) -> None:
    answers = [
        api.http.post("/v1/sweeps", json=BODY | wrong).json()
        for wrong in ({"metric": "x"}, {"positions": "x"}, {"hooks": ["x"]})
    ]
    assert answers[0]["allowed"] == "logprob, logit_diff, recovered, kl"
    assert answers[1]["allowed"] == "all_prompt, last_prompt"
    assert answers[2]["allowed"].startswith("pre_attn, attn_out")


def test_an_unknown_model_and_one_whose_worker_does_not_grade_are_refused(
    api: Api, hand: Hand
) -> None:
    assert api.http.post("/v1/sweeps", json=BODY | {"model": "other"}).status_code == 404
    hand.serve()
    answer = api.http.post("/v1/sweeps", json=BODY)
    assert (answer.status_code, answer.json()["field"]) == (400, "model")


# --- Quotas
# --------------------------------------------------------------------------------------------------


def test_sweep_cells_are_capped_per_sweep_and_in_total(redis_url: str, tmp_path: Path) -> None:
    # field case 36
    with running(
        tmp_path, redis_url, sweep_cells=2 * CELLS, sweep_cells_waiting=2 * CELLS + 1
    ) as api:
        hand = Hand(api.settings)
        hand.serve(grades=True)
        large = api.http.post("/v1/sweeps", json=BODY | {"pairs": [PAIR] * 3})
        assert (large.status_code, large.json()["field"]) == (400, "pairs")
        assert "48 cells (3 pairs × 1 hook × 4 layers × 4 columns)" in large.json()["detail"]
        first, second = (
            swept(api),
            api.http.post("/v1/sweeps", json=BODY, headers={"Idempotency-Key": "k"}).json()["id"],
        )
        refused = api.http.post("/v1/sweeps", json=BODY)
        assert (refused.status_code, refused.json()["type"]) == (
            429,
            "urn:midstream:too_many_cells",
        )
        assert int(refused.headers["retry-after"]) >= 1
        assert "waiting or running: 32; cells of this sweep: 16" in refused.json()["detail"]
        assert (
            api.http.post("/v1/sweeps", json=BODY, headers={"Idempotency-Key": "k"}).json()["id"]
            == second
        ), "it is accepted already"
        assert api.submit(), "other jobs are not stopped"
        assert api.http.post(f"/v1/jobs/{first}/cancel").status_code == 202
        third = swept(api)
        assert hand.view(third).state is State.QUEUED, "what is over makes room"
        hand.close()


# --- Following
# --------------------------------------------------------------------------------------------------


def test_sweep_events_are_streamed_in_order_and_resumable(api: Api, hand: Hand) -> None:
    job_id = swept(api)
    claim = hand.claim(job_id)
    sweep = claim.job.sweep
    assert sweep is not None
    start = sweep_start(sweep)
    data = {name: getattr(start, name) for name in start.__struct_fields__}
    assert hand.emit(claim, Event(event="start", data=data, attempt=claim.attempt))
    units = list(Units(sweep).cells(0))[:2]
    records = [
        UnitRecord(unit=units[0].number, value=0.25, logprob=-1.5, attempt=1),
        UnitRecord(unit=units[1].number, reason="why", attempt=1),
    ]
    cells = [sweep_cell(sweep, unit, record) for unit, record in zip(units, records, strict=True)]
    kept = hand.do(
        Sweeps(hand.ledger).keep(
            claim.job, claim.attempt, list(zip(records, cells, strict=True)), 1, 1
        )
    )
    assert kept == "kept"
    assert api.http.get(f"/v1/jobs/{job_id}/result").status_code == 409, "not over yet"
    assert api.view(job_id)["cells"] == 2
    hand.do(hand.ledger.request_cancel(job_id))
    assert hand.do(hand.ledger.finish_cancel(job_id, claim.attempt))
    told = parse(api.http.get(f"/v1/jobs/{job_id}/events").text)
    assert [event["event"] for event in told] == [
        "state",
        "state",
        "start",
        "cell",
        "cell",
        "state",
        "state",
        "done",
    ]
    for event in told:
        event["data"].pop("attempt", None)
    assert from_json(to_json(told[2]["data"]), SweepStart) == start
    assert [from_json(to_json(event["data"]), SweepCell) for event in told[3:5]] == cells
    rest = parse(
        api.http.get(f"/v1/jobs/{job_id}/events", headers={"Last-Event-ID": told[3]["id"]}).text
    )
    assert [event["event"] for event in rest] == ["cell", "state", "state", "done"]
    assert rest[0]["data"]["reason"] == "why"


def test_a_queued_sweep_is_cancelled_immediately(api: Api, hand: Hand) -> None:
    job_id = swept(api)
    assert api.http.post(f"/v1/jobs/{job_id}/cancel").json()["state"] == "aborted"
    assert hand.do(hand.ledger.tenants.usage("default")).sweep_cells == 0


# --- Planned, and seen while it runs
# -----------------------------------------------------------------------------------------


def test_a_plan_aligns_both_prompts_and_accepts_nothing(api: Api, hand: Hand) -> None:
    pair = PAIR | {"clean": "hello user world a"}
    answer = api.http.post("/v1/sweeps/plan", json=BODY | {"pairs": [pair], "hooks": ["resid_pre"]})
    assert answer.status_code == 200, answer.text
    plan = from_json(answer.content, SweepPlan)
    assert (plan.hooks, plan.layers, plan.patched, plan.cells, plan.skipped) == (
        ["pre_attn"],
        [0, 1, 2, 3],
        "corrupt",
        CELLS,
        4,
    )
    assert plan.pairs[0].clean_tokens == ["<bos>", "hello", "user", "world", "a"]
    assert plan.pairs[0].corrupt_tokens == ["<bos>", "hello", "there", "a"]
    assert [(column.positions, column.sources) for column in plan.pairs[0].columns] == [
        ([0], [0]),
        ([1], [1]),
        ([], []),
        ([3], [4]),
    ]
    assert "takes its place" in plan.pairs[0].columns[2].reason
    assert (plan.pairs[0].answer_tokens, plan.pairs[0].foil_tokens) == ([10], [11])
    assert hand.count_jobs() == 0


def test_a_plan_of_the_other_direction_names_each_prompt_as_the_body_does(
    api: Api, hand: Hand
) -> None:
    pair = PAIR | {"clean": "hello user world a"}
    plan = from_json(
        api.http.post(
            "/v1/sweeps/plan", json=BODY | {"pairs": [pair], "direction": "noise"}
        ).content,
        SweepPlan,
    )
    assert (plan.patched, plan.pairs[0].clean_tokens[2], plan.pairs[0].corrupt_tokens[2]) == (
        "clean",
        "user",
        "there",
    )
    assert [(column.positions, column.sources) for column in plan.pairs[0].columns] == [
        ([0], [0]),
        ([1], [1]),
        ([], []),
        ([], []),
        ([4], [3]),
    ]


def test_an_ablation_is_planned_without_sources(api: Api, hand: Hand) -> None:
    pair = {"clean": "hello world a", "answer": " b"}
    body = {"model": MODEL, "pairs": [pair], "ablation": "zeros", "metric": "logprob"}
    plan = from_json(api.http.post("/v1/sweeps/plan", json=body).content, SweepPlan)
    assert (plan.patched, plan.pairs[0].corrupt_tokens) == ("clean", [])
    assert [(column.positions, column.sources) for column in plan.pairs[0].columns] == [
        ([place], []) for place in range(4)
    ]


def test_a_plan_has_the_errors_of_the_submission(api: Api, hand: Hand) -> None:
    for wrong in (
        {"pairs": [PAIR | {"answer": "b"}]},
        {"hooks": ["x"]},
        {"layers": 9},
        {"lora": "none"},
        {"model": "other"},
    ):
        planned, sent = (
            api.http.post(path, json=BODY | wrong) for path in ("/v1/sweeps/plan", "/v1/sweeps")
        )
        assert 400 <= planned.status_code == sent.status_code, planned.text
        assert [planned.json().get(name) for name in ("field", "detail")] == [
            sent.json().get(name) for name in ("field", "detail")
        ]


def test_a_running_sweep_shows_its_request_and_its_cells_so_far(api: Api, hand: Hand) -> None:
    asked = {**BODY, "hooks": ["resid_pre"], "layers": "0-1"}
    job_id = str(api.http.post("/v1/sweeps", json=asked).json()["id"])
    assert cells_of(seen(api, job_id)) == [[None] * 4] * 2, "queued"
    claim = hand.claim(job_id)
    assert claim.job.sweep is not None
    unit = list(Units(claim.job.sweep).cells(0))[1]
    record = UnitRecord(unit=unit.number, value=0.25, attempt=1)
    kept = hand.do(
        Sweeps(hand.ledger).keep(
            claim.job, claim.attempt, [(record, sweep_cell(claim.job.sweep, unit, record))], 1, 1
        )
    )
    assert kept == "kept"
    view = seen(api, job_id)
    assert (view.job.state, view.job.cells) == (State.RUNNING, 1)
    assert view.request is not None
    assert (view.request.hooks, view.request.layers) == (["resid_pre"], "0-1"), "as it was written"
    assert cells_of(view) == [[None, 0.25, None, None], [None] * 4]
    hand.do(hand.ledger.request_cancel(job_id))
    assert hand.do(hand.ledger.finish_cancel(job_id, claim.attempt))
    rest = parse(
        api.http.get(f"/v1/jobs/{job_id}/events", headers={"Last-Event-ID": view.last_event}).text
    )
    assert [event["event"] for event in rest] == ["state", "state", "done"], (
        "what came after the view"
    )
    ended = seen(api, job_id)
    assert (ended.job.state, cells_of(ended)) == (State.CANCELLED, cells_of(view)), (
        "what was known stays to be seen"
    )


def test_only_a_sweep_is_seen_as_one(api: Api, hand: Hand) -> None:
    assert api.http.get(f"/v1/sweeps/{api.submit()}").status_code == 404
    assert api.http.get("/v1/sweeps/job_none").status_code == 404


def seen(api: Api, job_id: str) -> SweepView:
    answer = api.http.get(f"/v1/sweeps/{job_id}")
    assert answer.status_code == 200, answer.text
    return from_json(answer.content, SweepView)


def cells_of(view: SweepView) -> list[list[float | None]]:
    return view.result.pairs[0].grids["pre_attn"]


# --- With a worker
# --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(
        tmp_path_factory.mktemp("sweeps"),
        api=True,
        callbacks=False,
        lease_s=60.0,
        visibility_timeout_s=60,
    ) as started:
        yield started


def test_a_sweep_runs_from_the_request_to_the_grid(stack: Stack) -> None:
    """Text in, and out a grid in which the column without a counterpart is empty."""
    # field case 33, 34
    pair = {
        "clean": "The Eiffel Tower is",
        "corrupt": "The Colosseum is",
        "answer": "P",
        "foil": "R",
        "positions": {"start": -8},
    }
    body = {"model": stack.settings.served_model, "pairs": [pair], "metric": "logit_diff"}
    with httpx2.Client(base_url=stack.url, timeout=60) as http:
        answer = http.post("/v1/sweeps", json=body, headers={"Prefer": "wait=50"})
        assert answer.status_code == 200, answer.text
        result = from_json(answer.content, JobResult)
        assert result.sweep is not None
        told = parse(http.get(f"/v1/jobs/{result.id}/events").text)
    of_pair = result.sweep.pairs[0]
    assert of_pair.labels == list("sseum is")
    grid = of_pair.grids["post_block"]
    skipped = {(layer, of.column) for of in result.sweep.skipped for layer in of.layers}
    assert skipped
    for layer, row in enumerate(grid):
        assert [(layer, column) for column, value in enumerate(row) if value is None] == sorted(
            s for s in skipped if s[0] == layer
        )
    kinds = [event["event"] for event in told]
    assert kinds.count("cell") == result.sweep.summary.total
    assert (kinds[2], kinds[-3], kinds[-1]) == ("start", "summary", "done")


def test_zooming_into_an_unequal_span_patches_the_same_rows(stack: Stack) -> None:
    # field case 34
    spans = [
        {"name": "subject", "clean": [{"text": "Eiffel Tower"}], "corrupt": [{"text": "Colosseum"}]}
    ]
    with Client(stack.url) as client:
        study = PatchStudy("The Eiffel Tower is", "The Colosseum is now", "P", "R", client=client)
        closer = study.sweep(spans=spans, layers=[1], metric="logprob", progress=False).zoom(
            progress=False
        )
    coarse, fine = study.result.pairs[0], closer.result.pairs[0]
    assert (fine.positions, fine.sources) == (
        [[place] for place in coarse.positions[0]],
        [[place] for place in coarse.sources[0]],
    )
    assert (fine.labels, closer.result.summary.skipped) == (list("Colosseum"), 0)
    assert [coarse.source_tokens[place] for place in coarse.sources[0]] == list("fel Tower")
