"""A real `VllmEngine` in a process of its own, driven by JSON lines: each engine needs an environment of its own.

Run as `python engine_process.py`; settings come from the environment. Used through `host.Host`.
"""

import asyncio
import sys
from typing import Any

import msgspec

from midstream.schemas.base import from_json, to_json
from midstream.schemas.errors import MidstreamError
from midstream.schemas.jobs import Job, Output
from midstream.schemas.settings import load_settings
from midstream.schemas.steering import GlobalSteering
from midstream.schemas.tensors import Tensor
from midstream.workers.engine import ask_of
from midstream.workers.rank_control import disagreement


class Command(msgspec.Struct, omit_defaults=True):
    """`jobs` run all at once; `cancel_after` aborts the named job after that many tokens; `call` is a collective
    RPC, or by another name than `midstream_…` a method of the engine."""

    jobs: list[Job] = []
    vectors: dict[str, Tensor] = {}
    cancel_after: dict[str, int] = {}
    look: bool = False  # have the worker look at its ranks while the jobs run
    everyone: GlobalSteering = GlobalSteering()  # that the jobs run under
    call: str = ""
    arguments: list[Any] = []


class Answer(msgspec.Struct, omit_defaults=True):
    outputs: dict[str, list[Output]] = {}
    errors: dict[str, str] = {}
    result: Any = None
    info: Any = None
    waiting: int = 0  # the most requests that waited for rows of the steering table at once


async def serve(reply: Any) -> None:
    from midstream.workers.vllm_engine import VllmEngine

    engine = VllmEngine(load_settings())
    await engine.start()
    reply(Answer(info=msgspec.to_builtins(engine.info)))
    for line in iter(lambda: sys.stdin.readline(), ""):
        command = from_json(line, Command)
        if command.call:
            on_ranks = command.call.startswith("midstream_")
            called = engine._call(command.call, tuple(command.arguments)) if on_ranks else getattr(engine, command.call)(*command.arguments)
            reply(Answer(result=await called))
            continue
        answer = Answer()
        await asyncio.gather(*(run(engine, job, command, answer) for job in command.jobs), *([look(engine)] if command.look else []))
        reply(answer)
    await engine.shutdown()


async def look(engine: Any) -> None:
    """As the worker does every few seconds."""
    await asyncio.sleep(0.3)
    assert not disagreement(await engine.steering_status())


async def run(engine: Any, job: Job, command: Command, answer: Answer) -> None:
    async def fetch(name: str) -> Tensor:
        return command.vectors[name]

    async def one(request: int) -> Output | None:
        tokens = 0
        async for progress in engine.generate(ask_of(job, request, 1), command.everyone):
            tokens += len(progress.token_ids)
            answer.waiting = max(answer.waiting, engine.waiting)
            if tokens >= command.cancel_after.get(job.id, 1 << 30):
                await engine.abort(job.id, 1)
                return None
            if progress.finished:
                return progress.finished
        return None

    steering = [entry for entries in job.steering for entry in entries]
    names = sorted({name for entry in (*steering, *command.everyone.entries) for name in entry.tensors})
    try:
        await engine.hold_vectors(names, fetch)
        try:
            outputs = await asyncio.gather(*(one(request) for request in range(len(job.prompts))))
        finally:
            await engine.release_vectors(names)
        answer.outputs[job.id] = [output for output in outputs if output is not None]
    except MidstreamError as error:
        answer.errors[job.id] = str(error)


if __name__ == "__main__":
    # vLLM logs to stdout; the answers go to the stream that was stdout when we started.
    import os

    channel = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    asyncio.run(serve(lambda answer: channel.write(to_json(answer) + b"\n")))
