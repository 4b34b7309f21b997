"""The table of kinds of things: what each verb does with a kind, and how one is shown."""

from collections.abc import Iterator
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, get_args

import httpx2

from ...schemas.access.audit import AuditEntry
from ...schemas.access.handling import Handling
from ...schemas.access.keys import Limits
from ...schemas.base.errors import MidstreamError, Translated, invalid, suggestion
from ...schemas.base.records import to_json
from ...schemas.base.version import full_version
from ...schemas.jobs.jobs import JobView, State
from ...schemas.jobs.kinds import KINDS as ROWS
from ...schemas.packages import part
from ...schemas.requests.artifact_kinds import ARTIFACTS
from ...schemas.requests.steering import Dynamic, GlobalView
from ...schemas.service.health import Health
from ..render import figures, readings, records, steering
from ..render.jobs import moment
from ..render.lines import computed
from ..sdk import wire
from ..sdk.client import Client
from ..sdk.readings import Words
from . import captures, keys, options
from .jobs import print_result, words_of
from .kind import Act, Kind, added, calls_of
from .terminal import Connector, err, out, print_json, say

#: The most entries of a page.
MOST = 200
#: The beginning of a text that a spreadsheet would run as a formula: what is no number.
_FORMULA = r"\A[=+\-@\t\r](?![\d.]*\Z)"
#: Fields of every job, and its model.
_OF_EVERY_JOB = (*Handling.__struct_fields__, "model")


# --- Jobs


def _show_job(connect: Connector, view: JobView) -> None:
    out.print(records.one(view))
    if view.state is State.SUCCEEDED:
        print_result(connect(), connect().result(view.id))


def _export_job(
    connect: Connector, job: str, path: str = "-", /, *, pair: int | None = None
) -> str:
    """Write a job's result."""
    result = connect().result(job)
    words = words_of(connect(), result.model, readings.tokens(result))
    written = write_result(result, job, path, words=words or None, pair=pair)
    rows = written and not computed(result) and result.capture_results.files
    return f"{written}, without its rows: midstream export capture {job}" if rows else written


def write_result(
    result: Any,
    name: str,
    path: str,
    words: Words | None = None,
    pair: int | None = None,
) -> str:
    """Write a result to a file: as JSON, as a table (.csv), or drawn. `words`: token id → text."""
    if path == "-":
        print_json(result)
        return ""
    match Path(path).suffix:
        case ".json":
            Path(path).write_bytes(to_json(result))
        case ".csv":
            frame = result.to_pandas(**wire.given(words=words))
            frame.replace(_FORMULA, r"'\g<0>", regex=True).to_csv(path, index=False)
        case _:
            figures.check(path, "--output")
            figures.plot(result, path, **wire.given(words=words, pair=pair))
    return f"{name} written to {path}"


# --- Named things


def _put_global(connect: Connector, /, *entries: str, **fields: Any) -> GlobalView:
    return connect().global_steering.put(options.steering(entries, "ENTRY"), **fields)


def _show_global(_: Connector, view: GlobalView) -> None:
    out.print(steering.global_line(view), soft_wrap=True)
    if view.entries:
        out.print(steering.entries(view.entries))


def _show_ranks(_: Connector, found: Dynamic) -> None:
    for worker in found.workers:
        out.print(steering.worker_line(worker), soft_wrap=True)
        out.print(steering.ranks(worker, found.determinism))
    out.print(steering.agreement_line(found), soft_wrap=True)


# --- The service


def _tenant(connect: Connector, name: str | None = None, /) -> Any:
    tenants = connect().tenants
    if name is not None and name not in (known := [view.name for view in tenants.list()]):
        raise MidstreamError(
            "not_found",
            f"unknown tenant {name!r}: it has neither keys nor limits of its own",
            allowed=", ".join(known) or None,
            hint=suggestion(name, known),
        )
    return tenants.get(name)


def _put_tenant(connect: Connector, name: str, /, **limits: Any) -> Any:
    """Set all limits of a tenant; omitted limits follow the service's settings. 0: no limit."""
    return connect().tenants.put(name, wire.checked(limits, Limits))


def _show_secrets(_: Connector, listed: Any) -> None:
    """Print the secret alone to standard output, for a shell's variable."""
    print(listed.secrets[0].secret)
    for former in listed.secrets[1:]:
        err.print(f"also valid until {moment(former.until)}: {former.secret}", style="dim")


def _export_audit(connect: Connector, path: str, /) -> str:
    """Write the whole audit log as JSON lines, oldest first."""
    entries: list[AuditEntry] = []
    page = connect().changes.list(limit=MOST)
    entries += page.entries
    while page.next:
        page = connect().changes.list(limit=MOST, cursor=page.next)
        entries += page.entries
    Path(path).write_bytes(b"".join(to_json(entry) + b"\n" for entry in reversed(entries)))
    return f"{len(entries)} entries written to {path}"


def _server(connect: Connector, /) -> Health:
    client: Client = connect()
    with Translated(
        httpx2.TransportError, lambda error: wire.unreachable(client.url, error), hidden=True
    ):
        return wire.decode(httpx2.get(f"{client.url}/healthz", timeout=3.0), Health)


def _show_server(connect: Connector, health: Health) -> None:
    server = health.build or health.version
    say(f"midstream {full_version()}\nserver {server} at {connect().url}")


def _with_added(kind: Kind) -> Kind:
    """Return a kind with what the rows of kinds of jobs add to its acts."""
    more = {verb: path for (verb, of), path in _ADDED.items() if of == kind.name}
    return kind._replace(acts={**kind.acts, **more})


_NAMED = ("list", "get", "put", "delete")
#: Verb and kind → what the row of a kind of jobs names.
_ADDED = {tuple(act.split()): path for row in ROWS.values() for act, path in row.acts.items()}
_OWN = (
    Kind("job", "jobs", calls_of("jobs", "list", "get") | {"export": _export_job}, _show_job, True),
    *added(),
    Kind(
        "capture",
        "captures",
        calls_of("captures", "list", "delete")
        | {
            "get": captures.show_capture,
            "export": captures.export_capture,
            "check": captures.check_capture,
        },
        paged=True,
    ),
    *(
        Kind(row.command, plural, {**calls_of(plural, *_NAMED), **row.acts})
        for plural, row in ARTIFACTS.items()
    ),
    Kind("run", "runs", calls_of("source_runs", "list", "get", "delete"), paged=True),
    Kind(
        "global",
        "global steering",
        calls_of("global_steering", "get", "delete") | {"put": _put_global},
        _show_global,
    ),
    Kind("ranks", "ranks", {"get": "global_steering.dynamic"}, _show_ranks),
    Kind(
        "model",
        "models",
        {"list": "models", "delete": "midstream_ops.upkeep.commands:delete_model"},
    ),
    Kind("server", "servers", {"get": _server}, _show_server),
    Kind("key", "keys", calls_of("keys", "list", "delete") | {"create": keys.key}, keys.show_key),
    Kind("tenant", "tenants", {"list": "tenants.list", "get": _tenant, "put": _put_tenant}),
    Kind(
        "audit",
        "audit",
        {"list": "changes.list", "export": _export_audit},
        paged=True,
    ),
    Kind("webhook", "webhooks", calls_of("webhooks", "list", "get"), paged=True),
    Kind(
        "secret",
        "secrets",
        {"get": "secrets.list", "create": "secrets.create"},
        _show_secrets,
    ),
    Kind("admin-key", "admin keys", {"create": keys.admin_key}, keys.show_lines),
    Kind("curve", "CURVE keys", {"create": keys.curve}, keys.show_lines),
    Kind("acl", "ACL files", {"create": keys.acl}, keys.show_lines),
)
KINDS = tuple(map(_with_added, _OWN))
_BY_NAME = {word: kind for kind in KINDS for word in (kind.name, kind.plural)}


def kinds_with(verb: str) -> list[str]:
    """Return the names of the kinds that a verb takes."""
    return [kind.name for kind in KINDS if verb in kind.acts]


def keywords_of(verb: str) -> dict[str, list[str]]:
    """Return the fields that a verb takes, by kind, without those of every job."""
    return {
        kind.name: [name for name in _keywords(kind.acts[verb]) if name not in _OF_EVERY_JOB]
        for kind in KINDS
        if verb in kind.acts
    }


def _keywords(act: Act) -> Iterator[str]:
    """Yield the keywords of a function; of `**fields: Unpack[…]`, each."""
    function = _loaded(act)
    if not callable(function):
        return
    for parameter in signature(function).parameters.values():
        if parameter.kind is Parameter.KEYWORD_ONLY:
            yield parameter.name
        elif parameter.kind is Parameter.VAR_KEYWORD:
            for of in get_args(parameter.annotation):
                yield from of.__annotations__


def find(name: str, verb: str) -> tuple[Kind, Act]:
    """Return the kind of a name, in singular or plural, and the verb's act. Raises MidstreamError
    with a suggestion.
    """
    kind = _BY_NAME.get(name)
    names = kinds_with(verb)
    if kind is None:
        raise invalid(
            "KIND",
            f"unknown kind {name!r}",
            allowed=", ".join(names),
            hint=suggestion(name, [word for word, row in _BY_NAME.items() if verb in row.acts]),
        )
    if verb not in kind.acts:
        raise invalid(
            "KIND",
            f"{verb!r} is not for {kind.plural}",
            allowed=f"{', '.join(kind.acts)} {kind.name}",
        )
    return kind, _loaded(kind.acts[verb])


def _loaded(act: Act) -> Act:
    """Return an act; of one that is named as `module:name`, the function."""
    return part(act) if isinstance(act, str) and ":" in act else act
