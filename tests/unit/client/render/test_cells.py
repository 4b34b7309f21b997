"""Cells of tables are templates: they name fields that records have, and no markup of users."""

from string import Formatter
from typing import Any, get_type_hints

import pytest

from midstream.client.render import records
from midstream.client.render.jobs import text_of
from midstream.schemas.jobs.jobs import Output


def _named(kind: type) -> set[str]:
    """Return the paths of fields in the templates of a type."""
    shown = records.SHOWN[kind]
    cells = [*shown.columns.values(), *shown.facts.values()]
    return {
        path
        for cell in cells
        if isinstance(cell, str)
        for _, path, _, _ in Formatter().parse(cell)
        if path
    }


@pytest.mark.parametrize("kind", records.SHOWN)
def test_templates_name_fields_of_their_records(kind: type) -> None:
    for path in _named(kind):
        found: Any = kind
        for name in path.split("."):
            assert hasattr(found, name), path
            given = getattr(found, name)
            own = isinstance(given, property)
            found = get_type_hints(given.fget)["return"] if own else get_type_hints(found)[name]


def test_texts_in_templates_are_no_markup() -> None:
    output = Output(
        index=0, text="[red]a[/]", token_ids=[1, 2], finish_reason="stop", prompt_tokens=1
    )
    assert text_of("{text}, {token_ids:number}", output) == r"\[red]a\[/], 2"
    assert text_of("{logprobs}", output) == "", "what is not there is left out"
