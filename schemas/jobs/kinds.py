"""The kinds of jobs: a row for each, those of this package and those of installed ones."""

import re

from ..base.errors import MidstreamError
from ..packages import load_all
from .job_kind import JobKind
from .queues import GRADIENTS

#: Entry points of rows: kind of a job → its `JobKind`.
GROUP = "midstream.jobs"

_SERVING = "midstream.workers.serving"
_GRADIENTS = "midstream.workers.gradient_jobs"
_RESULTS = "midstream.broker.ledger.results"
_SDK = "midstream.client.sdk"
_PROMPTS = {"": f"{_SERVING}.prompts:run"}

OWN = (
    JobKind("generate", path="/v1/jobs", run=_PROMPTS),
    JobKind("completion", step=3, path="/v1/completions", run=_PROMPTS),
    JobKind("chat", step=3, path="/v1/chat/completions", run=_PROMPTS),
    JobKind(
        "sweep",
        path="/v1/sweeps",
        reads_receipts=True,
        grid=True,
        slow=True,
        nullable=True,
        work="midstream.schemas.jobs.sweep_units:SweepWork",
        run={"": f"{_SERVING}.sweeps.run:run"},
        result="midstream.schemas.jobs.sweeps:SweepResult",
        outcome=f"{_RESULTS}.sweep_result:sweep_so_far",
        routes="midstream.api.routes.sweeps:ROUTES",
        calls={"sweeps": f"{_SDK}.sweeps:Sweeps", "sweep": f"{_SDK}.sweeps:Sweeps.run"},
        verbs="midstream.client.cli.sweeps:register",
        shown="midstream.client.cli.sweeps:shown",
    ),
    JobKind(
        "attribution",
        path="/v1/attributions",
        queue=GRADIENTS,
        reads_receipts=True,
        grid=True,
        slow=True,
        work="midstream.schemas.jobs.sweep_units:SweepWork",
        run={
            "": f"{_SERVING}.sweeps.run:run",
            GRADIENTS: f"{_GRADIENTS}.attribution_attempt:run",
        },
        result="midstream.schemas.jobs.attributions:AttributionResult",
        outcome=f"{_RESULTS}.attribution_result:attribution_so_far",
        routes="midstream.api.routes.sweeps:ROUTES",
        calls={
            "attributions": f"{_SDK}.sweeps:Attributions",
            "attribute": f"{_SDK}.sweeps:Attributions.run",
        },
        answer=f"{_SDK}.answers.attribution:attribution_of",
        verbs="midstream.client.cli.sweeps:register",
        shown="midstream.client.cli.sweeps:shown_attribution",
    ),
    JobKind(
        "fit",
        queue=GRADIENTS,
        reads_receipts=True,
        slow=True,
        work="midstream.schemas.jobs.fits:FitWork",
        run={GRADIENTS: f"{_GRADIENTS}.fit_attempt:run"},
        result="midstream.schemas.jobs.fits:FitOutcome",
        outcome=f"{_RESULTS}.fit_result:fit_result",
        routes="midstream.api.routes.fits:ROUTES",
        calls={
            "fits": f"{_SDK}.fits:Fits",
            "fit_module": f"{_SDK}.fits:Fits.module",
            "fit_lens": f"{_SDK}.fits:Fits.lens",
        },
        shown="midstream.client.cli.fits:shown",
    ),
    JobKind(
        "dose",
        slow=True,
        work="midstream.schemas.jobs.doses:DoseWork",
        run={"": f"{_SERVING}.doses:run"},
        result="midstream.schemas.jobs.doses:DoseResult",
        outcome=f"{_RESULTS}.dose_result:dose_result",
        routes="midstream.api.routes.fits:ROUTES",
        verbs="midstream.client.cli.doses:register",
        shown="midstream.client.cli.doses:shown",
    ),
    JobKind(
        "gradient", path="/v1/jobs", queue=GRADIENTS, run={GRADIENTS: f"{_GRADIENTS}.rows:run"}
    ),
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


def kind_of(name: str) -> JobKind:
    """Return the row of a kind; that of one without parts for a kind that is not installed."""
    return KINDS.get(name, JobKind(name))


def installed(name: str) -> JobKind:
    """Return the row of a kind. Raises MidstreamError("not_installed")."""
    if name not in KINDS:
        raise MidstreamError(
            "not_installed",
            f"no package that is installed here knows jobs of kind {name!r}: install its package "
            "again, and restart",
        )
    return KINDS[name]


def of_kinds(field: str) -> list[str]:
    """Return what the rows name for a part, each once."""
    named = (getattr(row, field) for row in KINDS.values())
    return list(dict.fromkeys(path for path in named if path))
