"""Jobs that answer the texts of their prompts, and capture one layer."""

from midstream.schemas.jobs.job_kind import JobKind

ROW = JobKind(
    "echo",
    path="/v1/echoes",
    work="midstream_echo.records:EchoWork",
    run={"": "midstream_echo.worker:run"},
    result="midstream_echo.records:EchoResult",
    outcome="midstream_echo.records:outcome",
    routes="midstream_echo.api:ROUTES",
    calls={"echoes": "midstream_echo.client:Echoes", "echo": "midstream_echo.client:Echoes.run"},
    verbs="midstream_echo.client:COMMANDS",
    forms="midstream_echo.client:FORMS",
)
