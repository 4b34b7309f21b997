"""Shallow requests and steps: those of requests that need no token, and only the first layers.

A step of shallow requests alone ends at the deepest layer that one of them needs. In a step with
other requests they are computed like these, in every layer. So a few waiting tokens of shallow
requests join whole steps, and many get steps of their own, which take turns with whole ones: others
wait for one step at most, as they would for a long prompt, and for less of it.
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

from vllm.platforms import current_platform

from .cell_steps import ENOUGH_TOKENS

#: Tokens on an accelerator with which a step takes as long for its products as for reading the
#: weights, so that a step of its own costs others no more than the layers that it leaves out save.
_ENOUGH_ON_ACCELERATOR = 512


@dataclass(slots=True)
class _Shallow:
    depth: int  # layers that it needs
    tokens: int  # that are still to be computed


class ShallowSteps:
    """The shallow requests of one scheduler, and whose turn a step is."""

    def __init__(self) -> None:
        self._live: dict[str, _Shallow] = {}
        self._waiting = 0  # tokens of all of them that are still to be computed
        self._was_shallow = False  # the last step in which there was a choice
        self._enough = ENOUGH_TOKENS if current_platform.is_cpu() else _ENOUGH_ON_ACCELERATOR

    def join(self, request_id: str, depth: int, tokens: int) -> None:
        """Add a request with so many tokens to compute."""
        self._live[request_id] = _Shallow(depth, tokens)
        self._waiting += tokens

    def leave(self, request_id: str) -> None:
        if request_id in self._live:
            self._waiting -= self._live.pop(request_id).tokens

    def left(self, request_id: str, tokens: int) -> None:
        """Note how many tokens of a request are still to be computed, if it is shallow."""
        if (request := self._live.get(request_id)) is not None:
            self._waiting += tokens - request.tokens
            request.tokens = tokens

    def held_out(self, live: Mapping[str, Any]) -> Set[str]:
        """Return the requests that the next step does not take, of all `live` ones."""
        if not self._live:
            return frozenset()
        alone = len(self._live) == len(live)
        if not alone and self._waiting < self._enough:
            return frozenset()
        shallow = alone or not self._was_shallow
        self._was_shallow = shallow
        if not shallow:
            return frozenset(self._live)
        deeper = self._deeper()
        return deeper if alone else deeper | (live.keys() - self._live.keys())

    def _deeper(self) -> Set[str]:
        """Return the shallow requests that would make the others' step deeper, if it has enough
        tokens without them. The oldest is never one of them.
        """
        deepest = 0
        tokens = 0
        deeper = set[str]()
        for request_id, request in self._live.items():
            if tokens >= self._enough and request.depth > deepest:
                deeper.add(request_id)
            else:
                tokens += request.tokens
                deepest = max(deepest, request.depth)
        return deeper

    def take(self, step: Mapping[str, int], live: Mapping[str, Any]) -> int:
        """Note the tokens that a step takes of each of its requests; return after how many layers
        it may end, 0 for all.
        """
        taken = [name for name in self._live if name in step]
        for name in taken:
            # those of the step count as computed
            self.left(name, live[name].num_tokens - live[name].num_computed_tokens)
        shallow = taken and len(taken) == len(step)
        return max(self._live[name].depth for name in taken) if shallow else 0
