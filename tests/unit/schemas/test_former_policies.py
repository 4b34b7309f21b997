"""Jobs and receipts of a build whose policies had the mode `canary` are read."""

import json
from typing import Any

import pytest
from tree import ROOT

from midstream.schemas.artifacts import conditions
from midstream.schemas.base.records import from_msgpack, to_msgpack
from midstream.schemas.jobs.jobs import Job
from midstream.schemas.jobs.receipts import Receipt

#: Kind → what that build stored, of a policy that acted on the request and of one that did not.
STORED = json.loads((ROOT / "tests" / "data" / "former_policy_of_jobs.json").read_text())


@pytest.mark.parametrize(("kind", "field"), [(Job, "probes"), (Receipt, "scores")])
def test_a_policy_of_the_former_mode_canary_has_the_mode_of_its_request(
    kind: Any, field: str, caplog: pytest.LogCaptureFixture
) -> None:
    conditions._say_former.cache_clear()
    record = from_msgpack(bytes.fromhex(STORED[kind.__name__]), kind)
    policies = [probe.policy for probe in getattr(record, field)]
    assert [(policy.mode, policy.acts) for policy in policies] == [
        ("active", True),
        ("shadow", False),
    ]
    assert caplog.text.count("of an earlier build") == 1
    assert b"canary" not in to_msgpack(record)
