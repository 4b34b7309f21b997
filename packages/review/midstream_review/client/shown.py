"""Tables and data frames of hits and of precisions."""

from typing import Any

from rich.markup import escape
from rich.table import Table

from midstream.client.render.forms import Form, Shown
from midstream.client.render.jobs import Cells, lines

from ..records import Hit, HitPage, HitWords, Mark, PrecisionList, VersionPrecision
from ..replays import ReplayedHit, ReplayTurn, ReplayView

#: The most characters of a text before and after a hit's token, in a list.
BEFORE = 40
AFTER = 16
#: What a frame has in place of the fields that are records.
_FLAT = {"text", "mark", "token_ids", "actions"}


def _folded(text: str) -> str:
    """Return a text on one line, as rich shows it."""
    return escape(text.replace("\n", "⏎"))


def _around(text: HitWords | None, before: int, after: int) -> str:
    if text is None:
        return ""
    end = _folded(text.before)[-before:]
    return f"{end}[bold]{_folded(text.token)}[/]{_folded(text.after)[:after]}"


def _marked(mark: Mark | None) -> str:
    return "" if mark is None else mark.verdict.replace("_", " ")


def _share(found: VersionPrecision) -> str:
    return "" if found.precision is None else f"{found.precision:.0%}"


def _line(hit: Hit) -> dict[str, Any]:
    """Return the line of a hit in a table of a file."""
    text = hit.text or HitWords(before="", token="", after="")
    mark = hit.mark
    return {
        **{name: getattr(hit, name) for name in Hit.__struct_fields__ if name not in _FLAT},
        "actions": " ".join(hit.actions),
        "before": text.before,
        "token": text.token,
        "after": text.after,
        "mark": None if mark is None else mark.verdict,
        "note": None if mark is None else mark.note,
        "marked": None if mark is None else mark.at,
        "marked_by": None if mark is None else mark.key,
    }


def _lines(page: HitPage) -> list[dict[str, Any]]:
    return [_line(hit) for hit in page.hits]


def _versions(found: PrecisionList) -> list[VersionPrecision]:
    return found.versions


_HIT = Shown(
    "Hits",
    {
        "id": "{id}\n{at:minute}, {tenant}",
        "v": "{version}",
        "score": lambda hit: f"{hit.score:.3g}\n≥ {hit.threshold:.3g}",
        "mode": lambda hit: "acted" if hit.acted else hit.mode,
        "text": lambda hit: _around(hit.text, BEFORE, AFTER),
        "mark": lambda hit: _marked(hit.mark),
    },
    {
        "hit": "{id}",
        "policy": "{policy}, version {version}, {mode}",
        "time": "{at:moment}",
        "job": lambda hit: f"{hit.job}, prompt {hit.request}, of {escape(hit.tenant)}",
        "token": lambda hit: f"{hit.position}, score {hit.score:.6g} of {escape(hit.label)}",
        "threshold": "{threshold:g}",
        "times": lambda hit: f"it turned on {hit.triggers} times" if hit.triggers > 1 else "",
        "did": lambda hit: ", ".join(hit.actions) if hit.acted else "nothing: it only recorded",
        "text": lambda hit: _around(hit.text, 10_000, 10_000),
        "mark": lambda hit: _marked(hit.mark),
        "note": lambda hit: escape(hit.mark.note) if hit.mark else "",
    },
)
_PRECISION = Shown(
    "Precision by version",
    {
        "version": "{version}",
        "right": "{right}",
        "false alarms": "{false_alarm}",
        "unsure": "{unsure}",
        "precision": _share,
    },
)


def _turned(turn: ReplayTurn | None) -> str:
    return "" if turn is None else f"{turn.score:.3g} at token {turn.position}"


_REPLAYED: Cells = {
    "job": "{job}\nprompt {request}, {tenant}",
    "old": lambda hit: _turned(hit.old),
    "new": lambda hit: _turned(hit.new),
    "text": lambda hit: _around(hit.text, BEFORE, AFTER),
}


def _new_version(view: ReplayView) -> str:
    return f"{view.new}, with another condition" if view.changed else f"{view.new}"


def _changes(view: ReplayView) -> list[Table]:
    """Return the tables of the prompts that only one version turned on at."""
    both = {"Gained: only the new version": view.gained, "Lost: only the old version": view.lost}
    return [lines(title, _REPLAYED, hits) for title, hits in both.items() if hits]


def _replayed(view: ReplayView) -> list[dict[str, Any]]:
    """Return a line for each prompt that only one version turned on at."""
    return [
        {
            "change": change,
            "job": hit.job,
            "request": hit.request,
            "tenant": hit.tenant,
            "score": turn.score,
            "position": turn.position,
            "token": hit.text.token if hit.text else None,
        }
        for change, hits in (("gained", view.gained), ("lost", view.lost))
        for hit in hits
        for turn in (hit.new, hit.old)
        if turn is not None
    ]


_REPLAY = Shown(
    facts={
        "replay": "{id}",
        "state": "{state}",
        "policy": "{policy}",
        "old version": "{old}",
        "new version": _new_version,
        "prompts": "{prompts:,}",
        "both": "{kept:,}",
        "gained": "{gained:number}",
        "lost": "{lost:number}",
    },
    details=_changes,
)
#: Class → its form.
FORMS: dict[type, Form] = {
    Hit: Form(shown=_HIT),
    HitPage: Form(lines=_lines),
    ReplayView: Form(lines=_replayed, shown=_REPLAY),
    ReplayedHit: Form(shown=Shown("Changes", _REPLAYED)),
    PrecisionList: Form(lines=_versions),
    VersionPrecision: Form(shown=_PRECISION),
}
