"""When does a promise of `midstream doctor --deep` hold, what is reported, and what do its
measurements count?
"""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.settings.settings import Settings
from midstream.schemas.settings.vllm_options import VllmOptions
from midstream_ops import beside_stock
from midstream_ops.checks import costs, facts, rows
from midstream_ops.checks.finding import Check, CheckFinding, findings_of
from midstream_ops.checks.promises import PROMISES, judge
from midstream_ops.checks.report import Report
from midstream_ops.checks.rig import Rig
from midstream_ops.checks.table import of


@pytest.mark.parametrize(
    ("figures", "level"),
    [
        ([1.0], "ok"),
        ([1.05], "ok"),
        ([1.06], "fail"),
        ([1.0, 1.2, 1.01, 0.99], "ok"),  # one slow pair
        ([1.2, 1.3, 1.25, 1.2], "fail"),
        ([0.9, 1.3, 1.25, 1.0, 1.1], "warn"),
        ([], "fail"),
        ([math.nan], "fail"),
        ([1.0, math.inf], "fail"),
    ],
)
def test_a_promise_fails_if_its_whole_interval_is_above_the_limit(
    figures: list[float], level: str
) -> None:
    assert judge("idle", figures, "").level == level


def test_each_promise_is_judged_by_one_check_and_a_measurement_may_move_its_limit() -> None:
    assert judge("idle", [1.2], "", limit=1.3).level == "ok"
    checks = [*of("deep"), *of("end")]
    judged = ", ".join(check.about for check in checks).split(", ")
    assert judged == ["machine", "settings", "model", *PROMISES]


def test_the_report_has_figures_limits_and_what_failed() -> None:
    console = Console(width=100, record=True)
    report = Report(console)
    report.add([CheckFinding("info", "vllm", "0.32.0")])
    report.add([judge("idle", [1.0, 1.02], "2 pairs"), judge("receipts", [3], "")])
    assert report.end() == 1
    text = console.export_text()
    assert "ok   idle           1.01× [1, 1.02], at most 1.05×: cost of a call" in text
    assert "fail receipts       3, at most 0: files" in text
    assert "info vllm           0.32.0" in text
    assert text.splitlines()[-1] == "ok: 1, warnings: 0, failures: 1 (receipts)"


def test_settings_that_differ_from_the_defaults_are_listed_without_secrets() -> None:
    given = Settings(
        vllm=VllmOptions(dtype="float32"),
        admin_key="ms_secret",
        redis_url="redis://:pw@h",
        model="m",
    )
    assert facts.changed(given) == "engine.dtype=float32"


def test_each_engine_gets_half_of_a_gpu_unless_its_share_is_given() -> None:
    share = "gpu_memory_utilization"
    assert beside_stock.for_both(Settings(), False).engine_options == {}
    assert beside_stock.for_both(Settings(), True).engine_options == {share: beside_stock.GPU_SHARE}
    given = Settings(engine_options={share: 0.3})
    assert beside_stock.for_both(given, True).engine_options == {share: 0.3}


def test_a_check_that_raises_fails_and_does_not_end_the_others() -> None:
    def broken(rig: Any) -> Any:
        raise MidstreamError("unavailable", "no answer")

    fine = CheckFinding("info", "c", "fine")
    checks = [Check(("deep",), "a, b", broken, "wait"), Check(("deep",), "c", lambda rig: [fine])]
    found = list(findings_of(checks, None))
    assert [finding.about for finding in found] == ["a", "b", "c"]
    assert [finding.level for finding in found] == ["fail", "fail", "info"]
    assert found[0].found == "no answer"
    assert found[0].advice == "wait"


# --- Measurements ---


class FakeRig:
    """A service with one request beside another; `leak`: what steering adds to the other's rows."""

    prompts = Rig.prompts
    steering = Rig.steering

    def __init__(self, leak: float = 0.0, shift: float = 0.0, apart: int = 0):
        self.card = {"max_model_len": 999, "vocab_size": 80, "hidden_size": 4, "id": "m"}
        self.rng = np.random.default_rng(0)
        self.leak = leak
        self.shift = shift
        self.apart = apart
        self.steered = False
        self.runs = 0
        self.client = SimpleNamespace(wait=lambda *_: None)

    def submit(self, prompts: Any, tokens: int, capture: Any, steering: Any) -> Any:
        self.steered = bool(steering)
        return SimpleNamespace(id="other")

    def await_start(self, job: str) -> None: ...

    def rows(self, prompts: Any) -> tuple[np.ndarray, int]:
        self.runs += 1
        return np.ones((2, 3, 4)) + self.leak * self.steered + self.shift * (self.runs % 2), 50

    def step(self, job: str) -> int:
        return 60 + self.apart


@pytest.mark.parametrize(
    ("rig", "figures"),
    [
        (FakeRig(), [0]),
        (FakeRig(leak=1e-7), [1]),
    ],
)
def test_steering_that_reaches_a_neighbour_is_counted(rig: FakeRig, figures: list[int]) -> None:
    (found,) = rows.neighbour(rig)  # type: ignore[arg-type]
    assert found.figures == figures


def test_requests_that_never_share_a_step_show_nothing() -> None:
    with pytest.raises(MidstreamError, match="never shared a step"):
        list(rows.neighbour(FakeRig(apart=1000)))  # type: ignore[arg-type]


def test_bits_that_differ_by_the_batch_alone_are_no_leak() -> None:
    rig = FakeRig(shift=1e-7)
    rig.rows([])  # the run alone then has other bits than those beside
    (found,) = rows.neighbour(rig)  # type: ignore[arg-type]
    assert found.figures == [0]


@pytest.mark.parametrize(("dtype", "limit"), [("bfloat16", 0.25), ("float32", 1e-3)])
def test_the_noise_floor_is_bounded_by_the_certificates_tolerance(dtype: str, limit: float) -> None:
    rig = FakeRig(shift=1e-6)
    rig.card["dtype"] = dtype
    rig.certificate = SimpleNamespace(  # type: ignore[attr-defined]
        laws=[SimpleNamespace(law=rows.BATCH_LAW, tolerance=32.0)]
    )
    (measured,) = rows.noise(rig)  # type: ignore[arg-type]
    assert measured.limit == limit
    assert measured.figures[0] == pytest.approx(1e-6, rel=1e-3)


class TimedRig(FakeRig):
    """Two servers with a clock that only calls move: `seconds` of each kind of call."""

    stock = "http://stock"
    seconds = 0.0

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: dict[str, float], lacking: int):
        super().__init__()
        self.clock = 0.0
        self.of = seconds
        self.lacking = lacking
        clock = SimpleNamespace(perf_counter=lambda: self.clock, monotonic=lambda: self.clock)
        monkeypatch.setattr(costs, "time", clock)
        monkeypatch.setattr(costs.httpx2, "post", self.post)
        deleted = SimpleNamespace(delete=lambda job: None)
        self.client = SimpleNamespace(
            wait=lambda *_: None, completion=self.completion, captures=deleted
        )

    def usage(self, kind: str, tokens: int) -> dict[str, Any]:
        self.clock += self.of[kind]
        made = costs.BATCH * tokens
        if kind == "steer":
            made -= self.lacking
        return {"usage": {"completion_tokens": made}}

    def post(self, url: str, json: Any, timeout: float) -> Any:
        made = self.usage("stock", json["max_tokens"])
        return SimpleNamespace(raise_for_status=lambda: None, json=lambda: made)

    def submit(self, prompts: Any, tokens: int, capture: Any, steering: Any = None) -> Any:
        return SimpleNamespace(id="source")

    def completion(self, model: str, prompts: Any, max_tokens: int, **fields: Any) -> Any:
        names = {"capture": "capture", "steering": "steer", "patch": "patch"}
        kind = next((names[name] for name in names if name in fields), "idle")
        return SimpleNamespace(raw=self.usage(kind, max_tokens), job="job")


def test_costs_are_of_calls_with_all_their_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"stock": 2.0, "idle": 1.0, "capture": 1.25, "steer": 1.0, "patch": 1.5}
    taken = costs.costs(TimedRig(monkeypatch, seconds, 0))  # type: ignore[arg-type]
    figures = {found.about: set(found.figures) for found in taken}
    assert figures == {"idle": {0.5}, "capture": {1.25}, "steer": {1.0}, "patch": {1.5}}
    seconds = dict.fromkeys(("stock", "idle", "capture", "steer", "patch"), 1.0)
    with pytest.raises(MidstreamError, match="steer: 511 tokens instead of 512"):
        list(costs.costs(TimedRig(monkeypatch, seconds, 1)))  # type: ignore[arg-type]
