"""What policies refuse, and the versions that changes make."""

from typing import Any

import msgspec
import pytest
from model_kit import model
from refusal_kit import refuses

from midstream.api.resolve.readings.probes import _tag_of, changed, digest_of, replaceable
from midstream.api.routes.registered import _with
from midstream.broker.ledger.named.probes import unfit, with_policies
from midstream.schemas.artifacts.conditions import Condition
from midstream.schemas.artifacts.probes import ProbeContent, StoredProbe
from midstream.schemas.jobs.jobs import Job, Sampling
from midstream.schemas.prompts.selectors import HOOKS
from midstream.schemas.requests.policies import (
    CaptureWindow,
    ConditionChange,
    Policy,
    PolicyChange,
    PolicyRequest,
    PolicyVersion,
    Steer,
    Webhook,
)
from midstream.schemas.requests.specs import Tag

HOOK = Webhook(url="https://alerts.example.com/x?secret=1")
JOB = Job(id="j", model="m", created=0.0, kind="sweep", prompts=[], sampling=Sampling())


def policy(*actions: Any, **fields: Any) -> Policy:
    content = ProbeContent(
        hook=HOOKS[0], layer=0, tensors=["w", "b"], labels=["x", "y"], thresholds=[1.0, None]
    )
    fields = {"mode": "active", **fields}
    version = PolicyVersion(
        version=1,
        digest="d",
        created=0.0,
        content=PolicyRequest(
            probe="p", condition=Condition(at_least=1.0, label="y"), actions=[*actions], **fields
        ),
        probe=StoredProbe(name="p", digest=content.digest, content=content),
        modules=[],
        identity="a",
        tenant="t",
        key="k",
    )
    return Policy(name="guard", model="m", digest="d", created=1.0, versions=[version])


@pytest.mark.parametrize(
    ("actions", "changes", "words"),
    [
        (["flag"], {"identity": "b"}, "identity a; the one that is served has b"),
        (["flag"], {"speculative_tokens": 2}, "speculative decoding"),
        (["flag", "stop"], {"pp": 2}, "(stop) that is not served with pipeline parallelism"),
        ([Steer(module="m")], {"pp": 2}, "(steer)"),
        ([CaptureWindow(layers=0)], {"pp": 2}, "(capture)"),
        (["flag"], {"pp": 2}, None),
    ],
)
def test_a_policy_that_does_not_fit_the_model(
    actions: list[Any], changes: dict[str, Any], words: str | None
) -> None:
    why = unfit(policy(*actions).current, model(**{"identity": "a", **changes}))
    assert why == words or (words is not None and words in str(why))


@pytest.mark.parametrize(
    ("actions", "acts", "kept"),
    [
        ([Steer(module="m")], False, []),
        ([Steer(module="m"), "flag", HOOK], True, ["flag", "webhook"]),
        (["flag", "stop", Steer(module="m")], True, ["flag", "stop"]),
        (["stop"], True, ["stop"]),
    ],
)
def test_only_steering_is_left_out_in_sweeps_and_harvests(
    actions: list[Any], acts: bool, kept: list[str]
) -> None:
    for mode, on in (("active", acts), ("shadow", False)):
        job = with_policies(JOB, [policy(*actions, mode=mode)])
        stored = job.probes[0].policy
        assert job.probes[0].actions == (kept if on else [])
        assert stored.acts == on
        assert stored.actions == kept
        assert [*job.hooks] == (["guard"] if on and HOOK in actions else [])


def test_tags_of_policies_are_distinct() -> None:
    long = "n" * 57
    names = ["a.b", "a-b", "a..b", "a.-b", long, f"{long}n", f"{long}m", "x" * 128]
    names += [_tag_of(name)[len("policy-") :] for name in ("a.b", f"{long}n")]
    tags = msgspec.convert([_tag_of(name) for name in names], list[Tag])
    assert len({*tags}) == len(names)
    assert tags[1] == "policy-a-b"
    assert tags[4] == f"policy-{long}"


def test_changes_make_versions() -> None:
    first = policy("flag", mode="shadow")
    active = changed(first, PolicyChange(mode="active"))
    assert active.content.mode == "active"
    assert digest_of(active) != digest_of(first.current)


@pytest.mark.parametrize(
    ("action", "change", "field", "words"),
    [
        (CaptureWindow(layers=0), {"all_traffic": True}, "all_traffic", "the action capture"),
    ],
)
def test_a_change_is_refused_by_the_field_that_is_wrong(
    action: Any, change: dict[str, Any], field: str, words: str
) -> None:
    with refuses(words, field=field, status=400):
        changed(policy(action), PolicyChange(**change))


def test_a_change_of_the_condition_keeps_its_other_fields() -> None:
    """It is a registration of its own, so that former latches do not apply."""
    former = policy("flag", mode="shadow")
    change = ConditionChange(at_least=2.5)
    made = changed(former, PolicyChange(condition=change))
    assert made.content.condition == Condition(at_least=2.5, label="y")
    assert made.registered > former.current.registered == changed(former, PolicyChange()).registered
    for field, wrong in (("condition", {"window": 2}), ("condition.label", {"label": "z"})):
        with refuses(field=field):
            changed(former, PolicyChange(condition=ConditionChange(**wrong)))


def test_switches_of_the_mode_push_no_content_out() -> None:
    kept: Any = None
    for registered in [1.0] + [2.0] * 8 + [3.0]:
        made = msgspec.structs.replace(policy("flag").current, registered=registered)
        kept = _with(kept, made, "m", "guard")
    assert [each.version for each in kept.versions] == [1, 4, 5, 6, 7, 8, 9, 10]


def test_identical_content_makes_no_version_but_another_registration() -> None:
    """The history stays, and former latches do not apply."""
    kept: Any = None
    for number, at_least in enumerate([1.0] + [2.0] * 10):
        condition = Condition(at_least=at_least, label="y")
        content = msgspec.structs.replace(policy("flag").current.content, condition=condition)
        made = msgspec.structs.replace(policy().current, content=content, registered=float(number))
        kept = _with(kept, made, "m", "guard").after(kept)
    assert [each.version for each in kept.versions] == [1, 2]
    assert [each.registered for each in kept.versions] == [0.0, 10.0]


def test_content_without_a_mode_does_not_replace_a_policy_that_acts() -> None:
    acting = policy("flag", mode="active")
    silent = policy("flag", mode=None).current.content
    with refuses("version 1 is active: give mode", field="mode"):
        replaceable(acting, silent)
    shadow = policy("flag", mode="shadow")
    for former, content in ((acting, acting.current.content), (None, silent), (shadow, silent)):
        assert replaceable(former, content) == former
