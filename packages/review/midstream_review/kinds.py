"""The row of replays among the kinds of jobs, which brings all of this package."""

from midstream.schemas.jobs.job_kind import JobKind

ROW = JobKind(
    "replay",
    slow=True,
    work="midstream_review.replays:ReplayWork",
    routes="midstream_review.api.routes:ROUTES",
    run={"": "midstream.workers.serving.prompts:run"},
    calls={
        "hits": "midstream_review.client.calls:Hits",
        "replays": "midstream_review.client.replays:Replays",
    },
    verbs="midstream_review.client.commands:COMMANDS",
    things="midstream_review.client.things:THINGS",
    forms="midstream_review.client.shown:FORMS",
)
