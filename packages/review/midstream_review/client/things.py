"""What the verbs of the command line do with hits and precisions."""

from pathlib import Path
from typing import Literal

from midstream.client.cli.kind import Kind
from midstream.client.cli.terminal import Connector
from midstream.schemas.artifacts.conditions import Mode
from midstream.schemas.base.records import to_json

from ..records import Hit, HitPage, HitVerdict


def _export(
    connect: Connector,
    policy: str,
    path: str = "-",
    /,
    *,
    model: str | None = None,
    label: str | None = None,
    version: int | None = None,
    mode: Mode | None = None,
    mark: HitVerdict | Literal["none"] | None = None,
    at_least: float | None = None,
    below: float | None = None,
    tenant: str | None = None,
) -> str:
    """Write all hits of a policy with their marks, newest first: as JSON lines, or as a table
    (.csv).
    """
    hits = connect().hits.every(
        policy,
        model=model,
        label=label,
        version=version,
        mode=mode,
        mark=mark,
        at_least=at_least,
        below=below,
        tenant=tenant,
    )
    if Path(path).suffix == ".csv":
        # that module reads `THINGS`
        from midstream.client.cli.kinds import write_result

        return write_result(HitPage(hits=[*hits]), f"hits of {policy}", path)
    lines = "".join(f"{to_json(hit).decode()}\n" for hit in hits)
    if path == "-":
        print(lines, end="")
        return ""
    Path(path).write_text(lines)
    return f"hits of {policy} written to {path}"


def _get(connect: Connector, hit: str, /, *, policy: str, model: str | None = None) -> Hit:
    return connect().hits.get(policy, hit, model=model)


THINGS = [
    Kind("hit", "hits", {"list": "hits.list", "get": _get, "export": _export}, paged=True),
    Kind("precision", "precisions", {"list": "hits.precision"}),
]
