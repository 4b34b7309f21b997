"""Does a request of any size leave the API to others while it is looked at, or is it refused by the
field that is too much?
"""

import asyncio
import dataclasses
import threading
import tracemalloc
from typing import Any

import numpy as np
import pytest
from model_kit import model
from refusal_kit import refuses

from midstream.api.resolve.admission import admission
from midstream.api.resolve.admission.admission import resolve, with_tools
from midstream.api.resolve.admission.costs import RESOLVE_LIMIT, check_cost
from midstream.api.resolve.edits.model_state import ModelState
from midstream.api.resolve.edits.steering import MAX_ENTRIES
from midstream.api.resolve.prompts.request_parsing import ParsedPrompt, ParsedRequest
from midstream.api.resolve.prompts.tokenizer import FoundSpan, SearchedPrompt
from midstream.schemas.base.tensors import from_numpy
from midstream.schemas.jobs.jobs import Sampling, StoredPrompt
from midstream.schemas.prompts.chat import ToolUse
from midstream.schemas.prompts.selectors import Span
from midstream.schemas.requests.specs import CaptureSpec, SteeringSpec
from midstream.schemas.requests.steering import Module, SteeringTemplate

VECTOR = from_numpy(np.ones(8, np.float32))
MODEL = model(max_model_len=10_000)


def wish(capture: CaptureSpec | None = None, *steering: SteeringSpec) -> ParsedRequest:
    return ParsedRequest("generate", "m", [], Sampling(), capture=capture, steering=list(steering))


def steered(positions: Any, layers: Any = 0) -> SteeringSpec:
    return SteeringSpec(layers=layers, vector=VECTOR, positions=positions)


@pytest.mark.parametrize(
    ("asked", "prompts", "apart"),
    [
        (wish(CaptureSpec(positions=[0])), 2, False),
        (wish(CaptureSpec(positions=list(range(100)))), 100, True),
        (wish(CaptureSpec(positions=Span(text="a"))), 2, False),
        (wish(CaptureSpec(positions=Span(text="a"))), 60, True),
        (wish(None, steered("all")), 4096, True),
    ],
)
def test_slow_resolution_runs_off_the_event_loop(
    monkeypatch: pytest.MonkeyPatch, asked: ParsedRequest, prompts: int, apart: bool
) -> None:
    """A span costs the tokenisation of every prompt's text, 100 characters here."""
    threads = []
    bounds = admission.Bounds

    def noted(*arguments: Any) -> admission.Bounds:
        threads.append(threading.current_thread())
        return bounds(*arguments)

    places: list[bool] = []

    class Letters:
        """A token per letter."""

        async def locate(
            self, searched: list[SearchedPrompt], spans: list[Span], apart: bool
        ) -> Any:
            places.append(apart)
            return [[FoundSpan(b"\0\0\0\0")] * len(spans)] * len(searched)

    monkeypatch.setattr(admission, "Bounds", noted)
    stored = [StoredPrompt(token_ids=[1] * 100, text="a" * 100)] * prompts
    asked = dataclasses.replace(
        asked, prompts=[ParsedPrompt(f"prompts[{index}]", "a" * 100) for index in range(prompts)]
    )
    captures, steering, _ = asyncio.run(resolve(asked, stored, MODEL, Letters(), 4))  # type: ignore[arg-type]
    assert len(captures or steering) == prompts
    assert (threads[0] is not threading.main_thread()) == apart
    assert set(places) <= {apart}


@pytest.mark.parametrize(
    ("asked", "prompts", "characters", "field"),
    [
        (wish(CaptureSpec(positions=[0] * 65_536)), 64, 0, "capture.positions"),
        (
            wish(CaptureSpec(), steered("all"), steered([0] * 1100)),
            4096,
            0,
            "steering[1].positions",
        ),
        (
            wish(CaptureSpec(positions=[Span(text=str(number)) for number in range(1000)])),
            1,
            150_000,
            "capture.positions",
        ),
        (wish(None, *[steered("all")] * 32), 4096, 0, "steering"),
        (
            wish(
                CaptureSpec(positions=Span(text="a")), *[steered("all", ",".join("0" * 512))] * 1100
            ),
            1,
            0,
            "steering[0].layers",
        ),
        (
            wish(CaptureSpec(), *[steered([Span(stop=9000)])] * 8),
            64,
            1 << 20,
            "steering[0].positions",
        ),
        (
            wish(CaptureSpec(), *[steered([Span(start=-9000, stop=9000)])] * 8),
            2,
            1_040_000,
            "steering[0].positions",
        ),
        (wish(None, *[steered("all")] * (MAX_ENTRIES + 1)), 1, 0, "steering"),
    ],
)
def test_requests_too_costly_to_resolve_are_refused_by_field(
    asked: ParsedRequest, prompts: int, characters: int, field: str
) -> None:
    with refuses(status=400, field=field) as refused:
        check_cost(asked, prompts, characters)
    assert "at most" in str(refused.value.allowed) or "fewer prompts" in str(refused.value.hint)
    assert (
        check_cost(asked, prompts // 2, characters // 2) <= RESOLVE_LIMIT if prompts > 1 else True
    )


def test_a_large_module_used_often_is_refused_before_expansion() -> None:
    entry = SteeringTemplate(
        layers=[0], hook="post_block", positions="all", family="add", tensors=["a"]
    )
    large = Module(
        name="large", model="m", digest="d", entries=[entry] * 4096, bytes=1, created=0.0
    )
    tracemalloc.start()
    try:
        with refuses() as refused:
            check_cost(
                wish(None, *[SteeringSpec(module="large")] * 100),
                1,
                0,
                ModelState({"large": large}),
            )
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert refused.value.field == "steering"
    assert refused.value.detail == "has 409600 entries"


def test_a_range_costs_its_expanded_positions() -> None:
    alone = wish(None, steered(Span(start=5)))
    short = wish(None, steered([Span(stop=50)]))
    open_end = wish(None, steered([Span(stop=-1)]))
    assert [
        check_cost(asked, 100, 1_000_000)
        for asked in (wish(None, steered("all")), alone, short, open_end)
    ] == [800, 900, 5900, 1_000_900]


@pytest.mark.parametrize(
    ("parsers", "told"),
    [([], "with the setting tool_parser"), (["a", "b"], "; its chat template suggests a or b")],
)
def test_tools_without_a_parser_name_the_setting(parsers: list[str], told: str) -> None:
    asked = dataclasses.replace(wish(), tools=ToolUse(tools=b"[]", choice="auto"))
    several = model(tool_parsers=parsers)
    with refuses(match=f"{told}", field="tools", allowed=None):
        with_tools(asked, several)
    assert with_tools(asked, model(tool_parser="hermes")) is asked


def test_tools_need_a_parser_unless_they_may_not_be_called() -> None:
    asked = dataclasses.replace(wish(), tools=ToolUse(tools=b"[]", choice="none"))
    assert with_tools(asked, MODEL).tools is None
    named = ToolUse(tools=b"[]", choice="none", named=True)  # a function of this name
    with refuses("without a parser"):
        with_tools(dataclasses.replace(asked, tools=named), MODEL)
