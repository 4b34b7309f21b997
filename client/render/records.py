"""Renders records as terminal tables; `SHOWN` has the columns and facts of each type."""

import time
from collections.abc import Iterable
from operator import attrgetter
from typing import Any

from rich.markup import escape
from rich.table import Table

from ...schemas.access.audit import AuditEntry
from ...schemas.access.keys import KeyView, TenantView
from ...schemas.access.webhooks import DeliveryAttempt, WebhookDelivery
from ...schemas.artifacts.jacobian_lenses import JacobianLens
from ...schemas.artifacts.loras import Lora
from ...schemas.artifacts.probes import Probe
from ...schemas.artifacts.registered import Registered
from ...schemas.artifacts.saes import Sae
from ...schemas.artifacts.tuned_lenses import TunedLens
from ...schemas.base.errors import shortened
from ...schemas.base.limits import POLICY_DAYS
from ...schemas.jobs.captures import CaptureEntry
from ...schemas.jobs.jobs import JobView, ListedJob, Output
from ...schemas.jobs.kinds import kind_of
from ...schemas.jobs.models import SHOWN_IDENTITY
from ...schemas.prompts.selectors import as_ranges
from ...schemas.prompts.sight import TurnLook
from ...schemas.readings.installed import ReaderReading, ReaderResult
from ...schemas.requests.artifact_kinds import ARTIFACTS
from ...schemas.requests.policies import Policy
from ...schemas.requests.source_runs import RunView
from ...schemas.requests.steering import ModuleView
from ...schemas.requests.trainings import Training
from .forms import Shown, form_of
from .jobs import (
    Cell,
    Cells,
    coloured,
    count,
    day,
    facts,
    lines,
    moment,
    run_prompts,
    seconds,
    size,
    table,
    text_of,
)
from .steering import DIGEST, entries, what

#: The most characters of a URL in a list: about as many as the id of a webhook above it has.
_URL = 48
#: The most characters of a prompt in a list: as many as the id of the job above it has.
_PROMPT = 39
#: The cell of a digest in a list.
_SHORT_DIGEST = f"{{digest:.{DIGEST}}}"
#: The most values of an array that a reader returned.
_VALUES = 6
#: The most labels of a probe in a list.
_LABELS = 4


def listed(records: Iterable[Any], kind: type) -> Table:
    """Return a table with one line per record."""
    shown = layout(kind)
    return lines(shown.title, shown.columns, records)


def one(record: Any) -> Table:
    """Return a table of one record's facts, without its details."""
    return facts(
        *((name, text_of(cell, record)) for name, cell in layout(type(record)).facts.items())
    )


def parts(record: Any) -> list[Table]:
    """Return the tables of one record: facts and details."""
    return [one(record), *layout(type(record)).details(record)]


def outcome(attempt: DeliveryAttempt | None) -> str:
    """Return the response's status and the error of a delivery attempt."""
    said = ("", "") if attempt is None else (str(attempt.status or ""), escape(attempt.error))
    return " ".join(filter(None, said))


def _in_brief(name: str) -> Cell:
    """Return a cell with the beginning of a field of any type."""
    return lambda record: escape(shortened(str(getattr(record, name)), _URL))


def _digest(record: Any) -> str:
    """Return the record's digest, and that of the record that it replaced."""
    return f"{record.digest}" + (
        f" (before: {record.replaced[:DIGEST]})" if record.replaced else ""
    )


def _receiver(delivery: WebhookDelivery) -> str:
    """Return the URL, cut: the other columns need their room."""
    url = delivery.url
    return url if len(url) <= _URL else f"{url[:_URL]}…"


def _extent(view: JobView) -> str:
    if not kind_of(view.kind).grid:
        return count(view.prompts, "prompt")
    # an attribution that verifies nothing computes no cell
    return (
        f"{view.cells} of {view.cells_expected} cells" if view.cells_expected else "estimates only"
    )


def _job(view: ListedJob) -> str:
    """Return the id, the beginning of the prompt, and the model."""
    prompt = shortened(" ".join(view.prompt.split()), _PROMPT)
    return escape("\n".join(filter(None, (view.id, prompt, view.model))))


def _standing(view: JobView) -> str:
    """Return the state, how long that took, and which attempt it is."""
    took = seconds(view.created, view.finished)
    attempt = f"attempt {view.attempt}" if view.retry_reason else ""
    return "\n".join(filter(None, (coloured(view.state), took and f"in {took}", attempt)))


def _what(view: JobView) -> str:
    """Return the kind and how much it is, what became of captures, and which policies triggered."""
    captures = coloured(view.capture_status)
    parts = (
        view.kind,
        _extent(view),
        "" if view.capture_status == "not_requested" else f"captures {captures}",
        f"triggered {_triggered(view)}" if view.triggered else "",
    )
    return "\n".join(filter(None, parts))


def _triggered(view: JobView) -> str:
    """Return the policies that were triggered, and those that did nothing then."""
    marks = view.triggered.items()
    return escape(", ".join(name if acted else f"{name} (only recorded)" for name, acted in marks))


def _hits(policy: Policy) -> str:
    """Return how many of the prompts that it read triggered it."""
    prompts, hits = (sum(map(attrgetter(of), policy.days)) for of in ("prompts", "triggered"))
    return f"{hits:,} of {prompts:,}" if prompts else ""


def _hits_of_all_versions(policy: Policy) -> str:
    hits = _hits(policy)
    return f"{hits} prompts in {POLICY_DAYS} days, of all versions" if hits else ""


def _sae_kind(sae: Sae) -> str:
    """Return an SAE's architecture, with k for top-k."""
    return escape(
        f"topk {sae.form.k}" if sae.form.architecture == "topk" else sae.form.architecture
    )


def _fit(lens: JacobianLens) -> str:
    """Return how a Jacobian lens was fitted, with the largest error of a sketch."""
    if (fit := lens.fit) is None:
        return "not stated"
    error = f", error up to {max(fit.errors):.1%}" if fit.errors else ""
    return f"{fit.method}, of {count(fit.prompts, 'prompt')}{error}"


def _site(probe: Probe) -> str:
    after = " after" if probe.content.at == "after" else ""
    return escape(f"{probe.content.hook}.{probe.content.layer}{after}")


def _labels(probe: Probe) -> str:
    more = ", …" if len(probe.content.labels) > _LABELS else ""
    return escape(", ".join(probe.content.labels[:_LABELS]) + more)


def _thresholds(probe: Probe) -> str:
    return escape(
        ", ".join(
            label if threshold is None else f"{label} ≥ {threshold:.4g}"
            for label, threshold in zip(probe.content.labels, probe.content.thresholds, strict=True)
        )
    )


def _arrays(part: ReaderResult) -> Table:
    """Return the arrays that a reader returned on a pipeline stage, and what each begins with."""
    sites = ", ".join(f"{hook} {as_ranges(layers)}" for hook, layers in part.sites.items())
    shown = table(sites, "array", "type", "shape", "values")
    for name, array in part.arrays.items():
        values = [f"{value:.4g}" for value in array.numpy().flat[: _VALUES + 1]]
        if len(values) > _VALUES:
            values[-1] = "…"
        shown.add_row(escape(name), array.dtype, f"{array.shape}", " ".join(values))
    return shown


def training(of: Training) -> str:
    """Return how a module was learned, and its dose."""
    doses = [site.dose for site in of.sites]
    dose = " to ".join(dict.fromkeys(f"{end:.2g}" for end in (min(doses), max(doses))))
    layers = as_ranges(site.layer for site in of.sites)
    steps = f", {count(of.steps, 'step')}" if of.losses else ""
    return (
        f"{of.method} at {of.hook} {layers} from {of.examples} examples{steps}; "
        f"changes rows by {dose} of their norm"
    )


def effect(of: Training) -> str:
    found = of.effect
    verdict = "better than none" if found.better else "not better than none"
    return (
        f"{found.measure} {found.before:.3g} → {found.after:.3g} (± {found.error:.2g}) on "
        f"{found.examples} held-out examples: {verdict}"
    )


def _expires(key: KeyView) -> str:
    if key.expires is None:
        return "never"
    return day(key.expires) if key.expires > time.time() else "[red]expired[/]"


def _registered(title: str, noun: str, columns: Cells, own: Cells, **more: Any) -> Shown:
    """Return how registered artifacts of a kind are shown. `own`: the facts that others lack."""
    return Shown(
        title,
        {"name": "{name}", **columns},
        {
            noun: "{name}",
            "model": "{model}",
            "digest": _digest,
            **own,
            "description": "{description}",
        },
        **more,
    )


def _lens(noun: str, **own: Cell) -> Shown:
    """Return how lenses of a kind are shown. `own`: the facts that other kinds lack."""
    return _registered(
        f"{noun[0].upper()}{noun[1:]}es",
        noun,
        {
            "reads": "{hook}",
            "layers": "{layers:ranges}",
            "bytes": "{bytes:size}",
            "path": "{path}",
        },
        {
            "path": "{path}",
            "reads": "{hook} of layers {layers:ranges}",
            **own,
            "file": "{bytes:size}",
        },
    )


def layout(kind: type) -> Shown:
    """Return the layout of a type of record, empty if it has none. Artifacts of installed kinds are
    shown by their fields.
    """
    if known := SHOWN.get(kind) or form_of(kind).shown:
        return known
    if not issubclass(kind, Registered):
        return Shown()
    own = {name: _in_brief(name) for name in kind.__struct_fields__ if name not in _OF_ALL}
    (row,) = (row for row in ARTIFACTS.values() if row.view is kind)
    columns = {"digest": _SHORT_DIGEST, "since": "{created:minute}", "description": "{description}"}
    return _registered(row.plural.capitalize(), row.noun, columns, own)


#: Fields that every registered artifact has.
_OF_ALL = frozenset(Registered.__struct_fields__)
#: What a tenant has used → the figure and its limit.
_USAGE: Cells = {
    "jobs in flight": "{usage.jobs_in_flight:,} / {limits.jobs_in_flight:limit}",
    "requests this minute": "{usage.requests_this_minute:,} / {limits.requests_per_minute:limit}",
    "tokens this minute": "{usage.tokens_this_minute:,} / {limits.tokens_per_minute:limit}",
    "captures, harvests": "{usage.capture_bytes:size} / {limits.capture_mib:limit_mib}",
    "sweep cells": "{usage.sweep_cells:,} / {limits.sweep_cells:limit}",
    "modules": (
        "{usage.modules:,} / {limits.modules:limit}, "
        "{usage.module_bytes:size} / {limits.module_mib:limit_mib}"
    ),
    "open harvests": "{usage.harvests:,} / {limits.harvests:limit}",
}

_condition = attrgetter("current.content.condition")


def _looked_at(look: TurnLook) -> str:
    """Return the part of a conversation that a policy reads."""
    turn = "" if look.turn is None else f"turn {look.turn}"
    return " ".join(filter(None, [look.role, turn, look.part]))


def _schedule(policy: Policy) -> str:
    """Return which tokens a policy's condition reads."""
    schedule = _condition(policy).schedule
    tokens = schedule.tokens
    named = tokens if isinstance(tokens, str) else " or ".join(map(_looked_at, tokens))
    text = f"{named} tokens"
    if schedule.start:
        text += f" from {schedule.start}"
    if schedule.stop is not None:
        text += f" to {schedule.stop}"
    if schedule.every > 1:
        text += f", every {schedule.every}"
    return text


#: The cells of a policy's condition, in brief and in full: beside its threshold, by the names of
#: its fields.
_DECIDES: Cells = {
    "probe": "{current.content.probe}",
    "condition": (
        "{current.content.condition.aggregation} ≥ {current.content.condition.at_least:g}"
    ),
}
_CONDITION: Cells = {
    "window": "{current.content.condition.window}",
    "decay": "{current.content.condition.decay}",
    "release_below": "{current.content.condition.release_below:g}",
    "schedule": _schedule,
    "cool_down": lambda policy: f"{_condition(policy).cool_down or ''}",
    "latch": lambda policy: _condition(policy).latch.removeprefix("none"),
}

#: The facts of a job.
_JOB: Cells = {
    "job": "{id}",
    "state": lambda view: coloured(view.state),
    "kind": lambda view: f"{view.kind}, {_extent(view)}, model {escape(view.model)}",
    "identity": lambda view: view.identity[:SHOWN_IDENTITY],
    "triggered": _triggered,
    "attempt": lambda view: (
        f"{view.attempt}" + (f", after {view.retry_reason}" if view.retry_reason else "")
    ),
    "waited": lambda view: seconds(view.queued or view.created, view.started),
    "generated in": lambda view: seconds(view.started, view.generated),
    "ended after": lambda view: seconds(view.created, view.finished),
    "worker": "{worker}",
    "layers": lambda view: "" if view.layers is None else f"{view.layers}, from the first",
    "captures": lambda view: (
        coloured(view.capture_status)
        if view.capture_status != "not_requested"
        else "none requested"
    ),
    "receipts": lambda view: (
        f"{view.receipts} of {view.receipts_expected}" if view.receipts_expected else ""
    ),
    "error": lambda view: f"[red]{escape(view.error.detail)}[/]" if view.error else "",
}

#: Record type → how it is shown.
SHOWN: dict[type, Shown] = {
    ModuleView: _registered(
        "Modules",
        "module",
        {
            "digest": _SHORT_DIGEST,
            "what": lambda view: what(view.entries),
            "bytes": "{bytes:size}",
            "since": "{created:minute}",
            "description": "{description}",
        },
        {
            "tensors": lambda view: (
                f"{len({tensor for entry in view.entries for tensor in entry.tensors})}, "
                f"{size(view.bytes)}"
            ),
            "learned": lambda view: training(view.training) if view.training else "",
            "effect": lambda view: effect(view.training) if view.training else "",
        },
        details=lambda view: [entries(view.entries)],
    ),
    Lora: _registered(
        "Adapters",
        "adapter",
        {
            "digest": _SHORT_DIGEST,
            "rank": "{rank}",
            "bytes": "{bytes:size}",
            "path": "{path}",
            "since": "{created:minute}",
            "description": "{description}",
        },
        {
            "path": "{path}",
            "rank": "{rank}",
            "modules": "{modules:list}",
            "weights": "{bytes:size}",
        },
    ),
    Sae: _registered(
        "Sparse autoencoders",
        "autoencoder",
        {
            "kind": _sae_kind,
            "reads": "{hook} {layer}",
            "features": "{form.d_sae:,}",
            "bytes": "{bytes:size}",
            "path": "{path}",
        },
        {
            "trained on": "{trained_on}",
            "path": "{path}",
            "kind": _sae_kind,
            "reads": "{hook} of layer {layer}",
            "features": "{form.d_sae:,} of rows of width {form.d_in:,}",
            "weights": "{bytes:size}",
        },
    ),
    TunedLens: _lens(
        "tuned lens", gives=lambda tuned: "h + W h + b" if tuned.residual else "W h + b"
    ),
    JacobianLens: _lens(
        "Jacobian lens",
        fit=_fit,
        edits=lambda lens: f"{lens.vocabulary:,} tokens" if lens.vocabulary else "none",
    ),
    Probe: _registered(
        "Probes",
        "probe",
        {
            "digest": _SHORT_DIGEST,
            "site": _site,
            "labels": _labels,
            "description": "{description}",
        },
        {
            "site": _site,
            "labels": _thresholds,
            "aggregation": lambda probe: (
                probe.content.aggregation
                + (f", decay {probe.content.decay:g}" if probe.content.decay else "")
            ),
        },
    ),
    # the actions are below each other, for the same reason as the jobs of runs
    Policy: Shown(
        "Policies",
        {
            "name": "{name} v{current.version}",
            "mode": lambda policy: (
                policy.mode + (", all traffic" if policy.current.content.all_traffic else "")
            ),
            **_DECIDES,
            "actions": lambda policy: "\n".join(policy.current.content.kinds),
            "hits": _hits,
        },
        {
            "name": "{name}",
            "digest": _SHORT_DIGEST,
            "version": "{current.version}",
            "mode": "{mode}",
            "traffic": lambda policy: "all" if policy.current.content.all_traffic else "named",
            **_DECIDES,
            **_CONDITION,
            "actions": "{current.content.kinds:list}",
            "hits": _hits_of_all_versions,
            "told": lambda policy: "in answers" if policy.current.content.told else "",
            "warnings": lambda policy: escape("\n".join(policy.warnings)),
        },
    ),
    # the job is below the run's name, so that both fit 80 columns
    RunView: Shown(
        "Source runs",
        {
            "run": "{name}\n{job}",
            "state": lambda view: coloured(view.state),
            "bytes": "{bytes:size}",
            "in use": "{in_use}",
            "held by": "{held_by:list}",
        },
        {
            "run": "{name}",
            "state": lambda view: (
                coloured(view.state) + (f" ({escape(view.detail)})" if view.detail else "")
            ),
            "model": "{model}",
            "job": "{job}",
            "tag": "{tag}",
            "files": "{bytes:size}",
            "in use": lambda view: f"by {count(view.in_use, 'job')}" if view.in_use else "",
            "in memory": "{held_by:list}",
        },
        lambda view: [run_prompts(view.prompts)] if view.prompts else [],
    ),
    JobView: Shown(facts=_JOB),
    # the prompt and the model are below the job's id, for the same reason
    ListedJob: Shown(
        "Jobs",
        {
            "job": _job,
            "state": _standing,
            "what": _what,
            # without the year
            "sent": lambda view: "\n".join(moment(view.created)[5:].split()),
        },
        _JOB,
    ),
    CaptureEntry: Shown(
        "Captures",
        {
            "job": "{job}",
            "status": lambda entry: coloured(entry.status),
            "rows": "{rows}",
            "size": "{bytes:size}",
            "tags": "{tags:list}",
        },
    ),
    Output: Shown(
        "Outputs",
        {
            "request": "{index}",
            "text": "{text!r}",
            "tokens": "{token_ids:number}",
            "finish": "{finish_reason}",
        },
    ),
    ReaderReading: Shown(
        facts={
            "reader": "{name} of {package} {version}, prompt {request}",
            "options": lambda reading: escape(
                ", ".join(f"{name}={value}" for name, value in reading.options.items())
            ),
        },
        details=lambda reading: [_arrays(part) for part in reading.parts],
    ),
    AuditEntry: Shown(
        "Changes",
        {
            "at": "{at:moment}",
            "by": "{by}",
            "tenant": "{tenant}",
            "what": "{what} {name}",
            "action": "{action}",
        },
    ),
    # the receiver is below the webhook's id, for the same reason
    WebhookDelivery: Shown(
        "Webhooks",
        {
            "id": lambda delivery: f"{delivery.id}\n→ {escape(_receiver(delivery))}",
            "state": lambda delivery: coloured(delivery.state),
            "tries": "{attempts:number}",
            "last": lambda delivery: outcome(next(reversed(delivery.attempts), None)),
        },
        {
            "webhook": "{id}",
            "event": "{event}",
            "state": lambda delivery: coloured(delivery.state),
            "to": "{url}",
            "job": "{job}",
            "again in": lambda delivery: (
                ""
                if delivery.next_attempt is None
                else f"{max(delivery.next_attempt - time.time(), 0):.0f} s"
            ),
        },
        lambda delivery: [listed(delivery.attempts, DeliveryAttempt)] if delivery.attempts else [],
    ),
    DeliveryAttempt: Shown(
        "Attempts",
        {
            "at": "{at:moment}",
            "took": "{seconds:.3f} s",
            "answer": outcome,
        },
    ),
    # the tenant is below the key's name, for the same reason
    KeyView: Shown(
        "keys",
        {
            "id": "{id}",
            "name, tenant": "{name}\n{tenant}",
            "scopes": lambda key: " ".join(key.scopes),
            "created": "{created:day}",
            "expires": _expires,
        },
    ),
    TenantView: Shown(
        "Tenants: used / limit",
        {
            "tenant": "{name}",
            **{name: _USAGE[name] for name in ("jobs in flight", "requests this minute")},
            "captures, harvests": _USAGE["captures, harvests"],
            "weight": "{limits.weight}",
        },
        {
            "tenant": "{name}: used / limit",
            **_USAGE,
            "may harvest": "{limits.harvest_sources:list}",
            "weight": "{limits.weight}",
            "highest priority": "{limits.highest_priority}",
            "edits": lambda view: (
                f"{view.limits.edit_limit.relative:g} ({view.limits.edit_limit.then})"
                if view.limits.edit_limit
                else ""
            ),
        },
    ),
}
