"""Every engine request is made in one place, with all that the operator has set for all traffic."""

import re
from typing import Any, get_args

import pytest
from plan_kit import model as model_of, pair, plan
from tree import ROOT, sources

from midstream.broker.ledger.core.scripts import stored_tags
from midstream.schemas.artifacts.loras import StoredLora
from midstream.schemas.artifacts.probes import ProbeContent, StoredProbe
from midstream.schemas.jobs.jobs import Job, Sampling, StoredPrompt
from midstream.schemas.jobs.models import ModelInfo
from midstream.schemas.requests.specs import CaptureSpec, StoredCapture
from midstream.schemas.requests.steering import GlobalSteering, SteeringTemplate
from midstream.workers.engine import requests
from midstream.workers.engine.protocol import EngineRequest
from midstream.workers.engine.requests import (
    EXEMPT,
    RequestKind,
    prompt_request,
    sequence_request,
    tensors_of,
    trial_request,
)
from midstream_lab.records.sweep_units import SweepWork
from midstream_lab.run.requests import SweepRequests

INFO = model_of()
CONTENT = ProbeContent(
    hook="post_block", layer=1, tensors=["weight", "bias"], labels=["x"], thresholds=[0.0]
)
WATCHING = StoredProbe(name="guard", digest="d", content=CONTENT, actions=["stop"])
EVERYONE = GlobalSteering(
    version=1,
    entries=[
        SteeringTemplate(
            layers=[1], hook="post_block", positions="all", family="add", tensors=["v"]
        )
    ],
)
OPERATORS = CaptureSpec(layers=[0], positions=[0, 20], tag="ops")


def test_engine_requests_are_made_in_one_module() -> None:
    makers = {
        str(path.relative_to(ROOT))
        for path in sources("workers", "broker", "api", "client")
        if re.search(r"\bEngineRequest\(", path.read_text())
    }
    assert makers == {"workers/engine/requests.py"}


def job_of(kind: Any, **fields: Any) -> Job:
    """One that a probe watches, and of which the operator captures."""
    common = {"model": "m", "prompts": [], "sampling": Sampling(), "created": 0.0}
    watched = {"probes": [WATCHING], "global_captures": [OPERATORS]}
    return Job(id=f"job of {kind}", kind=kind, **common | watched | fields)


def sequence(model: ModelInfo, **fields: Any) -> EngineRequest:
    job = job_of("harvest", **fields)
    rows = StoredCapture(sites={"post_block": [1]}, positions="all", tag="harvest")
    return sequence_request(
        job, model, rows, sampling=Sampling(max_tokens=9), request=0, attempt=1, token_ids=[1] * 4
    )


def requests_of_every_kind(model: ModelInfo) -> dict[RequestKind, list[EngineRequest]]:
    """Of jobs with an adapter of a tenant, under global steering."""
    lora = StoredLora(name="l", digest="ad", path="l")
    of_alice = {"tenant": "alice", "lora": lora, "global_steering": EVERYONE}
    asked = [StoredPrompt(token_ids=[1] * 4)]
    prompt = job_of("chat", prompts=asked, global_captures=[], **of_alice)
    stored = plan(pair(), info=model, hooks=["attn_out"], noise=1).sweep
    made = SweepRequests(
        job_of("sweep", work=SweepWork(sweep=stored).packed, **of_alice), 1, model, True
    )
    units = made.units
    return {
        "prompt": [prompt_request(prompt, 0, 1)],
        "sequence": [sequence(model, **of_alice)],
        "unpatched": [
            ask for unit in (units.base(0), units.source(0)) for ask in made.control(unit)
        ],
        "patched": [
            ask for unit in (*units.noise(0), *units.cells(0)) for ask in made.patched(unit)
        ],
        "trial": [trial_request("cert", 0, [1], 1)],
    }


def test_what_operators_set_applies_to_every_kind_of_request_or_has_a_reason() -> None:
    found = requests_of_every_kind(INFO)
    assert found.keys() == set(get_args(RequestKind))
    for kind, asks in found.items():
        assert asks, kind
        for ask in asks:
            watched = [probe.name for probe in ask.probes] == ["guard"] and any(
                capture.scored for capture in ask.captures
            )
            captured = any(
                capture.tag == "ops" and capture.positions == [0] for capture in ask.captures
            )
            assert watched == (kind not in EXEMPT), kind
            assert captured == (kind in ("sequence", "unpatched")), (
                f"{kind}: of prompts the API has added it"
            )
            assert kind == "trial" or (
                ask.tenant,
                ask.lora is not None,
                ask.global_steering,
            ) == ("alice", True, EVERYONE)


def test_global_capture_that_exceeds_a_steps_room_is_left_out_of_a_harvest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left: list[str] = []
    monkeypatch.setattr(
        requests, "count_skipped", lambda reason, prompts, detail: left.append(reason)
    )
    ask = sequence(model_of(capture_row_limit=1))
    assert [capture.tag for capture in ask.captures if not capture.scored] == ["harvest"]
    assert left == ["buffer"]


def test_what_applies_to_all_traffic_is_held_and_listed_for_a_harvest() -> None:
    part = job_of("harvest", global_steering=EVERYONE)
    assert tensors_of(part) == {"v", "weight", "bias"}
    assert stored_tags(part) == ["ops"]
