"""The kinds of jobs of this package."""

from midstream.schemas.jobs.job_kind import JobKind
from midstream.schemas.jobs.queues import GRADIENTS

_GRIDS = "midstream_lab.run.run:run"
_SO_FAR = "midstream_lab.results.attribution_result:result_so_far"
_FORMS = "midstream_lab.show.forms:FORMS"

SWEEP = JobKind(
    "sweep",
    path="/v1/sweeps",
    reads_receipts=True,
    grid=True,
    slow=True,
    nullable=True,
    work="midstream_lab.records.sweep_units:SweepWork",
    run={"": _GRIDS},
    result="midstream_lab.records.sweeps:SweepResult",
    outcome=_SO_FAR,
    routes="midstream_lab.routes.sweeps:ROUTES",
    calls={
        "sweeps": "midstream_lab.client.sweeps:Sweeps",
        "sweep": "midstream_lab.client.sweeps:Sweeps.run",
    },
    verbs="midstream_lab.cli.sweeps:COMMANDS",
    forms=_FORMS,
)
ATTRIBUTION = JobKind(
    "attribution",
    path="/v1/attributions",
    queue=GRADIENTS,
    reads_receipts=True,
    grid=True,
    slow=True,
    work="midstream_lab.records.sweep_units:SweepWork",
    run={"": _GRIDS, GRADIENTS: "midstream_lab.gradient_jobs.attribution_attempt:run"},
    result="midstream_lab.records.attributions:AttributionResult",
    outcome=_SO_FAR,
    routes="midstream_lab.routes.sweeps:ROUTES",
    calls={
        "attributions": "midstream_lab.client.sweeps:Attributions",
        "attribute": "midstream_lab.client.sweeps:Attributions.run",
    },
    answer="midstream_lab.client.attribution:attribution_of",
    verbs="midstream_lab.cli.sweeps:COMMANDS",
    forms=_FORMS,
)
FIT = JobKind(
    "fit",
    queue=GRADIENTS,
    reads_receipts=True,
    slow=True,
    work="midstream_lab.records.fits:FitWork",
    run={GRADIENTS: "midstream_lab.gradient_jobs.fit_attempt:run"},
    result="midstream_lab.records.fits:FitOutcome",
    outcome="midstream_lab.results.fit_result:fit_result",
    routes="midstream_lab.routes.fits:ROUTES",
    calls={
        "fits": "midstream_lab.client.fits:Fits",
        "fit_module": "midstream_lab.client.fits:Fits.module",
        "fit_lens": "midstream_lab.client.fits:Fits.lens",
    },
    acts={
        "fit module": "midstream_lab.cli.fits:module",
        "fit jacobian": "midstream_lab.cli.fits:lens",
        "fit probe": "midstream_lab.cli.probes:probe",
    },
    verbs="midstream_lab.cli.fit:COMMANDS",
    forms=_FORMS,
)
DOSE = JobKind(
    "dose",
    slow=True,
    work="midstream_lab.records.doses:DoseWork",
    run={"": "midstream_lab.run.doses:run"},
    result="midstream_lab.records.doses:DoseResult",
    outcome="midstream_lab.results.dose_result:dose_result",
    routes="midstream_lab.routes.fits:ROUTES",
    calls={
        "doses": "midstream_lab.client.doses:Doses",
        "dose": "midstream_lab.client.doses:Doses.run",
    },
    verbs="midstream_lab.cli.doses:COMMANDS",
    forms=_FORMS,
)
GRADIENT = JobKind(
    "gradient",
    path="/v1/jobs",
    queue=GRADIENTS,
    submit="midstream_lab.routes.gradients:submit",
    run={GRADIENTS: "midstream_lab.gradient_jobs.rows:run"},
)
