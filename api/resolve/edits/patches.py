"""Resolves `patch` per prompt into entries that replace rows, one per source vector.

A rule reads a spec and returns a value, as in `captures.py`; `SOURCES` has one row per kind of
source. Only this module reads names of runs and modules: the entries refer to content
(`schemas.requests.source_runs.row_name`).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import cast

from ....schemas.base.errors import Translated, invalid, suggestion
from ....schemas.base.limits import MAX_MASKS, MAX_PATCH_ROWS
from ....schemas.base.tensors import PackedTensors
from ....schemas.jobs.models import SHOWN_IDENTITY
from ....schemas.prompts.selectors import (
    Hook,
    PositionSelector,
    PositionWindow,
    SelectorError,
    Span,
    as_ranges,
    resolve_hook,
    resolve_layers,
    resolve_positions,
    select,
)
from ....schemas.requests.interventions import FAMILIES, FAMILY
from ....schemas.requests.source_runs import ZEROS, RunPrompt, RunRow, RunView, row_name, run_key
from ....schemas.requests.specs import (
    PatchSpec,
    PromptEdits,
    SteeringSpec,
    StoredSteering,
    fed_back,
)
from ....schemas.requests.steering import Module
from ..positions.captures import (
    Bounds,
    Rules,
    apply_rules,
    at_field,
    of_prompt,
    one_hook,
    positions_of_each,
)
from ..positions.heads import dimensions, heads_of, whole_tensor
from .interventions import (
    RULES as STEERING_RULES,
    check_magnitude,
    keep,
    largest,
    mask_tensor,
)
from .model_state import ModelState, unknown_module

#: Source runs that one request may use: a worker holds all of them in memory together.
MAX_RUNS = 64
#: Limit on the ranges of a mean's positions, which are part of its name.
MAX_MEAN_RANGES = 256
#: Number of captured ranges that an error lists.
SHOWN_RANGES = 8


def runs_of(specs: Iterable[PatchSpec]) -> list[str]:
    """Return the distinct names of source runs. Raises a 400 for more than a worker should hold."""
    names = list(dict.fromkeys(spec.source.run for spec in specs if spec.source.run is not None))
    if len(names) > MAX_RUNS:
        raise invalid(
            "patch", f"names {len(names)} source runs", allowed=f"at most {MAX_RUNS} in one request"
        )
    return names


# --- Which rows are written


def _destinations(spec: PatchSpec, bounds: Bounds) -> list[PositionSelector]:
    """Return one selector per prompt: a list if the positions are known, else a name or a window.

    Lists are preferred because rows of the steering table with disjoint lists can share a slot.
    """
    destinations: list[PositionSelector] = []
    for index, (selector, prompt) in enumerate(
        zip(positions_of_each(spec, bounds), bounds.prompts, strict=True)
    ):
        with of_prompt(index, bounds):
            destinations.append(
                _listed(selector, prompt.tokens, prompt.tokens + fed_back(bounds.max_tokens))
            )
    return destinations


def _listed(selector: PositionSelector, tokens: int, end: int) -> PositionSelector:
    """Return the positions as a list if they are known.

    `end`: one past the last position that may be computed; the last generated token never is.
    """
    if isinstance(selector, list):
        return selector
    if selector in ("last_prompt", "all_prompt") or (end == tokens and selector == "all"):
        return list(select(selector, 0, tokens, tokens))
    if selector == "all_generated" and end == tokens:
        raise SelectorError(
            ("nothing would be patched: with max_tokens 0 or 1, no generated token is fed back"),
            "",
        )
    if not isinstance(selector, PositionWindow):
        return selector
    text = (
        f"the model computes positions 0 to {end - 1} at most; the last generated token "
        "is not fed back"
    )
    if selector.start >= end:
        raise SelectorError(f"position {selector.start} is never patched: {text}", ".start")
    if selector.stop is None and end > tokens:
        return selector
    if selector.stop is not None and selector.stop > end:
        raise SelectorError(f"the range stops at {selector.stop}: {text}", ".stop")
    return list(select(selector, 0, end, tokens))


def _heads(spec: PatchSpec, bounds: Bounds) -> list[int]:
    return heads_of(spec.heads, [resolve_hook(spec.hook)], bounds.model)


def _mask(spec: PatchSpec, bounds: Bounds) -> list[int] | None:
    """Return the dimensions that are written; None for all."""
    if spec.heads is not None:
        if spec.mask is not None:
            raise ValueError("give either heads or mask")
        return dimensions(_heads(spec, bounds), bounds.model.inside[resolve_hook(spec.hook)])
    if spec.mask is None:
        return None
    size = bounds.model.row_size(resolve_hook(spec.hook))
    chosen = resolve_layers(spec.mask, size, "dimension")
    return None if len(chosen) == size else chosen


RULES: Rules = (
    ("hook", lambda spec, bounds: one_hook(spec.hook, bounds)),
    ("layers", lambda spec, bounds: resolve_layers(spec.layers, bounds.model.num_layers)),
    ("heads", _heads),
    ("mask", _mask),
    ("positions", _destinations),
)


@dataclass(frozen=True)
class ResolvedPatch:
    """One patch spec, and where it acts."""

    spec: PatchSpec
    at: str  # its path in the body
    hook: Hook
    layers: list[int]
    positions: list[PositionSelector]  # one per prompt

    def source(self, name: str) -> str:
        """Return the path of a field of the spec's source."""
        return f"{self.at}.source.{name}"

    def everywhere(self, tensor: str, scale: float = 1.0) -> PromptEdits:
        """Return an entry per prompt that writes one vector at all sites and positions."""
        return [[self.entry(self.layers, chosen, tensor, scale)] for chosen in self.positions]

    def entry(
        self, layers: list[int], positions: PositionSelector, tensor: str, scale: float = 1.0
    ) -> StoredSteering:
        return StoredSteering(
            layers=layers,
            hook=self.hook,
            positions=positions,
            family="replace",
            tensors=[tensor],
            scale=scale,
            numbers=[self.spec.alpha],
        )


# --- What is written

VECTOR_RULES = tuple(
    rule for rule in STEERING_RULES["replace"] if rule[0] in ("vector.shape", "vector.data")
)


def _of_vector(
    patch: ResolvedPatch, bounds: Bounds, model_state: ModelState, blobs: PackedTensors
) -> PromptEdits:
    vector = patch.spec.source.vector
    assert vector is not None
    if patch.spec.heads is not None:
        shape = bounds.model.inside[patch.hook]
        vector = whole_tensor(vector, _heads(patch.spec, bounds), shape)
    spec = SteeringSpec(layers=patch.layers, op="replace", vector=vector, hook=patch.hook)
    apply_rules(VECTOR_RULES, spec, bounds, f"{patch.at}.source")
    with at_field(patch.source("vector.data")):
        check_magnitude(largest(vector), bounds)
    return patch.everywhere(keep(vector, blobs))


def _of_module(
    patch: ResolvedPatch, bounds: Bounds, model_state: ModelState, blobs: PackedTensors
) -> PromptEdits:
    name = patch.spec.source.module
    at = patch.source("module")
    module = model_state.modules.get(name or "")
    if module is None:
        raise unknown_module(at, name, bounds.model.name, model_state)
    if why := _why_not_one_vector(module):
        raise invalid(
            at,
            f"module {name!r} is not a single vector: it {why}",
            allowed=f"a module with one entry, of op {' or '.join(_OPS_OF_ONE_VECTOR)}",
        )
    if module.hidden_size != bounds.model.hidden_size:
        raise invalid(
            at,
            (
                f"module {name!r} has hidden size {module.hidden_size}, but the model has "
                f"{bounds.model.hidden_size}"
            ),
        )
    (entry,) = module.entries
    with at_field(at):
        check_magnitude(module.reach[0], bounds)
    return patch.everywhere(entry.tensors[0], entry.scale)


#: What a patch can take a vector from.
_OPS_OF_ONE_VECTOR = sorted(family.op for family in FAMILIES if family.is_one_vector)


def _why_not_one_vector(module: Module) -> str:
    if len(module.entries) != 1:
        return f"has {len(module.entries)} entries"
    (entry,) = module.entries
    family = FAMILY[entry.family]
    return "" if family.is_one_vector else f"has op {family.written!r}"


def _of_run(
    patch: ResolvedPatch, bounds: Bounds, model_state: ModelState, blobs: PackedTensors
) -> PromptEdits:
    """Return an entry for each source position and layer, per prompt."""
    run = _run(patch, bounds, model_state)
    prompt = _prompt(patch, run, bounds)
    _check_captured(patch, prompt)
    key = run_key(run.job, prompt.request, run.tag)
    mean: tuple[int, ...] | None = None
    if patch.spec.source.mean:
        with at_field(patch.source("positions")):
            mean = _mean_of(patch, prompt)
    per_prompt = []
    for index, chosen in enumerate(patch.positions):
        which = f"prompt {index}: " if len(patch.positions) > 1 else ""
        rows = (
            {(None, mean): chosen} if mean is not None else _rows_of(patch, chosen, prompt, which)
        )
        per_prompt.append(
            [
                patch.entry(
                    [layer], written, row_name(RunRow(key, patch.hook, layer, position, over))
                )
                for (position, over), written in rows.items()
                for layer in patch.layers
            ]
        )
    return per_prompt


def _run(patch: ResolvedPatch, bounds: Bounds, model_state: ModelState) -> RunView:
    name = patch.spec.source.run
    model = bounds.model
    at = patch.source("run")
    run = model_state.runs.get(name or "")
    if run is None:
        listing = " or ".join(
            filter(None, [", ".join(model_state.run_names), "the id of a job with captures"])
        )
        raise invalid(
            at,
            f"unknown source run {name!r} of model {model.name!r}",
            allowed=listing,
            hint=suggestion(name or "", model_state.run_names),
        )
    if run.model != model.name:
        raise invalid(
            at,
            (
                f"{name!r} is a run of model {run.model!r}: rows can only be used with the "
                "model they were captured from"
            ),
        )
    if run.identity != model.identity:
        captured = run.identity[:SHOWN_IDENTITY] or "not known"
        raise invalid(
            at,
            f"run {name!r} of job {run.job} has rows of another model: its identity was "
            f"{captured}, and {model.name!r} is now "
            f"{model.identity[:SHOWN_IDENTITY]}",
            allowed="a run that was captured from the model that is served now",
        )
    if run.state != "ready":
        why = f": {run.detail}" if run.detail else ""
        hint = f"wait with GET /v1/jobs/{run.job}?wait=30" if run.state == "pending" else None
        raise invalid(at, f"run {name!r} of job {run.job} is {run.state}{why}", hint=hint)
    return run


def _prompt(patch: ResolvedPatch, run: RunView, bounds: Bounds) -> RunPrompt:
    prompt = {prompt.request: prompt for prompt in run.prompts or []}.get(patch.spec.source.prompt)
    if prompt is None:
        detail = (
            f"run {patch.spec.source.run!r} of job {run.job} has no rows of prompt "
            f"{patch.spec.source.prompt}"
        )
        raise invalid(patch.source("prompt"), detail, allowed="the index of a prompt in that job")
    if prompt.hidden_size not in (0, bounds.model.hidden_size):
        detail = (
            f"run {patch.spec.source.run!r} has rows of hidden size {prompt.hidden_size}, "
            f"but the model has {bounds.model.hidden_size}"
        )
        raise invalid(
            patch.source("run"),
            (f"{detail}: it was captured from a different model also named {bounds.model.name!r}"),
        )
    return prompt


def _check_captured(patch: ResolvedPatch, prompt: RunPrompt) -> None:
    name = patch.spec.source.run
    if patch.hook not in prompt.sites:
        listing = "; ".join(
            f"{hook} {as_ranges(layers, SHOWN_RANGES)}" for hook, layers in prompt.sites.items()
        )
        raise invalid(
            f"{patch.at}.hook", f"{patch.hook} was not captured in run {name!r}", allowed=listing
        )
    captured = prompt.sites[patch.hook]
    if missing := sorted(set(patch.layers) - set(captured)):
        listing = as_ranges(captured, SHOWN_RANGES)
        raise invalid(
            f"{patch.at}.layers",
            (
                f"layer {missing[0]} was not captured at {patch.hook} in run {name!r}, which "
                f"has {listing}"
            ),
        )


def _rows_of(
    patch: ResolvedPatch, written: PositionSelector, prompt: RunPrompt, which: str
) -> dict[tuple[int | None, tuple[int, ...]], PositionSelector]:
    """Map each source position to the positions that get its row, ordered by their first.

    Raises a 400 at `source.position`.
    """
    position = patch.spec.source.position
    at = patch.source("position")
    if isinstance(position, int):
        with at_field(at):
            return {(_captured(position, prompt), ()): written}
    if not isinstance(written, list):
        raise invalid(
            at,
            f"{which}is required, because the patched positions are open-ended",
            allowed="one position, whose row is written to all patched positions, or mean",
        )
    if position is not None and len(position) != len(written):
        raise invalid(
            at,
            f"{which}has length {len(position)}, but the number of patched positions is "
            f"{len(written)}: give one for each, "
            "in ascending order",
        )
    shared: dict[int, list[int]] = {}
    for number, place in enumerate(written):
        with (
            at_field(at if position is None else f"{at}[{number}]"),
            Translated(
                SelectorError,
                lambda error: SelectorError(f"{which}{error}" if position is None else str(error)),
            ),
        ):
            source = _captured(place if position is None else position[number], prompt)
        shared.setdefault(source, []).append(place)
    return {(source, ()): places for source, places in shared.items()}


def _captured(place: int, prompt: RunPrompt) -> int:
    """Return a position of the run's prompt; a negative `place` counts from the end.

    Raises SelectorError if the run has no row of the position.
    """
    position = place + prompt.tokens if place < 0 else place
    if position < 0:
        raise SelectorError(
            f"position {place} is out of range: the run's prompt has positions 0 to "
            f"{prompt.tokens - 1}"
        )
    _check_has([position], prompt)
    return position


def _check_has(positions: Iterable[int], prompt: RunPrompt) -> None:
    if missing := set(positions) - set(prompt.positions):
        raise SelectorError(
            f"position {min(missing)} was not captured: the run has positions "
            f"{as_ranges(prompt.positions, SHOWN_RANGES)}"
        )


def _mean_of(patch: ResolvedPatch, prompt: RunPrompt) -> tuple[int, ...]:
    """Return the positions of the run over which the mean is taken; empty means all that it has.

    Raises SelectorError.
    """
    positions = patch.spec.source.positions
    if positions is None or positions == "all":
        return ()
    selector = resolve_positions(positions, prompt.tokens, _no_text)
    last = prompt.positions[-1]
    if selector == "all_generated" or (
        isinstance(selector, PositionWindow) and selector.stop is None
    ):
        present = set(prompt.positions)
        chosen = [
            position
            for position in select(selector, 0, last + 1, prompt.tokens)
            if position in present
        ]
        if not chosen:
            raise SelectorError(
                "the run has no rows there: it has positions "
                f"{as_ranges(prompt.positions, SHOWN_RANGES)}"
            )
    else:
        if isinstance(selector, PositionWindow):
            # check the ends of a long range before listing all its positions
            steps = (cast(int, selector.stop) - 1 - selector.start) // selector.step
            _check_has([selector.start, selector.start + steps * selector.step], prompt)
        chosen = list(select(selector, 0, max(last + 1, prompt.tokens), prompt.tokens))
        _check_has(chosen, prompt)
    if (ranges := as_ranges(chosen).count(",") + 1) > MAX_MEAN_RANGES:
        raise SelectorError(f"covers {ranges} ranges: a mean may cover at most {MAX_MEAN_RANGES}")
    return () if chosen == prompt.positions else tuple(chosen)


def _no_text(span: Span) -> list[int]:
    raise SelectorError(
        "is not available: a run has positions but no text; give numbers or a range",
        "" if span.is_turn else ".text",
    )


#: Kind of source → function that resolves it per prompt.
SOURCES: dict[str, Callable[[ResolvedPatch, Bounds, ModelState, PackedTensors], PromptEdits]] = {
    "run": _of_run,
    "vector": _of_vector,
    "module": _of_module,
    "zeros": lambda patch, bounds, model_state, blobs: patch.everywhere(ZEROS),
}


# --- All patches


def resolve_patches(
    specs: Sequence[PatchSpec], bounds: Bounds, model_state: ModelState, blobs: PackedTensors
) -> PromptEdits:
    """Return the entries of all patches, one list per prompt; empty without specs.

    Tensors that came with the specs are added to `blobs`, by content hash.

    Raises a 400 naming the field.
    """
    runs_of(specs)
    per_prompt: PromptEdits = [[] for _ in bounds.prompts] if specs else []
    total = 0
    masks = {""}
    for index, spec in enumerate(specs):
        at = f"patch[{index}]"
        if spec.source.run is not None and any(prompt.images for prompt in bounds.prompts):
            detail = (
                "rows of a run cannot be written into a prompt with images, whose positions "
                "only the worker knows"
            )
            raise invalid(f"{at}.source.run", detail, allowed="vector, module or zeros")
        made = apply_rules(RULES, spec, bounds, at)
        patch = ResolvedPatch(spec, at, made["hook"], made["layers"], made["positions"])
        model_state.check_seen(at, patch.hook, patch.layers)
        kind = next(name for name in SOURCES if getattr(spec.source, name) not in (None, False))
        total += _most_entries(patch)
        if total > MAX_PATCH_ROWS:
            raise invalid(
                "patch",
                f"needs {total} rows of runs and vectors over all prompts",
                allowed=f"at most {MAX_PATCH_ROWS}",
            )
        mask = (
            ""
            if made["mask"] is None
            else mask_tensor(made["mask"], bounds.model.row_size(patch.hook), blobs)
        )
        masks.add(mask)
        if len(masks) - 1 > MAX_MASKS:  # without the empty one
            raise invalid(
                f"{at}.mask",
                f"is one mask too many: the request already has {MAX_MASKS} different ones",
                allowed=f"at most {MAX_MASKS} different masks",
            )
        for entries, resolved in zip(
            per_prompt, SOURCES[kind](patch, bounds, model_state, blobs), strict=True
        ):
            entries += [entry.masked(mask) for entry in resolved] if mask else resolved
    return per_prompt


def _most_entries(patch: ResolvedPatch) -> int:
    """Return the largest number of entries that a patch may need, over all prompts."""
    if patch.spec.source.run is None:
        return len(patch.positions)
    separate = not patch.spec.source.mean and not isinstance(patch.spec.source.position, int)
    return len(patch.layers) * sum(
        len(chosen) if separate and isinstance(chosen, list) else 1 for chosen in patch.positions
    )
