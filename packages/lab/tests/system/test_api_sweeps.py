"""Is a sweep accepted with exactly what was asked, held against its quotas, and followed, fetched
and cancelled as any job?
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from edge import HIDDEN, MODEL, Api, Hand, refused, running
from server_sent import parse
from sweep_rig import keep

from midstream import Client, PatchStudy
from midstream.client import MidstreamError
from midstream.schemas.base.records import from_json, to_json
from midstream.schemas.base.tensors import to_numpy
from midstream.schemas.jobs.jobs import Event, State
from midstream.schemas.requests.specs import CaptureSpec
from midstream_lab.records.sweep_units import SweepWork, Units
from midstream_lab.records.sweep_views import SweepPlan, SweepView
from midstream_lab.records.sweeps import SweepCell, SweepStart, UnitRecord
from midstream_lab.results.sweep_result import sweep_cell, sweep_start

pytest_plugins = ["shared_stack"]
pytestmark = pytest.mark.xdist_group("shared_stack")

PAIR = {"clean": "hello world a", "corrupt": "hello there a", "answer": " b", "foil": " c"}
BODY = {"model": MODEL, "pairs": [PAIR]}
CELLS = 4 * 4  # layers and tokens, <bos> among them


@pytest.fixture
def hand(api: Api) -> Iterator[Hand]:
    """A worker by hand, whose ranks say log-probabilities of single tokens."""
    with Hand(api.settings, grades=True) as worker:
        yield worker


def swept(api: Api, **changes: Any) -> str:
    answer = api.http.post("/v1/sweeps", json=BODY | changes)
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


def test_a_sweep_is_accepted_as_a_job_and_located(api: Api, hand: Hand) -> None:
    # field case 33
    answer = api.http.post("/v1/sweeps", json={**BODY, "metadata": {"who": "me"}})
    view = answer.json()
    assert answer.status_code == 202
    assert view["kind"] == "sweep"
    assert view["state"] == "queued"
    assert answer.headers["location"] == f"/v1/jobs/{view['id']}"
    assert view["cells_expected"] == CELLS
    assert view["metadata"] == {"who": "me"}
    job = hand.job(view["id"])
    assert job.kind == "sweep"
    assert job.prompts == []
    sweep = job.work_as(SweepWork).sweep
    assert sweep.pairs[0].answer == [10]
    assert sweep.pairs[0].foil == [11]
    assert Units(sweep).nodes[0][0].token_ids == (10, 11), (
        "asked for by their ids, whatever is likely"
    )


def test_a_sweep_job_carries_what_applies_to_all_traffic(api: Api, hand: Hand) -> None:
    hand.serve(grades=True, global_captures=[CaptureSpec(layers=[0], tag="policy-x")])
    with Client(api.url) as client:
        client.probes.put("guard", weight=np.ones(HIDDEN), layer=0, thresholds=[1.0])
        condition = {"at_least": 1.0, "schedule": {"tokens": "all"}}
        fields = {"probe": "guard", "condition": condition, "mode": "active", "all_traffic": True}
        hook = {"action": "webhook", "url": "http://93.184.216.34/"}
        client.policies.put("guard", **fields, actions=["stop", hook])
        fields |= {"actions": [{"action": "capture", "layers": 0}], "all_traffic": False}
        client.policies.put("x", **fields)
        with pytest.raises(MidstreamError, match="'policy-x', which another capture has"):
            client.submit(prompts=["a"], policies=["x"], model=MODEL)
    job = hand.job(swept(api))
    assert job.hooks["guard"].url == hook["url"]
    assert job.hooks["guard"].tenant == "default"
    assert [(probe.name, probe.actions) for probe in job.probes] == [
        ("policy:guard", ["stop", "webhook"])
    ]
    assert [spec.tag for spec in job.global_captures] == ["policy-x"]
    for name in job.probes[0].content.tensors:
        assert hand.do(hand.ledger.get_tensor(name)).shape in ([1, HIDDEN], [1])


def test_a_sweep_job_carries_its_mask_tensor(api: Api, hand: Hand) -> None:
    job = hand.job(swept(api, mask=[0, -1]))
    sweep = job.work_as(SweepWork).sweep
    mask = to_numpy(hand.do(hand.ledger.get_tensor(sweep.mask)))
    assert mask.tolist() == [1, *[0] * (HIDDEN - 2), 1]


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
    refused(api.http.post("/v1/sweeps", json=BODY | changes), 400, field, words)
    assert hand.count_jobs() == 0


def test_an_unknown_model_and_one_whose_worker_does_not_grade_are_refused(
    api: Api, hand: Hand
) -> None:
    assert api.http.post("/v1/sweeps", json=BODY | {"model": "other"}).status_code == 404
    hand.serve()
    refused(api.http.post("/v1/sweeps", json=BODY), 400, "model")


# --- Quotas
# --------------------------------------------------------------------------------------------------


def test_sweep_cells_are_capped_per_sweep_and_in_total(redis_url: str, tmp_path: Path) -> None:
    # field case 36
    limits = {"sweep_cells": 2 * CELLS, "sweep_cells_waiting": 2 * CELLS + 1}
    with (
        running(tmp_path, redis_url, **limits) as api,
        Hand(api.settings, grades=True) as hand,
    ):
        refused(
            api.http.post("/v1/sweeps", json=BODY | {"pairs": [PAIR] * 3}),
            400,
            "pairs",
            "48 cells (3 pairs × 1 hook × 4 layers × 4 columns)",
        )
        first = swept(api)
        second = api.http.post("/v1/sweeps", json=BODY, headers={"Idempotency-Key": "k"}).json()[
            "id"
        ]
        answer = api.http.post("/v1/sweeps", json=BODY)
        says = "waiting or running: 32; cells of this sweep: 16"
        refused(answer, 429, None, says, kind="too_many_cells")
        assert int(answer.headers["retry-after"]) >= 1
        assert (
            api.http.post("/v1/sweeps", json=BODY, headers={"Idempotency-Key": "k"}).json()["id"]
            == second
        ), "it is accepted already"
        assert api.submit(), "other jobs are not stopped"
        assert api.http.post(f"/v1/jobs/{first}/cancel").status_code == 202
        assert hand.view(swept(api)).state is State.QUEUED, "what is over makes room"


# --- Following
# --------------------------------------------------------------------------------------------------


# --- Planned, and seen while it runs
# -----------------------------------------------------------------------------------------


def test_a_plan_aligns_both_prompts_and_accepts_nothing(api: Api, hand: Hand) -> None:
    pair = PAIR | {"clean": "hello user world a"}
    answer = api.http.post(
        "/v1/sweeps?dry_run=true", json=BODY | {"pairs": [pair], "hooks": ["resid_pre"]}
    )
    assert answer.status_code == 200, answer.text
    plan = from_json(answer.content, SweepPlan)
    assert plan.hooks == ["pre_attn"]
    assert plan.layers == [0, 1, 2, 3]
    assert plan.patched == "corrupt"
    assert plan.cells == CELLS
    assert plan.skipped == 4
    assert plan.pairs[0].clean_tokens == ["<bos>", "hello", "user", "world", "a"]
    assert plan.pairs[0].corrupt_tokens == ["<bos>", "hello", "there", "a"]
    assert [(column.positions, column.sources) for column in plan.pairs[0].columns] == [
        ([0], [0]),
        ([1], [1]),
        ([], []),
        ([3], [4]),
    ]
    assert "takes its place" in plan.pairs[0].columns[2].reason
    assert plan.pairs[0].answer_tokens == [10]
    assert plan.pairs[0].foil_tokens == [11]
    assert hand.count_jobs() == 0


def test_a_plan_has_the_errors_of_the_submission(api: Api, hand: Hand) -> None:
    for wrong in (
        {"pairs": [PAIR | {"answer": "b"}]},
        {"hooks": ["x"]},
        {"layers": 9},
        {"lora": "none"},
        {"model": "other"},
    ):
        planned, sent = (
            api.http.post(f"/v1/sweeps{query}", json=BODY | wrong)
            for query in ("?dry_run=true", "")
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
    sweep = claim.job.work_as(SweepWork).sweep
    assert sweep is not None
    start = sweep_start(sweep)
    data = {name: getattr(start, name) for name in start.__struct_fields__}
    assert hand.emit(claim, Event(event="start", data=data, attempt=claim.attempt))
    units = list(Units(sweep).cells(0))[1:3]
    records = [
        UnitRecord(unit=units[0].number, value=0.25, attempt=1),
        UnitRecord(unit=units[1].number, reason="why", attempt=1),
    ]
    cells = [sweep_cell(sweep, unit, record) for unit, record in zip(units, records, strict=True)]
    kept = zip(records, cells, strict=True)
    keeping = keep(hand.ledger, claim.job, claim.attempt, *kept, ranks=1)
    assert hand.do(keeping) == "kept"
    assert api.http.get(f"/v1/jobs/{job_id}/result").status_code == 409, "not over yet"
    view = seen(api, job_id)
    assert view.job.state == State.RUNNING
    assert view.job.cells == 2
    assert view.request is not None
    assert view.request.hooks == ["resid_pre"]
    assert view.request.layers == "0-1", "as it was written"
    assert cells_of(view) == [[None, 0.25, None, None], [None] * 4]
    hand.do(hand.ledger.request_cancel(job_id))
    assert hand.do(hand.ledger.finish_cancel(job_id, claim.attempt))
    events = f"/v1/jobs/{job_id}/events"
    told = parse(api.http.get(events).text)
    kinds = ["state", "state", "start", "cell", "cell", "state", "state", "done"]
    assert [event["event"] for event in told] == kinds
    for event in told:
        event["data"].pop("attempt", None)
    assert from_json(to_json(told[2]["data"]), SweepStart) == start
    assert [from_json(to_json(event["data"]), SweepCell) for event in told[3:5]] == cells
    rest = parse(api.http.get(events, headers={"Last-Event-ID": view.last_event}).text)
    assert rest == parse(api.http.get(events).text)[5:], "what came after the view"
    ended = seen(api, job_id)
    assert ended.job.state == State.CANCELLED
    assert cells_of(ended) == cells_of(view), "what was known stays to be seen"


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


def test_zooming_into_an_unequal_span_patches_the_same_rows(client: Client) -> None:
    # field case 34
    spans = [
        {"name": "subject", "clean": [{"text": "Eiffel Tower"}], "corrupt": [{"text": "Colosseum"}]}
    ]
    study = PatchStudy("The Eiffel Tower is", "The Colosseum is now", "P", "R", client=client)
    closer = study.sweep(spans=spans, layers=[1], metric="logprob", progress=False).zoom(
        progress=False
    )
    coarse = study.result.pairs[0]
    fine = closer.result.pairs[0]
    assert fine.positions == [[place] for place in coarse.positions[0]]
    assert fine.sources == [[place] for place in coarse.sources[0]]
    assert fine.labels == list("Colosseum")
    assert closer.result.summary.skipped == 0
    assert [coarse.source_tokens[place] for place in coarse.sources[0]] == list("fel Tower")
