"""The kinds of jobs: a row for each, those of this package and those of installed ones."""

import re

from ..base.errors import MidstreamError
from ..packages import installing, load_all
from .job_kind import JobKind

#: Entry points of rows: kind of a job → its `JobKind`.
GROUP = "midstream.jobs"

_SERVING = "midstream.workers.serving"
_PROMPTS = {"": f"{_SERVING}.prompts:run"}

OWN = (
    JobKind("generate", path="/v1/jobs", run=_PROMPTS),
    JobKind("completion", step=3, path="/v1/completions", run=_PROMPTS),
    JobKind("chat", step=3, path="/v1/chat/completions", run=_PROMPTS),
)


def _by_name(rows: list[JobKind]) -> dict[str, JobKind]:
    """Return the table of kinds. Raises ValueError for a name that two have, or none may have."""
    result: dict[str, JobKind] = {}
    for row in rows:
        # the name stands in Lua scripts, Python and addresses as it is
        if row.name in result or re.fullmatch("[a-z][a-z0-9_]*", row.name) is None:
            raise ValueError(f"{row.name!r} cannot be the name of another kind of jobs")
        result[row.name] = row
    return result


#: Kind of a job → its row, as pages list them.
KINDS = _by_name([*OWN, *load_all(GROUP)])


#: Kind of jobs of a package of ours → the extra that installs it.
EXTRAS = {
    **dict.fromkeys(("attribution", "dose", "fit", "gradient", "sweep"), "lab"),
    "harvest": "harvest",
    "replay": "review",
}


def kind_of(name: str) -> JobKind:
    """Return the row of a kind; that of one without parts for a kind that is not installed."""
    return KINDS.get(name, JobKind(name))


def not_installed(name: str) -> MidstreamError:
    """Return the error of a kind that is not installed, which says what installs it."""
    extra = EXTRAS.get(name)
    remedy = "install its package again" if extra is None else installing(extra)
    return MidstreamError(
        "not_installed",
        f"no package that is installed here knows jobs of kind {name!r}: {remedy}; then restart",
    )


def installed(name: str) -> JobKind:
    """Return the row of a kind. Raises MidstreamError("not_installed")."""
    if name not in KINDS:
        raise not_installed(name)
    return KINDS[name]


def of_kinds(field: str) -> list[str]:
    """Return what the rows name for a part, each once."""
    named = (getattr(row, field) for row in KINDS.values())
    return list(dict.fromkeys(path for path in named if path))
