"""Rows of models that take images are those of transformers' model, with text alone and with images."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from fidelity import Truth, capture, judge, options_of
from fidelity_page import Way
from nursery import Nursery
from tiny_vision import CHECKPOINTS, checkpoint

EAGER = Way("v1", "eager", "float32")
#: Each of another kind: one that rotates by three positions, one whose language model has no head of its own, one with sandwich norms.
FEW = ("qwen2-vl", "smolvlm", "gemma3")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return cache(lambda name: checkpoint(name, folder / name))


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in FEW else (pytest.mark.long,)) for name in CHECKPOINTS])
def test_text_alone_gives_transformers_rows_plain_and_edited(name: str, nursery: Nursery, checkpoints, tmp_path: Path) -> None:
    host = nursery.host(tmp_path / "engine", checkpoints(name), **options_of(EAGER))
    try:
        outcomes = capture(host, tuple(host.info["hooks"]))
    finally:
        host.close()
    figures = judge([outcomes], Truth(checkpoints(name), "float32"), "float32")
    assert {hook: str(figure) for hook, figure in figures.items() if figure.worst > EAGER.tolerance} == {}
