"""`Client` and `AsyncClient` have the same calls, with the same signatures and docstrings; each is
written once.
"""

import asyncio
import inspect
import pydoc
import textwrap
from collections.abc import AsyncIterator
from importlib import import_module
from typing import Any

import msgspec
import pytest
from http_kit import reply, server
from job_kit import job_view

from midstream.client import AsyncClient, AsyncPatchStudy, Client, PatchStudy
from midstream.client.sdk import fields
from midstream.client.sdk.calls import Awaits, Blocks, Calls, M, call, finish, iterate, stream
from midstream.client.sdk.transport import AwaitingTransport, BlockingTransport
from midstream.schemas.artifacts.probes import ProbeRequest
from midstream.schemas.jobs.jobs import JobRequest, Sampling
from midstream.schemas.jobs.openai import ChatRequest, CompletionRequest, Unserved
from midstream_harvest.client.fields import HarvestFields
from midstream_harvest.records.harvests import HarvestRequest
from midstream_lab.client import fields as lab
from midstream_lab.records.attributions import AttributionRequest
from midstream_lab.records.fits import FitRequest, LensFitRequest
from midstream_lab.records.sweeps import SweepRequest

#: Each group of calls, and the calls that a client has itself.
GROUPS = {name: type(group) for name, group in vars(Client("http://127.0.0.1:1")).items()
          if isinstance(group, Calls)} | {"client": Client}  # fmt: skip


def public(kind: type) -> dict[str, Any]:
    return {
        name: member
        for name, member in inspect.getmembers(kind, callable)
        if not name.startswith("_")
    }


def test_both_clients_have_the_same_groups() -> None:
    blocking = Client("http://127.0.0.1:1")
    awaiting = AsyncClient("http://127.0.0.1:1")
    names, others = (
        [name for name in dir(each) if name[0] != "_"] for each in (blocking, awaiting)
    )
    assert names == others
    assert len(GROUPS) > 12
    assert {*GROUPS} - {"client"} <= {*dir(blocking)}


@pytest.mark.parametrize("name", GROUPS)
def test_both_clients_have_the_same_calls_and_signatures(name: str) -> None:
    blocking = Client("http://127.0.0.1:1")
    awaiting = AsyncClient("http://127.0.0.1:1")
    if name != "client":
        blocking = getattr(blocking, name)
        awaiting = getattr(awaiting, name)
    for call_name in public(GROUPS[name]):
        if call_name == "close":
            continue
        one = getattr(blocking, call_name)
        other = getattr(awaiting, call_name)
        here = inspect.signature(one)
        there = inspect.signature(other)
        assert here.parameters == there.parameters, call_name
        assert here.return_annotation == there.return_annotation.removeprefix("Async"), call_name
        assert inspect.getdoc(one) == inspect.getdoc(other)
        assert inspect.iscoroutinefunction(other) or inspect.isasyncgenfunction(other), call_name
        assert not inspect.iscoroutinefunction(one), call_name


#: Typed keywords → the request whose fields they are, with fields that a call has on its own.
KEYWORDS: dict[Any, tuple[Any, set[str]]] = {
    fields.JobFields: (JobRequest, set()),
    lab.SweepFields: (SweepRequest, set()),
    lab.AttributionFields: (AttributionRequest, set()),
    HarvestFields: (HarvestRequest, set()),
    lab.FitFields: (FitRequest, set()),
    lab.LensFitFields: (LensFitRequest, set()),
    fields.CompletionFields: (CompletionRequest, {"model", "prompt"}),
    fields.ChatFields: (ChatRequest, {"model", "messages"}),
    fields.ProbeFields: (ProbeRequest, set()),
}


@pytest.mark.parametrize("keywords", KEYWORDS)
def test_typed_keywords_are_the_fields_of_the_request(keywords: Any) -> None:
    request, own = KEYWORDS[keywords]
    served = {
        field.encode_name
        for field in msgspec.structs.fields(request)
        if field.type != Unserved or field.name == "chat_template_kwargs"
    }
    if request is JobRequest:  # its short forms
        served |= {"prompt", *Sampling.__struct_fields__}
    assert {*keywords.__annotations__} | own == served


def test_help_of_a_call_lists_its_keywords_within_a_screen() -> None:
    shown = pydoc.plain(pydoc.render_doc(Client("http://127.0.0.1:1").run))
    assert "capture: Capture = None, steering: Some[Steering] = None" in shown
    assert "Annotated" not in shown
    assert sum(len(textwrap.wrap(line, 80)) or 1 for line in shown.splitlines()) <= 35


@pytest.mark.parametrize("module", ["midstream", "midstream.client", "midstream_harvest.reader"])
def test_lazy_modules_list_their_names(module: str) -> None:
    lazy = import_module(module)
    assert {*lazy.__all__} <= {*dir(lazy)}


def test_both_studies_have_the_same_calls_and_signatures() -> None:
    blocking = public(PatchStudy)
    awaiting = public(AsyncPatchStudy)
    assert blocking.keys() == awaiting.keys()
    for name in blocking:
        assert inspect.signature(blocking[name]) == inspect.signature(awaiting[name]), name
        assert not inspect.iscoroutinefunction(blocking[name]), name
    assert {name for name in awaiting if inspect.iscoroutinefunction(awaiting[name])} == {
        "sweep",
        "zoom",
    }


@pytest.mark.parametrize("kind", [*GROUPS.values(), PatchStudy])
def test_every_call_has_a_docstring(kind: type) -> None:
    assert [name for name, member in public(kind).items() if not inspect.getdoc(member)] == []


class _Counting(Calls[M]):
    open = 0

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
        _Counting.open += 1
        try:
            for number in range(below):
                yield await self.twice(number)
        finally:
            _Counting.open -= 1


def counting() -> _Counting[Blocks]:
    return _Counting(BlockingTransport("http://127.0.0.1:1", {}), blocking=True)


async def test_a_call_written_as_a_coroutine_blocks_and_awaits() -> None:
    client = counting()
    assert client.twice(4) == 8
    assert list(client.count(3)) == [0, 2, 4]
    with pytest.raises(ValueError, match="negative"):
        client.twice(-1)
    calls: _Counting[Awaits] = _Counting(AwaitingTransport("http://127.0.0.1:1", {}))
    assert await calls.twice(4) == 8
    assert [number async for number in calls.count(3)] == [0, 2, 4]
    assert list(counting().count(3)) == [0, 2, 4]


def test_an_iterator_that_is_left_early_closes_its_generator() -> None:
    calls = counting()._awaited
    held = calls.count(5)  # so that no collection of garbage closes it
    numbers = iterate(held)
    assert next(numbers) == 0
    assert calls.open == 1
    numbers.close()  # type: ignore[attr-defined]
    assert calls.open == 0


def test_a_blocking_call_that_would_suspend_is_refused() -> None:
    async def suspends() -> None:
        await asyncio.sleep(0)

    async def suspended() -> AsyncIterator[int]:
        await asyncio.sleep(0)
        yield 1

    for attempt in (lambda: finish(suspends()), lambda: list(iterate(suspended()))):  # type: ignore[arg-type]
        with pytest.raises(RuntimeError, match="suspended"):
            attempt()


async def test_both_clients_send_the_same_request() -> None:
    with server(reply(job_view())) as (url, requests):
        with Client(url, "ms_key") as client:
            client.jobs.cancel("job_x")
        async with AsyncClient(url, "ms_key") as awaiting:
            await awaiting.jobs.cancel("job_x")
    assert requests[0] == requests[1]
