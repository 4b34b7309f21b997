"""How many cached tokens a request may reuse, with a limit from vLLM and without one."""

from types import SimpleNamespace
from typing import Any

import pytest

from midstream.workers.runner.base import process
from midstream.workers.runner.vllm.cell_steps import RepeatedPrompt

TOKENS = 64


def without_limit(request: Any) -> tuple[str, int, int]:
    """vLLM 0.32's search in a cache that has every token."""
    assert request.block_hashes == ["hash"]
    return "found", request.num_tokens - 1, 0


def with_limit(request: Any, max_cache_hit_length: int | None = None) -> tuple[str, int, int]:
    """vLLM 0.33's."""
    if max_cache_hit_length is None:
        return without_limit(request)
    return "found", max_cache_hit_length, 0


@pytest.mark.parametrize("original", [without_limit, with_limit])
@pytest.mark.parametrize(
    ("capture", "base", "preemptions", "given", "expected"),
    [
        (None, None, 0, None, ("found", TOKENS - 1, 0)),
        (None, None, 0, 48, ("found", 48, 0)),
        (40, None, 0, None, ("found", 40, 0)),
        (40, None, 0, 48, ("found", 40, 0)),
        (40, None, 0, 32, ("found", 32, 0)),
        (0, None, 0, None, ("found", 0, 0)),
        (999, None, 0, None, ("found", TOKENS - 1, 0)),
        (40, None, 1, None, ("found", 5, 0)),  # its first captured position
        (None, RepeatedPrompt("r", 24, 0), 0, None, ("kept", 24, 0)),
        (None, RepeatedPrompt("r", 24, 0), 0, 16, ("kept", 16, 0)),
        (None, RepeatedPrompt("gone", 24, 3), 0, None, ("found", 24, 0)),
        (None, RepeatedPrompt("gone", 24, 3), 0, 16, ("found", 16, 0)),
        (40, RepeatedPrompt("r", 24, 3), 0, None, ("found", 24, 0)),
    ],
)
def test_the_lowest_limit_counts(
    monkeypatch: pytest.MonkeyPatch,
    original: Any,
    capture: int | None,
    base: RepeatedPrompt | None,
    preemptions: int,
    given: int | None,
    expected: tuple[str, int, int],
) -> None:
    monkeypatch.setattr(process, "die_with_parent", lambda: None)
    from midstream.workers.runner.vllm import scheduler

    made: Any = object.__new__(scheduler._Midstream)
    made._midstream_capturing = {} if capture is None else {"a": SimpleNamespace(lowest_captured=5)}
    made._midstream_bases = {} if base is None else {"a": base}
    made._midstream_rows = SimpleNamespace(reach=lambda *_: capture)
    made._midstream_blocks = SimpleNamespace(
        find=lambda run, _, tokens: ("kept", tokens) if run == "r" else None
    )
    request = SimpleNamespace(
        request_id="a", num_tokens=TOKENS, num_preemptions=preemptions, block_hashes=["hash"]
    )
    get_computed_blocks = made._capped(original)
    limits = () if original is without_limit and given is None else (given,)
    assert get_computed_blocks(request, *limits) == expected
    assert request.num_tokens == TOKENS
