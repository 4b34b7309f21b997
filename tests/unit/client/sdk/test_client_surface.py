"""`Client` and `AsyncClient` have the same calls, with the same signatures and docstrings; each is
written once.
"""

import asyncio
import inspect
from collections.abc import AsyncIterator, Iterator
from typing import Any, assert_type, get_args

import pytest
from http_kit import reply, server

from midstream.client import AsyncClient, AsyncPatchStudy, Client, PatchStudy
from midstream.client.sdk.calls import Blocking, Calls, call, finish, iterate, stream
from midstream.client.sdk.transport import AwaitingTransport, BlockingTransport
from midstream.schemas.jobs.jobs import Event, JobResult, JobView


def public(kind: type) -> dict[str, Any]:
    return {
        name: member
        for name, member in inspect.getmembers(kind, callable)
        if not name.startswith("_")
    }


def test_both_clients_have_the_same_calls_and_signatures() -> None:
    blocking, awaiting = public(Client), public(AsyncClient)
    assert blocking.keys() == awaiting.keys()
    assert len(blocking) > 60
    for name in blocking:
        here, there = inspect.signature(blocking[name]), inspect.signature(awaiting[name])
        assert here.parameters == there.parameters, name
        assert inspect.getdoc(blocking[name]) == inspect.getdoc(awaiting[name]), name
        if inspect.isasyncgenfunction(awaiting[name]):
            assert here.return_annotation == Iterator[get_args(there.return_annotation)], name
        else:
            assert inspect.iscoroutinefunction(awaiting[name]), name
            assert here.return_annotation == there.return_annotation, name
        assert not inspect.iscoroutinefunction(blocking[name]), name


def test_both_studies_have_the_same_calls_and_signatures() -> None:
    blocking, awaiting = public(PatchStudy), public(AsyncPatchStudy)
    assert blocking.keys() == awaiting.keys()
    for name in blocking:
        assert inspect.signature(blocking[name]) == inspect.signature(awaiting[name]), name
        assert not inspect.iscoroutinefunction(blocking[name]), name
    assert {name for name in awaiting if inspect.iscoroutinefunction(awaiting[name])} == {
        "sweep",
        "zoom",
    }


@pytest.mark.parametrize("kind", [Client, PatchStudy])
def test_every_call_has_a_docstring(kind: type) -> None:
    assert [name for name, member in public(kind).items() if not inspect.getdoc(member)] == []


def test_type_checkers_see_results_of_one_client_and_coroutines_of_the_other() -> None:
    """mypy reads this function; it is never run."""

    async def awaited(client: AsyncClient) -> None:
        assert_type(await client.submit(model="m"), JobView)
        assert_type(await client.run(model="m"), JobResult)
        async for event in client.events("job_x"):
            assert_type(event, Event)
        study = await AsyncPatchStudy("a").sweep()
        assert_type(await study.zoom(), AsyncPatchStudy)

    def blocked(client: Client) -> None:
        assert_type(client.submit(model="m"), JobView)
        assert_type(client.run(model="m"), JobResult)
        assert_type(client.events("job_x"), Iterator[Event])
        assert_type(PatchStudy("a").sweep().zoom(), PatchStudy)

    assert awaited
    assert blocked


class _Counting(Calls):
    def __init__(self, transport: Any) -> None:
        self._io = transport
        self.open = 0

    @call
    async def twice(self, number: int) -> int:
        """Doubled."""
        if number < 0:
            raise ValueError("negative")
        await self._io.sleep(0)
        return await self._io.work(lambda: 2 * number)

    @stream
    async def count(self, below: int) -> AsyncIterator[int]:
        """Counted."""
        self.open += 1
        try:
            for number in range(below):
                yield await self.twice(number)
        finally:
            self.open -= 1


class _CountingClient(Blocking, _Counting):
    def __init__(self) -> None:
        self._awaited = _Counting(BlockingTransport("http://127.0.0.1:1", {}))


def test_a_call_written_as_a_coroutine_blocks_and_awaits() -> None:
    client = _CountingClient()
    assert (client.twice(4), list(client.count(3))) == (8, [0, 2, 4])
    with pytest.raises(ValueError, match="negative"):
        client.twice(-1)

    async def awaited() -> None:
        calls = _Counting(AwaitingTransport("http://127.0.0.1:1", {}))
        assert (await calls.twice(4), [number async for number in calls.count(3)]) == (8, [0, 2, 4])

    asyncio.run(awaited())


def test_an_iterator_that_is_left_early_closes_its_generator() -> None:
    calls = _CountingClient()._awaited
    held = calls.count(5)  # so that no collection of garbage closes it
    numbers = iterate(held)
    assert (next(numbers), calls.open) == (0, 1)
    numbers.close()  # type: ignore[attr-defined]
    assert calls.open == 0


def test_the_blocking_client_works_inside_a_running_event_loop() -> None:
    """As in a notebook, whose cells run in one."""

    async def cell() -> list[int]:
        return list(_CountingClient().count(3))

    assert asyncio.run(cell()) == [0, 2, 4]


def test_a_blocking_call_that_would_suspend_is_refused() -> None:
    async def suspends() -> None:
        await asyncio.sleep(0)

    async def suspended() -> AsyncIterator[int]:
        await asyncio.sleep(0)
        yield 1

    for attempt in (lambda: finish(suspends()), lambda: list(iterate(suspended()))):  # type: ignore[arg-type]
        with pytest.raises(RuntimeError, match="suspended"):
            attempt()


def test_both_clients_send_the_same_request() -> None:
    async def awaited(url: str) -> None:
        async with AsyncClient(url, "ms_key") as client:
            await client.cancel("job_x")

    view = JobView(
        id="job_x", kind="generate", model="m", state="cancelled", attempt=1, version=1, created=1.0
    )  # type: ignore[arg-type]
    with server(reply(view)) as (url, requests):
        with Client(url, "ms_key") as client:
            client.cancel("job_x")
        asyncio.run(awaited(url))
    assert requests[0] == requests[1]
