"""Features of sparse autoencoders, of both clients: one call, and its answer."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from ...schemas.errors import MidstreamError
from ...schemas.jobs import JobResult
from ...schemas.readings import FeaturesReading
from ...schemas.tokens import Detokenized
from . import wire
from .tokens import _detokenize


@dataclass(frozen=True)
class Features:
    """The most active features of each token of one prompt, and of what was generated for it where positions name that."""

    job: str
    reading: FeaturesReading
    words: Mapping[int, str] = field(default_factory=dict)  # token id → its text, as far as known

    def word(self, place: int) -> str:
        """The text of the token at this place of `reading.positions`; its id where that is not known."""
        token = self.reading.token_ids[place]
        return self.words.get(token, f"#{token}")

    def of(self, place: int) -> dict[int, float]:
        """Feature → activation, most active first, of the token at this place of `reading.positions`."""
        return dict(zip(self.reading.features[place], self.reading.activations[place], strict=True))

    def activations(self, feature: int) -> np.ndarray:
        """float32 `[positions]` of one feature; 0 where it is not among the tokens' most active ones."""
        return np.array([self.of(place).get(feature, 0.0) for place in range(len(self.reading.positions))], np.float32)

    def top(self, count: int = 10) -> list[tuple[int, float]]:
        """The features with the largest activation on any token, most active first."""
        largest: dict[int, float] = {}
        for place in range(len(self.reading.positions)):
            for feature, value in self.of(place).items():
                largest[feature] = max(value, largest.get(feature, 0.0))
        return sorted(largest.items(), key=lambda item: -item[1])[:count]


def _fields(prompt: Any, spec: dict[str, Any], more: dict[str, Any], max_tokens: int) -> dict[str, Any]:
    chat = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], Mapping)
    given = {name: value for name, value in spec.items() if value is not None}
    sampling = {"max_tokens": max_tokens, **more.pop("sampling", {})}
    return {**more, ("messages" if chat else "prompts"): [prompt], "features": given, "sampling": sampling}


def _reading(result: JobResult) -> FeaturesReading:
    if not result.features:
        raise MidstreamError("not_found", f"job {result.id} has no features")
    return result.features[0]


class FeatureCalls(ABC):
    """Of the blocking client."""

    @abstractmethod
    def _send(self, call: wire.Call) -> httpx.Response: ...

    @abstractmethod
    def run(self, request: Any = None, *, timeout: float | None = None, progress: bool = True, **fields: Any) -> JobResult: ...

    def features(
        self,
        prompt: Any,
        sae: str,
        *,
        positions: str | Sequence[Any] | Mapping[str, Any] = "all_prompt",
        top_k: int = 10,
        at: str | None = None,
        max_tokens: int = 1,
        timeout: float | None = None,
        **fields: Any,
    ) -> Features:
        """The `top_k` most active features of the autoencoder `sae`, of each token at `positions`.

        `prompt`: text, token ids, or a conversation. `at`: after edits of the same place by default. `fields`: of the job: `model`,
        `steering`, …
        """
        spec = {"sae": sae, "positions": positions, "top_k": top_k, "at": at}
        result = self.run(timeout=timeout, progress=False, **_fields(prompt, spec, fields, max_tokens))
        known = sorted(set(_reading(result).token_ids))
        words = wire.decode(self._send(_detokenize(result.model, known)), Detokenized).token_strs
        return Features(result.id, _reading(result), dict(zip(known, words, strict=True)))


class AsyncFeatureCalls(ABC):
    """Of the client that awaits."""

    @abstractmethod
    async def _send(self, call: wire.Call) -> httpx.Response: ...

    @abstractmethod
    async def run(self, request: Any = None, *, timeout: float | None = None, progress: bool = True, **fields: Any) -> JobResult: ...

    async def features(
        self,
        prompt: Any,
        sae: str,
        *,
        positions: str | Sequence[Any] | Mapping[str, Any] = "all_prompt",
        top_k: int = 10,
        at: str | None = None,
        max_tokens: int = 1,
        timeout: float | None = None,
        **fields: Any,
    ) -> Features:
        """As `FeatureCalls.features`."""
        spec = {"sae": sae, "positions": positions, "top_k": top_k, "at": at}
        result = await self.run(timeout=timeout, progress=False, **_fields(prompt, spec, fields, max_tokens))
        known = sorted(set(_reading(result).token_ids))
        words = wire.decode(await self._send(_detokenize(result.model, known)), Detokenized).token_strs
        return Features(result.id, _reading(result), dict(zip(known, words, strict=True)))
