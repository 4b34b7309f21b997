"""Remote-control commands of a worker. Importing this module registers them with Celery.

`app.control.broadcast("midstream_cancel", arguments={"job_id": …})` stops a running job within
milliseconds. A broadcast may be lost, so the cancellation is in the ledger first, where the next
heartbeat finds it.
"""

from typing import Any

from celery.worker.control import control_command, inspect_command


@control_command(args=[("job_id", str)], signature="<job_id>")
def midstream_cancel(state: Any, job_id: str, **_: Any) -> dict[str, str]:
    """Stop a job if it runs here."""
    state.app.engine_host.cancel(job_id)
    return {"ok": job_id}


@inspect_command()
def midstream_engine(state: Any, **_: Any) -> dict[str, Any]:
    """Return the model, its ranks and the running jobs."""
    described: dict[str, Any] = state.app.engine_host.describe()
    return described
