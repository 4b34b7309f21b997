"""The blocking `Client` and the awaiting `AsyncClient`. Both have the same calls, each of which is
written once (`client.sdk.calls`).
"""

from typing import TYPE_CHECKING, NoReturn

from ...schemas.base.errors import suggestion
from ...schemas.jobs.kinds import KINDS
from ...schemas.packages import entries, installing, part
from ...schemas.requests.artifact_kinds import ARTIFACTS
from ..extras import CALLS
from . import discovery, wire
from .calls import Awaits, Blocks, Calls, M, added_verb, stream, verb
from .captures import Captures
from .jobs import Completions, Jobs
from .readings import Readings
from .registered import GlobalSteeringCalls, SourceRuns, calls_of
from .server import ServerCalls
from .service import Changes, Keys, Secrets, Tenants, Webhooks
from .transport import AwaitingTransport, BlockingTransport, Transport

if TYPE_CHECKING:
    from .registered import Jacobians, Lenses, Loras, Modules, Policies, Probes, Saes
    from .typed import Attributions, Doses, Fits, Harvests, Hits, Replays, Sweeps, over

#: First guess at what is done to a named thing → its verb, which HTTP, this client and the command
#: line share.
VERBS = {
    **dict.fromkeys(("register", "set", "add", "store", "upload"), "put"),
    **dict.fromkeys(("rm", "remove", "revoke", "clear", "unregister", "enable"), "delete"),
    **dict.fromkeys(("show", "describe", "inspect", "status"), "get"),
    **dict.fromkeys(("ls", "deliveries"), "list"),
    "save": "export",
    **dict.fromkeys(("new", "make", "generate", "rotate"), "create"),
}
#: First guess at a call → advice.
_MEANT = {
    "generate": "did you mean 'run'?",
    "complete": "did you mean 'run'?",
    "adapters": "did you mean 'loras'?",
}
#: Attribute of a client → the group of calls, or the call of one, that an entry point or the row of
#: a kind of jobs names. They are loaded when they are used, since their modules may import this
#: one.
_ADDED = {
    **{offer.name: offer.value for offer in entries("midstream.calls")},
    **{name: path for row in KINDS.values() for name, path in row.calls.items()},
}
_GROUPS = {name: path for name, path in _ADDED.items() if "." not in path.partition(":")[2]}


class Verbs(Calls[M]):
    """The calls of both clients: the groups, and the calls of every day, each that of a group."""

    run = verb(Jobs.run)
    submit = verb(Jobs.submit)
    plan = verb(Jobs.plan)
    wait = verb(Jobs.wait)
    result = verb(Jobs.result)
    completion = verb(Completions.completion)
    chat = verb(Completions.chat)
    capture = verb(Captures.open)
    rows = verb(Captures.rows)
    lens = verb(Readings.lens)
    features = verb(Readings.features)
    attention = verb(Readings.attention)
    models = verb(ServerCalls.models)
    model = verb(ServerCalls.model)
    ready = verb(ServerCalls.ready)
    status = verb(ServerCalls.status)
    tokenize = verb(ServerCalls.tokenize)
    positions = verb(ServerCalls.positions)
    detokenize = verb(ServerCalls.detokenize)

    def __init__(self, io: Transport, blocking: bool = False):
        super().__init__(io, blocking)
        self.jobs: Jobs[M] = Jobs(io, blocking)
        self.captures: Captures[M] = Captures(io, blocking)
        self.readings: Readings[M] = Readings(io, blocking)
        for plural, kind in ARTIFACTS.items():
            setattr(self, plural, calls_of(kind)(io, blocking))
        self.global_steering: GlobalSteeringCalls[M] = GlobalSteeringCalls(io, blocking)
        self.source_runs: SourceRuns[M] = SourceRuns(io, blocking)
        self.keys: Keys[M] = Keys(io, blocking)
        self.tenants: Tenants[M] = Tenants(io, blocking)
        self.changes: Changes[M] = Changes(io, blocking)
        self.webhooks: Webhooks[M] = Webhooks(io, blocking)
        self.secrets: Secrets[M] = Secrets(io, blocking)
        for name, path in _GROUPS.items():
            setattr(self, name, part(path)(io, blocking))

    if TYPE_CHECKING:  # what the rows of kinds and entry points name
        modules: Modules[M]
        loras: Loras[M]
        saes: Saes[M]
        lenses: Lenses[M]
        jacobians: Jacobians[M]
        probes: Probes[M]
        policies: Policies[M]
        map = stream(over)
        sweep = verb(Sweeps.run)
        attribute = verb(Attributions.run)
        dose = verb(Doses.run)
        fit_module = verb(Fits.module)
        fit_lens = verb(Fits.lens)
        sweeps: Sweeps[M]
        attributions: Attributions[M]
        doses: Doses[M]
        fits: Fits[M]
        harvests: Harvests[M]
        hits: Hits[M]
        replays: Replays[M]

    if not TYPE_CHECKING:  # a type checker would accept every name

        def __getattr__(self, name: str) -> NoReturn:
            """Name the call of a group that a name such as `register_sae` means."""
            words = [VERBS.get(word, word) for word in name.split("_")]
            meant = [
                f"{group}.{call}"
                for group, calls in vars(self).items()
                if isinstance(calls, Calls)
                and any(group.startswith(word) for word in words if word)
                for call in dir(calls)
                if call in words
            ]
            hint = f"did you mean {meant[0]!r}?" if meant else _MEANT.get(name)
            if name in CALLS:
                hint = installing(CALLS[name])
            hint = hint or suggestion(name, dir(self))
            raise AttributeError(
                f"{type(self).__name__} has no attribute {name!r}" + (f"; {hint}" if hint else ""),
                name=name,
                obj=self,
            )


for _name in _ADDED.keys() - _GROUPS.keys():
    setattr(Verbs, _name, added_verb(_ADDED[_name]))


class _Connected(Verbs[M]):
    """Base of both clients."""

    _transport: type[Transport]

    def __init__(self, url: str | None = None, api_key: str | None = None):
        self.url, api_key = discovery.address(url, api_key)
        super().__init__(self._transport(self.url, wire.headers(api_key)), self._blocking)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"


class Client(_Connected[Blocks]):
    """The blocking client.

    `url`: the address of the API; by default that of the running stack, as `client.sdk.discovery`
    finds it. `api_key`: by default the value of MIDSTREAM_API_KEY.

    Every call raises MidstreamError if the server rejects it or cannot carry it out (with its
    `kind` and `field`), VersionMismatch when the versions of client and server are incompatible,
    and ServerUnreachable when no server answers.
    """

    _blocking = True
    _transport = BlockingTransport
    _io: BlockingTransport

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _awaited(self) -> Verbs[Awaits]:
        return Verbs(self._io)

    def close(self) -> None:
        """Close the connections."""
        self._io.close()


class AsyncClient(_Connected[Awaits]):
    """The awaiting client: the calls of `Client`, as coroutines.

    Calls raise the same errors. Progress callbacks are called, not awaited.
    """

    _transport = AwaitingTransport
    _io: AwaitingTransport

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._io.close()
