"""Patched cells per second: Midstream's sweeps against TransformerLens-style batched hooks on
transformers, in turns, of one shape.

Ours: a pair of prompts through `SweepRequests`, as a worker asks them of its engine, without the
service around it. Theirs: one forward pass for each layer, with the patched prompt as many times in
the batch as it has positions, one position patched in each; a hook that writes the clean prompt's
row, logits of the last position only. Both have random weights, so only the time is compared.
"""

import asyncio
import json
import os
import time
from typing import Any

import kit
from engines import EXTRA, direct_engine, facts_of

#: Cells in our engine at a time.
IN_FLIGHT = 64
TOKENS, ROUNDS = 100, 3


class Ours:
    """An engine, and the receipts of its ranks."""

    def __init__(self, engine: Any, in_flight: int) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[tuple[str, int], asyncio.Future[Any]] = {}
        self._gate = asyncio.Semaphore(in_flight)
        self._number = 0

    def receive(self, receipt: Any) -> None:
        """Called by the sink's thread."""
        self._loop.call_soon_threadsafe(self._settle, receipt)

    def _settle(self, receipt: Any) -> None:
        waiting = self._waiting.pop((receipt.job, receipt.request), None)
        if waiting is not None and not waiting.done():
            waiting.set_result(receipt)

    async def _ask(self, ask: Any) -> Any:
        """The receipt of one request."""
        from midstream.schemas.requests.steering import GlobalSteering

        async with self._gate:
            told = self._waiting[ask.job, ask.request] = self._loop.create_future()
            async for _ in self._engine.generate(ask, GlobalSteering()):
                pass
            receipt = await asyncio.wait_for(told, 60)
        assert receipt.status == "ok", receipt.message
        return receipt

    async def sweep(self, base: list[int], source: list[int], layers: int) -> float:
        """Seconds of all cells of one pair at `pre_attn`, both unpatched prompts included."""
        from midstream.schemas.jobs.jobs import Job, Sampling
        from midstream.schemas.jobs.sweeps import Column, StoredPair, StoredSweep
        from midstream.schemas.requests.source_runs import RunFiles
        from midstream.workers.serving.sweeps.requests import SweepRequests

        self._number += 1
        columns = [Column(str(place), [(place, place)]) for place in range(len(base))]
        pair = StoredPair(base, source, columns, answer=[5], foil=[6])
        sweep = StoredSweep(
            pairs=[pair],
            hooks=["pre_attn"],
            layers=list(range(layers)),
            metric="logit_diff",
            direction="denoise",
            noise=1,
        )
        job = Job(
            id=f"sweep{self._number}",
            kind="sweep",
            model="",
            prompts=[],
            sampling=Sampling(max_tokens=1),
            created=0.0,
            sweep=sweep,
        )
        asks = SweepRequests(job, 1, self._engine.info, self._engine.enters)
        began = time.perf_counter()
        controls = [
            ask for unit in (asks.units.base(0), asks.units.source(0)) for ask in asks.control(unit)
        ]
        receipts = list(await asyncio.gather(*map(self._ask, controls)))

        async def locate(key: str) -> RunFiles:
            return asks.files(0, key, receipts)

        runs = asks.runs(0)
        await self._engine.hold_runs(runs, locate)
        cells = [ask for unit in asks.units.cells(0) for ask in asks.patched(unit)]
        graded = await asyncio.gather(*map(self._ask, cells))
        await self._engine.release_runs(runs)
        assert len(graded) == layers * len(base), len(graded)
        assert all(len(receipt.graded) == 2 for receipt in graded)
        return time.perf_counter() - began


class Theirs:
    """transformers with hooks."""

    def __init__(self, folder: Any, device: str, dtype: str) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.set_grad_enabled(False)
        self._torch, self._device = torch, device
        config = AutoConfig.from_pretrained(folder)
        with torch.device(device):
            self.model = AutoModelForCausalLM.from_config(
                config, dtype=getattr(torch, dtype), attn_implementation="sdpa"
            ).eval()

    def sweep(self, base: list[int], source: list[int], layers: int) -> float:
        torch, count = self._torch, len(base)
        tensor = lambda ids: torch.tensor([ids], device=self._device)  # noqa: E731
        began = time.perf_counter()
        clean = self.model(
            tensor(source), output_hidden_states=True, logits_to_keep=1
        ).hidden_states
        prompts, every = tensor(base).repeat(count, 1), torch.arange(count, device=self._device)
        values = []
        for layer in range(layers):

            def patch(module: Any, given: Any, named: Any, layer: int = layer) -> None:
                hidden = given[0] if given else named["hidden_states"]
                hidden[every, every] = clean[layer][0]

            handle = self.model.model.layers[layer].register_forward_pre_hook(
                patch, with_kwargs=True
            )
            logits = self.model(prompts, logits_to_keep=1, use_cache=False).logits[:, -1]
            handle.remove()
            values.append((logits[:, 5] - logits[:, 6]).float().cpu())
        assert sum(map(len, values)) == layers * count
        return time.perf_counter() - began


async def measure(asked: kit.Options) -> None:
    config = kit.shape("tiny" if asked.tiny else "8b")
    dtype = "bfloat16" if asked.gpu else "float32"
    model = kit.write_model(asked.out / "model", config, dtype)
    layers, tokens = int(config["num_hidden_layers"]), 6 if asked.tiny else TOKENS
    extra = kit.without_weights(asked) | ({"kv_cache_memory_bytes": 6 << 30} if asked.gpu else {})
    os.environ[EXTRA] = json.dumps(extra)
    told: list[Any] = []
    sink = kit.Sink(lambda receipt: told[0].receive(receipt))
    engine = direct_engine(
        kit.serving_settings(
            asked, asked.out / "engine", model, enable_prefix_caching=True, relay_url=sink.url
        )
    )
    await engine.start()
    ours = Ours(engine, IN_FLIGHT)
    told.append(ours)
    theirs = Theirs(model, asked.device, dtype)
    facts = facts_of(engine._llm) | {"enters": engine.enters}
    notes = [f"{layers} layers × {tokens} tokens, {IN_FLIGHT} cells at a time", f"ours: {facts}"]
    result: dict[str, Any] = {"figures": {}, "notes": notes}
    kit.so_far(asked, result)
    rates: dict[str, list[float]] = {"ours": [], "theirs": []}
    for turn in range(-1, 2 if asked.tiny else ROUNDS):  # the first is a warm-up
        if turn > 0 and asked.left < 0:
            break
        base, source = kit.token_ids(2, tokens, config["vocab_size"], seed=turn)
        taken = {
            "ours": await ours.sweep(base, source, layers),
            "theirs": theirs.sweep(base, source, layers),
        }
        if turn < 0:
            continue
        for name, seconds in taken.items():
            rates[name].append(layers * tokens / seconds)
        pairs = zip(rates["ours"], rates["theirs"], strict=True)
        result["figures"] = {
            "cells": kit.figure(rates["ours"]),
            "batched": kit.figure(rates["theirs"]),
            "ratio": kit.figure([mine / other for mine, other in pairs]),
        }
        kit.so_far(asked, result)
    kit.finish(asked, result)
    await engine.shutdown()


if __name__ == "__main__":
    asyncio.run(measure(kit.options(__doc__)))
    os._exit(0)  # vLLM's own clean-up at the end prints a traceback
