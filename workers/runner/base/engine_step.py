"""An engine step as the data plane sees it, the same for vLLM's v1 and v2 runners."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ....schemas.requests.specs import RankSpec

if TYPE_CHECKING:
    import torch

_Numbers = Sequence[int] | np.ndarray
#: Where the worker ends a request: its `RankSpec.key`, and the number of its tokens with those of
#: the prompt, or -1, see `Requests.end`.
RequestEnd = tuple[str, int]


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request seen for the first time, or again after a preemption."""

    id: str  # the engine's internal id: unique among live requests
    spec: RankSpec
    cached_tokens: int  # prompt tokens served by the prefix cache
    max_tokens: int = 0  # tokens generated at most; 0: unknown
    unreadable: str = ""  # why its spec cannot be read: see `ReadSpec`
    token_ids: Sequence[int] = ()  # of the prompt


@dataclass(frozen=True, slots=True)
class Finish:
    """End of a request in the scheduler.

    `token_ids`: prompt and generated tokens, including the last sampled one.
    """

    token_ids: list[int]
    aborted: bool
    # the probe that ended the request after these tokens; if there is one, the last token has a row
    stopped_by: str = ""

    @property
    def rows(self) -> int:
        """Return how many of the tokens have rows that count: a step that was under way may have
        computed one more, of the last token.
        """
        return len(self.token_ids) if self.stopped_by else len(self.token_ids) - 1


class EngineLoad(NamedTuple):
    """Load of the whole engine: requests in this step, waiting requests, and the share of the KV
    cache in use.
    """

    running: int = 0
    queued: int = 0
    kv_cache: float = 0.0


@dataclass(frozen=True, slots=True)
class RequestRows:
    """A request's share of the step's token rows: row `first_row + i` is token position
    `first_position + i`.
    """

    id: str
    first_row: int
    num_rows: int
    first_position: int
    # number of its rows in the step's logits, which are those of its last tokens: its draft tokens,
    # and one before them
    samples: int = 1


class StepView:
    """One real forward pass: its requests in the order of their token rows. Padded rows and dummy
    runs never appear.
    """

    def __init__(
        self,
        ids: Sequence[str],
        counts: _Numbers,
        positions: _Numbers,
        samples: _Numbers,
        inputs: "torch.Tensor | None" = None,
    ) -> None:
        """`ids`: of the requests. Of each request, copied: `counts`: its token rows; `positions`:
        the position of the first; `samples`: see `RequestRows`. `inputs`: token ids of the rows, on
        the device, which the next step overwrites.
        """
        self._inputs = inputs
        self.ids = list(ids)
        self.counts = np.array(counts, dtype=np.int64)
        self.positions = np.array(positions, dtype=np.int64)
        self.samples = np.array(samples, dtype=np.int64)
        self.num_rows = int(self.counts.sum())

    @cached_property
    def requests(self) -> list[RequestRows]:
        """The rows of each request. Steps that repeat the last one do without them."""
        numbers = (np.cumsum(self.counts) - self.counts, self.counts, self.positions, self.samples)
        return list(map(RequestRows, self.ids, *(each.tolist() for each in numbers)))

    def first_of(self, request: str) -> int:
        """Return the position of a request's first row; `sys.maxsize` if it has none."""
        return int(self.positions[self.ids.index(request)]) if request in self.ids else sys.maxsize

    def token_ids(self) -> np.ndarray:
        """Return the token id of each row; waits until the device has sampled it."""
        assert self._inputs is not None, "a runner gives them"
        return np.asarray(self._inputs[: self.num_rows].cpu())

    def is_like(self, other: "StepView") -> bool:
        """Return whether the rows are of the same requests, whatever their positions."""
        return (
            self.ids == other.ids
            and np.array_equal(self.counts, other.counts)
            and np.array_equal(self.samples, other.samples)
        )
