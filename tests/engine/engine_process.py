"""A real `VllmEngine` in a process of its own, driven by JSON lines: each engine needs an
environment of its own.

Run as `python engine_process.py`; settings come from the environment. Used through `host.Host`.
"""

import asyncio
import base64
import contextlib
import dataclasses
import functools
import os
import sys
import unittest.mock
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from refit import certify_with

from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.base.records import from_msgpack, to_json
from midstream.schemas.base.tensors import Tensor
from midstream.schemas.jobs.jobs import Job, Output
from midstream.schemas.requests.source_runs import ZEROS, RunFiles, is_row, runs_named
from midstream.schemas.requests.specs import DIMS_PREFIX, EntryPoint, Grade
from midstream.schemas.requests.steering import GlobalSteering
from midstream.schemas.settings.settings import load_settings
from midstream.workers.engine.protocol import EngineRequest
from midstream.workers.engine.ranks.control import disagreement
from midstream.workers.engine.requests import prompt_request
from midstream.workers.runner.probes.probe_news import Scored


class Command(msgspec.Struct, omit_defaults=True):
    """`jobs` run all at once; `cancel_after` aborts the named job after that many tokens; `call` is
    a collective RPC, or by another name than `midstream_…` a method of the engine.
    """

    jobs: list[Job] = []
    vectors: dict[str, Tensor] = {}
    runs: dict[str, RunFiles] = {}  # `run_key` → where its rows are, for all that the jobs may name
    entries: dict[str, EntryPoint] = {}  # job → where the forward of its requests may begin
    grades: dict[str, list[Grade]] = {}  # job → what is asked about each of its requests
    blocks: dict[str, str] = {}  # job → the run for whose cells its KV cache is kept
    files: dict[str, bytes] = {}  # images of all jobs by their digests
    bases: dict[str, str] = {}  # job → the run whose kept blocks it may use, without an entry
    together: bool = False  # all requests begin in one step
    cancel_after: dict[str, int] = {}
    look: bool = False  # have the worker look at its ranks while the jobs run
    everyone: GlobalSteering = GlobalSteering()  # that the jobs run under
    call: str = ""
    arguments: list[Any] = []


class Answer(msgspec.Struct, omit_defaults=True):
    outputs: dict[str, list[Output]] = {}
    errors: dict[str, str] = {}
    scores: dict[str, list[Scored]] = {}  # job → those that came with its tokens
    result: Any = None
    info: Any = None
    rank_calls: int = 0  # calls that all ranks answered meanwhile
    waiting: int = 0  # the most requests that waited for rows of the steering table at once


def overlap_steps() -> None:
    """Have the engine schedule steps ahead, as on an accelerator; vLLM's CPU platform turns that
    off, though its executor can.
    """
    from midstream.workers.engine import vllm
    from midstream.workers.engine.options import engine_arguments as vllm_options

    def on_an_accelerator(config: Any) -> str:
        config.scheduler_config.async_scheduling = True
        with unittest.mock.patch.object(
            vllm_options.current_platform, "is_cpu", return_value=False
        ):
            return vllm_options.scheduler_class(config)

    vllm.scheduler_class = on_an_accelerator


def keep_aux(folder: str) -> None:
    """Have every call of an EAGLE-3 head leave a file there: `positions` and, of each, the `hidden`
    states that the head was given.
    """
    import itertools

    import numpy as np
    import torch
    from vllm.v1.spec_decode.eagle import EagleProposer
    from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator

    numbers = itertools.count()

    def keep(positions: Any, hidden: Any) -> None:
        np.savez(
            os.path.join(folder, f"{next(numbers):06d}"),
            positions=positions.numpy(),
            hidden=hidden.float().numpy(),
        )

    def of_v1(self: Any, *args: Any, propose: Any = EagleProposer.propose, **options: Any) -> Any:
        keep(options["target_positions"], options["target_hidden_states"])
        return propose(self, *args, **options)

    def of_v2(
        self: Any, batch: Any, *args: Any, propose: Any = EagleSpeculator.propose, **options: Any
    ) -> Any:
        if args[3]:
            keep(
                batch.positions[: batch.num_tokens], torch.cat(args[3], dim=-1)[: batch.num_tokens]
            )
        return propose(self, batch, *args, **options)

    EagleProposer.propose = of_v1
    EagleSpeculator.propose = of_v2


def route_in_one_group() -> None:
    """Have vLLM choose experts by sigmoid without groups, which it refuses on CPUs, as with one
    group: it is the same function.
    """
    from vllm.model_executor.layers.fused_moe.router import cpu_router

    def computed(
        self: Any,
        hidden: Any,
        logits: Any,
        *args: Any,
        compute: Any = cpu_router.CPURouter._compute_routing,
        **options: Any,
    ) -> Any:
        if (
            self.scoring_func != "sigmoid"
            or self.use_grouped_topk
            or self.custom_routing_function is not None
        ):
            return compute(self, hidden, logits, *args, **options)
        return cpu_router._grouped_topk(
            gating_output=logits,
            topk=self.top_k,
            renormalize=self.renormalize,
            num_expert_group=1,
            topk_group=1,
            scoring_func="sigmoid",
            routed_scaling_factor=self.routed_scaling_factor,
            e_score_correction_bias=self.e_score_correction_bias,
        )

    cpu_router.CPURouter._compute_routing = computed


def draw_weights() -> None:
    """Have vLLM's loader of dummy weights draw them as `tiny` does: its own are so small that
    nothing of a branch shows in the stream.
    """
    import torch
    from tiny import INITIALIZER
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    def draw(self: Any, model: Any, config: Any) -> None:
        generator = torch.Generator().manual_seed(0)
        for name, each in (
            *model.named_parameters(),
            *((name, each) for name, each in model.named_buffers() if name.endswith("bias")),
        ):
            if each.is_floating_point():
                mean = 0.0
                size = 0.1 if each.ndim == 1 else INITIALIZER
                if each.ndim == 1 and ("norm" in name or "ln_" in name):
                    mean = 1.0
                    size = 0.2
                each.data.copy_(mean + size * torch.randn(each.shape, generator=generator))

    DummyModelLoader.load_weights = draw


async def serve(reply: Any) -> None:
    if os.environ.get("ROUTE_IN_ONE_GROUP"):
        route_in_one_group()
    from midstream.workers.engine.vllm import VllmEngine

    if os.environ.get("OVERLAP_STEPS"):
        overlap_steps()
    if folder := os.environ.get("KEEP_AUX"):
        keep_aux(folder)
    if os.environ.get("DRAW_WEIGHTS"):
        draw_weights()
    engine = VllmEngine(load_settings())
    await engine.start()
    engine.certify_with = functools.partial(certify_with, engine)  # type: ignore[attr-defined]
    called = count_rank_calls(engine)
    reply(Answer(info=msgspec.to_builtins(engine.info)))
    for line in iter(lambda: sys.stdin.readline(), ""):
        command = from_msgpack(base64.b64decode(line), Command)
        if command.call:
            on_ranks = command.call.startswith("midstream_")
            result = (
                engine._call(command.call, tuple(command.arguments))
                if on_ranks
                else getattr(engine, command.call)(*command.arguments)
            )
            reply(Answer(result=await result))
            continue
        answer = Answer()
        before = len(called)
        if command.together:
            await engine._llm.pause_generation(mode="keep", clear_cache=False)
        beside = []
        if command.look:
            beside.append(look(engine))
        elif command.together:
            beside.append(resume(engine, command, answer))
        await asyncio.gather(*(run(engine, job, command, answer) for job in command.jobs), *beside)
        answer.rank_calls = len(called) - before
        reply(answer)
    await engine.shutdown()


def count_rank_calls(engine: Any) -> list[str]:
    """The methods called on all ranks from now on, as they are called."""
    called: list[str] = []
    call = engine._llm.collective_rpc

    async def counted(method: str, **options: Any) -> list[Any]:
        called.append(method)
        return list(await call(method, **options))

    engine._llm.collective_rpc = counted
    return called


async def look(engine: Any) -> None:
    """As the worker does every few seconds."""
    await asyncio.sleep(0.3)
    assert not disagreement(await engine.steering_status())


async def resume(engine: Any, command: Command, answer: Answer) -> None:
    """Once all requests wait in the engine core, in the order of the jobs."""
    wanted = sum(len(job.prompts) for job in command.jobs)
    while len(engine._llm.output_processor.request_states) < wanted and not answer.errors:  # noqa: ASYNC110 - vLLM's
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.01)  # what is under way goes ahead of this on the same socket
    await engine._llm.resume_generation()


@contextlib.asynccontextmanager
async def adapter(engine: Any, job: Job) -> AsyncIterator[None]:
    """The job's adapter on the ranks."""
    if job.lora is None:
        yield
        return
    async with engine.holding_artifacts([job.lora]):
        yield


async def run(engine: Any, job: Job, command: Command, answer: Answer) -> None:
    async def fetch(name: str) -> Tensor:
        return command.vectors[name]

    async def locate(key: str) -> RunFiles:
        if key not in command.runs:
            raise MidstreamError("not_found", f"run {key} was deleted")
        return command.runs[key]

    def ask(request: int) -> EngineRequest:
        grade = command.grades[job.id][request] if job.id in command.grades else None
        base = command.bases.get(job.id) or (entry.run if entry else "")
        made = prompt_request(job, request, 1, files=command.files)
        return dataclasses.replace(
            made,
            global_steering=command.everyone,
            entry=entry,
            grade=grade,
            base=base,
            keep_blocks=command.blocks.get(job.id, ""),
        )

    async def one(request: int) -> Output | None:
        tokens = 0
        async for progress in engine.generate(ask(request)):
            tokens += len(progress.token_ids)
            answer.scores.setdefault(job.id, []).extend(progress.scores)
            answer.waiting = max(answer.waiting, engine.waiting)
            if tokens >= command.cancel_after.get(job.id, 1 << 30):
                await engine.abort(job.id, 1)
                return None
            if progress.finished:
                return progress.finished
        return None

    steering = [entry for entries in job.steering for entry in entries]
    tensors = {name for each in (*steering, *command.everyone.entries) for name in each.tensors}
    tensors |= {name for probe in job.probes for name in probe.content.tensors}
    names = sorted(
        name
        for name in tensors
        if name != ZEROS and not is_row(name) and not name.startswith(DIMS_PREFIX)
    )
    entry = command.entries.get(job.id)
    runs = sorted({*runs_named(tensors), *([entry.run] if entry else [])})
    try:
        async with (
            engine.holding_runs(runs, locate),
            engine.holding_vectors(names, fetch),
            adapter(engine, job),
        ):
            outputs = await asyncio.gather(*(one(request) for request in range(len(job.prompts))))
        answer.outputs[job.id] = [output for output in outputs if output is not None]
    except MidstreamError as error:
        answer.errors[job.id] = str(error)


if __name__ == "__main__":
    # vLLM logs to stdout; the answers go to the stream that was stdout when we started.
    import os

    channel = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    asyncio.run(serve(lambda answer: channel.write(to_json(answer) + b"\n")))
