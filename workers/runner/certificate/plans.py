"""Messages of the certification run: what the ranks must judge, and their judgements."""

from collections.abc import Iterator

import msgspec
import numpy as np

from ....schemas.prompts.selectors import Hook
from .laws import LawFinding


class EditRun(msgspec.Struct):
    """A request that adds a vector at `hook` of each `layers[i]`, at position `positions[i]`, times
    `scales[i]`.
    """

    request: int
    plain: int  # a request in the same batch with the same tokens and no edits
    hook: Hook
    layers: list[int]
    positions: list[int]
    scales: list[float]


class Copy(msgspec.Struct):
    """A request whose rows must equal the base's at these positions."""

    law: str
    request: int
    positions: list[int]


class CertificatePlan(msgspec.Struct):
    """Requests, by number, whose rows all ranks judge."""

    base: int
    tokens: list[int]  # the base's prompt and generated tokens
    positions: list[int]  # the base's captured positions, ascending
    first: int  # the first position with a next token: the last of the prompt
    copies: list[Copy]
    edits: list[EditRun]
    final: EditRun | None = None  # an edit of the last layer's `post_block` at `first`


class Judgement(msgspec.Struct):
    """Judgement of one rank."""

    findings: list[LawFinding]
    not_compared: dict[str, str]  # law → why it was not judged
    # float32 rows at the stage's first and last layer, for the neighbouring stages
    edges: dict[str, bytes]
    readings: dict[str, str] = {}  # kind of reading → why the run disproved it


def direction(hidden_size: int) -> np.ndarray:
    """Return the vector of all edits, float32 `[hidden_size]`: standard normal elements."""
    return np.random.default_rng(16).normal(size=hidden_size).astype(np.float32)


def places(edit: EditRun) -> Iterator[tuple[int, tuple[int, int, float]]]:
    """Yield (layer, (request, position, scale)) of each edit."""
    for layer, position, scale in zip(edit.layers, edit.positions, edit.scales, strict=True):
        yield layer, (edit.request, position, scale)
