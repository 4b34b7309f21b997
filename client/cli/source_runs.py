"""Source runs on the command line: `runs list`, `show`, `delete`."""

from typing import Annotated

import typer

from ...schemas.base.records import to_json
from ..render import jobs
from .jobs import AsJson, Model, Url, connect, out, print_list

Name = Annotated[
    str, typer.Argument(metavar="RUN", help="A run's name, or the id of a job with capture files.")
]

runs_app = typer.Typer(
    no_args_is_help=True, help="List, inspect and delete source runs: rows for patching."
)


def register(app: typer.Typer) -> None:
    """Add `runs …` to `midstream`."""
    app.add_typer(runs_app, name="runs")


@runs_app.command("list")
def runs_list(
    limit: Annotated[int, typer.Option(help="Number of runs.")] = 20,
    model: Model = None,
    json_: AsJson = False,
    url: Url = None,
) -> None:
    """List the newest named runs."""
    with connect(url) as client:
        page = client.source_runs(model, limit=limit)
    print_list(page, page.runs, jobs.runs, "runs", json_)


@runs_app.command("show")
def runs_show(name: Name, model: Model = None, json_: AsJson = False, url: Url = None) -> None:
    """Show a run: its state, and layers and positions of each prompt."""
    with connect(url) as client:
        view = client.source_run(name, model)
    if json_:
        print(to_json(view).decode())
        return
    out.print(jobs.run(view))
    if view.prompts:
        out.print(jobs.run_prompts(view.prompts))


@runs_app.command("delete")
def runs_delete(
    names: Annotated[list[str], typer.Argument(metavar="RUN...", help="Names of the runs.")],
    model: Model = None,
    url: Url = None,
) -> None:
    """Delete runs: their captures and their names."""
    with connect(url) as client:
        for name in names:
            client.delete_run(name, model)
            out.print(f"{name} deleted", markup=False)
