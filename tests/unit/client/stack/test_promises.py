"""When does a promise of `midstream verify` hold, and what is on its page?"""

import math
from types import SimpleNamespace
from typing import Any

import pytest

from midstream.client.render.verification import page
from midstream.client.stack import verify
from midstream.client.stack.measurements import facts
from midstream.client.stack.promises import PROMISES, Measured, Promise, Report, judge
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.base.settings import Settings

COST = Promise("idle", "cost", 1.05, "×")


@pytest.mark.parametrize(
    ("figures", "verdict"),
    [
        ([1.0], "PASS"),
        ([1.05], "PASS"),
        ([1.06], "FAIL"),
        ([1.0, 1.2, 1.01, 0.99], "PASS"),  # one slow pair
        ([1.2, 1.3, 1.25, 1.2], "FAIL"),
        ([0.9, 1.3, 1.25, 1.0, 1.1], "UNSURE"),
        ([], "FAIL"),
        ([math.nan], "FAIL"),
        ([1.0, math.inf], "FAIL"),
    ],
)
def test_a_promise_fails_if_its_whole_interval_is_above_the_limit(
    figures: list[float], verdict: str
) -> None:
    assert judge(COST, Measured(figures)).verdict == verdict


def test_a_measured_limit_replaces_that_of_the_table() -> None:
    assert judge(COST, Measured([1.2], limit=1.3)).verdict == "PASS"


def test_a_promise_without_a_measurement_fails() -> None:
    judged = verify.outcomes({"idle": Measured([1.0])})
    assert [outcome.name for outcome in judged] == [promise.name for promise in PROMISES]
    assert [outcome.name for outcome in judged if outcome.verdict == "PASS"] == ["idle"]


def test_every_promise_has_a_measurement() -> None:
    measured = " ".join(verify.MEASUREMENTS).split()
    assert [*measured, "processes"] == [promise.name for promise in PROMISES]


def test_the_page_has_each_promise_with_figure_limit_and_verdict() -> None:
    judged = verify.outcomes({"idle": Measured([1.0, 1.02], "2 pairs"), "receipts": Measured([3])})
    report = Report("now", 9.0, {"vllm": "0.32.0"}, {"name": "m"}, {"dtype": "bfloat16"}, judged)
    lines = page(report).splitlines()
    assert "PASS   idle         1.01× [1, 1.02], at most 1.05×: cost of a call" in page(report)
    assert "FAIL   receipts     3, at most 0: files" in page(report)
    assert lines[-1].startswith("1 of 10 promises hold; FAILED: certificate, capture, ")
    assert "settings      dtype=bfloat16" in lines


def test_settings_on_the_page_have_no_secrets_and_no_addresses() -> None:
    given = Settings(dtype="float32", admin_key="ms_secret", redis_url="redis://:pw@h", model="m")
    assert facts.changed(given) == {"dtype": "float32"}


def test_each_engine_gets_half_of_a_gpu_unless_its_share_is_given() -> None:
    share = "gpu_memory_utilization"
    assert verify.for_both(Settings(), False).engine_options == {}
    assert verify.for_both(Settings(), True).engine_options == {share: verify.GPU_SHARE}
    given = Settings(engine_options={share: 0.3})
    assert verify.for_both(given, True).engine_options == {share: 0.3}


def test_a_failed_measurement_does_not_end_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(rig: Any) -> Measured:
        raise MidstreamError("unavailable", "no answer")

    monkeypatch.setattr(verify, "MEASUREMENTS", {"a b": broken, "c": lambda rig: Measured([0])})
    taken = verify.measure(SimpleNamespace(say=lambda line: None))  # type: ignore[arg-type]
    assert [list(taken[name].figures) for name in "abc"] == [[], [], [0]]
    assert "no answer" in taken["a"].detail
