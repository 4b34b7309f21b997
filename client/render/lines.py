"""The lines of data frames: the numbers of each kind of result, which its figure draws."""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from msgspec.structs import asdict

from ...schemas.artifacts.probes import ProbeResult
from ...schemas.jobs.kinds import KINDS
from ...schemas.jobs.results import JobResult
from ...schemas.packages import part
from .. import frames
from ..captures.patterns import Attention
from ..sdk.readings import Features, Lens, Words, lens_of
from ..sdk.wire import Answer
from .forms import form_of, formless

Lines = Iterable[dict[str, Any]]


def of_kind(result: JobResult) -> list[Any]:
    """Return what a job computed that only its kind has."""
    found = [
        part(row.answer)(result) if row.answer else getattr(result, row.name)
        for row in KINDS.values()
        if row.result and getattr(result, row.name)
    ]
    return [each for each in found if each]


def computed(result: JobResult, request: int = 0, words: Words | None = None) -> list[Any]:
    """Return what a job computed beside texts: what its kind has, or the lenses, features and probe
    scores of one prompt. `words`: token id → text.
    """
    lenses = [
        lens_of(each, result.id, words) for each in result.lens or () if each.request == request
    ]
    features = [
        Features(result.id, each, words or {})
        for each in result.features or ()
        if each.request == request
    ]
    return [
        *of_kind(result),
        *lenses,
        *features,
        *[each for each in result.probes if each.request == request],
    ]


def _attention(attention: Attention) -> dict[str, np.ndarray]:
    positions = np.array(attention.positions)
    tokens = np.array(attention.tokens, dtype=object)
    panels = attention.panels
    query, key = np.tril_indices(len(positions))
    layers, heads = np.array(panels).reshape(-1, 2).T
    return {
        "layer": np.repeat(layers, len(query)),
        "head": np.repeat(heads, len(query)),
        "query": np.tile(positions[query], len(panels)),
        "key": np.tile(positions[key], len(panels)),
        "query_token": np.tile(tokens[query], len(panels)),
        "key_token": np.tile(tokens[key], len(panels)),
        "weight": np.array([attention.of(*panel)[query, key] for panel in panels]).ravel(),
    }


def _features(features: Features) -> Lines:
    for place, (position, token) in enumerate(
        zip(features.reading.positions, features.tokens, strict=True)
    ):
        for feature, activation in features.of(place).items():
            yield {
                "position": position,
                "token": token,
                "feature": feature,
                "activation": activation,
            }


def _lens(lens: Lens) -> Lines:
    """Yield the top tokens of each layer and position, and the named ones that are not among
    them.
    """
    for row, column in np.ndindex(lens.top_ids.shape[:2]):
        place = (row, column)
        top = lens.top_ids[row, column]
        lines = [*zip(range(len(top)), top, lens.logprobs[place], strict=True)]
        named = zip(lens.ranks[place], lens.named, lens.named_logprobs[place], strict=True)
        for rank, token, logprob in [*lines, *(line for line in named if line[1] not in top)]:
            yield (
                {"layer": lens.layers[row], "position": lens.positions[column], "rank": int(rank)}
                | {"token_id": int(token), "token": lens.word(token), "logprob": float(logprob)}
            )


def _scores(result: ProbeResult) -> Lines:
    if result.policy:
        of = {"prompt": result.request, "policy": result.policy.name, "acts": result.policy.acts}
        return [of | asdict(decision) for decision in result.decisions]
    if result.tokens is None:
        return [{"label": label, "score": score} for label, score in result.scores.items()]
    return [
        {"position": position, "label": label, "score": score}
        for position, scores in enumerate(result.tokens)
        for label, score in zip(result.scores, scores, strict=True)
    ]


def _job(
    result: JobResult,
    *,
    request: int = 0,
    words: Words | None = None,
    **options: Any,
) -> Any:
    policies = [each for each in result.probes if each.policy]
    if found := [each for each in computed(result, request, words) if each not in policies]:
        return found[0].to_pandas(**options)
    if any(each.decisions for each in policies):
        return itertools.chain.from_iterable(map(_scores, policies))
    return (
        {"prompt": one.index, "text": one.text, "finish_reason": one.finish_reason}
        for one in result.outputs
    )


def _answer(answer: Answer) -> Lines:
    for prompt, (text, reason) in enumerate(zip(answer.texts, answer.finish_reasons, strict=True)):
        yield {"prompt": prompt, "text": text, "finish_reason": reason}


#: Class → the lines or columns of its data frame; others have a `to_pandas` of their own.
LINES: dict[type, Callable[..., Any]] = {
    Answer: _answer,
    Attention: _attention,
    Features: _features,
    JobResult: _job,
    Lens: _lens,
    ProbeResult: _scores,
}


def frame(value: Any, *arguments: Any, **options: Any) -> Any:
    """Return a result of a class in `LINES`, or with a form, as a data frame. Raises an error
    without pandas, and MidstreamError without the package that has the form.
    """
    lines = LINES.get(type(value)) or form_of(type(value)).lines
    if lines is None:
        raise formless(value)
    return frames.pandas().DataFrame(lines(value, *arguments, **options))
