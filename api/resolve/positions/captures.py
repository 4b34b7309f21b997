"""Resolves captures per prompt; also has what the rules of captures, steering and patches share.

A rule reads a spec and returns the value to store; a ValueError's text becomes the problem's
detail, at the rule's field (and below it, when a SelectorError says where). A new option of
captures is a row in `CAPTURE_RULES`. Steering is resolved in `api/resolve/edits/steering.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ....broker.artifacts import global_capture
from ....broker.ledger.named.registry import NOTHING_FOUND, Lookup
from ....schemas.base.errors import Translated, invalid
from ....schemas.base.limits import MAX_READING_WORK
from ....schemas.jobs.models import ModelInfo
from ....schemas.prompts.images import ImageRef
from ....schemas.prompts.selectors import (
    Hook,
    PositionSelector,
    PositionWindow,
    RequestedPositions,
    SelectorError,
    Sites,
    SpanFinder,
    no_text,
    resolve_layers,
    resolve_positions,
    resolve_sites,
    served_hook,
)
from ....schemas.prompts.sites import SitesSpec
from ....schemas.requests.specs import (
    DEFAULT_CONSUMERS,
    MEMORY_JOB_BYTES,
    CaptureSpec,
    StoredCapture,
    memory_bytes,
)
from ....schemas.service.global_capture import captures_of, step_rows
from .heads import heads_of
from .windows import check_window, window_of

#: Whether rows come back, or readings → what exceeds the limit, and two ways to stay below it.
_MEMORY_WORDS = {
    True: (
        "rows: consumer 'memory' returns",
        "capture fewer rows",
        "use 'filesystem' alone",
    ),
    False: (
        "results: a response holds",
        "name fewer positions or layers",
        "fewer tokens of each",
    ),
}


@dataclass(frozen=True)
class PromptFacts:
    """A prompt's tokens, and how a span of its text becomes positions."""

    tokens: int  # as written, see `schemas.prompts.images`
    find: SpanFinder = no_text
    images: Sequence[ImageRef] = ()


@dataclass(frozen=True)
class Bounds:
    """Limits that a spec is checked against."""

    model: ModelInfo
    prompts: Sequence[PromptFacts]
    max_tokens: int = 1  # tokens generated, at most; 0: none is wanted
    probes: Sequence[str] = ()  # the probes that score the request
    found: Lookup = NOTHING_FOUND  # the registered artifacts that the request names


#: Fields of a spec, each with what checks it and returns its value.
Rules = tuple[tuple[str, Callable[[Any, Bounds], Any]], ...]


class Positioned(Protocol):
    """A spec with positions."""

    @property
    def positions(self) -> RequestedPositions | None: ...


# --- Shared rules


def positions_of_each(spec: Positioned, bounds: Bounds) -> list[PositionSelector]:
    """Return one resolved selector per prompt."""
    if spec.positions is None or (isinstance(spec.positions, str) and spec.positions != "image"):
        return [spec.positions or "all"] * len(bounds.prompts)
    resolved = []
    for index, prompt in enumerate(bounds.prompts):
        with of_prompt(index, bounds):
            positions = resolve_positions(spec.positions, prompt.tokens, prompt.find, prompt.images)
            resolved.append(_reachable(positions, prompt.tokens + bounds.max_tokens))
    return resolved


def recorded_of_each(spec: Positioned, bounds: Bounds) -> list[PositionSelector]:
    """Return one resolved selector of rows or readings per prompt.

    Raises SelectorError for generated tokens alone, where none is generated.
    """
    if spec.positions == "all_generated" and not bounds.max_tokens:
        raise SelectorError(
            "selects nothing: max_tokens is 0, so choose positions of the prompt, such as "
            "all_prompt or last_prompt"
        )
    return positions_of_each(spec, bounds)


def of_prompt(index: int, bounds: Bounds) -> Translated[SelectorError]:
    """Return a context whose errors say which of several prompts they are about."""
    which = f"prompt {index}: " if len(bounds.prompts) > 1 else ""
    return Translated(SelectorError, lambda error: SelectorError(f"{which}{error}", error.at))


def _reachable(positions: PositionSelector, total: int) -> PositionSelector:
    """Raises SelectorError for a range that begins after the last position that the request may
    have.
    """
    if isinstance(positions, PositionWindow) and positions.start >= total:
        raise SelectorError(
            (
                f"position {positions.start} is out of range: the prompt and the generated "
                f"tokens have at most {total} positions"
            ),
            ".start",
        )
    return positions


def one_hook(name: Any, bounds: Bounds) -> Hook:
    return served_hook(name, bounds.model.hooks, bounds.model.absent)


def at_field(at: str) -> Translated[ValueError]:
    """Turn a ValueError into a 400 at the field `at`, or below it if a SelectorError says where."""
    return Translated(
        ValueError, lambda error: invalid(f"{at}{getattr(error, 'at', '')}", str(error))
    )


def apply_rules(rules: Rules, spec: Any, bounds: Bounds, at: str) -> dict[str, Any]:
    """Return by field what its rule returns.

    Raises a 400 naming the field of the first rule that fails.
    """
    made = {}
    for field, rule in rules:
        try:
            made[field] = rule(spec, bounds)
        except ValueError as error:
            place = f"{at}.{field}{getattr(error, 'at', '')}"
            raise invalid(place.removeprefix("."), str(error)) from error
    return made


# --- Rules of capture


def sites_of(spec: SitesSpec, bounds: Bounds) -> Sites:
    """Return the sites of either form of the request. Raises SelectorError."""
    return resolve_sites(
        spec.wanted, bounds.model.num_layers, bounds.model.hooks, bounds.model.absent
    )


def _one_hook(spec: SitesSpec, bounds: Bounds) -> None:
    """Check `hook` of the short form, `hook` and `layers`, so that an error names it."""
    if spec.hooks is None:
        one_hook(spec.hook or "post_block", bounds)


def _all_layers(spec: SitesSpec, bounds: Bounds) -> None:
    if spec.layers is not None:
        resolve_layers(spec.layers, bounds.model.num_layers)


def _consumers(spec: CaptureSpec, bounds: Bounds) -> None:
    present = bounds.model.consumers or list(DEFAULT_CONSUMERS)
    for index, name in enumerate(spec.consumers):
        if name not in present:
            raise SelectorError(
                f"unknown consumer {name!r}: the worker has {', '.join(present)}", f"[{index}]"
            )
        if name in spec.consumers[:index]:
            raise SelectorError(f"{name!r} is listed twice", f"[{index}]")


def _of(spec: CaptureSpec, bounds: Bounds) -> None:
    """Check that the rows are activations: `readings.gradients` resolves the others."""
    if spec.of != "activation":
        raise ValueError("gradient rows are served by POST /v1/jobs only")


def _scalar(spec: CaptureSpec, bounds: Bounds) -> None:
    if spec.scalar is not None:
        raise ValueError("is valid with of = 'gradient' only: omit it, or set of")


def _positions(spec: CaptureSpec, bounds: Bounds) -> list[PositionSelector]:
    """Return one selector per prompt: of all positions for a window, which chooses when the request
    has ended.
    """
    if window_of(spec.positions) is not None:
        return ["all"] * len(bounds.prompts)
    return recorded_of_each(spec, bounds)


def _run(spec: CaptureSpec, bounds: Bounds) -> None:
    """Check that a source run is stored as files, which workers may read long after the job."""
    if spec.run is not None and spec.heads is not None:
        raise ValueError("a source run has whole rows: omit heads")
    if spec.run is not None and window_of(spec.positions) is not None:
        raise ValueError("a source run has rows at positions that are known: name other positions")
    if spec.run is not None and "filesystem" not in spec.consumers:
        raise ValueError(
            "requires the consumer 'filesystem' (consumers: "
            f"{', '.join(spec.consumers) or 'none'}): add it, or omit run"
        )


#: Rules of sites; the value for `hooks` has the sites of both forms of the request.
SITE_RULES: Rules = (
    ("hook", _one_hook),
    ("layers", _all_layers),
    ("hooks", sites_of),
)

CAPTURE_RULES: Rules = (
    *SITE_RULES,
    (
        "heads",
        lambda spec, bounds: heads_of(spec.heads, [*sites_of(spec, bounds)], bounds.model),
    ),
    ("positions", _positions),
    ("consumers", _consumers),
    ("run", _run),
    ("of", _of),
    ("scalar", _scalar),
)


def stored_captures(spec: CaptureSpec, bounds: Bounds, at: str) -> list[StoredCapture]:
    """Return one capture per prompt. Raises a 400 naming the field below `at`."""
    made = apply_rules(CAPTURE_RULES, spec, bounds, at)
    window = window_of(spec.positions)
    tokens = sum(prompt.tokens + bounds.max_tokens for prompt in bounds.prompts)
    check_window(window, bounds.probes, bounds.model, f"{at}.positions", tokens)
    return [
        spec.stored(made["hooks"], chosen, heads=made["heads"], window=window)
        for chosen in made["positions"]
    ]


#: Returns one capture per prompt, of a spec in the model's bounds and its place in the request.
Stored = Callable[[CaptureSpec, Bounds, str], list[StoredCapture]]


def resolve_captures(
    spec: CaptureSpec | None,
    bounds: Bounds,
    readings: Sequence[tuple[str, list[StoredCapture]]] = (),
    stored: Stored = stored_captures,
    held: Sequence[tuple[str, StoredCapture]] = (),
) -> list[list[StoredCapture]]:
    """Return the captures of each prompt: the user's, those for readings, then global capture;
    empty if there are none.

    `readings`: (field of the request, one capture per prompt). `stored` resolves `spec`. `held`:
    what else of the request takes room in a step, of each prompt.

    Raises a 400 naming the field of what the user requests; never because of global capture.
    """
    per_prompt: list[list[StoredCapture]] = [[] for _ in bounds.prompts]
    if spec is not None and spec.tag in {
        global_spec.tag for global_spec in bounds.model.global_captures
    }:
        raise invalid(
            "capture.tag",
            f"{spec.tag!r} is the tag of the operator's global capture: choose another",
        )
    request = [("capture", stored(spec, bounds, "capture"))] if spec is not None else []
    asked = [*request, *readings]
    for field, captures in asked:
        for index, capture in enumerate(captures):
            per_prompt[index].append(capture)
            _check_step(field, per_prompt[index], index, bounds)
    _check_memory(
        [
            ("capture.consumers" if field == "capture" else field, captures)
            for field, captures in asked
        ],
        bounds,
    )
    beside = [capture for _, capture in held]
    for index, captures in enumerate(per_prompt if held else ()):
        _check_step(held[-1][0], [*captures, *beside], index, bounds)
    for global_spec in bounds.model.global_captures:
        _add(global_spec, per_prompt, beside, bounds)
    return [split(captures, bounds.model) for captures in per_prompt] if any(per_prompt) else []


def split(captures: Sequence[StoredCapture], model: ModelInfo) -> list[StoredCapture]:
    """Split each capture into one per bank: rows of different widths are recorded and stored
    separately.
    """
    return [part for capture in captures for part in capture.split(model.inside)]


def _add(
    spec: CaptureSpec,
    per_prompt: Sequence[list[StoredCapture]],
    beside: Sequence[StoredCapture],
    bounds: Bounds,
) -> None:
    """Add global capture to the prompts whose steps have room for it, with what is recorded
    `beside` their captures; never reject a request for it.
    """
    crowded = 0
    result = captures_of(spec, bounds.model, [prompt.tokens for prompt in bounds.prompts])
    for index, (captures, more) in enumerate(zip(per_prompt, result, strict=True)):
        if more is None:
            continue
        if _fits_step([*captures, more, *beside], index, bounds):
            captures.append(more)
        else:
            crowded += 1
    if crowded:
        global_capture.count_skipped(
            "buffer",
            crowded,
            "one token has more rows than the worker's buffer holds (tuning.capture_buffer_mib)",
        )


def _fits_step(captures: Sequence[StoredCapture], index: int, bounds: Bounds) -> bool:
    return bounds.model.step_holds(_unsplit_rows(captures, index, bounds))


def _unsplit_rows(captures: Sequence[StoredCapture], index: int, bounds: Bounds) -> int:
    return step_rows(captures, bounds.model, bounds.prompts[index].tokens, bounds.max_tokens)


def _check_step(field: str, captures: Sequence[StoredCapture], index: int, bounds: Bounds) -> None:
    """Raises a 400 unless the rows of one token, with its drafts, fit the capture buffer."""
    if not _fits_step(captures, index, bounds):
        rows = _unsplit_rows(captures, index, bounds)
        drafts = bounds.model.speculative_tokens
        tokens = f"one token and {drafts} drafts" if drafts else "one token"
        raise invalid(
            field,
            f"prompt {index} produces {rows} rows in one engine step, for {tokens}: more than the "
            "worker's buffer holds (setting tuning.capture_buffer_mib)",
            allowed=f"at most {bounds.model.capture_row_limit} rows per step",
            hint="use fewer layers or hooks",
        )


def _check_memory(
    stored_captures: Sequence[tuple[str, Sequence[StoredCapture]]], bounds: Bounds
) -> None:
    """Raise 400 if the rows and readings of one prompt, or of all, could exceed their memory limit,
    or the readings of all `MAX_READING_WORK`.

    `stored_captures`: field → one capture per prompt.
    """
    limit = bounds.model.memory_limit_kib << 10
    total = 0
    work = 0
    of_prompt = [0] * len(bounds.prompts)
    most = (
        f"at most {bounds.model.memory_limit_kib} KiB per prompt (setting tuning.memory_limit_kib)"
    )
    for field, captures in stored_captures:
        what, fewer, way = _MEMORY_WORDS[field == "capture.consumers"]
        for index, capture in enumerate(captures):
            size = _returned_bytes(capture, index, bounds)
            of_prompt[index] += size
            total += size * (bounds.model.tp if capture.everywhere else 1)
            if capture.reading is not None:
                work += (
                    capture.count_stored(bounds.prompts[index].tokens, bounds.max_tokens)
                    * capture.num_sites
                    * capture.reading.row_work(bounds.model.hidden_size, bounds.model.vocab_size)
                )
            if size and of_prompt[index] > limit:
                raise invalid(
                    field,
                    (
                        f"prompt {index} may produce {of_prompt[index]} bytes of {what} {most}; "
                        f"{fewer}, or {way}"
                    ),
                )
        if total > max(limit, MEMORY_JOB_BYTES):
            raise invalid(
                field,
                f"the job's {len(captures)} prompts may produce {total} bytes of {what} at most "
                f"{max(limit, MEMORY_JOB_BYTES) >> 20} MiB "
                f"per job; send fewer prompts in one job, or {way}",
            )
        if work > MAX_READING_WORK:
            raise invalid(
                field,
                f"the readings of the job's {len(captures)} prompts may take {work} multiply-adds",
                allowed=f"at most {MAX_READING_WORK} per job",
                hint="name fewer positions or layers, or send fewer prompts in one job",
            )


def _returned_bytes(capture: StoredCapture, index: int, bounds: Bounds) -> int:
    """Return the most bytes that one prompt returns in the response; per rank, if several have
    parts.
    """
    model = bounds.model
    prompt = bounds.prompts[index]
    positions = capture.count_stored(prompt.tokens, bounds.max_tokens)
    if capture.reading is not None:
        return capture.reading.size(positions, capture.num_sites)
    if "memory" not in capture.consumers:
        return 0
    dtype = model.dtype if capture.dtype == "model" else capture.dtype
    return sum(
        memory_bytes(
            positions, part.num_sites, part.stored_size(model.hidden_size), dtype, model.pp
        )
        for part in split([capture], model)
    )
