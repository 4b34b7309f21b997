"""The share of each tenant in a step: which waiting requests may enter it, and how many tokens of
each prompt.

Runs in the scheduler. While requests of several tenants are in the engine, the tokens that a step
has for prompts are divided between the tenants that have prompts to compute: none gets more than it
needs, and the others the rest, by their weights. So a tenant without a backlog enters the next
step. Where one has none, the tokens of prompts are also limited to what the step's pace allows,
since it waits for the end of that step. With one tenant, nothing is limited.
"""

import time
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.request import RequestStatus

from .step_pace import LOOSE_PACE, PACE, StepPace
from .tenant_places import TenantPlaces
from .tenant_queue import TenantQueue, tenant_of, weight_of

#: A tenant counts as here for so many seconds after its last request: one that asks again when it
#: has an answer would otherwise meet a step that is full.
_LINGERS_S = 0.5


class TenantTurns:
    """The turns in one scheduler."""

    def __init__(
        self,
        policy: SchedulingPolicy,
        most: int,
        next_tokens: int,
        places: int,
        *,
        splits: bool,
    ) -> None:
        """`policy`: of the requests of a tenant. `most`: tokens in a step at most. `next_tokens`:
        those of a request that generates, at most. `places`: of requests that run. `splits`:
        whether prompts may be computed in several steps, cut anywhere.
        """
        self.waiting = TenantQueue(policy)
        self._most = most
        self._next_tokens = next_tokens
        self._all_places = places
        self._places: TenantPlaces | None = None  # before this step; None: nobody waits for one
        self._splits = splits
        self.pace = StepPace(most)
        self._requests = Counter[str]()  # tenant → its requests in the engine
        self._weights = dict[str, int]()
        self._left = dict[str, float]()  # tenant without requests → when its last one ended
        # tenant that is here → tokens of its prompts that were computed, divided by its weight
        self._served = dict[str, float]()
        #: Tenant → tokens of its prompts that this step may still compute, in the order of their
        #: turns; None: nothing is divided.
        self.left: dict[str, int] | None = None

    def join(self, request: Any) -> None:
        """Note that a request has arrived; `leave` that it has ended."""
        tenant = tenant_of(request)
        self._requests[tenant] += 1
        self._weights[tenant] = weight_of(request)
        self._left.pop(tenant, None)
        # what it did not use while it was away is not made up for
        self._served.setdefault(tenant, min(self._served.values(), default=0.0))

    def leave(self, request: Any) -> None:
        tenant = tenant_of(request)
        self._requests[tenant] -= 1
        if not self._requests[tenant]:
            del self._requests[tenant]
            self._left[tenant] = time.monotonic()

    def crowding(self, running: Sequence[Any], places: int) -> Any | None:
        """Look at the places before a step, of which so many are free; return the request that is
        to give its place to another tenant's.
        """
        self._places = None
        if not self.waiting or not self._several():
            return None
        queues = self.waiting.of_tenants()
        held = {
            tenant: number - len(queues.get(tenant, ()))
            for tenant, number in self._requests.items()
        }
        self._places = TenantPlaces.of(self._all_places, held, self._weights)
        if places > 0 or not self._places.short & queues.keys():
            return None
        tenant = self._places.crowding
        return next(request for request in reversed(running) if tenant_of(request) == tenant)

    def divide(
        self, running: int, computing: Iterable[Any], places: int, waits: Container[str]
    ) -> bool:
        """Divide a step that begins, until `end`; return whether there is something to divide.
        `running`: number of requests that run; `computing`: those of them whose prompts are not
        computed; `places`: how many others may enter; `waits`: ids of requests that get no tokens.
        """
        computing = [request for request in computing if request.request_id not in waits]
        if self._places is not None:
            self.waiting.close(self._places.closed(places))
        if (computing or (self.waiting and places > 0)) and self._several():
            most = self._most - (running - len(computing)) * self._next_tokens
            needs = self._needs(most, computing, places)
            shares = self._shares(most, needs)
            self.left = {
                tenant: shares[tenant]
                for tenant in sorted(
                    shares,
                    key=lambda tenant: (shares[tenant] < needs[tenant], self._served[tenant]),
                )
            }
        self.waiting.serve(self.left)
        return self.left is not None

    def end(self) -> None:
        """Note that the step is composed."""
        self.left = None
        self.waiting.serve(None)
        self.waiting.close(set())

    def take(self, request: Any, tokens: int, *, whole: bool) -> int:
        """Return how many of its next `tokens` a request may compute in this step, and take them
        from its tenant's share. `whole`: all or none.
        """
        assert self.left is not None, "only steps that are divided have shares"
        if self._is_free(request, tokens):
            return tokens
        few = tokens <= self._next_tokens  # vLLM pads these by drafts, and takes all or none
        tenant = tenant_of(request)
        share = self.left.get(tenant, 0)
        if share <= 0:
            return 0
        taken = tokens if few or whole or not self._splits else min(tokens, share)
        self._charge(tenant, taken)
        return taken

    def give_back(self, request: Any, taken: int, computed: int) -> None:
        """Give back what was taken of a share and is not computed in this step."""
        if not self._is_free(request, taken):
            self._charge(tenant_of(request), computed - taken)

    def _is_free(self, request: Any, tokens: int) -> bool:
        """Return whether these next tokens are of no share: the request generates, or its prompt is
        nearly computed.
        """
        return tokens <= self._next_tokens and request.status == RequestStatus.RUNNING

    def _charge(self, tenant: str, tokens: int) -> None:
        assert self.left is not None, "only steps that are divided have shares"
        self.left[tenant] = self.left.get(tenant, 0) - tokens
        self._served[tenant] += tokens / self._weights[tenant]

    def _several(self) -> bool:
        """Return whether requests of several tenants are here, or were just now."""
        since = time.monotonic() - _LINGERS_S
        for tenant in [tenant for tenant, left in self._left.items() if left < since]:
            del self._left[tenant], self._served[tenant], self._weights[tenant]
        return len(self._served) > 1

    def _shares(self, most: int, needs: Mapping[str, int]) -> dict[str, int]:
        """Return how many of the `most` tokens that a step has for prompts each tenant gets that
        needs some.
        """

        def within(limit: int) -> dict[str, int]:
            return divided(min(most, limit), needs, self._weights)

        paced = within(self.pace.tokens(PACE))
        # Those who get what they need wait for the end of the step only.
        kept = {name for name in self._served if paced.get(name, 0) >= needs.get(name, 0)}
        if not kept:
            return within(most)
        if not self._requests.keys() & kept:
            return within(self.pace.tokens(LOOSE_PACE))
        if self.pace.probes():
            return {name: share if name in kept else 0 for name, share in paced.items()}
        return paced

    def _needs(self, most: int, computing: Iterable[Any], places: int) -> Counter[str]:
        """Return how many tokens of each tenant's prompts could be in a step of `most` tokens."""
        needs = Counter[str]()
        for request in computing:
            needs[tenant_of(request)] += request.num_tokens - request.num_computed_tokens
        for tenant, queue in self.waiting.open_tenants():
            for request in islice(queue, places):
                if needs[tenant] >= most:
                    break
                needs[tenant] += request.num_tokens
        return needs


def divided(most: int, needs: Mapping[str, int], weights: Mapping[str, int]) -> dict[str, int]:
    """Divide `most` tokens by weights, so that none gets more than it needs, and all that need more
    than their share the rest.
    """
    shares = dict[str, int]()
    total = sum(weights[tenant] for tenant in needs)
    for tenant in sorted(needs, key=lambda tenant: needs[tenant] / weights[tenant]):
        share = -(-max(most, 0) * weights[tenant] // total)
        shares[tenant] = min(needs[tenant], share)
        most -= shares[tenant]
        total -= weights[tenant]
    return shares
