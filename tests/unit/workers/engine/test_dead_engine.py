"""A call that is on its way when vLLM's core dies ends with an error, and nothing waits for it."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from refusal_kit import refuses
from vllm import envs

from midstream.workers.engine.vllm import VllmEngine

LONG_S = 10.0


class Core:
    """A core that takes calls, never answers, and is dead once `errored` is set."""

    def __init__(self) -> None:
        self.errored = False
        self.cancelled = 0

    async def collective_rpc(self, method: str, **options: Any) -> list[Any]:
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled += 1
        return []


def engine_on(core: Any) -> VllmEngine:
    engine = object.__new__(VllmEngine)
    engine._llm = core
    return engine


async def test_a_call_that_a_dying_core_took_fails() -> None:
    core = Core()
    call = asyncio.create_task(engine_on(core)._call("midstream_status", ()))
    await asyncio.sleep(0.4)
    assert not call.done(), "a slow call is waited for while the core lives"
    core.errored = True
    with refuses("the engine died", kind="engine_failed"):
        await asyncio.wait_for(call, LONG_S)
    await asyncio.sleep(0)
    assert core.cancelled == 1


def test_an_answer_counts_even_if_the_core_has_died_since() -> None:
    async def answer(method: str, args: tuple[Any, ...], **_: Any) -> list[Any]:
        return [method, *args]

    engine = engine_on(SimpleNamespace(collective_rpc=answer, errored=True))
    assert asyncio.run(engine._call("midstream_status", (1,))) == ["midstream_status", 1]


@pytest.mark.parametrize(
    ("method", "bound"),
    [
        ("midstream_status", envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS),
        ("midstream_certify", None),
    ],
)
async def test_ranks_must_answer_as_fast_as_in_a_step_unless_the_model_decides(
    method: str, bound: int | None
) -> None:
    """A rank whose machine is lost never answers, and vLLM's core would wait for it forever."""
    bounds = []

    async def answer(_: str, timeout: float | None, **__: Any) -> list[Any]:
        bounds.append(timeout)
        return []

    await engine_on(SimpleNamespace(collective_rpc=answer, errored=False))._call(method, ())
    assert bounds == [bound]
