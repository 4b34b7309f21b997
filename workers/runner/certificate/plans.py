"""What the ranks are asked to judge, and what they answer."""

from collections.abc import Iterator

import msgspec
import numpy as np

from ....schemas.prompts.selectors import Hook
from .laws import Finding


class EditRun(msgspec.Struct):
    """A request that adds a vector at `hook` of each of `layers`, at the position of the same place
    in `positions`.
    """

    request: int
    plain: int  # the request next to it with the same tokens and no edits
    hook: Hook
    layers: list[int]
    positions: list[int]
    scales: list[float]


class Copy(msgspec.Struct):
    """A request whose rows must be those of the base, at these positions."""

    law: str
    request: int
    positions: list[int]


class Plan(msgspec.Struct):
    """Laws that all ranks judge. Requests are numbers."""

    base: int
    tokens: list[int]  # prompt and generated
    positions: list[int]  # captured of the base, ascending
    first: int  # the first position with a next token: the last of the prompt
    copies: list[Copy]
    edits: list[EditRun]
    final: EditRun | None = None  # an edit of the last layer's `post_block` at `first`


class Judgement(msgspec.Struct):
    """Judgement of one rank."""

    findings: list[Finding]
    not_compared: dict[str, str]
    # float32 rows at the stage's first and last layer, for the neighbouring stages
    edges: dict[str, bytes]
    readings: dict[str, str] = {}  # kind of reading → why it is not served after all


def direction(hidden_size: int) -> np.ndarray:
    """The vector of all edits, float32 `[hidden_size]`, of about unit size in every element."""
    return np.random.default_rng(16).normal(size=hidden_size).astype(np.float32)


def places(edit: EditRun) -> Iterator[tuple[int, tuple[int, int, float]]]:
    """Yield (layer, (request, position, scale)) of each edit."""
    for layer, position, scale in zip(edit.layers, edit.positions, edit.scales, strict=True):
        yield layer, (edit.request, position, scale)
