"""The logit lens of the clients: one call, and its answer as arrays."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from ...schemas.base.errors import MidstreamError
from ...schemas.jobs.jobs import JobResult
from ...schemas.requests.readings import LensReading
from .. import notebook
from . import wire
from .calls import call
from .jobs import JobCalls
from .readings import Positions, one_prompt, words
from .tokens import _detokenize


@dataclass(frozen=True)
class Lens:
    """Logit lens of one prompt.

    `tokens[i, j, k]`: the k-th most likely next token, of layer `layers[i]` at `positions[j]`.
    """

    job: str
    hook: str
    layers: list[int]
    positions: list[int]  # absolute token positions
    token_ids: list[int]  # the token at each position
    tokens: np.ndarray  # int64 `[layers, positions, k]`, most likely first
    logprobs: np.ndarray  # float32 `[layers, positions, k]`, nats
    named: list[int]  # token ids that the request named
    ranks: np.ndarray  # int64 `[layers, positions, named]`; 0: the most likely of the vocabulary
    named_logprobs: np.ndarray  # float32 `[layers, positions, named]`, nats
    words: Mapping[int, str] = field(default_factory=dict)  # token id → its text, as far as known

    def word(self, token: int) -> str:
        """The token's text; its number where that is not known."""
        return self.words.get(int(token), f"#{int(token)}")

    def figure(self, path: Any = None, places: Sequence[int] | None = None) -> Any:
        """The heat map of top tokens (matplotlib, extra `plots`).

        `path`: saved there. `places`: of `positions`; by default all.

        Raises MidstreamError when matplotlib is missing or cannot write that format, OSError.
        """
        return notebook.rendered("lens_figure", self, path, places)

    def plotly(self) -> Any:
        """An interactive heatmap: `plotly.graph_objects.Figure`.

        Raises MidstreamError without plotly.
        """
        return notebook.rendered("plotly_figure", self)

    def _repr_html_(self) -> str:
        return str(notebook.rendered("lens_html", self))


def lens_of(reading: LensReading, job: str = "", words: Mapping[int, str] | None = None) -> Lens:
    """Return the lens as arrays. `words`: token id → text."""
    shape = len(reading.layers), len(reading.positions)
    return Lens(
        job=job,
        hook=reading.hook,
        layers=reading.layers,
        positions=reading.positions,
        token_ids=reading.token_ids,
        tokens=np.array(reading.top_tokens, dtype=np.int64).reshape(*shape, -1),
        logprobs=np.array(reading.top_logprobs, dtype=np.float32).reshape(*shape, -1),
        named=reading.named_tokens,
        ranks=np.array(reading.named_ranks, dtype=np.int64).reshape(
            *shape, len(reading.named_tokens)
        ),
        named_logprobs=np.array(reading.named_logprobs, dtype=np.float32).reshape(
            *shape, len(reading.named_tokens)
        ),
        words=words or {},
    )


def known_tokens(readings: Sequence[LensReading]) -> list[int]:
    """All token ids in these, ascending."""
    result: set[int] = set()
    for reading in readings:
        result.update(
            reading.token_ids,
            reading.named_tokens,
            *(row for layer in reading.top_tokens for row in layer),
        )
    return sorted(result)


def _fields(
    prompt: Any, spec: dict[str, Any], max_tokens: int, sampling: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the job's fields."""
    return {
        "lens": {**spec, "tokens": list(spec["tokens"])},
        **one_prompt(prompt, max_tokens, sampling),
    }


def _tokens(result: JobResult) -> list[int]:
    """Return the tokens whose texts are needed. Raises MidstreamError for a job without a lens."""
    if not result.lens:
        raise MidstreamError("not_found", f"job {result.id} has no lens")
    return known_tokens(result.lens[:1])


def _found(result: JobResult, texts: httpx.Response) -> Lens:
    return lens_of((result.lens or [])[0], result.id, words(_tokens(result), texts))


class LensCalls(JobCalls):
    @call
    async def lens(
        self,
        /,
        prompt: Any,
        *,
        layers: Any = "all",
        positions: Positions = "all_prompt",
        top_k: int = 5,
        tokens: Sequence[int | str] = (),
        hook: str | None = None,
        tuned: str | None = None,
        at: str | None = None,
        max_tokens: int = 1,
        timeout: float | None = None,
        sampling: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> Lens:
        """Return each layer's prediction of the next token, through the model's own final norm and
        output matrix.

        `prompt`: text, token ids, or a conversation. `tokens`: ids, or texts of one token, whose
        rank and log-probability are wanted.
        `hook`: post_block by default. `tuned`: the name of a tuned lens, whose maps rows go through
        first. `at`: after edits of the same place by default. `fields`: of the job: `model`,
        `steering`, …
        """
        spec = wire.given(
            layers=layers,
            positions=positions,
            top_k=top_k,
            tokens=tokens,
            hook=hook,
            tuned=tuned,
            at=at,
        )
        result = await self.run(
            timeout=timeout, progress=False, **fields | _fields(prompt, spec, max_tokens, sampling)
        )
        return _found(result, await self._send(_detokenize(result.model, _tokens(result))))
