"""Readings of one prompt: the logit lens, the features of autoencoders and attention patterns, and
their answers as arrays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Unpack

import numpy as np

from ...schemas.base.errors import MidstreamError
from ...schemas.base.records import Plotted
from ...schemas.jobs.jobs import JobRequest
from ...schemas.jobs.results import JobResult
from ...schemas.prompts.selectors import LayerSelector, as_ranges
from ...schemas.readings.features import FeaturesReading
from ...schemas.readings.lens import LensReading, LensSpec
from ...schemas.requests.specs import PatchSpec
from ..captures.patterns import Attention, attention_of
from ..captures.reader import CaptureReader
from ..values import known_keywords
from . import wire
from .attention import (
    Patterns,
    attention_patches,
    by_layer,
    capture_fields,
    patched_fields,
    values_fields,
)
from .calls import Awaits, Calls, M, call
from .captures import Captures
from .fields import FeatureFields, Fields, Numbers, Positions, ReadingFields, RunFields
from .jobs import Jobs
from .server import ServerCalls

#: Names of autoencoders, or name → how many features to return per token.
SaeChoice = Sequence[str] | Mapping[str, int]
#: Token id → its text, as far as known.
Words = Mapping[int, str]
TOP_K = 10


@dataclass(frozen=True)
class Lens(Plotted):
    """Logit lens of one prompt.

    `top_ids[i, j, k]`: the k-th most likely next token, of layer `layers[i]` at `positions[j]`.
    """

    job: str
    hook: str
    layers: list[int]
    positions: list[int]  # absolute token positions
    token_ids: list[int]  # the token at each position
    top_ids: np.ndarray  # int64 `[layers, positions, k]`, most likely first
    logprobs: np.ndarray  # float32 `[layers, positions, k]`, nats
    named: list[int]  # token ids that the request named
    ranks: np.ndarray  # int64 `[layers, positions, named]`; 0: the most likely of the vocabulary
    named_logprobs: np.ndarray  # float32 `[layers, positions, named]`, nats
    words: Words = field(default_factory=dict)

    def __repr__(self) -> str:
        return (
            f"Lens(job={self.job!r}, hook={self.hook!r}, layers={as_ranges(self.layers)}, "
            f"positions={as_ranges(self.positions)}, top_k={self.top_ids.shape[2]})"
        )

    @property
    def tokens(self) -> list[str]:
        """The text of the token at each of `positions`, as far as known."""
        return list(map(self.word, self.token_ids))

    def word(self, token: int) -> str:
        """Return the token's text, or its number if the text is not known."""
        return self.words.get(int(token), f"#{int(token)}")


def lens_of(reading: LensReading, job: str = "", words: Words | None = None) -> Lens:
    """Return the lens as arrays. `words`: token id → text."""
    shape = len(reading.layers), len(reading.positions)
    return Lens(
        job=job,
        hook=reading.hook,
        layers=reading.layers,
        positions=reading.positions,
        token_ids=reading.token_ids,
        top_ids=np.array(reading.top_tokens, dtype=np.int64).reshape(*shape, -1),
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
    """Return all token ids in these readings, ascending."""
    parts = [
        part
        for reading in readings
        for part in (reading.token_ids, reading.named_tokens, *chain(*reading.top_tokens))
    ]
    return sorted({*chain(*parts)})


@dataclass(frozen=True)
class Features(Plotted):
    """The most active features of each token of one prompt, and of generated tokens if the
    positions include them.
    """

    job: str
    reading: FeaturesReading
    words: Words = field(default_factory=dict)

    def __repr__(self) -> str:
        return (
            f"Features(job={self.job!r}, sae={self.reading.sae!r}, "
            f"positions={as_ranges(self.reading.positions)})"
        )

    @property
    def tokens(self) -> list[str]:
        """The text of the token at each of `reading.positions`, or its id if it is not known."""
        return [self.words.get(token, f"#{token}") for token in self.reading.token_ids]

    def of(self, place: int) -> dict[int, float]:
        """Return feature → activation, most active first, of the token at this index of
        `reading.positions`.
        """
        return dict(zip(self.reading.features[place], self.reading.activations[place], strict=True))

    def activations(self, feature: int) -> np.ndarray:
        """Return one feature's activations, float32 `[positions]`; 0 at tokens whose returned
        features do not include it.
        """
        return np.array(
            [self.of(place).get(feature, 0.0) for place in range(len(self.reading.positions))],
            np.float32,
        )

    def top(self, count: int = 10, start: int = 0) -> list[tuple[int, float]]:
        """Return the features with the largest activation on any token, most active first.

        `start`: the first index of `reading.positions` that counts.
        """
        largest: dict[int, float] = {}
        for place in range(start, len(self.reading.positions)):
            for feature, value in self.of(place).items():
                largest[feature] = max(value, largest.get(feature, 0.0))
        return sorted(largest.items(), key=lambda item: -item[1])[:count]


class Readings(Calls[M]):
    """Readings of one prompt (docs/read.md); `patch_attention` has heads attend as given
    (docs/read.md#patching-a-pattern).
    """

    async def _run(
        self,
        prompt: Any,
        max_tokens: int,
        sampling: Fields | None,
        timeout: float | None,
        fields: dict[str, Any],
    ) -> JobResult:
        """Run a job of one prompt: text, token ids, or a conversation."""
        chat = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], Mapping)
        fields["messages" if chat else "prompts"] = [prompt]
        fields["sampling"] = {"max_tokens": max_tokens, **(sampling or {})}
        return await Jobs[Awaits](self._io).run(timeout=timeout, progress=False, **fields)

    async def _texts(self, model: str, tokens: Sequence[int]) -> dict[int, str]:
        """Token id → its text."""
        answer = await ServerCalls[Awaits](self._io).detokenize(model, tokens)
        return dict(zip(tokens, answer.token_strs, strict=True))

    @call
    async def lens(
        self,
        /,
        prompt: Any,
        *,
        layers: Numbers = "all",
        positions: Positions = "all_prompt",
        top_k: int = 5,
        tokens: Sequence[int | str] = (),
        hook: str | None = None,
        tuned: str | None = None,
        jacobian: str | None = None,
        at: str | None = None,
        max_tokens: int = 0,
        timeout: float | None = None,
        sampling: Fields | None = None,
        **fields: Unpack[ReadingFields],
    ) -> Lens:
        """Return the logit lens of a prompt: each layer's rows, passed through the model's final
        norm and output matrix, as predictions of the next token.

        `prompt`: text, token ids, or a conversation. `tokens`: ids, or texts of one token, whose
        rank and log-probability to return. `hook`: post_block by default. `tuned`: the name of a
        tuned lens, whose maps are applied to the rows first; `jacobian`: of a Jacobian lens, in its
        place. `at`: before or after (default) edits at the same site. `fields`: other fields of the
        job: `model`, `steering`, …
        """
        spec = wire.given(
            layers=layers,
            positions=positions,
            top_k=top_k,
            tokens=list(tokens),
            hook=hook,
            tuned=tuned,
            jacobian=jacobian,
            at=at,
        )
        known_keywords(fields, JobRequest, LensSpec.__struct_fields__)
        result = await self._run(prompt, max_tokens, sampling, timeout, {**fields, "lens": spec})
        if not result.lens:
            raise MidstreamError("not_found", f"job {result.id} has no lens")
        texts = await self._texts(result.model, known_tokens(result.lens[:1]))
        return lens_of(result.lens[0], result.id, texts)

    @call
    async def features(
        self, /, prompt: Any, sae: str, *, top_k: int = TOP_K, **options: Unpack[FeatureFields]
    ) -> Features:
        """Return the `top_k` most active features of the autoencoder `sae`.

        `options`: as for `features_of`.
        """
        return (await self.features_of(prompt, {sae: top_k}, **options))[sae]

    @call
    async def features_of(
        self,
        /,
        prompt: Any,
        saes: SaeChoice,
        *,
        positions: Positions = "all_prompt",
        at: str | None = None,
        max_tokens: int = 0,
        timeout: float | None = None,
        sampling: Fields | None = None,
        **fields: Unpack[ReadingFields],
    ) -> dict[str, Features]:
        """Return, by autoencoder, the most active features of each token at `positions`, in one
        request.

        `prompt`: text, token ids, or a conversation. `at`: before or after (default) edits at the
        same site. `fields`: other fields of the job: `model`, `steering`, …
        """
        if not isinstance(saes, Mapping):
            saes = dict.fromkeys([saes] if isinstance(saes, str) else saes, TOP_K)
        specs = [
            wire.given(sae=sae, positions=positions, top_k=top_k, at=at)
            for sae, top_k in saes.items()
        ]
        result = await self._run(
            prompt, max_tokens, sampling, timeout, {**fields, "features": specs}
        )
        if not result.features:
            raise MidstreamError("not_found", f"job {result.id} has no features")
        tokens = {token for reading in result.features for token in reading.token_ids}
        texts = await self._texts(result.model, sorted(tokens))
        return {reading.sae: Features(result.id, reading, texts) for reading in result.features}

    @call
    async def attention(
        self,
        /,
        prompt: str | Sequence[int],
        *,
        layers: LayerSelector = "all",
        heads: LayerSelector | None = None,
        **fields: Unpack[RunFields],
    ) -> Attention:
        """Return the attention patterns `[heads, query, key]` of a prompt in `layers`.

        `prompt`: text or token ids. `heads`: by default all. `fields`: of the job that captures
        queries and keys, such as `model`, `steering` or `lora`; edits at `q` and `k` affect the
        patterns. The job's capture stays on the server, see `Attention.job`. Raises what the job
        and `CaptureReader.attention` raise.
        """
        own = {"progress": False, **fields}
        known_keywords(
            own.keys() - RunFields.__annotations__.keys(), JobRequest, ("layers", "heads")
        )
        with await self._captured(capture_fields(prompt, layers, own)) as reader:
            return await self._io.work(attention_of, reader, layers, heads)

    @call
    async def patch_attention(
        self, /, prompt: str | Sequence[int], patterns: Patterns, **fields: Unpack[RunFields]
    ) -> JobResult:
        """Run a prompt with the attention of some heads replaced by `patterns`: z ← A′·v, with the
        prompt's own values, layer after layer.

        `patterns`: (layer, head) → A′ `[query, key]` over the tokens of the prompt, zero where the
        key is later than the query; rows need not sum to 1. Generated tokens attend as usual.
        `fields`: of the job, such as `model`, `capture` and `sampling`; probes may not steer. Runs
        one job per layer, which captures that layer's values with the layers below patched, and
        then the job itself. Raises what `attention_patches` and the jobs raise.
        """
        patches: list[PatchSpec] = []
        for layer, layer_patterns in by_layer(patterns, fields).items():
            job = {"progress": False, **values_fields(prompt, layer, patches, dict(fields))}
            with await self._captured(job) as reader:
                patches = [*patches, *attention_patches(reader, layer_patterns)]
        return await Jobs[Awaits](self._io).run(**patched_fields(prompt, patches, dict(fields)))

    async def _captured(self, fields: dict[str, Any]) -> CaptureReader:
        """Run a job; return a reader of what it captured."""
        return await Captures[Awaits](self._io).open(await Jobs[Awaits](self._io).run(**fields))
