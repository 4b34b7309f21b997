"""Resolves `steering`: of a request, of a named module, or of global steering.

Named modules are replaced by their entries here; later stages see no names. Patches (`patches.py`)
precede steering.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import msgspec

from ....schemas.artifacts.conditions import POLICY
from ....schemas.base.edit_sizes import EditLimit, strictest
from ....schemas.base.errors import MidstreamError, Translated, invalid
from ....schemas.base.limits import (
    MAX_ENTRIES,
    MAX_JOB_EDITS,
    MAX_POLICY_VECTORS,
    MAX_STEERING_ROWS,
    MAX_TRIGGERS,
)
from ....schemas.base.records import from_msgpack
from ....schemas.base.tensors import PackedTensors, Tensor
from ....schemas.jobs.models import ModelInfo
from ....schemas.model.banks import BANK, RESIDUAL
from ....schemas.prompts.selectors import (
    PositionSelector,
    RequestedPositions,
    SelectorError,
    Span,
    as_ranges,
)
from ....schemas.requests.interventions import FAMILY
from ....schemas.requests.specs import (
    PatchSpec,
    PromptEdits,
    SteeringRow,
    SteeringSpec,
    StoredSteering,
    columns_of,
    shared_by,
    steering_rows,
)
from ....schemas.requests.steering import Module, SteeringTemplate
from ....schemas.settings.tuning import global_share
from ..positions.captures import (
    Bounds,
    PromptFacts,
    Rules,
    apply_rules,
    at_field,
    positions_of_each,
)
from ..positions.gates import Gated, gated_entries
from ..positions.windows import check_trigger
from .features import NONE, NamedFeatures, plain_spec, resolve_feature
from .installed_ops import check_not_installed, resolve_installed
from .interventions import (
    Placed,
    check_limit,
    check_magnitude,
    check_together,
    check_without,
    edited_layers,
    resolve_entry,
)
from .model_state import NOTHING, ModelState, unknown_module
from .patches import resolve_patches

#: Limit on listed positions of global steering: workers scan them for every prompt.
MAX_GLOBAL_POSITIONS = 1 << 15

NO_POSITION = "no position given: give at least one"


class Room(NamedTuple):
    """Space that entries take, or may take, in the worker's tables."""

    rows: int
    entries: int


def modules_named(specs: Iterable[SteeringSpec], patch: Iterable[PatchSpec] = ()) -> list[str]:
    """Return the distinct names of modules."""
    named = [*(spec.module for spec in specs), *(spec.source.module for spec in patch)]
    return list(dict.fromkeys(name for name in named if name is not None))


def check_number(specs: Iterable[SteeringSpec], model_state: ModelState, prompts: int = 1) -> None:
    """Raises a 400 for too many entries.

    Call it before modules are resolved, because one module may be named many times.
    """
    named = (model_state.modules.get(spec.module or "") for spec in specs)
    entries = sum(1 if module is None else len(module.entries) for module in named)
    entries += sum(len(plain) - 1 for plain in model_state.features.directions.values())
    if entries > MAX_ENTRIES:
        raise invalid(
            "steering",
            f"has {entries} entries",
            allowed=f"at most {MAX_ENTRIES}, including those of modules",
        )
    if entries * prompts > MAX_JOB_EDITS:
        raise invalid(
            "steering",
            f"has {entries} entries for {prompts} prompts",
            allowed=f"at most {MAX_JOB_EDITS} over all prompts",
            hint="use fewer entries, or fewer prompts in one job",
        )


# --- A named module in a request

EntryT = TypeVar("EntryT", SteeringTemplate, StoredSteering)
#: Fields that are valid together with `module`.
BESIDE_MODULE = ("module", "layers", "positions", "scale")
REFERENCE_RULES: Rules = (
    ("layers", lambda spec, bounds: None if spec.layers is None else edited_layers(spec, bounds)),
    (
        "positions",
        lambda spec, bounds: None if spec.positions is None else positions_of_each(spec, bounds),
    ),
)


def _placed_of_module(
    spec: SteeringSpec, bounds: Bounds, at: str, model_state: ModelState
) -> list[Placed]:
    """Return the entries of the module that `spec` names. Raises a 400 naming the field below
    `at`.
    """
    check_together(spec, at, "module, which defines it", BESIDE_MODULE)
    made = apply_rules(REFERENCE_RULES, spec, bounds, at)
    module = model_state.modules.get(spec.module or "")
    if module is None:
        raise unknown_module(f"{at}.module", spec.module, bounds.model.name, model_state)
    scale = 1.0 if spec.scale is None else spec.scale
    placed = []
    for number, entry, reach in _chosen(module, spec, bounds):
        _check_fits(module, number, entry, bounds, at)
        _check_scale(entry, reach, scale, bounds, f"{at}.scale", "the module's")
        positions = made["positions"] or _own_positions(module, number, entry, bounds, at)
        placed.append(Placed(entry.scaled(scale), positions, reach * abs(scale)))
    if not placed:
        layers = as_ranges({layer for entry in module.entries for layer in entry.layers})
        raise invalid(f"{at}.layers", f"module {module.name!r} edits none of them", allowed=layers)
    return placed


def _chosen(
    module: Module, spec: SteeringSpec, bounds: Bounds
) -> list[tuple[int, SteeringTemplate, float]]:
    """Return number, entry and reach of the module's entries at those of their layers that the spec
    chooses.
    """
    every = zip(range(len(module.entries)), module.entries, module.reach, strict=True)
    if spec.layers is None:
        return [*every]
    wanted = frozenset(edited_layers(spec, bounds))
    return [
        (number, msgspec.structs.replace(entry, layers=layers), reach)
        for number, entry, reach in every
        if (layers := [layer for layer in entry.layers if layer in wanted])
    ]


def _check_fits(
    module: Module, number: int, entry: SteeringTemplate, bounds: Bounds, at: str
) -> None:
    """Raises a 400 for a module of other sizes: its model's name may now serve another model."""
    model = bounds.model
    last = entry.layers[-1]
    absent = model.absent.get(entry.hook)
    why = f", which is not served ({absent})" if absent is not None else ""
    for wrong, applies in (
        (
            f"hidden size {module.hidden_size}, but the model has {model.hidden_size}",
            module.hidden_size != model.hidden_size,
        ),
        (
            f"layer {last} in entry {number}; the model has layers 0 to {model.num_layers - 1}",
            last >= model.num_layers,
        ),
        (
            f"hook {entry.hook} in entry {number}{why}; the model has {', '.join(model.hooks)}",
            entry.hook not in model.hooks,
        ),
    ):
        if applies:
            raise invalid(
                f"{at}.module",
                f"module {module.name!r} has {wrong}; it was registered for a different model also "
                f"named {model.name!r}",
            )


def _check_scale(
    entry: SteeringTemplate, reach: float, scale: float, bounds: Bounds, field: str, whose: str
) -> None:
    """Raises a 400 naming `field` if the entry, multiplied by `scale`, would be refused as an entry
    of a request. `reach`: see `Module.reach`.
    """
    made = entry.scaled(scale)
    family = FAMILY[made.family]
    number, value = (
        (family.numbers[0], made.numbers[0]) if family.scale is None else (family.scale, made.scale)
    )
    with Translated(
        ValueError,
        lambda error: invalid(field, f"{scale:.3g} times {whose} {number.name}: {error}"),
    ):
        check_limit(family, number, value)
    if family.scale is not None:
        with at_field(field):
            what = f"{scale:.3g} times {whose} scaled vector "
            check_magnitude(reach * abs(scale), bounds, what)


def _own_positions(
    module: Module, number: int, entry: SteeringTemplate, bounds: Bounds, at: str
) -> list[PositionSelector]:
    with Translated(
        SelectorError,
        lambda error: invalid(
            f"{at}.module",
            f"module {module.name!r}, entry {number}: {error}",
            hint=(
                f"give {at}.positions, instead of the module's own"
                if at.startswith("steering")
                else "use another module"
            ),
        ),
    ):
        return positions_of_each(entry, bounds)


# --- A request


def resolve_edits(
    patch: Sequence[PatchSpec],
    specs: Sequence[SteeringSpec],
    bounds: Bounds,
    model_state: ModelState = NOTHING,
    gated: Sequence[Gated] = (),
    scales: Sequence[float] = (),
) -> tuple[PromptEdits, PackedTensors]:
    """Return the edits per prompt (patches, then steering, then what probes apply: `gated`), and
    the tensors that came with them, by content hash.

    Both are empty when nothing is edited. Tensors of named modules are not included. `scales`: of a
    dose; steering, but not what probes apply, must be valid at each of them. Raises a 400 naming
    the field.
    """
    blobs: PackedTensors = {}
    per_prompt: PromptEdits = [[] for _ in bounds.prompts] if specs or gated else []
    own = [module for module in gated if module.module is None]
    for index, spec in enumerate(specs):
        placed = _placed(spec, bounds, f"steering[{index}]", model_state, blobs)
        for number, scale in enumerate(scales):
            for each in placed:
                whose = f"steering[{index}]'s"
                _check_scale(each.entry, each.reach, scale, bounds, f"scales[{number}]", whose)
        for entry, positions, _ in placed:
            named: dict[str, StoredSteering] = {}  # shared by all prompts
            for entries, chosen in zip(per_prompt, positions, strict=True):
                stored = entry.stored(chosen)
                if isinstance(chosen, str):
                    stored = named.setdefault(chosen, stored)
                entries.append(stored)
    for module in own:
        _extend(per_prompt, _applied(module, bounds, model_state))
    _check_each(per_prompt, "steering" if specs or not own else "probes", bounds.model)
    if patch:
        patched = resolve_patches(patch, bounds, model_state, blobs)
        _extend(patched, per_prompt)
        per_prompt = patched
        _check_each(per_prompt, "patch", bounds.model)
    for module in gated:
        if module.module is not None:
            # what a policy's action refers to: its module alone
            state = ModelState({module.module.name: module.module})
            _extend(per_prompt, _applied(module, bounds, state))
    return per_prompt, blobs


def _extend(
    per_prompt: Sequence[list[StoredSteering]], more: Sequence[list[StoredSteering]]
) -> None:
    for entries, added in zip(per_prompt, more, strict=False):
        entries += added


def _applied(gated: Gated, bounds: Bounds, model_state: ModelState) -> PromptEdits:
    """Return for each prompt the entries that a probe or a policy applies."""
    applied = [
        (entry.stored("all"), positions)
        for entry, positions, _ in _placed(gated.spec, bounds, gated.at, model_state, {})
    ]
    return gated_entries(gated, applied, bounds)


def _check_each(per_prompt: Sequence[list[StoredSteering]], field: str, model: ModelInfo) -> None:
    """Raises a 400 naming `field` for the first prompt that needs more room than there is."""
    rows: dict[tuple[int, ...], int] = {}
    for index, entries in enumerate(per_prompt):
        if len(entries) > MAX_ENTRIES and field == "patch":
            raise invalid(
                field,
                f"needs {len(entries)} entries for prompt {index}: one per layer and source "
                "position, plus those of steering",
                allowed=f"at most {MAX_ENTRIES}",
            )
        sharing = _sharing(entries)
        if rows.get(sharing, MAX_STEERING_ROWS + 1) > MAX_STEERING_ROWS:
            # above the limit, it depends on the prompt which rows meet at one token
            rows[sharing] = _check_room(entries, room_of(model), f"for prompt {index}", field=field)


def _placed(
    spec: SteeringSpec, bounds: Bounds, at: str, model_state: ModelState, blobs: PackedTensors
) -> list[Placed]:
    check_trigger(spec.trigger, at, bounds.model)
    placed = (
        _entries_of(spec, bounds, at, blobs, model_state.features)
        if spec.module is None
        else _placed_of_module(spec, bounds, at, model_state)
    )
    for each in placed:
        model_state.check_seen(at, each.entry.hook, each.entry.layers)
    return [each._replace(entry=_qualified(each.entry, spec, at)) for each in placed]


def _qualified(entry: SteeringTemplate, spec: SteeringSpec, at: str) -> SteeringTemplate:
    """Return an entry of the spec with the spec's limit and trigger."""
    entry = limited(entry, spec.limit, at)
    return entry if spec.trigger is None else msgspec.structs.replace(entry, trigger=spec.trigger)


def limited(entry: EntryT, limit: EditLimit | None, at: str) -> EntryT:
    """Return the entry with the stricter of its own limit and `limit`, of the spec at `at`.

    Raises a 400 for an entry whose edits cannot be limited: at hooks inside attention and MLP, each
    tensor-parallel rank holds a part of the rows.
    """
    if limit is None:
        return entry
    if BANK[entry.hook] != RESIDUAL:
        raise invalid(
            f"{at}.limit",
            f"edits at {entry.hook} cannot be limited: ranks hold parts of its rows",
            allowed=", ".join(hook for hook, bank in BANK.items() if bank == RESIDUAL),
        )
    return msgspec.structs.replace(entry, limit=strictest(entry.limit, limit.stored))


def _entries_of(
    spec: SteeringSpec, bounds: Bounds, at: str, blobs: PackedTensors, features: NamedFeatures
) -> list[Placed]:
    """Return the entries of a spec other than a module, with their positions in each prompt."""
    if at in features.directions:
        return [resolve_entry(plain, bounds, at, blobs) for plain in features.directions[at]]
    return [_entry_of(spec, bounds, at, blobs, features)]


def _entry_of(
    spec: SteeringSpec, bounds: Bounds, at: str, blobs: PackedTensors, features: NamedFeatures
) -> Placed:
    if spec.extension is not None:
        return resolve_installed(spec, bounds, at, blobs)
    check_without(spec, at, "extension", ("options",))
    plain = plain_spec(spec, features)
    if plain.sae is not None:
        return resolve_feature(spec, bounds, at, blobs, features)
    try:
        return resolve_entry(plain, bounds, at, blobs)
    except MidstreamError as error:
        if spec.sae is None or error.field != f"{at}.scale":
            raise
        raise invalid(f"{at}.value", error.detail, error.allowed) from error


# --- Modules and global steering


@dataclass(frozen=True)
class SteeringContent:
    """Entries for prompts that are not known yet."""

    entries: list[SteeringTemplate]
    reach: list[float]  # of each entry, see `Module.reach`
    blobs: PackedTensors  # tensors that came with them, by content hash

    @property
    def size(self) -> int:
        """Bytes of the tensors in `blobs`."""
        return sum(len(from_msgpack(raw, Tensor).data) for raw in self.blobs.values())


def resolve_module(
    specs: Sequence[SteeringSpec],
    model: ModelInfo,
    features: NamedFeatures = NONE,
    limit: EditLimit | None = None,
) -> SteeringContent:
    """Return the content of a named module, each entry with `limit` or its own, if that is
    stricter. Raises a 400 naming the field.
    """
    blobs: PackedTensors = {}
    entries = []
    reach = []
    for index, spec in enumerate(specs):
        at = f"steering[{index}]"
        if spec.module is not None:
            raise invalid(
                f"{at}.module",
                "a module cannot refer to another module: give its entries",
            )
        if spec.positions == []:
            raise invalid(f"{at}.positions", NO_POSITION)
        check_not_installed(spec, at)
        check_trigger(spec.trigger, at, model)
        found = _entries_of(spec, Bounds(model, []), at, blobs, features)
        entries += [limited(_qualified(each.entry, spec, at), limit, at) for each in found]
        reach += [each.reach for each in found]
    _check_room([_unresolved(entry) for entry in entries], room_of(model))
    return SteeringContent(entries, reach, blobs)


def resolve_global(
    specs: Sequence[SteeringSpec], model: ModelInfo, model_state: ModelState
) -> SteeringContent:
    """Return the content of global steering. Raises a 400 naming the field."""
    check_number(specs, model_state)
    blobs: PackedTensors = {}
    bounds = Bounds(model, [])
    entries = []
    listed = 0
    for index, spec in enumerate(specs):
        at = f"steering[{index}]"
        check_not_installed(spec, at)
        place = (
            f"{at}.positions"
            if spec.module is None or spec.positions is not None
            else f"{at}.module"
        )
        for entry, _, _ in _placed(spec, bounds, at, model_state, blobs):
            if spec.positions is not None:
                entry = msgspec.structs.replace(entry, positions=spec.positions)
            _check_global_positions(entry.positions, place)
            listed += _listed(entry.positions, model)
            entries.append(entry)
        if listed > MAX_GLOBAL_POSITIONS:
            allowed = (
                f"at most {MAX_GLOBAL_POSITIONS} in all lists; a single range outside a list "
                "does not count"
            )
            raise invalid(place, f"the lists have {listed} positions in total", allowed=allowed)
    rows, vectors = room_of(model)
    _check_room(
        [_unresolved(entry) for entry in entries],
        Room(global_share(rows), global_share(vectors)),
        "as global steering",
    )
    return SteeringContent(entries, [], blobs)


def _unresolved(entry: SteeringTemplate) -> StoredSteering:
    """Return the entry with its requested positions: entries that request the same positions share
    a row in every prompt.
    """
    return entry.stored(entry.positions)  # type: ignore[arg-type]


def _listed(requested_positions: RequestedPositions, model: ModelInfo) -> int:
    """Return an upper bound on the positions in a list, whose ranges begin at 0 or later."""
    if not isinstance(requested_positions, list):
        return 0
    end = model.max_model_len
    ranges = [
        (item.start or 0, end if item.stop is None else min(item.stop, end))
        for item in requested_positions
        if isinstance(item, Span)
    ]
    return (
        len(requested_positions) - len(ranges) + sum(max(stop - start, 0) for start, stop in ranges)
    )


def _check_global_positions(requested_positions: RequestedPositions, at: str) -> None:
    """Raises a 400 for positions that depend on the prompt."""
    allowed = "a name, positions of 0 or more, or a range with `start` and `stop` of 0 or more"
    for index, item in enumerate(
        requested_positions if isinstance(requested_positions, list) else [requested_positions]
    ):
        where = (
            f"{at}[{index}]"
            if isinstance(requested_positions, list) and not at.endswith(".module")
            else at
        )
        if item == "image" or (isinstance(item, Span) and item.image is not None):
            raise invalid(
                where,
                "images are not valid here: global steering applies to every prompt",
                allowed=allowed,
            )
        if isinstance(item, Span) and not item.is_range:
            raise invalid(
                where,
                f"{'a turn' if item.is_turn else 'text'} is not valid here: global steering "
                "applies to every prompt",
                allowed=allowed,
            )
        for place in (item.start, item.stop) if isinstance(item, Span) else (item,):
            if isinstance(place, int) and place < 0:
                raise invalid(
                    where,
                    f"{place} is a different position in each prompt: count from the beginning",
                    allowed=allowed,
                )
    if requested_positions == []:
        raise invalid(at, NO_POSITION, allowed=allowed)


# --- Room in the tables


def _room(rows: Sequence[SteeringRow]) -> Room:
    return Room(len(rows), sum(row.num_vectors for row in rows))


def _triggers(rows: Sequence[SteeringRow]) -> int:
    return len({row.condition[1] for row in rows} - {b""})


def room_of(model: ModelInfo) -> Room:
    """Return the room of a request, and of a module; 0: not reported."""
    return Room(model.steering_rows, model.steering_entries)


def check_policies(gated: Sequence[Gated], model: ModelInfo, field: str) -> None:
    """Raises a 400 for modules of policies that do not fit the model, or, naming `field`, that need
    more room together than those of all traffic have, or those that a request names.
    """
    named = ", ".join(dict.fromkeys(module.probe.removeprefix(POLICY) for module in gated))

    def check(what: str, requested: int, most: int) -> None:
        if requested > most:
            raise invalid(
                field,
                f"the modules of {named} need {requested} {what}",
                allowed=f"at most {most} for the policies of all traffic that act, and for those "
                "that a request names",
                hint="give entries of a module the same limit and trigger, or merge directions "
                "into one lowrank",
            )

    # first, because all of them are resolved for the other figures
    entries = sum(len(each.module.entries) for each in gated if each.module is not None)
    check("entries", entries, MAX_POLICY_VECTORS)
    per_prompt, _ = resolve_edits([], [], Bounds(model, [PromptFacts(1)]), gated=gated)
    rows = [row for edits in per_prompt for row in steering_rows(edits)]
    needed = _room(rows)
    for what, requested, most in (
        ("rows of the steering table", needed.rows, MAX_STEERING_ROWS),
        ("vectors", needed.entries, MAX_POLICY_VECTORS),
        ("triggers", _triggers(rows), MAX_TRIGGERS),
    ):
        check(what, requested, most)


def _places(rows: Sequence[SteeringRow]) -> int:
    """Return the largest number of rows that one token may have.

    Positions that count from a prompt's end or quote its text may be any token.
    """
    known = [
        msgspec.structs.replace(row, positions="all")
        if isinstance(row.positions, list)
        and not all(isinstance(place, int) and place >= 0 for place in row.positions)
        else row
        for row in rows
    ]
    return max(columns_of(known), default=-1) + 1


def _sharing(entries: list[StoredSteering]) -> tuple[int, ...]:
    """Return for each entry the number of the first that may share its row.

    Prompts with equal results take the same rows.
    """
    first: dict[object, int] = {}
    return tuple(first.setdefault(shared_by(entry), number) for number, entry in enumerate(entries))


def _check_room(
    entries: list[StoredSteering], room: Room, whom: str = "", field: str = "steering"
) -> int:
    """Check that the entries fit into the room of their owner; return the number of their rows.

    Raises a 400 naming `field`. Requests that fit alone but not together wait for each other.
    """
    rows = steering_rows(entries)
    needed = _room(rows)
    whom = f" {whom}" if whom else ""
    if (triggers := _triggers(rows)) > MAX_TRIGGERS:
        raise invalid(
            field, f"has {triggers} different triggers{whom}", allowed=f"at most {MAX_TRIGGERS}"
        )
    if needed.rows > MAX_STEERING_ROWS and (places := _places(rows)) > MAX_STEERING_ROWS:
        raise invalid(
            field,
            f"needs {places} rows of the steering table for one token{whom}: one for each "
            "set of positions that may contain it, and one "
            "more where an op repeats at the same site and cannot be merged",
            allowed=f"at most {MAX_STEERING_ROWS} for one token",
            hint="use disjoint positions, give entries the same positions, place entries that "
            "replace rows at the same positions next to each other, or merge directions into one "
            "lowrank",
        )
    for name, requested, present in zip(Room._fields, needed, room, strict=True):
        if present and requested > present:
            raise invalid(
                field,
                f"needs {requested} steering {name}{whom}",
                allowed=f"at most {present} (setting tuning.steering_{name})",
                hint="use fewer layers or entries, or a lower rank"
                if field == "steering"
                else "use fewer layers or positions",
            )
    return needed.rows
