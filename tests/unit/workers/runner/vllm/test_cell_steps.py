"""Sweep cells are composed into steps of few layers, with whole prompts, and wait otherwise."""

from typing import Any, NamedTuple

import pytest
from vllm.v1.core.sched.request_queue import FCFSRequestQueue, PriorityRequestQueue

from midstream.workers.runner.vllm import cell_steps
from midstream.workers.runner.vllm.cell_steps import CELLS, CellSteps, RepeatedPrompt


class Request(NamedTuple):
    request_id: str
    num_tokens: int


class Rig:
    def __init__(self, most: int = 2048, kept: tuple[str, ...] = ("base",)) -> None:
        self.bases: dict[str, RepeatedPrompt] = {}
        self.waiting = FCFSRequestQueue()
        self.running = list[Any]()
        self.steps = CellSteps(self.bases, kept, most)  # type: ignore[arg-type]

    def cells(self, layer: int, prompt: int, columns: int | None = None) -> None:
        """A row of the grid: one cell for each position of a prompt of so many tokens."""
        for first in range(prompt if columns is None else columns):
            request = Request(f"{layer}.{first}", prompt)
            self.bases[request.request_id] = RepeatedPrompt("base", first, layer)
            self.waiting.append(request)

    def step(self, *waits: str) -> list[str]:
        """What a scheduler that takes all sees; `waits`: requests that may not begin."""
        with self.steps.composing(self.running, self.waiting, waits):
            seen = [request.request_id for request in self.waiting]
            self.waiting.clear()
        return seen

    def layers(self) -> list[int]:
        return [int(name.split(".")[0]) for name in self.step()]


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cell_steps.current_platform, "is_cpu", lambda: True)


def test_a_step_takes_the_cells_of_one_layer() -> None:
    rig = Rig()
    for layer in (3, 4, 5):
        rig.cells(layer, prompt=26)
    assert [rig.layers() for _ in range(3)] == [[3] * 26, [4] * 26, [5] * 26]
    assert not rig.waiting


def test_layers_of_few_tokens_share_a_step() -> None:
    rig = Rig()
    for layer in range(8):
        rig.cells(layer, prompt=9)  # 45 tokens
    assert rig.layers() == [0] * 9 + [1] * 9 + [2] * 9


def test_a_step_takes_no_more_cells_than_the_next_has_left() -> None:
    rig = Rig()
    rig.cells(2, prompt=60)
    assert len(rig.step()) == CELLS
    assert len(rig.step()) == 60 - CELLS


def test_prompts_are_computed_whole() -> None:
    rig = Rig(most=300)
    rig.cells(2, prompt=100, columns=5)
    assert len(rig.step()) == 3, (
        "100, 99 and 98 tokens: a part of the next would have the step begin at the first layer"
    )
    without = Rig(most=199, kept=())
    without.cells(2, prompt=100, columns=2)
    assert len(without.step()) == 1, (
        "no blocks of the base are kept: both are computed from their first token"
    )
    alone = Rig(most=50)
    alone.cells(2, prompt=100, columns=1)
    assert len(alone.step()) == 1, "what fits no step is not held back for ever"


def test_an_accelerator_takes_cells_of_several_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cell_steps.current_platform, "is_cpu", lambda: False)
    rig = Rig()
    rig.cells(3, prompt=26)
    rig.cells(4, prompt=26)
    assert rig.layers() == [3] * 26 + [4] * 6


def test_beside_other_requests_layers_do_not_matter() -> None:
    for place in ("waiting", "running"):
        rig = Rig()
        rig.cells(3, prompt=26)
        rig.cells(4, prompt=26)
        getattr(rig, place).append(Request("other", 10))
        assert rig.step()[:CELLS] == [f"3.{first}" for first in range(26)] + [
            f"4.{first}" for first in range(6)
        ]


def test_other_requests_are_never_held_back() -> None:
    rig = Rig()
    rig.cells(3, prompt=60)
    rig.waiting.append(Request("other", 10))
    assert rig.step()[-1] == "other"


def test_the_queue_keeps_its_order() -> None:
    rig = Rig()
    rig.cells(3, prompt=26)
    rig.cells(4, prompt=26)
    before = [request.request_id for request in rig.waiting]
    with rig.steps.composing(rig.running, rig.waiting, set()):
        rig.waiting.popleft()  # scheduled
        rig.waiting.appendleft(Request("preempted", 10))
    assert [request.request_id for request in rig.waiting] == ["preempted", *before[1:]]


def test_requests_that_wait_for_writers_keep_their_place_and_hold_up_no_other() -> None:
    rig = Rig()
    rig.cells(3, prompt=26)
    rig.waiting.extendleft([Request("plain", 9), Request("captures", 9)])
    assert rig.step("captures", *(f"3.{first}" for first in range(25))) == ["plain", "3.25"]
    rig.waiting.append(Request("later", 9))
    assert rig.step() == ["captures", *(f"3.{first}" for first in range(25)), "later"]


@pytest.mark.parametrize("number", [0, 2])
def test_a_queue_of_priorities_gets_back_what_a_step_does_not_take(number: int) -> None:
    """As with vLLM's `scheduling_policy: priority`: the queue has an order of its own."""
    rig = Rig()
    queue = PriorityRequestQueue()
    requests: list[Any] = [Request(name, 9) for name in ("captures", "first", "second", "third")]
    for request in requests:
        queue.add_request(request)
    with rig.steps.composing([], queue, {"captures"}):
        assert list(queue) == requests[1:]
        for _ in range(number):
            queue.pop_request()  # scheduled
        preempted = Request("a preempted one", 9)
        queue.add_request(preempted)  # type: ignore[arg-type]
    assert list(queue) == [preempted, requests[0], *requests[1 + number :]]
