"""Agreement of the gradient worker's rows with the vLLM worker's, hook by hook, on a fixed prompt.

The vLLM worker's rows come from an ordinary capture job in the model's queue. They are judged as
the certificate judges them (`workers.engine.proof.comparison`). What a layer adds to the stream is
no scale for the error of `post_block` alone: the first token's norm may be a thousand times that,
and float32 rounds the stream by as much as 1e-3 of it.
"""

import asyncio
import contextlib
import logging
import operator
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from midstream.broker.ledger.jobs.captures import LedgerCaptures
from midstream.broker.ledger.jobs.ledger import Ledger, new_job_id
from midstream.broker.ledger.named.source_runs import LedgerRuns
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.base.records import now
from midstream.schemas.jobs.jobs import TERMINAL, Job, Sampling, State, StoredPrompt
from midstream.schemas.jobs.models import ModelInfo
from midstream.schemas.jobs.queues import COMPARISONS
from midstream.schemas.prompts.selectors import Hook
from midstream.schemas.prompts.sites import hook_layers
from midstream.schemas.requests.source_runs import run_key
from midstream.schemas.requests.specs import StoredCapture
from midstream.storage.store import open_store
from midstream.workers.engine.proof.comparison import (
    STREAM_TENSORS,
    ComparedPrompt,
    Difference,
    differences,
)
from midstream.workers.engine.protocol import NotYet

from ..run.neurons import rows_of_run
from .loading import refused
from .points import Points

logger = logging.getLogger(__name__)

#: Tokens of the prompt at most.
TOKENS = 64
#: About how many of its positions are compared.
COMPARED = 8
#: Seconds that a vLLM worker has to begin the capture job.
PATIENCE_S = 30.0
#: Seconds that it has to end it.
RUN_S = 120.0
_LOOK_S = 0.25
_SEED = 1


class RowsAwaited(NotYet):
    """No vLLM worker has supplied rows to compare with."""


class Traces:
    """The worker's model as `differences` takes it: first its rows in float32, after `round` as
    they are.
    """

    def __init__(self, points: Points, hooks: Sequence[Hook]) -> None:
        self._points = points
        self._exact = True
        self._hooks = dict.fromkeys([*STREAM_TENSORS, *hooks])
        routes = (any("experts" in name for name, _ in at.named_modules()) for at in points.layers)
        self.routed = list(accumulate(routes, operator.or_))

    def trace(
        self, tokens: Sequence[int], positions: Sequence[int]
    ) -> list[dict[str, torch.Tensor]]:
        """Return for each layer its rows at `positions`, `[positions, width]` float32, by hook."""
        points = self._points
        sites = [(hook, layer) for layer in range(points.num_layers) for hook in self._hooks]
        with _in_float32(points.model) if self._exact else contextlib.nullcontext():
            run = points.run(points.batch([tokens]), sites)
        traces: list[dict[str, torch.Tensor]] = [{} for _ in points.layers]
        for hook, layer in sites:
            rows = run.rows((hook, layer))[0, list(positions)].float().cpu()
            traces[layer][hook] = traces[layer][STREAM_TENSORS.get(hook, hook)] = rows
        return traces

    def round(self, dtype: torch.dtype) -> None:
        self._exact = False

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("logits are not compared: the hooks determine them")


@contextlib.contextmanager
def _in_float32(model: Any) -> Iterator[None]:
    """Compute in float32 inside the block; weights are widened module by module, which is exact,
    so that only the largest module's take twice the memory.
    """
    kept: dict[Any, list[Any]] = {}

    def widen(module: Any, *_: Any) -> None:
        kept[module] = [(weight, weight.data) for weight in module.parameters(recurse=False)]
        for weight, data in kept[module]:
            weight.data = data.float()

    def restore(module: Any, *_: Any) -> None:
        for weight, data in kept.pop(module):
            weight.data = data

    with contextlib.ExitStack() as stack:
        for module in model.modules():
            stack.callback(module.register_forward_pre_hook(widen, prepend=True).remove)
            stack.callback(module.register_forward_hook(restore, always_call=True).remove)
        yield


def prompt_of(vocab_size: int, num_layers: int, max_model_len: int) -> tuple[list[int], list[int]]:
    """Return the prompt's tokens, drawn as the certificate draws its own, and the positions that
    are compared, ascending from the first.
    """
    length = min(max(16, num_layers + 4), TOKENS, max_model_len - 1)
    generator = np.random.default_rng(_SEED)
    tokens = generator.integers(vocab_size // 8, vocab_size // 2, size=length).tolist()
    return tokens, sorted({0, *range(length - 1, 0, -max(1, length // COMPARED))})


async def served_rows(ledger: Ledger, info: ModelInfo, hooks: Sequence[Hook]) -> ComparedPrompt:
    """Return rows that a vLLM worker of the model computed for the fixed prompt, at every layer.

    Raises RowsAwaited while no vLLM worker takes the capture job, and MidstreamError if it fails
    ("gradients_refused") or its rows cannot be read.
    """
    tokens, positions = prompt_of(info.vocab_size, info.num_layers, info.max_model_len)
    layers = list(range(info.num_layers))
    capture = StoredCapture(
        sites={hook: layers for hook in hooks}, positions=positions, tag=COMPARISONS
    )
    job = Job(
        id=new_job_id(),
        kind="generate",
        model=info.name,
        prompts=[StoredPrompt(token_ids=tokens)],
        sampling=Sampling(max_tokens=0),
        created=now(),
        captures=[capture.split(info.inside)],
        tenant=COMPARISONS,
        priority="high",
        expires=now() + PATIENCE_S,
        identity=info.identity,
    )
    await ledger.submit(job, {})
    try:
        await _ended(ledger, job.id)
        files = await LedgerRuns(ledger).files(run_key(job.id, 0, COMPARISONS))
        sites = hook_layers(capture.sites)
        store = open_store(ledger.settings.artifacts)
        rows = await asyncio.to_thread(rows_of_run, store, files, sites)
    finally:
        with contextlib.suppress(MidstreamError):  # the reaper deletes what is left
            await LedgerCaptures(ledger).delete(job.id)
    of_site = {site: found.float() for site, found in rows.items()}
    return ComparedPrompt(tokens, positions, of_site)


async def _ended(ledger: Ledger, job_id: str) -> None:
    """Wait until the capture job has succeeded."""
    deadline = asyncio.get_running_loop().time() + PATIENCE_S + RUN_S
    while (view := await ledger.view(job_id)).state not in TERMINAL:
        if asyncio.get_running_loop().time() > deadline:
            await ledger.request_cancel(job_id)
            raise RowsAwaited(f"the vLLM worker's rows did not arrive within {RUN_S:g} s")
        await asyncio.sleep(_LOOK_S)
    if view.state is State.ABORTED:
        raise RowsAwaited(f"no vLLM worker of {view.model!r} began within {PATIENCE_S:g} s")
    if view.state is not State.SUCCEEDED:
        why = view.error.detail if view.error is not None else view.state
        raise refused(f"the vLLM worker supplied no rows to compare with: {why}")
    if view.steered:
        raise refused(
            "global steering is active: the vLLM worker's rows are those of the steered model"
        )


def compared(points: Points, served: ComparedPrompt, dtype: str) -> list[Difference]:
    """Return the difference of each hook in each layer. Raises MidstreamError("gradients_refused")
    for the first that is beyond its tolerance.
    """
    figures = differences(Traces(points, [hook for hook, _ in served.rows]), [served], None, dtype)
    worst = max(figures, key=lambda item: item.share)
    logger.info("rows of %d sites compared with the vLLM worker's; worst: %s", len(figures), worst)
    if not worst.ok:
        raise refused(f"the vLLM worker's and the gradient worker's rows differ: {worst}")
    return figures
