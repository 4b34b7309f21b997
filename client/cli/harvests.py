"""The commands `harvest run`, `stream`, `status`, `list`, `pause`, `resume`, `cancel`, `delete`,
`verify`, `survey`.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

from ...schemas.base.errors import MidstreamError, invalid
from ...schemas.jobs.harvests import HarvestRequest, HarvestView
from ..render import jobs as show, records
from ..sdk.answers.progress import harvest_bar
from ..sdk.client import Client
from ..sdk.wire import given
from . import jobs, options
from .jobs import AsJson, delete, detach, out, print_json, print_list, with_client

Id = Annotated[str, typer.Argument(metavar="HARVEST", help="The harvest's id.")]
SOURCE: dict[str, Any] = {"rich_help_panel": "Source"}
ROWS: dict[str, Any] = {"rich_help_panel": "Rows"}
RESULT: dict[str, Any] = {"rich_help_panel": "Result"}

harvest_app = typer.Typer(
    no_args_is_help=True, help="Store rows of a whole corpus as shards: run, follow, verify."
)


def register(app: typer.Typer) -> None:
    """Add `harvest …` to `midstream`."""
    app.add_typer(harvest_app, name="harvest")


@harvest_app.command("run")
@with_client
def harvest_run(
    client: Client,
    source: Annotated[
        str | None,
        typer.Option(help="File or folder below the server's harvest_sources.", **SOURCE),
    ] = None,
    lines: Annotated[
        Path | None,
        typer.Option(help="A local file, one document a line, sent with the request.", **SOURCE),
    ] = None,
    body: Annotated[
        Path | None,
        typer.Option(help="A whole HarvestRequest as JSON, instead of the options.", **SOURCE),
    ] = None,
    format_: Annotated[
        str | None,
        typer.Option("--format", help="auto (default), jsonl, parquet or arrow.", **SOURCE),
    ] = None,
    kind: Annotated[
        str | None, typer.Option(help="text (default), chat or tokens.", **SOURCE)
    ] = None,
    field: Annotated[
        str | None,
        typer.Option(help="Column or JSON field with the document; default: text.", **SOURCE),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Default: the first model served.", **SOURCE)
    ] = None,
    max_length: Annotated[
        int | None,
        typer.Option(help="Tokens of a sequence; default: the model's maximum.", **SOURCE),
    ] = None,
    fit: Annotated[
        str | None, typer.Option(help="truncate (default), split or pack.", **SOURCE)
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(help="Tokens of all sequences; default: the whole source.", **SOURCE),
    ] = None,
    hooks: Annotated[
        str | None,
        typer.Option(
            metavar=options.HOOKS_FORM,
            help="Such as post_block:15; default: post_block, all layers.",
            **ROWS,
        ),
    ] = None,
    layers: Annotated[
        str | None, typer.Option(help="all (default), 3, 0-5, or 0-5,9,-1.", **ROWS)
    ] = None,
    every: Annotated[
        int | None, typer.Option(help="Every n-th position of a document.", **ROWS)
    ] = None,
    sample: Annotated[
        int | None,
        typer.Option(help="Number of random positions to sample from each document.", **ROWS),
    ] = None,
    skip_first: Annotated[
        int | None, typer.Option(help="Number of first positions to skip in each sequence.", **ROWS)
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="model (default), float32, bfloat16, float16, int8, float8_e4m3fn.", **ROWS
        ),
    ] = None,
    shard_mib: Annotated[
        int | None, typer.Option(help="MiB of rows in a shard; default: 64.", **ROWS)
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="Seed of the order in a shard and of --sample; default: 0.", **ROWS),
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(help="One of the server's harvest_stores; default: its first.", **ROWS),
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(help="store (default): files that stay; stream: to its consumer.", **RESULT),
    ] = None,
    wait: Annotated[
        bool,
        typer.Option(
            "--wait/--no-wait", help="Follow to the end, or print the id and exit.", **RESULT
        ),
    ] = True,
    json_: AsJson = False,
) -> None:
    """Harvest the rows of a corpus. Interrupting it leaves the harvest running."""
    fields = {
        "source": given(
            path=source,
            lines=lines and options.read_lines(lines),
            format=format_,
            kind=kind,
            field=field,
        ),
        "cut": given(max_length=max_length, fit=fit),
        "positions": given(every=every, sample=sample, skip_first=skip_first, seed=seed),
        "shards": given(mib=shard_mib, shuffle=seed),
        **given(model=model, dtype=dtype, store=store, max_tokens=max_tokens, to=to),
        **_sites(hooks, layers),
    }
    chosen = {name: value for name, value in fields.items() if value}
    if body is not None and chosen:
        raise invalid("--body", "is the whole request: not valid with options for source or rows")
    if body is None and not (source or lines):
        raise invalid("--source", "is required unless --lines or --body is given")
    if body is not None:
        view = client.harvests.submit(options.read_json(body, HarvestRequest, "--body"))
    else:
        view = client.harvests.submit(
            **{"model": jobs.only_model(client), **chosen} if model is None else chosen
        )
    detach(view, wait, json_)
    with harvest_bar() as progress:
        view = client.harvests.wait(view, progress)
    _print(view, json_)


@harvest_app.command("stream")
@with_client
def harvest_stream(
    client: Client,
    harvest: Id,
    to: Annotated[
        str,
        typer.Option(
            help="file:FOLDER, or a Mooncake store: tcp://MASTER:PORT, rdma://MASTER:PORT."
        ),
    ],
    consumer: Annotated[str, typer.Option(help="One of the stream's consumers.")] = "trainer",
    limit: Annotated[
        int, typer.Option(min=1, help="Wait while this many samples are not taken.")
    ] = 4096,
) -> None:
    """Hand a stream's documents to a trainer, as hs_connectors reads them.

    Goes on where it was after an interruption. A trainer takes a sample by deleting it.
    """
    from ..sdk.bridge import bridge, target_of

    bridge(client, harvest, target_of(to, harvest), consumer, limit)


@harvest_app.command("status")
@with_client
def harvest_status(client: Client, harvest: Id, json_: AsJson = False) -> None:
    """Show a harvest: state, counts, tokens/s and time left."""
    _print(client.harvests.get(harvest), json_)


@harvest_app.command("list")
@with_client
def harvest_list(
    client: Client,
    limit: Annotated[int, typer.Option(help="Number of harvests.")] = 20,
    json_: AsJson = False,
) -> None:
    """List the newest harvests."""
    page = client.harvests.list(limit=limit)
    print_list(page, page.harvests, HarvestView, "harvests", json_)


@harvest_app.command("pause")
@with_client
def harvest_pause(client: Client, harvest: Id, json_: AsJson = False) -> None:
    """Pause a harvest; finished shards are kept."""
    _print(client.harvests.pause(harvest), json_)


@harvest_app.command("resume")
@with_client
def harvest_resume(client: Client, harvest: Id, json_: AsJson = False) -> None:
    """Continue a paused harvest."""
    _print(client.harvests.resume(harvest), json_)


@harvest_app.command("cancel")
@with_client
def harvest_cancel(client: Client, harvest: Id, json_: AsJson = False) -> None:
    """Cancel a harvest; it cannot be resumed."""
    _print(client.harvests.cancel(harvest), json_)


@harvest_app.command("delete")
@with_client
def harvest_delete(
    client: Client,
    harvests: Annotated[list[str], typer.Argument(metavar="HARVEST...", help="Their ids.")],
) -> None:
    """Delete harvests that have ended: files and records."""
    delete(harvests, client.harvests.delete)


@harvest_app.command("verify")
def harvest_verify(
    uri: Annotated[
        str,
        typer.Argument(
            metavar="URI", help="The folder or URI of a harvest, as `harvest status` shows it."
        ),
    ],
    json_: AsJson = False,
) -> None:
    """Recompute checksums, keys, order and counts from the files.

    Exits non-zero if anything differs.
    """
    from ..harvest import verify

    result = verify(uri)
    facts = {
        "shards": result.shards,
        "rows": result.rows,
        "bytes": result.bytes,
        "faults": result.faults,
    }
    if not print_json(facts, json_):
        size, verdict = f"{result.bytes / 2**20:,.1f} MiB", "ok" if result.ok else "damaged"
        out.print(
            f"{result.shards:,} shards, {result.rows:,} rows, {size}: {verdict}",
            markup=False,
            highlight=False,
        )
    if not result.ok:
        raise MidstreamError("capture_damaged", "; ".join(result.faults[:5]))


@harvest_app.command("survey")
@with_client
def harvest_survey(
    client: Client,
    harvest: Id,
    sae: Annotated[
        str | None, typer.Option(help="The registered autoencoder whose features are surveyed.")
    ] = None,
    against: Annotated[
        str | None, typer.Option(metavar="HARVEST", help="Another harvest to compare it with.")
    ] = None,
    top: Annotated[int, typer.Option(help="Examples of each feature.")] = 10,
    context: Annotated[int, typer.Option(help="Tokens on either side of an example.")] = 8,
    feature: Annotated[
        int | None, typer.Option(help="Whose examples are shown; default: the first listed.")
    ] = None,
    json_: AsJson = False,
) -> None:
    """Survey the features of a finished harvest, or compare it with another of the same tokens."""
    fields = given(sae=sae, against=against, top=top, context=context)
    found, model = client.harvests.survey(harvest, **fields), client.harvests.get(harvest).model
    view = found.view(limit=20, feature=feature)
    if not print_json(view, json_):
        tokens = sorted({token for one in view.examples for token in one.token_ids})
        texts = client.detokenize(model, tokens).token_strs if tokens else []
        shown = records.survey(view, dict(zip(tokens, texts, strict=True)))
        out.print(*shown, sep="\n", soft_wrap=True)


def _print(view: HarvestView, json_: bool) -> None:
    if not print_json(view, json_):
        out.print(show.harvest(view), markup=False, highlight=False, soft_wrap=True)


def _sites(hooks: str | None, layers: str | None) -> dict[str, Any]:
    chosen = None if layers is None else options.parse_layers(layers)
    if hooks is not None:
        return {"hooks": options.read_hooks(hooks, chosen)}
    return {} if chosen is None else {"layers": chosen}
