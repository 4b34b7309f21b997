"""Whose turn a step is, and where it ends. Counted in steps and tokens."""

from types import SimpleNamespace
from typing import Any

from midstream.workers.runner.vllm.shallow_steps import ShallowSteps


class Engine:
    """Takes up to `most` tokens of each request that a step does not hold out."""

    def __init__(self, most: int = 100) -> None:
        self.steps = ShallowSteps()
        self.enough = self.steps._enough
        self.live: dict[str, Any] = {}
        self._most = most

    def add(self, name: str, tokens: int, depth: int = 0) -> None:
        self.live[name] = SimpleNamespace(num_tokens=tokens, num_computed_tokens=0)
        if depth:
            self.steps.join(name, depth, tokens)

    def step(self) -> tuple[list[str], int]:
        """The requests of the next step, and its depth. A request that is computed is over, unless
        it generates.
        """
        out = self.steps.held_out(self.live)
        taken = {}
        for name, request in self.live.items():
            if name not in out:
                taken[name] = min(self._most, request.num_tokens - request.num_computed_tokens)
                request.num_computed_tokens += taken[name]
        depth = self.steps.take(taken, self.live)
        for name in taken:
            request = self.live[name]
            if request.num_computed_tokens == request.num_tokens:
                if name.startswith("generates"):
                    request.num_tokens += 1
                else:
                    del self.live[name]
                    self.steps.leave(name)
        return sorted(taken), depth


def test_without_shallow_requests_nothing_is_held_out() -> None:
    engine = Engine()
    engine.add("generates", 10)
    assert engine.step() == (["generates"], 0)


def test_shallow_requests_alone_end_at_the_deepest() -> None:
    engine = Engine()
    engine.add("a", 10, depth=2)
    engine.add("b", 10, depth=5)
    assert engine.step() == (["a", "b"], 5)
    assert engine.live == {}


def test_few_shallow_tokens_join_whole_steps() -> None:
    engine = Engine()
    engine.add("generates", 10)
    engine.add("a", engine.enough - 1, depth=2)
    assert engine.step() == (["a", "generates"], 0)


def test_many_shallow_tokens_take_turns_with_whole_steps() -> None:
    """No request waits longer than one step; the last tokens join a whole one."""
    engine = Engine(most=100)
    engine.add("generates", 10)
    engine.add("a", 2 * 100 + engine.enough, depth=3)
    steps = [engine.step() for _ in range(6)]
    assert steps[:4] == [(["a"], 3), (["generates"], 0), (["a"], 3), (["generates"], 0)]
    assert all("generates" in names for names, _ in steps[5:])


def test_deeper_requests_wait_while_others_fill_a_step_and_the_oldest_never_waits() -> None:
    engine = Engine(most=1000)
    engine.add("old", engine.enough, depth=3)
    engine.add("deep", engine.enough, depth=20)
    engine.add("low", engine.enough, depth=2)
    assert engine.step() == (["low", "old"], 3)
    assert engine.step() == (["deep"], 20)


def test_what_is_computed_again_counts_again() -> None:
    """As after a preemption; and requests that leave early count no more."""
    engine = Engine(most=100)
    engine.add("generates", 10)
    engine.add("a", 100 + engine.enough, depth=3)
    assert engine.step() == (["a"], 3)
    engine.live["a"].num_computed_tokens = 0
    engine.steps.left("a", engine.live["a"].num_tokens)
    assert engine.step() == (["generates"], 0)
    assert engine.step() == (["a"], 3)
    engine.steps.leave("a")
    engine.steps.leave("a")
    del engine.live["a"]
    assert engine.steps._waiting == 0
    assert engine.step() == (["generates"], 0)
