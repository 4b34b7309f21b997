"""What a refusal says, checked in one place."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from midstream.schemas.base.errors import MidstreamError


@contextmanager
def refuses(
    *words: str, match: str = "", **facts: Any
) -> Iterator[pytest.ExceptionInfo[MidstreamError]]:
    """The block raises a MidstreamError that says all of `words`, and something that `match`
    matches; its attributes, such as `field` and `allowed`, are `facts`.
    """
    with pytest.raises(MidstreamError) as caught:
        yield caught
    said = str(caught.value)
    assert [word for word in words if word not in said] == [], said
    assert re.search(match, said), said
    assert {name: getattr(caught.value, name) for name in facts} == facts, said
    # The error's traceback holds this frame: a cycle would keep open what the block had opened.
    del caught
