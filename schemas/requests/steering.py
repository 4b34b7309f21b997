"""Global steering, named modules, and the ranks' reports on them.

Both are kept in Redis. A claim gives a job the global steering of that moment, under which its
requests run to their end. A module's name refers to its content: registering the name again does
not affect requests that were accepted before.
"""

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec

from ..access.keys import Caller, shown
from ..artifacts.registered import ArtifactKind, Registered, Registration
from ..base.edit_sizes import EditLimit, limit_of
from ..base.limits import MAX_ENTRIES, Name
from ..base.records import Published, Record, fields_of
from ..base.store_calls import StoreCalls
from ..prompts.selectors import (
    PositionSelector,
    RequestedPositions,
    cut_positions,
    resolve_positions,
)
from ..prompts.windows import Trigger
from .interventions import FAMILY
from .specs import (
    CheckedSteering,
    Owner,
    SteeringRow,
    SteeringSpec,
    StoredSteering,
    content_key,
    steering_rows,
)
from .trainings import Training

SteeringEntries = Annotated[list[SteeringSpec], msgspec.Meta(min_length=1, max_length=MAX_ENTRIES)]


class SteeringTemplate(CheckedSteering, kw_only=True):
    """A `SteeringSpec` after validation against a model, but not for a prompt: positions are not
    resolved yet.
    """

    positions: RequestedPositions

    def stored(self, positions: PositionSelector, owner: Owner = "request") -> StoredSteering:
        """Return the entry for one prompt, at the resolved `positions`."""
        own = msgspec.structs.asdict(self)
        return StoredSteering(**own | {"positions": positions, "owner": owner})


def content_digest(entries: list[SteeringTemplate]) -> str:
    """Return the SHA-256, in hexadecimal, of everything that determines what the entries do; empty
    for no entries.
    """
    return content_key(entries) if entries else ""


def tensors_of(entries: Sequence[SteeringTemplate]) -> list[str]:
    """Return the unique content hashes of the entries' tensors."""
    return list(dict.fromkeys(name for entry in entries for name in entry.tensors))


#: Metadata key of a module's file: the model that it belongs to.
MODEL_HEADER = "x-midstream-model"


# --- Named modules


class ModuleRequest(Registration, kw_only=True):
    """Body of `PUT /v1/artifacts/modules/{name}`: entries as in a request's `steering`, except
    entries that name modules.
    """

    steering: SteeringEntries
    # of each entry; the stricter counts where an entry has its own. It holds wherever the module is
    # used
    limit: EditLimit | None = None


class ModuleFacts(Registered, kw_only=True):
    """Describes a named module, as stored and as shown. `digest`: `content_digest(entries)`."""

    bytes: int  # of its distinct tensors
    training: Training | None = None  # of a learned module


class EntryView(Record):
    """One entry of a module or of global steering, with content hashes of its tensors."""

    op: str
    hook: str
    layers: list[int]
    positions: RequestedPositions
    tensors: list[str]
    scale: float
    numbers: list[float]
    rank: int = 0
    norm_match: bool = False
    limit: EditLimit | None = None
    trigger: Trigger | None = None


def views_of(entries: Sequence[SteeringTemplate]) -> list[EntryView]:
    return [_view_of(entry) for entry in entries]


def _view_of(entry: SteeringTemplate) -> EntryView:
    family = FAMILY[entry.family]
    numbers = {
        number.name: given for number, given in zip(family.numbers, entry.numbers, strict=True)
    }
    return EntryView(
        op=family.op,
        hook=entry.hook,
        layers=entry.layers,
        positions=entry.positions,
        tensors=entry.tensors,
        scale=numbers.pop("scale", entry.scale),
        numbers=list(numbers.values()),
        rank=entry.rank,
        norm_match=family.flag == "norm_match",
        limit=limit_of(entry.limit),
        trigger=entry.trigger or None,
    )


class ModuleView(ModuleFacts, kw_only=True):
    """A named module as the API returns it."""

    entries: list[EntryView]


class Module(ModuleFacts, kw_only=True):
    """A named module as stored."""

    entries: list[SteeringTemplate]
    hidden_size: int = 0  # of the model that it was registered for
    # for each entry, the largest coordinate of scale · vector; 0 if the vector is not scaled
    reach: list[float] = []

    @property
    def tensors(self) -> list[str]:
        """The unique content hashes of its tensors."""
        return tensors_of(self.entries)

    def shown_to(self, caller: Caller) -> ModuleView:
        own = {"name": shown(self.name), "entries": views_of(self.entries)}
        return ModuleView(**fields_of(self, ModuleFacts) | own)


MODULES = ArtifactKind(
    plural="modules",
    short="module",
    noun="module",
    record=Module,
    request=ModuleRequest,
    takes="entries as in a request's `steering`, as JSON or as a safetensors file. Changes require "
    "scope `submit` only.",
    make="midstream.api.routes.steering:make_module",
    scope="submit",
    file="midstream.api.routes.steering:module_of",
    calls="midstream.client.sdk.registered:Modules",
    acts={
        "put": "midstream.client.cli.named:put_module",
        "export": "midstream.client.cli.named:export_module",
    },
    of_tenants=True,
    shown=ModuleView,
)


# --- Global steering


class GlobalRequest(Record):
    """Body of `PUT /v1/steering/global`: steering for every request to the model that starts after
    the change.

    Positions apply to prompts of every length, so they are names, ranges that begin at a position,
    or positions counted from the beginning; positions beyond the end of a prompt or request are
    ignored.
    """

    steering: SteeringEntries
    model: Name | None = None  # null: the only served model


class GlobalSteering(Record):
    """Steering applied to every request to a model."""

    version: int = 0  # grows with every change; 0: never set
    entries: list[SteeringTemplate] = []  # empty: no global steering
    changed: float = 0.0

    @property
    def digest(self) -> str:
        return content_digest(self.entries)

    @property
    def tensors(self) -> list[str]:
        """The unique content hashes of its tensors."""
        return tensors_of(self.entries)

    def at(self, prompt_tokens: int) -> list[StoredSteering]:
        """Return the entries for a prompt of this length, without entries that have no position in
        the prompt.
        """
        cut = [(entry, cut_positions(entry.positions, prompt_tokens)) for entry in self.entries]
        return [
            entry.stored(resolve_positions(request, prompt_tokens), "operator")
            for entry, request in cut
            if request != []
        ]

    def most_rows(self) -> list[SteeringRow]:
        """Return the rows of a prompt that has all positions: entries that request the same
        positions share a row in every prompt.
        """
        return steering_rows(
            [entry.stored(entry.positions, "operator") for entry in self.entries]  # type: ignore[arg-type]
        )

    def common_rows(self) -> list[SteeringRow]:
        """Return the rows that every request needs: those of entries whose positions are a name or
        a range.

        (A list of positions is cut to each prompt, so its row differs between prompts.)
        """
        same = [entry for entry in self.entries if not isinstance(entry.positions, list)]
        return steering_rows(
            [entry.stored(resolve_positions(entry.positions, 0), "operator") for entry in same]
        )


# --- Status reported by the ranks


class RankLoad(Published):
    """Says what a rank holds and does; rows and entries are those of its steering table."""

    rows_used: int
    rows: int
    entries_used: int
    entries: int
    outbox: int  # receipts that the relay has not acknowledged yet
    backlog: int  # bytes of captured rows that wait for the writers
    captured_rows: int = 0  # since the rank started; a row is one hook of one layer at one position
    captured_bytes: int = 0
    dropped_positions: int = 0  # requested positions dropped under overload
    running: int = 0  # requests in the engine's last step, with or without interventions
    kv_cache: float = 0.0  # share of the KV cache in use in that step, 0 to 1


class RankSteering(RankLoad, kw_only=True, forbid_unknown_fields=True):
    """The report of one rank from `midstream_status`."""

    rank: int
    tp: int
    pp: int
    step: int
    checksum: str  # of every action since `epoch` began, 16 hex digits
    actions: int
    epoch: int  # how often its ledger was reset (resyncs)
    vectors: int
    requests: int
    queued: int = 0  # requests that waited in that step
    # operation → the rank's requests to object storage since it started, and those of the process
    # that writes its files
    store: dict[str, StoreCalls] = {}
    files_store: dict[str, StoreCalls] = {}


WorkerState = Literal["serving", "resyncing", "quarantined"]


class WorkerSteering(Record):
    """A worker's report, published at every change and on request."""

    worker: str
    boot: str
    model: str
    state: WorkerState
    detail: str  # why it does not serve
    at: float
    ask: str = ""  # the last query (`Steering.ask`) that this report answers
    waiting: int = 0  # requests that wait for rows of the table
    desyncs: int = 0  # disagreements of ranks since the worker started
    resyncs: int = 0  # disagreements that were resolved
    ranks: list[RankSteering] = []


class StageAgreement(Record):
    """Agreement of the ranks of one pipeline stage of one worker."""

    worker: str
    pp: int
    consistent: bool
    actions: dict[int, int]  # rank → count
    checksums: dict[int, str]  # rank → checksum


class RankAgreement(Record):
    """The agreement of all queried workers; a worker that did not respond, or a rank without a
    checksum, counts as inconsistent.
    """

    consistent: bool
    stages: list[StageAgreement]
    detail: str = ""  # what is not consistent


class Dynamic(Record):
    """Answer of `GET /v1/steering/dynamic`."""

    workers: list[WorkerSteering]
    determinism: RankAgreement


class GlobalView(Record):
    """Answer of `GET`, `PUT` and `DELETE /v1/steering/global`: what jobs that are claimed from now
    on run under.
    """

    model: str
    version: int
    digest: str  # empty: no global steering
    entries: list[EntryView]
    changed: float
