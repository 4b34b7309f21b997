"""Readings of a job on the terminal: the lens and the features of each prompt."""

from collections.abc import Iterator, Mapping

from rich.table import Table

from ...schemas.jobs.jobs import JobResult
from ..sdk.readings import Features, known_tokens, lens_of
from . import features, lens

#: Of more prompts, only the first are shown.
PROMPTS = 4


def tokens(result: JobResult) -> list[int]:
    """Return the tokens whose texts the tables need, ascending."""
    results = set(known_tokens(result.lens or []))
    return sorted(results.union(*(reading.token_ids for reading in result.features or [])))


def tables(result: JobResult, words: Mapping[int, str]) -> Iterator[Table | str]:
    """`words`: token id → its text."""
    many = len(result.outputs) > 1
    readings = [
        (item.request, lens.table(lens_of(item, result.id, words)))
        for item in result.lens or []
        if item.request < PROMPTS
    ]
    readings += [
        (item.request, features.table(Features(result.id, item, words)))
        for item in result.features or []
        if item.request < PROMPTS
    ]
    for request, drawn in sorted(readings, key=lambda reading: reading[0]):
        yield f"{drawn.title}, prompt {request}" if many else str(drawn.title)
        drawn.title = None  # it would be folded to the width of the table
        yield drawn
    if readings and len(result.outputs) > PROMPTS:
        yield (
            f"… and {len(result.outputs) - PROMPTS} more prompts: midstream job result {result.id}"
        )
