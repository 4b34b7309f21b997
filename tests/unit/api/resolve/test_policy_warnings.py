"""What a registration warns of, by the norms that the certificate measured."""

from typing import Any

import numpy as np
import pytest
from model_kit import model

from midstream.api.resolve.readings.policy_warnings import needed, warnings_of
from midstream.broker.ledger.named.probes import _warnings
from midstream.schemas.artifacts.conditions import Condition, Schedule
from midstream.schemas.artifacts.probes import ProbeContent, StoredProbe
from midstream.schemas.base.edit_sizes import EditLimit
from midstream.schemas.base.tensors import content_hash, from_numpy
from midstream.schemas.jobs.certificates import Certificate
from midstream.schemas.requests.policies import PolicyDay, PolicyRequest, PolicyVersion, Steer
from midstream.schemas.requests.steering import Module, SteeringTemplate

WIDTH = 16
VECTOR = from_numpy(np.full(WIDTH, 0.5, np.float32))  # of length 2
WEIGHT = from_numpy(np.array([[0.0] * WIDTH, [0.25] * WIDTH], np.float32))  # the second of length 1
BIAS = from_numpy(np.array([0.0, 1.0], np.float32))
TENSORS = {content_hash(each): each for each in (VECTOR, WEIGHT, BIAS)}
CERTIFICATE = Certificate(
    architecture="A",
    dtype="float32",
    model="m",
    vllm="",
    version="",
    runner="v1",
    mode="eager",
    tp=1,
    pp=1,
    created=0.0,
    seconds=0.0,
    proven=[],
    row_norms={"post_block": [8.0, 1.0]},
    first_norms={"post_block": [8.0, 40.0]},
)
MODEL = model(certificate=CERTIFICATE)


def version(at_least: float = 90.0, layer: int = 1, **fields: Any) -> PolicyVersion:
    entry: dict[str, Any] = {"layers": [0, 1], "hook": "post_block", "positions": "all"}
    entry |= {"family": "add", "tensors": [content_hash(VECTOR)]}
    entry |= fields.pop("entry", {})
    content = ProbeContent(
        hook="post_block",
        layer=layer,
        tensors=[content_hash(WEIGHT), content_hash(BIAS)],
        labels=["x", "y"],
        thresholds=[None, None],
    )
    made = [SteeringTemplate(**entry)]
    module = Module(name="m", model="m", digest="d", created=0.0, bytes=0, entries=made)
    condition = Condition(at_least=at_least, label="y", schedule=fields.pop("schedule", Schedule()))
    return PolicyVersion(
        version=1,
        digest="d",
        created=0.0,
        content=PolicyRequest(
            probe="p", condition=condition, actions=[Steer(module="m", **fields)]
        ),
        probe=StoredProbe(name="p", digest="d", content=content),
        modules=[module],
        identity="a",
        tenant="t",
        key="k",
    )


@pytest.mark.parametrize(
    ("fields", "size"),
    [
        ({}, "2 times"),  # at layer 1, whose rows have the length 1
        ({"scale": -0.4}, None),
        ({"scale": -0.6}, "1.2 times"),
        ({"entry": {"layers": [0]}}, None),
        ({"entry": {"scale": 3.0, "layers": [0]}, "scale": 2.0}, "1.5 times"),
        ({"entry": {"limit": 0.5}}, None),
        ({"limit": EditLimit(relative=1.5)}, "1.5 times"),
        ({"limit": EditLimit(relative=0.5)}, None),
        ({"entry": {"family": "add_matched", "numbers": [1.5]}, "scale": -2.0}, "3 times"),
        ({"entry": {"family": "ablate", "numbers": [1.0]}}, None),
        ({"entry": {"hook": "mlp_out"}}, None),  # its rows are unknown
    ],
)
def test_an_edit_longer_than_the_row_is_told(fields: dict[str, Any], size: str | None) -> None:
    found = warnings_of(version(**fields), MODEL, TENSORS)
    sizes = [] if size is None else [size]
    assert [[each in text for each in sizes] for text in found] == [[True] for _ in sizes]
    assert set(needed(version(**fields))) == {*TENSORS}


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"at_least": 30.9}, True),  # 1 + 3 · 40 / √16
        ({"at_least": 31.1}, False),
        ({"at_least": 30.9, "schedule": Schedule(tokens="generated")}, False),
        ({"at_least": 30.9, "schedule": Schedule(start=1)}, False),
        ({"at_least": 0.0, "layer": 0}, False),  # its first row is as others are
    ],
)
def test_a_threshold_within_the_noise_of_the_first_token_is_told(
    fields: dict[str, Any], told: bool
) -> None:
    found = warnings_of(version(scale=0.1, **fields), MODEL, TENSORS)
    assert ["first token" in text for text in found] == ([True] if told else [])


def test_a_model_without_norms_warns_of_nothing() -> None:
    assert warnings_of(version(at_least=0.0), model(), {}) == []


@pytest.mark.parametrize(
    ("days", "told"),
    [
        ([(20, 11)], True),
        ([(20, 10)], False),
        ([(19, 19)], False),  # too few
        ([(100, 100), (20, 1)], False),  # of an earlier day
        ([], False),
    ],
)
def test_a_policy_that_triggers_on_most_prompts_is_told(
    days: list[tuple[int, int]], told: bool
) -> None:
    counted = [PolicyDay(f"2026-11-{number + 1:02}", *each, 0) for number, each in enumerate(days)]
    found = _warnings(counted, 0.5)
    assert ["11 of 20 prompts" in text for text in found] == ([True] if told else [])
