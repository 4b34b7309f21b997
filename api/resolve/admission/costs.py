"""Estimates what a request costs to resolve, from its fields and before anything is listed, so that
a request that would take long is refused.
"""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from operator import mul

from ....broker.prompts.turns import renders
from ....schemas.base.records import by_key
from ....schemas.prompts.selectors import (
    DimensionSelector,
    LayerSelector,
    RequestedPositions,
    Span,
    parts_of,
)
from ....schemas.requests.specs import PatchSpec
from ..edits.model_state import NOTHING, ModelState
from ..edits.steering import check_number
from ..positions.gates import all_steering
from ..prompts.request_parsing import ParsedRequest
from ..prompts.tokenizer import too_many_positions
from ..readings.readings import positions_asked

#: Cost of resolving, for one prompt, an entry, a span, and a part of a text such as `0-3,7,-1`. The
#: unit is the time for one listed position.
ENTRY_COST = 8
SPAN_COST = 64
PART_COST = 8
#: Cost of rendering a conversation, and each of its messages.
RENDER_COST = 32
MESSAGE_COST = 64
#: Characters of a prompt that are searched for a span's text, or rendered, in one unit.
SEARCHED_CHARACTERS = 32
#: Number of layers assumed for a patch that gives its layers as a text.
ASSUMED_LAYERS = 32
#: The most that a job may cost (about a second). A job that costs more than `RESOLVE_INLINE` is
#: resolved aside.
RESOLVE_LIMIT = 1 << 22
RESOLVE_INLINE = 1 << 12


def check_cost(
    parsed: ParsedRequest, prompts: int, characters: int, model_state: ModelState = NOTHING
) -> int:
    """Return what captures and steering cost to resolve, see `RESOLVE_LIMIT`.

    `characters`: of all `prompts`. Raises a 400 naming the field that costs most.
    """
    check_number(all_steering(parsed).values(), model_state, prompts)
    # sums over the prompts, so that a selector costs the same to look at for one and for thousands
    messages = [len(prompt.value) for prompt in parsed.prompts if prompt.is_conversation]
    once = RENDER_COST + characters // prompts // SEARCHED_CHARACTERS
    rendered = [once + number * MESSAGE_COST for number in messages]
    conversations = sum(rendered)
    by_message = sum(map(mul, messages, rendered))
    images = sum(len(prompt.images) for prompt in parsed.prompts)
    costs: Counter[str] = Counter()
    for field, positions in _wanted(parsed, model_state):
        spans = _spans(positions)
        ranges = [span for span in spans if span.is_range]
        texts = [span.text for span in spans if span.text is not None]
        cost = prompts * (ENTRY_COST + numbers_in(positions) + len(ranges) + SPAN_COST * len(texts))
        cost += len(set(texts)) * characters // SEARCHED_CHARACTERS  # a text is searched for once
        cost += images * sum(
            1 + (span.stop or 0) - (span.start or 0) for span in spans if span.image is not None
        )
        cost += _written_out(positions, prompts, characters)
        for times, each in (renders(span) for span in spans if span.is_turn):
            cost += times * conversations + each * by_message
            if cost > RESOLVE_LIMIT:
                break
        costs[field] += cost
    for field, selector in _selectors(parsed):
        costs[field] += PART_COST * (parts_of(selector) - 1)  # the first is in the entry's cost
    for index, patch in enumerate(parsed.patch):
        costs[f"patch[{index}].positions"] += _cost_of_patch(patch, prompts, characters)
    if sum(costs.values()) > RESOLVE_LIMIT:
        raise too_many_positions(max(costs, key=lambda field: costs[field]))
    return sum(costs.values())


def check_examples(
    field: str, positions: RequestedPositions, examples: Sequence[Sequence[int]]
) -> None:
    """Raises a 400 naming `field` if its positions would take long to resolve for each of the
    tokenised examples.
    """
    number = len(examples)
    items = len(positions) if isinstance(positions, list) else 0
    cost = number * (ENTRY_COST + items)
    if cost + _written_out(positions, number, sum(map(len, examples))) > RESOLVE_LIMIT:
        raise too_many_positions(field)


def _cost_of_patch(patch: PatchSpec, prompts: int, characters: int) -> int:
    """Return what a patch costs in addition to its selectors: its positions are listed, and rows of
    a run become one entry for each position and layer.

    The cost of these entries is capped, because `resolve_patches` limits their number.
    """
    parsed = patch.positions
    named = len(parsed) if isinstance(parsed, list) else 1
    whole = parsed in ("all", "all_prompt") or (isinstance(parsed, Span) and parsed.is_range)
    places = characters if whole else prompts * named
    if patch.source.run is None or patch.source.mean or isinstance(patch.source.position, int):
        return places
    layers = ASSUMED_LAYERS
    if isinstance(patch.layers, list):
        layers = len(patch.layers)
    elif isinstance(patch.layers, int):
        layers = 1
    return places + min(places * layers * ENTRY_COST, RESOLVE_INLINE + 1)


def _wanted(parsed: ParsedRequest, model_state: ModelState) -> list[tuple[str, RequestedPositions]]:
    """Return (field, positions) of the capture and of each patch and edit; for a module, of each of
    its entries.
    """
    requested_positions: list[tuple[str, RequestedPositions]] = [
        (f"patch[{index}].positions", spec.positions) for index, spec in enumerate(parsed.patch)
    ]
    for at, spec in all_steering(parsed).items():
        module = None if spec.module is None else model_state.modules.get(spec.module)
        if module is None or spec.positions is not None:
            requested_positions += [(f"{at}.positions", spec.positions or "all")] * (
                1 if module is None else len(module.entries)
            )
        else:
            requested_positions += [(f"{at}.module", entry.positions) for entry in module.entries]
    requested_positions += positions_asked(parsed)
    if (capture := parsed.capture) is not None:
        requested_positions.append(("capture.positions", capture.positions))
        if capture.scalar is not None and capture.scalar.positions is not None:
            requested_positions.append(("capture.scalar.positions", capture.scalar.positions))
    return requested_positions


def _selectors(
    parsed: ParsedRequest,
) -> Iterator[tuple[str, LayerSelector | DimensionSelector | None]]:
    """Yield (field, layers or dimensions) of each patch and edit, which are resolved once for all
    prompts. Those of a capture are left out, because they are few.
    """
    for index, spec in enumerate(parsed.steering):
        yield f"steering[{index}].layers", spec.layers
    for index, patch in enumerate(parsed.patch):
        yield f"patch[{index}].layers", patch.layers
        yield f"patch[{index}].mask", patch.mask


def spans_of(parsed: ParsedRequest, model_state: ModelState) -> dict[Span, list[str]]:
    """Return the spans of texts and messages that the request has → the fields with each."""
    return by_key(
        (span, field)
        for field, positions in _wanted(parsed, model_state)
        # windows may have lists, and no hash
        for span in dict.fromkeys(
            span for span in _spans(positions) if span.text is not None or span.is_turn
        )
    )


def _spans(positions: RequestedPositions) -> list[Span]:
    items = positions if isinstance(positions, list) else [positions]
    if Span not in set(map(type, items)):  # there may be millions of numbers
        return []
    return [item for item in items if isinstance(item, Span)]


def _written_out(positions: RequestedPositions, prompts: int, places: int) -> int:
    """Return how many positions the ranges of a list are written out as, in all prompts, which have
    this many `places`. Ranges of consecutive positions are joined first.
    """
    if not isinstance(positions, list):
        return 0
    ranges = [span for span in _spans(positions) if span.is_range]
    joined = prompts * sum(_length(span) for span in ranges if not span.every)
    stepped = (min(prompts * _length(span), places) // span.every for span in ranges if span.every)
    return min(joined, places) + sum(stepped)


def numbers_in(positions: RequestedPositions) -> int:
    return len(positions) - len(_spans(positions)) if isinstance(positions, list) else 0


def _length(span: Span) -> int:
    """Return the length of a range; `sys.maxsize` if its ends alone do not determine it."""
    start = span.start or 0
    stop = span.stop
    return stop - start if stop is not None and (start < 0) == (stop < 0) else sys.maxsize
