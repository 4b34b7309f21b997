"""Does no name that a client sends find what the service itself adds to a request?

Every field of a request that refers to something by name is tried with every such name.
"""

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import httpx2
import msgspec
import numpy as np
import pytest
from edge import refused
from midstream_fake_engine.model import HIDDEN_SIZE

import midstream.schemas
import midstream_harvest.records
import midstream_lab.records
from midstream.client import Client
from midstream.schemas.base.limits import Reference

pytest_plugins = ["shared_stack"]
pytestmark = pytest.mark.xdist_group("shared_stack")

#: What a policy adds to a request: its scores, and the modules of its actions by their number.
INTERNAL = ("policy:guard", "policy:guard:0", "policy:guard:1")
ONES = [1.0] * HIDDEN_SIZE
JOB: dict[str, Any] = {"model": "fake-model", "prompts": ["hello there"]}
DOSE = JOB | {"scales": [1.0], "effect": {"words": ["x"]}, "held_out": ["you"]}
PAIRS = [{"clean": "hello there", "corrupt": "hello you", "answer": " a", "foil": " b"}]
WHEN = {"at_least": 0.0}
POLICY = {"condition": {"at_least": 1.0}, "actions": [], "probe": "calm"}


def where(score: dict[str, Any]) -> dict[str, Any]:
    """A capture of gradient rows of this scalar."""
    return {"capture": {"of": "gradient", "scalar": score}}


#: (type, its field) → requests that name `{}` there: path, fields, the field that is refused.
CASES: dict[tuple[str, str], list[tuple[str, dict[str, Any], str]]] = {
    ("SteeringSpec", "module"): [
        ("/v1/jobs", JOB | {"steering": [{"module": "{}"}]}, "steering[0].module"),
        ("/v1/doses", DOSE | {"steering": [{"module": "{}"}]}, "steering[0].module"),
        (
            "/v1/completions",
            {"model": "fake-model", "prompt": "hello", "steering": [{"module": "{}"}]},
            "steering[0].module",
        ),
        (
            "/v1/harvests",
            {
                "model": "fake-model",
                "source": {"lines": ["hello"]},
                "hooks": {"post_block": "all"},
                "steering": [{"module": "{}"}],
            },
            "steering[0].module",
        ),
        ("/v1/steering/global", {"steering": [{"module": "{}"}]}, "steering[0].module"),
        ("/v1/artifacts/modules/x", {"steering": [{"module": "{}"}]}, "steering[0].module"),
    ],
    ("SteeringSpec", "sae"): [
        (
            "/v1/jobs",
            JOB | {"steering": [{"sae": "{}", "feature": 0, "op": "ablate"}]},
            "steering[0].sae",
        )
    ],
    ("SteeringSpec", "extension"): [
        (
            "/v1/jobs",
            JOB | {"steering": [{"extension": "{}", "layers": 1}]},
            "steering[0].extension",
        )
    ],
    ("SteeringSpec", "jacobian"): [
        (
            "/v1/jobs",
            JOB | {"steering": [{"jacobian": "{}", "token": "a", "layers": 1}]},
            "steering[0].jacobian",
        )
    ],
    ("PatchSource", "module"): [
        (
            "/v1/jobs",
            JOB | {"patch": [{"layers": 3, "positions": [0], "source": {"module": "{}"}}]},
            "patch[0].source.module",
        )
    ],
    ("ProbeUse", "probe"): [("/v1/jobs", JOB | {"probes": [{"probe": "{}"}]}, "probes[0]")],
    ("ProbeUse", "module"): [
        (
            "/v1/jobs",
            JOB | {"probes": [{"probe": "calm", "action": "steer", "module": "{}"}]},
            "probes[0].module",
        )
    ],
    ("ModelRequest", "probes"): [("/v1/jobs", JOB | {"probes": ["{}"]}, "probes[0]")],
    ("ModelRequest", "policies"): [("/v1/jobs", JOB | {"policies": ["{}"]}, "policies[0]")],
    ("FeatureSpec", "sae"): [("/v1/jobs", JOB | {"features": [{"sae": "{}"}]}, "features[0].sae")],
    ("LensSpec", "tuned"): [("/v1/jobs", JOB | {"lens": {"tuned": "{}"}}, "lens.tuned")],
    ("LensSpec", "jacobian"): [("/v1/jobs", JOB | {"lens": {"jacobian": "{}"}}, "lens.jacobian")],
    ("Adapted", "lora"): [("/v1/jobs", JOB | {"lora": "{}"}, "lora")],
    ("ScalarSpec", "probe"): [
        # no gradients are served here: the name is not looked up
        ("/v1/jobs", JOB | where({"kind": "probe", "probe": "{}"}), "capture.of")
    ],
    ("ScalarSpec", "sae"): [
        (
            "/v1/jobs",
            JOB | where({"kind": "feature", "sae": "{}", "feature": 0}),
            "capture.of",
        )
    ],
    ("DoseEffect", "probe"): [
        (
            "/v1/doses",
            DOSE | {"steering": [{"layers": 1, "vector": ONES}], "effect": {"probe": "{}"}},
            "probes[0]",
        )
    ],
    ("AttributionRequest", "sae"): [
        (
            "/v1/attributions",
            {"model": "fake-model", "pairs": PAIRS, "metric": "logit_diff", "sae": "{}"},
            "sae",
        )
    ],
    ("Steer", "module"): [
        (
            "/v1/artifacts/policies/x",
            POLICY | {"actions": [{"action": "steer", "module": "{}"}]},
            "actions[0].module",
        )
    ],
    ("PolicyRequest", "probe"): [("/v1/artifacts/policies/x", POLICY | {"probe": "{}"}, "probe")],
    ("When", "probe"): [
        (
            "/v1/jobs",
            JOB | {"capture": {"positions": {"when": {"probe": "{}", **WHEN}}}},
            "capture.positions.when.probe",
        )
    ],
}


def references() -> Iterator[tuple[str, str]]:
    """The fields of all records that are a `Reference`, or hold some."""
    modules = [
        module.name
        for room in (midstream.schemas, midstream_harvest.records, midstream_lab.records)
        for module in pkgutil.walk_packages(room.__path__, f"{room.__name__}.")
    ]
    for name in modules:
        for record in vars(importlib.import_module(name)).values():
            if (
                isinstance(record, type)
                and issubclass(record, msgspec.Struct)
                and record.__module__ == name
            ):
                hints = get_type_hints(record, include_extras=True)
                own = record.__annotations__.keys() & hints.keys()
                yield from ((record.__name__, each) for each in own if holds(hints[each]))


def holds(hint: Any) -> bool:
    return hint == Reference or any(map(holds, get_args(hint)))


@pytest.fixture(scope="module")
def guarded(client: Client) -> None:
    """All traffic has a policy with two modules, which only flags where it may not steer."""
    client.probes.put("calm", weight=np.ones((1, HIDDEN_SIZE)), layer=1, thresholds=1.0)
    client.modules.put("secret", steering=[{"layers": 2, "vector": ONES}])
    steer = {"action": "steer", "module": "secret"}
    fields = POLICY | {"actions": ["flag", steer, steer], "mode": "active", "all_traffic": True}
    client.policies.put("guard", **fields)


def test_every_field_that_refers_to_something_is_tried() -> None:
    assert {*references()} | {("When", "probe")} == CASES.keys()


@pytest.mark.parametrize("name", INTERNAL)
@pytest.mark.parametrize(
    ("path", "fields", "field"), [case for cases in CASES.values() for case in cases]
)
def test_no_name_of_a_client_finds_what_the_service_adds(
    http: httpx2.Client, guarded: None, path: str, fields: dict[str, Any], field: str, name: str
) -> None:
    body = msgspec.json.encode(fields).decode().replace("{}", name)
    method = "PUT" if "artifacts" in path or "global" in path else "POST"
    answer = http.request(method, path, content=body, headers={"Content-Type": "application/json"})
    refused(answer, 400, field)
