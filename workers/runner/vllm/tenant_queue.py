"""vLLM's queue of waiting requests, by tenant: a step takes them from the tenants whose turn it is.

Runs in the scheduler, which sees of the queue only what may still enter the step.
"""

from collections.abc import Iterable, Iterator, Mapping, Set
from itertools import chain
from typing import Any

from vllm.v1.core.sched.request_queue import RequestQueue, SchedulingPolicy, create_request_queue

from ..base.packed_spec import TenantShare, share_of

#: Attribute of a request: its tenant and that tenant's weight.
_SHARE = "midstream_share"


def tenant_of(request: Any) -> str:
    """Return the tenant of a request."""
    return _share(request).tenant


def weight_of(request: Any) -> int:
    """Return the weight of a request's tenant, as it was when its job began."""
    return _share(request).weight


def _share(request: Any) -> TenantShare:
    if not hasattr(request, _SHARE):
        setattr(request, _SHARE, share_of(request.sampling_params))
    share: TenantShare = getattr(request, _SHARE)
    return share


class TenantQueue(RequestQueue):
    """A queue of vLLM's for each tenant with waiting requests."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._policy = policy
        self._of_tenants = dict[str, RequestQueue]()
        self._closed: Set[str] = frozenset()  # tenants of which this step takes none
        # tenants of which this step takes requests, in order, and tokens left to each; None: any
        self._turns: Mapping[str, int] | None = None
        # the one that `peek_request` chose, and `pop_request` is to take from
        self._chosen: str | None = None

    def serve(self, turns: Mapping[str, int] | None) -> None:
        """Show only requests of tenants to which `turns` leaves tokens, in its order, until the
        next call; None: of all.
        """
        self._turns = turns
        self._chosen = None

    def close(self, tenants: Set[str]) -> None:
        """Show no requests of these tenants, until the next call."""
        self._closed = tenants
        self._chosen = None

    def open_tenants(self) -> Iterator[tuple[str, RequestQueue]]:
        """Yield the tenants with waiting requests that are not closed, with these requests."""
        for tenant, queue in self._of_tenants.items():
            if tenant not in self._closed:
                yield tenant, queue

    def of_tenants(self) -> Mapping[str, RequestQueue]:
        """Return the waiting requests of each tenant that has some."""
        return self._of_tenants

    def add_request(self, request: Any) -> None:
        self._queue(request).add_request(request)

    def prepend_request(self, request: Any) -> None:
        self._queue(request).prepend_request(request)

    def prepend_requests(self, requests: Iterable[Any]) -> None:
        for request in requests:
            self.prepend_request(request)

    def peek_request(self) -> Any:
        self._chosen = self._next()
        if self._chosen is None:
            raise IndexError("peek from an empty queue")
        return self._of_tenants[self._chosen].peek_request()

    def pop_request(self) -> Any:
        # A request that was looked at may have taken what was left to its tenant.
        tenant = self._next() if self._chosen is None else self._chosen
        self._chosen = None
        if tenant is None:
            raise IndexError("pop from an empty queue")
        request = self._of_tenants[tenant].pop_request()
        self._drop_if_empty(tenant)
        return request

    def remove_request(self, request: Any) -> None:
        tenant = tenant_of(request)
        self._of_tenants[tenant].remove_request(request)
        self._chosen = None
        self._drop_if_empty(tenant)

    def remove_requests(self, requests: Iterable[Any]) -> None:
        removed = set(requests)
        self._chosen = None
        for tenant in {tenant_of(request) for request in removed} & self._of_tenants.keys():
            self._of_tenants[tenant].remove_requests(removed)
            self._drop_if_empty(tenant)

    def __bool__(self) -> bool:
        return self._next() is not None

    def __len__(self) -> int:
        return sum(map(len, self._of_tenants.values()))

    def __iter__(self) -> Iterator[Any]:
        return chain.from_iterable(self._of_tenants[tenant] for tenant in self._open())

    def _next(self) -> str | None:
        """Return the tenant whose request is next; None: no request may enter."""
        return next(self._open(), None)

    def _open(self) -> Iterator[str]:
        """Yield the tenants of which requests may enter, in the order of their turns."""
        turns = self._of_tenants.keys() if self._turns is None else self._turns
        for tenant in turns:
            has_turn = self._turns is None or self._turns[tenant] > 0
            if has_turn and tenant in self._of_tenants and tenant not in self._closed:
                yield tenant

    def _queue(self, request: Any) -> RequestQueue:
        tenant = tenant_of(request)
        self._chosen = None
        if tenant not in self._of_tenants:
            self._of_tenants[tenant] = create_request_queue(self._policy)
        return self._of_tenants[tenant]

    def _drop_if_empty(self, tenant: str) -> None:
        if not self._of_tenants[tenant]:
            del self._of_tenants[tenant]
