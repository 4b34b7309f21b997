"""Features of sparse autoencoders: the calls, and their answer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from ...schemas.base.errors import MidstreamError
from ...schemas.jobs.jobs import JobResult
from ...schemas.requests.readings import FeaturesReading
from .. import notebook
from . import wire
from .calls import call
from .jobs import JobCalls
from .readings import Positions, one_prompt, words
from .tokens import _detokenize


@dataclass(frozen=True)
class Features:
    """The most active features of each token of one prompt, and of what was generated for it where
    positions name that.
    """

    job: str
    reading: FeaturesReading
    words: Mapping[int, str] = field(default_factory=dict)  # token id → its text, as far as known

    def word(self, place: int) -> str:
        """The text of the token at this place of `reading.positions`; its id where that is not
        known.
        """
        token = self.reading.token_ids[place]
        return self.words.get(token, f"#{token}")

    def of(self, place: int) -> dict[int, float]:
        """Feature → activation, most active first, of the token at this place of
        `reading.positions`.
        """
        return dict(zip(self.reading.features[place], self.reading.activations[place], strict=True))

    def activations(self, feature: int) -> np.ndarray:
        """float32 `[positions]` of one feature; 0 where it is not among the tokens' most active
        ones.
        """
        return np.array(
            [self.of(place).get(feature, 0.0) for place in range(len(self.reading.positions))],
            np.float32,
        )

    def _repr_html_(self) -> str:
        return str(notebook.rendered("features_html", self))

    def top(self, count: int = 10) -> list[tuple[int, float]]:
        """The features with the largest activation on any token, most active first."""
        largest: dict[int, float] = {}
        for place in range(len(self.reading.positions)):
            for feature, value in self.of(place).items():
                largest[feature] = max(value, largest.get(feature, 0.0))
        return sorted(largest.items(), key=lambda item: -item[1])[:count]


#: Names of autoencoders, or name → how many features of each token come back.
Saes = Sequence[str] | Mapping[str, int]
TOP_K = 10


def _fields(
    prompt: Any,
    saes: Saes,
    positions: Positions,
    at: str | None,
    max_tokens: int,
    sampling: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Return the job's fields."""
    most = (
        saes
        if isinstance(saes, Mapping)
        else dict.fromkeys([saes] if isinstance(saes, str) else saes, TOP_K)
    )
    fields = [
        wire.given(sae=sae, positions=positions, top_k=top_k, at=at) for sae, top_k in most.items()
    ]
    return {"features": fields, **one_prompt(prompt, max_tokens, sampling)}


def _tokens(result: JobResult) -> list[int]:
    """Return the tokens whose texts are needed.

    Raises MidstreamError for a job without features.
    """
    if not result.features:
        raise MidstreamError("not_found", f"job {result.id} has no features")
    return sorted({token for reading in result.features for token in reading.token_ids})


def _found(result: JobResult, texts: httpx.Response) -> dict[str, Features]:
    results = words(_tokens(result), texts)
    return {reading.sae: Features(result.id, reading, results) for reading in result.features or []}


class FeatureCalls(JobCalls):
    @call
    async def features(
        self, /, prompt: Any, sae: str, *, top_k: int = TOP_K, **options: Any
    ) -> Features:
        """The `top_k` most active features of the autoencoder `sae`.

        `options`: as of `features_of`.
        """
        return (await self.features_of(prompt, {sae: top_k}, **options))[sae]

    @call
    async def features_of(
        self,
        /,
        prompt: Any,
        saes: Saes,
        *,
        positions: Positions = "all_prompt",
        at: str | None = None,
        max_tokens: int = 1,
        timeout: float | None = None,
        sampling: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> dict[str, Features]:
        """Name of each autoencoder → the most active features of each token at `positions`, by one
        request.

        `prompt`: text, token ids, or a conversation. `at`: after edits of the same place by
        default. `fields`: of the job: `model`, `steering`, …
        """
        fields |= _fields(prompt, saes, positions, at, max_tokens, sampling)
        result = await self.run(timeout=timeout, progress=False, **fields)
        return _found(result, await self._send(_detokenize(result.model, _tokens(result))))
