"""Plans a sweep: tokens, columns and cells; a 400 names the invalid field and what is valid.

Everything is resolved here, so the worker gets positions and token ids. `alignment.py` pairs the
prompts' tokens; `continuations.py` tokenises the answers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from midstream.api.resolve.admission.costs import (
    ENTRY_COST,
    RESOLVE_LIMIT,
    SEARCHED_CHARACTERS,
    SPAN_COST,
)
from midstream.api.resolve.edits.interventions import mask_tensor
from midstream.api.resolve.edits.steering import NO_POSITION
from midstream.api.resolve.positions.captures import Bounds, at_field, one_hook
from midstream.api.resolve.prompts.tokenizer import Codec
from midstream.api.web.aside import call_aside
from midstream.schemas.base.errors import Excluded, Translated, check_excluded, invalid
from midstream.schemas.jobs.models import ModelInfo
from midstream.schemas.prompts.selectors import (
    DimensionSelector,
    Hook,
    LayerSelector,
    PositionSelector,
    PositionWindow,
    PromptPositions,
    SelectorError,
    Span,
    SpanFinder,
    no_text,
    resolve_layers,
    resolve_positions,
    select,
)
from midstream.schemas.settings.settings import Settings

from ..records.sweeps import (
    Alignment,
    Column,
    PairSpan,
    PatchPlace,
    StoredPair,
    StoredSweep,
    SweepPair,
    SweepRequest,
)
from .alignment import (
    CLEAN,
    CORRUPT,
    Aligned,
    Matched,
    align,
    match_span,
    match_spans,
)
from .columns import ColumnPart, columns_on, parts_of
from .continuations import NOTHING, Continuation, ReadPrompt, continue_prompts
from .limits import check_limits, too_many_cells
from .paths import resolve_path
from .prompts import read_prompts

#: Tokens that a note lists.
SHOWN_ALONE = 8
#: Source position of each place in an ablation, which has no source prompt.
NO_SOURCE = -1


class PlannedSweep(NamedTuple):
    """A sweep that can run, and its mask: content hash → MessagePack `Tensor`."""

    sweep: StoredSweep
    blobs: dict[str, bytes]


@dataclass(frozen=True)
class _Pair:
    """One pair with its tokenised prompts. An ablation has no corrupt prompt."""

    at: str
    spec: SweepPair
    clean: ReadPrompt
    corrupt: ReadPrompt | None
    patched: str  # CLEAN or CORRUPT

    @property
    def base(self) -> ReadPrompt:
        return self.clean if self.corrupt is None or self.patched == CLEAN else self.corrupt

    @property
    def source(self) -> ReadPrompt:
        """The prompt that rows come from; empty in an ablation."""
        return self.clean if self.patched == CORRUPT else self.corrupt or ReadPrompt([], [])


async def plan_sweep(
    request: SweepRequest,
    model: ModelInfo,
    codec: Codec,
    settings: Settings,
) -> PlannedSweep:
    """Resolve a sweep. Raises a 400 with the path of the first invalid field."""
    _check_model(model)
    _check_fields(request)
    hooks = _hooks(request, model)
    path, layers = resolve_path(
        request, hooks, _numbers("layers", request.layers, model.num_layers), model
    )
    blobs: dict[str, bytes] = {}
    mask = _mask(request, hooks, model, blobs)
    parts = parts_of(request, hooks, model)
    pairs = await _read_pairs(request, model, codec)
    answers = await _continue_pairs(request, pairs, model, codec)
    stored = await call_aside(_store_pairs, request, pairs, answers, parts, settings.sweep_cells)
    sweep = StoredSweep(
        pairs=stored,
        hooks=hooks,
        layers=layers,
        metric=request.metric,
        direction=request.direction,
        ablation=request.ablation,
        window=request.window,
        alpha=request.alpha,
        mask=mask,
        noise=request.noise,
        axis=request.axis,
        path=path,
    )
    check_limits(sweep, model, settings)
    return PlannedSweep(sweep, blobs)


# --- Checks that do not need the prompts


def _check_model(model: ModelInfo) -> None:
    if not model.grades:
        raise invalid(
            "model",
            (
                f"the worker of {model.name!r} cannot return log-probabilities of single "
                "tokens, so it runs no sweeps"
            ),
        )


def _check_fields(request: SweepRequest) -> None:
    """Check fields that exclude or require each other."""
    ablation = request.ablation
    metric = request.metric
    one_prompt = (
        "is not valid with ablation, which has one prompt: omit it, or omit ablation "
        f"({ablation!r})"
    )
    check_excluded(
        [
            Excluded("direction", ablation and request.direction != "denoise", one_prompt),
            Excluded("alignment", ablation and request.alignment != "auto", one_prompt),
            Excluded(
                "metric",
                ablation and metric == "recovered",
                "'recovered' compares two prompts, but an ablation has only one",
                allowed="logprob, logit_diff, kl",
                hint="omit ablation",
            ),
        ]
    )
    for index, pair in enumerate(request.pairs):
        at = f"pairs[{index}]"
        check_excluded(
            [
                Excluded(
                    f"{at}.corrupt",
                    ablation is None and pair.corrupt is None,
                    "is required: the corrupted prompt, unless `ablation` is given",
                ),
                Excluded(f"{at}.corrupt", ablation and pair.corrupt is not None, one_prompt),
                Excluded(f"{at}.alignment", ablation and pair.alignment is not None, one_prompt),
                Excluded(
                    f"{at}.answer",
                    pair.answer is None and metric != "kl",
                    f"is required for metric {metric}; only kl needs none",
                ),
                Excluded(
                    f"{at}.foil",
                    pair.foil is None and metric == "logit_diff",
                    "is required: logit_diff is the answer's log-probability minus the foil's",
                ),
                Excluded(
                    f"{at}.spans",
                    (pair.spans is None) != (request.pairs[0].spans is None),
                    "some pairs have spans and others do not",
                    allowed="spans with the same names in every pair",
                ),
            ]
        )
        if pair.spans is not None:
            _check_spans(at, pair, pair.spans, request)


def _check_spans(at: str, pair: SweepPair, spans: list[PairSpan], request: SweepRequest) -> None:
    check_excluded(
        [
            Excluded(
                f"{at}.positions",
                pair.positions is not None,
                "is not valid together with spans: a column is either a position or a span",
            ),
            Excluded(
                "window.positions",
                request.window.positions > 1,
                "is not valid together with spans: a window applies to columns that are positions",
                allowed="1",
            ),
            Excluded(f"{at}.spans", not spans, "is empty: give at least one, or omit it"),
        ]
    )
    first = [span.name for span in request.pairs[0].spans or []]
    names = [span.name for span in spans]
    first_at: dict[str, int] = {}
    for index, span in enumerate(spans):
        place = f"{at}.spans[{index}]"
        check_excluded(
            [
                Excluded(
                    f"{place}.name",
                    not span.name,
                    "is empty: a span needs a name, which labels its column",
                ),
                Excluded(
                    f"{place}.name",
                    first_at.setdefault(span.name, index) < index,
                    f"{span.name!r} is listed twice",
                ),
                Excluded(
                    f"{place}.corrupt",
                    request.ablation and span.corrupt is not None,
                    "is not valid with ablation, which has one prompt: omit it",
                ),
            ]
        )
    if first and names != first:
        raise invalid(
            f"{at}.spans",
            f"has the columns {', '.join(names)}",
            allowed=f"as in pairs[0]: {', '.join(first)}",
        )


def _hooks(request: SweepRequest, model: ModelInfo) -> list[Hook]:
    hooks: list[Hook] = []
    for index, name in enumerate(request.hooks):
        with at_field(f"hooks[{index}]"):
            hook = one_hook(name, Bounds(model, []))
        if hook in hooks:
            raise invalid(f"hooks[{index}]", f"{name!r} is {hook}, which is already listed")
        hooks.append(hook)
    return hooks


def _numbers(
    field: str, selector: LayerSelector | DimensionSelector, count: int, what: str = "layer"
) -> list[int]:
    with at_field(field):
        return resolve_layers(selector, count, what)


def _mask(
    request: SweepRequest, hooks: Sequence[Hook], model: ModelInfo, blobs: dict[str, bytes]
) -> str:
    """Return the mask's name and add its bytes to `blobs`; empty if all dimensions are written."""
    if request.mask is None:
        return ""
    size = model.row_size(hooks[0])
    for index, hook in enumerate(hooks):
        if model.row_size(hook) != size:
            raise invalid(
                f"hooks[{index}]",
                (
                    f"{hook} has rows of another size than {hooks[0]}, so the mask does not hold "
                    "for both"
                ),
            )
    chosen = _numbers("mask", request.mask, size, "dimension")
    return "" if len(chosen) == size else mask_tensor(chosen, size, blobs)


# --- Prompts and answers


async def _read_pairs(request: SweepRequest, model: ModelInfo, codec: Codec) -> list[_Pair]:
    prompts = iter(await read_prompts(request.pairs, model, codec))
    patched = CORRUPT if request.ablation is None and request.direction == "denoise" else CLEAN
    pairs = []
    for index, pair in enumerate(request.pairs):
        clean = next(prompts)
        corrupt = None if pair.corrupt is None else next(prompts)
        if corrupt is not None and corrupt.ids == clean.ids:
            raise invalid(
                f"pairs[{index}].corrupt",
                "has the same tokens as clean, so there is nothing to compare",
            )
        pairs.append(_Pair(f"pairs[{index}]", pair, clean, corrupt, patched))
    return pairs


async def _continue_pairs(
    request: SweepRequest, pairs: Sequence[_Pair], model: ModelInfo, codec: Codec
) -> dict[str, Continuation]:
    """Return answers and foils by field."""
    needed = [
        (
            f"{pair.at}.{name}",
            value,
            [prompt for prompt in (pair.clean, pair.corrupt) if prompt is not None],
        )
        for pair in pairs
        for name, value in (("answer", pair.spec.answer), ("foil", pair.spec.foil))
        if value is not None
    ]
    made = {result.field: result for result in await continue_prompts(needed, model, codec)}
    for pair in pairs:
        answer = made.get(f"{pair.at}.answer", NOTHING)
        foil = made.get(f"{pair.at}.foil", NOTHING)
        if not answer.ids or not foil.ids:
            continue
        if answer.ids == foil.ids:
            raise invalid(foil.field, f"has the same tokens as the answer, {foil.text!r}")
        if all(one == other for one, other in zip(answer.ids, foil.ids, strict=False)):
            shorter, longer = sorted((answer, foil), key=lambda result: len(result.ids))
            raise invalid(
                foil.field,
                (
                    f"{shorter.text!r} is a prefix of {longer.text!r}: give two continuations that "
                    "exclude each other"
                ),
            )
    return made


# --- Columns


def _store_pairs(
    request: SweepRequest,
    pairs: Sequence[_Pair],
    answers: dict[str, Continuation],
    parts: Sequence[ColumnPart],
    limit: int,
) -> list[StoredPair]:
    _check_cost(request, pairs, limit)
    stored: list[StoredPair] = []
    columns = 0
    for pair in pairs:
        stored.append(_store_pair(request, pair, answers, parts))
        columns += len(stored[-1].columns)
        if columns > limit:  # each column is a cell in every layer, so the rest is not built
            raise too_many_cells(f"more than {limit} cells", limit)
    return stored


def _store_pair(
    request: SweepRequest,
    pair: _Pair,
    answers: dict[str, Continuation],
    parts: Sequence[ColumnPart],
) -> StoredPair:
    notes: list[str] = []
    aligned = _aligned(request, pair)
    if aligned is not None:
        notes += aligned.notes
    columns = list(
        _spans(pair, aligned, notes)
        if pair.spec.spans is not None
        else _positions(request, pair, aligned)
    )
    if not any(column.places for column in columns):
        raise invalid(
            f"{pair.at}.{'spans' if pair.spec.spans is not None else 'positions'}",
            (f"contains nothing that can be patched: {columns[0].label!r}: {columns[0].reason}"),
        )
    if request.axis not in ("position", "head_position"):
        notes += _left_out(pair, [column for column in columns if not column.places])
    columns = columns_on(request, columns, parts)
    answer = answers.get(f"{pair.at}.answer", NOTHING)
    foil = answers.get(f"{pair.at}.foil", NOTHING)
    notes += [result.note for result in (answer, foil) if result.note]
    if request.metric == "kl" and len(answer.ids) > 1:
        notes.append(
            "kl covers the first token after the prompt; the answer's log-probability "
            f"covers all of its {len(answer.ids)} tokens"
        )
    sender: list[PatchPlace] = []
    if request.path is not None:
        _check_one_token(answer, foil)
        if request.path.sender is not None and aligned is not None:
            sender = sorted(aligned.counterparts(pair.patched).items())
            if not sender:
                raise invalid(
                    "path.sender",
                    f"{pair.at}: no token of one prompt has a counterpart in the other",
                )
    return StoredPair(
        base=pair.base.ids,
        source=pair.source.ids,
        columns=columns,
        answer=answer.ids,
        foil=foil.ids,
        base_tokens=pair.base.words,
        source_tokens=pair.source.words,
        answer_text=answer.text,
        foil_text=foil.text,
        notes=notes,
        sender=sender,
    )


def _left_out(pair: _Pair, alone: Sequence[Column]) -> list[str]:
    """Return a note on positions that are not patched because they have no counterpart."""
    if not alone:
        return []
    shown = ", ".join(repr(column.label) for column in alone[:SHOWN_ALONE]) + (
        ", …" if len(alone) > SHOWN_ALONE else ""
    )
    return [
        (
            f"without a counterpart, so they stay as they are in the {pair.patched} prompt "
            f"(count: {len(alone)}): {shown}"
        )
    ]


def _check_one_token(*continuation: Continuation) -> None:
    for item in continuation:
        if len(item.ids) > 1:
            detail = (
                f"{item.text!r} has {len(item.ids)} tokens, but with path the values are of the "
                "next token alone"
            )
            raise invalid(item.field, detail, allowed="one token")


def _aligned(request: SweepRequest, pair: _Pair) -> Aligned | None:
    """Return None for an ablation, and if all spans name their tokens in both prompts."""
    named_in_both = (
        pair.spec.spans is not None
        and all(span.corrupt is not None for span in pair.spec.spans)
        and pair.spec.alignment is None
    )
    if pair.corrupt is None or named_in_both:
        return None
    how: Alignment | list[tuple[int, int]] = (
        request.alignment if pair.spec.alignment is None else pair.spec.alignment
    )
    with at_field(f"{'' if pair.spec.alignment is None else pair.at + '.'}alignment"):
        return align(pair.clean, pair.corrupt, how, pair.patched)


def _positions(request: SweepRequest, pair: _Pair, aligned: Aligned | None) -> Iterator[Column]:
    """Yield a column for each position of the patched prompt."""
    of_pair = pair.spec.positions is not None
    field = f"{pair.at}.positions" if of_pair else "positions"
    requested = request.positions if pair.spec.positions is None else pair.spec.positions
    whose = "" if of_pair else f"{pair.at}: "
    sources = dict.fromkeys(range(len(pair.base.ids)), NO_SOURCE)
    if aligned is not None:
        sources = aligned.counterparts(pair.patched)
    for place in _resolved(requested, pair.base, field, whose):
        yield Column(
            label=pair.base.words[place],
            places=[(place, sources[place])] if place in sources else [],
            reason="" if aligned is None else aligned.alone(pair.patched).get(place, ""),
        )


def _spans(pair: _Pair, aligned: Aligned | None, notes: list[str]) -> Iterator[Column]:
    for index, span in enumerate(pair.spec.spans or []):
        field = f"{pair.at}.spans[{index}]"
        clean = _resolved(span.clean, pair.clean, f"{field}.clean")
        if pair.corrupt is None:
            yield Column(label=span.name, places=[(place, NO_SOURCE) for place in clean])
            continue
        result = _matched(span, clean, pair, pair.corrupt, aligned, field)
        if result.note:
            notes.append(result.note)
        places = (
            result.pairs
            if pair.patched == CLEAN
            else [(corrupt, clean) for clean, corrupt in result.pairs]
        )
        yield Column(label=span.name, places=sorted(places), reason=result.reason)


def _matched(
    span: PairSpan,
    clean: list[int],
    pair: _Pair,
    corrupt: ReadPrompt,
    aligned: Aligned | None,
    field: str,
) -> Matched:
    if span.corrupt is None:
        assert aligned is not None
        return match_span(span.name, clean, aligned, pair.clean)
    rest = _resolved(span.corrupt, corrupt, f"{field}.corrupt")
    return match_spans(span.name, clean, rest, (pair.clean, corrupt))


def _resolved(
    requested_positions: PromptPositions, prompt: ReadPrompt, field: str, whose: str = ""
) -> list[int]:
    """Return ascending positions of the prompt. Raises a 400 for positions outside it."""
    tokens = len(prompt.ids)
    find: SpanFinder = no_text if prompt.where is None else prompt.where.find
    with Translated(
        SelectorError,
        lambda error: invalid(
            f"{field}{error.at}", whose + (NO_POSITION if requested_positions == [] else str(error))
        ),
    ):
        return list(
            select(
                _inside(resolve_positions(requested_positions, tokens, find), tokens),
                0,
                tokens,
                tokens,
            )
        )


def _inside(positions: PositionSelector, tokens: int) -> PositionSelector:
    """Raises SelectorError for a range beyond the prompt: a sweep generates no tokens."""
    if isinstance(positions, PositionWindow):
        for name, place in (("start", positions.start), ("stop", (positions.stop or 1) - 1)):
            if place >= tokens:
                raise SelectorError(
                    f"position {place} is out of range: the prompt has positions 0 to {tokens - 1}",
                    f".{name}",
                )
    return positions


def _check_cost(request: SweepRequest, pairs: Sequence[_Pair], limit: int) -> None:
    """Raise 400 if the plan would take long to resolve: see `costs.RESOLVE_LIMIT`."""
    total = 0
    for pair in pairs:
        if pair.spec.spans is None:
            selectors = [
                (
                    "positions",
                    request.positions if pair.spec.positions is None else pair.spec.positions,
                )
            ]
        else:
            if len(pair.spec.spans) > limit:
                raise invalid(
                    f"{pair.at}.spans",
                    f"has {len(pair.spec.spans)} spans",
                    allowed=f"at most {limit} cells in one sweep",
                )
            selectors = [
                ("spans", requested)
                for span in pair.spec.spans
                for requested in (span.clean, span.corrupt)
                if requested is not None
            ]
        for field, requested in selectors:
            total += max(_cost(requested, prompt) for prompt in (pair.clean, pair.base))
            if total > RESOLVE_LIMIT:
                raise invalid(
                    f"{pair.at}.{field}",
                    "selects too many positions",
                    hint="use fewer positions or spans, or fewer pairs in one sweep",
                )


def _cost(requested_positions: PromptPositions, prompt: ReadPrompt) -> int:
    """Return the cost as `costs.check_cost` counts it."""
    characters = len(prompt.text or "")
    items = requested_positions if isinstance(requested_positions, list) else [requested_positions]
    texts = sum(isinstance(item, Span) and item.text is not None for item in items)
    named = sum(1 if isinstance(item, int) else len(prompt.ids) for item in items)
    return ENTRY_COST + named + texts * (SPAN_COST + characters // SEARCHED_CHARACTERS)
