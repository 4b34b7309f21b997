"""What do the measurements of `midstream verify` count?"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from midstream.client.stack.measurements import costs, rows
from midstream.client.stack.measurements.rig import Rig
from midstream.schemas.base.errors import MidstreamError


class FakeRig:
    """A service with one request beside another; `leak`: what steering adds to the other's rows."""

    prompts = Rig.prompts
    steering = Rig.steering

    def __init__(self, leak: float = 0.0, shift: float = 0.0, apart: int = 0):
        self.card = {"max_model_len": 999, "vocab_size": 80, "hidden_size": 4, "id": "m"}
        self.rng = np.random.default_rng(0)
        self.leak, self.shift, self.apart, self.steered, self.runs = leak, shift, apart, False, 0
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
        (FakeRig(apart=1000), []),  # never in one step: nothing is shown
    ],
)
def test_steering_that_reaches_a_neighbour_is_counted(rig: FakeRig, figures: list[int]) -> None:
    assert list(rows.neighbour(rig).figures) == figures  # type: ignore[arg-type]


def test_bits_that_differ_by_the_batch_alone_are_no_leak() -> None:
    rig = FakeRig(shift=1e-7)
    rig.rows([])  # the run alone then has other bits than those beside
    assert list(rows.neighbour(rig).figures) == [0]  # type: ignore[arg-type]


@pytest.mark.parametrize(("dtype", "limit"), [("bfloat16", 0.25), ("float32", 1e-3)])
def test_the_noise_floor_is_bounded_by_the_certificates_tolerance(dtype: str, limit: float) -> None:
    rig = FakeRig(shift=1e-6)
    rig.card["dtype"] = dtype
    rig.certificate = SimpleNamespace(  # type: ignore[attr-defined]
        laws=[SimpleNamespace(law=rows.BATCH_LAW, tolerance=32.0)]
    )
    measured = rows.noise(rig)  # type: ignore[arg-type]
    assert measured.limit == limit
    assert measured.figures[0] == pytest.approx(1e-6, rel=1e-3)


class TimedRig(FakeRig):
    """Two servers with a clock that only calls move: `seconds` of each kind of call."""

    stock, seconds = "http://stock", 0.0

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: dict[str, float], lacking: int):
        super().__init__()
        self.clock, self.of, self.lacking = 0.0, seconds, lacking
        clock = SimpleNamespace(perf_counter=lambda: self.clock, monotonic=lambda: self.clock)
        monkeypatch.setattr(costs, "time", clock)
        monkeypatch.setattr(costs.httpx2, "post", self.post)
        deleted = SimpleNamespace(delete=lambda job: None)
        self.client = SimpleNamespace(
            wait=lambda *_: None, completion=self.completion, captures=deleted
        )

    def usage(self, kind: str, tokens: int) -> dict[str, Any]:
        self.clock += self.of[kind]
        made = costs.BATCH * tokens - self.lacking * (kind == "steer")
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


def test_a_fast_idle_call_does_not_hide_what_edits_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"stock": 2.0, "idle": 1.0, "capture": 1.25, "steer": 1.0, "patch": 1.5}
    taken = costs.costs(TimedRig(monkeypatch, seconds, 0))  # type: ignore[arg-type]
    figures = {kind: set(measured.figures) for kind, measured in taken.items()}
    assert figures == {"idle": {0.5}, "capture": {1.25}, "steer": {1.0}, "patch": {1.5}}


def test_calls_with_too_few_tokens_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = dict.fromkeys(("stock", "idle", "capture", "steer", "patch"), 1.0)
    with pytest.raises(MidstreamError, match="steer: 511 tokens instead of 512"):
        costs.costs(TimedRig(monkeypatch, seconds, 1))  # type: ignore[arg-type]
