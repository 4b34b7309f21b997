"""The row of harvests among the kinds of jobs."""

from midstream.schemas.jobs.job_kind import JobKind

ROW = JobKind(
    "harvest",
    step=9,
    reads_receipts=True,
    slow=True,
    work="midstream_harvest.records.harvests:HarvestWork",
    run={"": "midstream_harvest.run.run:run"},
    routes="midstream_harvest.api.routes:ROUTES",
    calls={"harvests": "midstream_harvest.client.calls:Harvests"},
    verbs="midstream_harvest.client.commands:COMMANDS",
    things="midstream_harvest.client.things:THINGS",
    forms="midstream_harvest.client.shown:FORMS",
)
