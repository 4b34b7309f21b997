"""Each runner's adapter gives a step's rows and logits as they lie in the batch, with and without
draft tokens.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from midstream.workers.runner.base import process
from midstream.workers.runner.base.engine_step import RequestRows, StepView

#: Request → (first position, tokens, drafts among them). The second is the last token of a prompt,
#: padded with placeholder drafts.
STEP = {"chunk": (0, 5, 0), "padded": (9, 4, 3), "drafted": (20, 3, 2), "plain": (30, 1, 0)}
VIEW = StepView(
    [
        RequestRows("chunk", 0, 5, 0, 1),
        RequestRows("padded", 5, 4, 9, 4),
        RequestRows("drafted", 9, 3, 20, 3),
        RequestRows("plain", 12, 1, 30, 1),
    ],
    13,
)


class Plane:
    def plan(self, view: StepView) -> None:
        self.view = view


@pytest.fixture
def adapters(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(process, "die_with_parent", lambda: None)
    from midstream.workers.runner.vllm import runner_adapters as adapters

    return adapters


def v1(adapters: Any) -> StepView:
    counts = np.array([count for _, count, _ in STEP.values()])

    class Runner:
        input_batch = SimpleNamespace(
            req_ids=[*STEP, None],
            num_computed_tokens_cpu=np.array([first for first, _, _ in STEP.values()] + [0]),
        )

        def _prepare_inputs(self, scheduler_output: Any, num_scheduled_tokens: Any) -> str:
            return "prepared"

    made = type("Made", (adapters.V1Adapter, Runner), {})()
    made.midstream = Plane()
    drafts = {name: [-1] * count for name, (_, _, count) in STEP.items() if count}
    assert (
        made._prepare_inputs(SimpleNamespace(scheduled_spec_decode_tokens=drafts), counts)
        == "prepared"
    )
    return made.midstream.view


def v2(adapters: Any) -> StepView:
    samples = [1 + drafts for _, _, drafts in STEP.values()]
    batch = SimpleNamespace(
        num_reqs=len(STEP),
        req_ids=list(STEP),
        # padded for a graph
        num_scheduled_tokens=np.array([*(count for _, count, _ in STEP.values()), 0, 0]),
        num_computed_tokens_np=np.array([first for first, _, _ in STEP.values()]),
        cu_num_logits_np=np.array([0, *np.cumsum(samples)]),
    )

    class Runner:
        def prepare_inputs(self) -> Any:
            return batch

    made = type("Made", (adapters.V2Adapter, Runner), {})()
    made.midstream = Plane()
    assert made.prepare_inputs() is batch
    return made.midstream.view


@pytest.mark.parametrize("runner", [v1, v2])
def test_both_runners_count_the_logits_of_drafts(adapters: Any, runner: Any) -> None:
    assert runner(adapters) == VIEW
