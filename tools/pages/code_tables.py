"""Writes the pages of `docs/reference/` that repeat the code: settings and limits from their
comments, metrics from their declarations, options of vLLM from the lists, the client's calls from
its groups, commands and kinds of things from the command line.

    python tools/pages/code_tables.py

A table stands below `<!-- table: NAME -->`. Tables of settings are named after their section in the
code (a comment between blank lines begins one), or after the table of the file that sets them.
"""

import ast
import inspect
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kernel_costs
import option_tables
import typer
from comments import described, parsed
from prometheus_client import REGISTRY

from midstream.api.routes import service as _service  # noqa: F401
from midstream.broker.telemetry.scraped_metrics import OF_WORKER, ScrapedMetrics
from midstream.client import Client
from midstream.client.cli.kinds import KINDS
from midstream.client.cli.main import app
from midstream.client.sdk.calls import Calls
from midstream.schemas.base import limits
from midstream.schemas.base.records import Record
from midstream.schemas.requests.interventions import FAMILIES
from midstream.schemas.settings.faults import CRASH_POINTS
from midstream.schemas.settings.settings import TABLES, Settings
from midstream_webhooks import sender as _sender  # noqa: F401

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "docs" / "reference"
PAGES = {
    name: REFERENCE / f"{name}.md"
    for name in (
        "commands",
        "faults",
        "kernels",
        "limits",
        "metrics",
        "options",
        "settings",
    )
}
LIMITS = ROOT / "schemas" / "base" / "limits.py"
SETTINGS = ROOT / "schemas" / "settings"
END = "<!-- end of the table -->"
TABLE = re.compile(rf"<!-- table: (?P<name>[^\n]+) -->\n.*?{END}", re.DOTALL)
LINK = re.compile(r"docs/(?P<file>(?:[\w-]+/)*[\w-]+\.md)(?P<anchor>#[\w-]+)?")


def rewritten(page: Path) -> str:
    """Return the page with its tables as the code has them."""
    written = {
        **dict(_settings()),
        "limits of requests": _limits(),
        "groups of calls": _calls(),
        "commands": _commands(),
        "kinds": _kinds(),
        "metrics": _metrics(),
        "crash points": _crash_points(),
        "kernel costs": f"{kernel_costs.table()}\n",
        "kernel families": _families(),
        "engine options": "\n".join([*option_tables.lists(), ""]),
        "flags": "\n".join([*option_tables.flags(), ""]),
    }

    def table(found: re.Match[str]) -> str:
        rows = LINK.sub(lambda link: _link(link, page), written[found["name"]])
        return f"<!-- table: {found['name']} -->\n\n{rows}\n{END}"

    return TABLE.sub(table, page.read_text())


def _settings() -> Iterator[tuple[str, str]]:
    """Yield the name and the table of each section of settings."""
    tables = {table: type(getattr(Settings(), name)) for table, name in TABLES.items()}
    for prefix, record in {"": Settings, **tables}.items():
        sections: dict[str, list[str]] = {}
        for section, name, meaning in _of_record(record):
            full = f"{prefix}.{name}" if prefix else name
            default = json.dumps(getattr(record(), name)).replace("null", "unset")
            sections.setdefault(section or prefix, []).append(
                f"| `{full}` | `{default}` | {meaning} |\n"
            )
        for section, rows in sections.items():
            yield section, f"| setting | default | meaning |\n|---|---|---|\n{''.join(rows)}"


def _limits() -> str:
    rows = [
        f"| {meaning} | {int(getattr(limits, name)):,} | `{name}` |\n"
        for _, name, meaning in described(*parsed(LIMITS))
        if name.startswith(("MAX_", "MIN_"))
    ]
    return (
        f"| what | at most | constant in `schemas/base/limits.py` |\n|---|---|---|\n{''.join(rows)}"
    )


def _calls() -> str:
    client = Client("127.0.0.1:1")  # it connects when it is called
    rows = [
        f"| `client.{name}` | {_names(type(group))} | {_paragraph(type(group))} |\n"
        for name, group in vars(client).items()
        if isinstance(group, Calls)
    ]
    return f"| group | calls | |\n|---|---|---|\n{''.join(rows)}"


def _commands() -> str:
    group: Any = typer.main.get_command(app)
    commands = {name: group.get_command(None, name) for name in group.list_commands(None)}
    rows = [
        f"| `midstream {name}` | {_first(each.help)} |\n"
        for name, each in commands.items()
        if not each.hidden
    ]
    return f"| command | |\n|---|---|\n{''.join(rows)}"


def _kinds() -> str:
    rows = [
        f"| `{kind.name}` | {' '.join(f'`{verb}`' for verb in kind.acts)} |\n" for kind in KINDS
    ]
    return f"| kind | verbs |\n|---|---|\n{''.join(rows)}"


def metrics() -> Iterator[tuple[str, str, tuple[str, ...], str]]:
    """Yield the name, kind, labels and meaning of each metric that a process registers, other than
    those of HTTP. (A worker registers its own when its engine runs.)
    """
    for collector in [*REGISTRY._collector_to_names, ScrapedMetrics(OF_WORKER, list)]:
        if not hasattr(collector, "describe"):
            continue
        labels = getattr(collector, "_labelnames", None)
        for family in collector.describe():
            if re.match(r"midstream_(?!http)", family.name):
                name = f"{family.name}_total" if family.type == "counter" else family.name
                own = getattr(family, "_labelnames", None) or labels or ()
                yield name, family.type, tuple(own), family.documentation


def _metrics() -> str:
    rows = [
        f"| `{name}` | {kind} | {', '.join(labels)} | {meaning} |\n"
        for name, kind, labels, meaning in sorted(set(metrics()))
    ]
    return f"| metric | kind | labels | meaning |\n|---|---|---|---|\n{''.join(rows)}"


def _crash_points() -> str:
    rows = [f"| `{point}` | {meaning} |\n" for point, meaning in CRASH_POINTS.items()]
    return f"| point | state at that point |\n|---|---|\n{''.join(rows)}"


def _families() -> str:
    rows = [
        f"| `{family.name}` | {family.effect} | {family.formula} | {family.source} |\n"
        for family in FAMILIES
    ]
    return f"| family | effect | formula | source |\n|---|---|---|---|\n{''.join(rows)}"


def _names(group: type[Calls[Any]]) -> str:
    return ", ".join(f"`{name}`" for name in dir(group) if not name.startswith("_"))


def _paragraph(group: type[Calls[Any]]) -> str:
    return _first(inspect.getdoc(group))


def _first(text: str | None) -> str:
    """The first paragraph."""
    return " ".join((text or "").partition("\n\n")[0].split()).rstrip(".")


def _of_record(record: type[Record]) -> Iterator[tuple[str, str, str]]:
    """Yield the section, name and comment of each setting of a record."""
    for path in SETTINGS.glob("*.py"):
        lines, statements = parsed(path)
        for node in statements:
            if isinstance(node, ast.ClassDef) and node.name == record.__name__:
                found = described(lines, node.body)
                yield from (each for each in found if each[1] not in TABLES.values())


def _link(found: re.Match[str], page: Path) -> str:
    file = found["file"]
    anchor = found["anchor"] or ""
    packaged = list(ROOT.glob(f"packages/*/docs/{file}"))
    target = packaged[0] if packaged else ROOT / "docs" / file
    if target == page:
        return f"[below]({anchor})"
    return f"[{target.name}]({os.path.relpath(target, page.parent)}{anchor})"


if __name__ == "__main__":
    for page in PAGES.values():
        page.write_text(rewritten(page))
