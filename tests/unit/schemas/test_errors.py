"""Tests errors: one line of text, and the way over the wire and back."""

import pytest

from midstream.api.web.problems import openai_error
from midstream.schemas.base.errors import MidstreamError, error_of, invalid, suggestion, unknown

REFUSED = invalid("axis", "'heads' is unknown", allowed="head, token", hint="did you mean 'head'?")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (REFUSED, "axis: 'heads' is unknown; did you mean 'head'? (allowed: head, token)"),
        (invalid("lora", "is not served", hint="omit it"), "lora: is not served; omit it"),
        (invalid("axis", "is unknown", allowed="head"), "axis: is unknown (allowed: head)"),
        (MidstreamError("gone", "it is gone"), "it is gone"),
    ],
)
def test_the_line_has_the_advice_before_the_valid_values(error: MidstreamError, line: str) -> None:
    assert str(error) == line
    assert openai_error(error.problem()).message == line


def test_an_error_survives_the_wire() -> None:
    assert vars(error_of(REFUSED.problem())) == vars(REFUSED)


def test_an_error_of_another_field_keeps_the_rest() -> None:
    error = MidstreamError(
        "rate_limited", "too many", field="a", allowed="b", hint="wait", retry_after=3.0
    )
    assert vars(error.at("c")) == vars(error) | {"field": "c"}


def test_an_unknown_name_lists_names_only() -> None:
    error = unknown("module", "jol", "tiny", ["joy", "calm"])
    assert error.allowed == "joy, calm"
    assert error.hint == "did you mean 'joy'?"
    error = unknown("module", "joy", "tiny", [])
    assert error.allowed is None
    assert error.hint == "no module exists yet"
    assert suggestion("entirely other", ["joy"]) is None
