"""Rows of the page's table: the beginning of an output is read from the head of what is stored."""

import pytest

from midstream.broker.ledger.core.record import SHOWN
from midstream.schemas.base.errors import shortened
from midstream.schemas.base.records import to_msgpack
from midstream.schemas.jobs.jobs import Output
from midstream_page.feed_rows import OUTPUT_BYTES, _output


@pytest.mark.parametrize("length", [0, 5, 31, 32, 100, 300, 70_000])
@pytest.mark.parametrize("outputs", [1, 15, 16, 70_000])
def test_the_head_of_outputs_has_the_first_text(outputs: int, length: int) -> None:
    first = Output(
        index=0, text="é日" * (length // 2), token_ids=[1], finish_reason="stop", prompt_tokens=3
    )
    second = Output(index=1, text="no", token_ids=[], finish_reason="stop", prompt_tokens=1)
    head = to_msgpack([first] + [second] * (outputs - 1))[:OUTPUT_BYTES]
    assert _output(head) == shortened(first.text, SHOWN)


def test_no_outputs_are_no_text() -> None:
    assert _output(b"") == ""
    assert _output(to_msgpack([])) == ""
