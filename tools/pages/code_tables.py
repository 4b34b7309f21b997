"""Writes the tables of `docs/` that repeat the code: settings and limits from their comments, the
client's calls from its groups, commands and kinds of things from the command line.

    python tools/pages/code_tables.py

A table stands below `<!-- table: NAME -->`. Tables of settings are named after their section in the
code (a comment between blank lines begins one), or after the table of the file that sets them.
"""

import ast
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from midstream.client import Client
from midstream.client.cli.kinds import KINDS
from midstream.client.cli.main import app
from midstream.client.sdk.calls import Calls
from midstream.schemas.base import limits
from midstream.schemas.base.records import Record
from midstream.schemas.settings.settings import TABLES, Settings

ROOT = Path(__file__).resolve().parents[2]
PAGES = {name: ROOT / "docs" / f"{name}.md" for name in ("client", "http", "settings")}
LIMITS = ROOT / "schemas" / "base" / "limits.py"
SETTINGS = ROOT / "schemas" / "settings"
END = "<!-- end of the table -->"
TABLE = re.compile(rf"<!-- table: (?P<name>[^\n]+) -->\n.*?{END}", re.DOTALL)
LINK = re.compile(r"docs/(?P<file>(?:[\w-]+/)*[\w-]+\.md)(?P<anchor>#[\w-]+)?")
COMMENT = re.compile(r" *# (?P<text>.+)")
#: Behind a field, on its line.
BEHIND = re.compile(r".*\S {2}# (?P<text>.+)")


def rewritten(page: Path) -> str:
    """Return the page with its tables as the code has them."""
    written = {
        **dict(_settings()),
        "limits of requests": _limits(),
        "groups of calls": _calls(),
        "commands": _commands(),
        "kinds": _kinds(),
    }

    def table(found: re.Match[str]) -> str:
        rows = LINK.sub(lambda link: _link(link, page.name), written[found["name"]])
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
        for _, name, meaning in _described(*_parsed(LIMITS))
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
        lines, statements = _parsed(path)
        for node in statements:
            if isinstance(node, ast.ClassDef) and node.name == record.__name__:
                found = _described(lines, node.body)
                yield from (each for each in found if each[1] not in TABLES.values())


def _parsed(path: Path) -> tuple[list[str], list[ast.stmt]]:
    text = path.read_text()
    return text.splitlines(), ast.parse(text).body


def _described(lines: list[str], statements: list[ast.stmt]) -> Iterator[tuple[str, str, str]]:
    """Yield the section, name and comment of each assignment."""
    section = ""
    for node in statements:
        if not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        first = node.lineno - 1
        last = node.end_lineno or node.lineno
        top = first
        while COMMENT.fullmatch(lines[top - 1]):
            top -= 1
        title = COMMENT.fullmatch(lines[top - 2])
        if title and not lines[top - 1]:
            section = title["text"]
        above = [COMMENT.fullmatch(line) for line in lines[top:first]]
        behind = [BEHIND.fullmatch(line) for line in lines[first:last]]
        meaning = " ".join(each["text"] for each in [*above, *behind] if each)
        yield section, ast.unparse(target), meaning


def _link(found: re.Match[str], page: str) -> str:
    file = found["file"]
    anchor = found["anchor"] or ""
    if file == page:
        return f"[below]({anchor})"
    packaged = [path.relative_to(ROOT) for path in ROOT.glob(f"packages/*/docs/{file}")]
    place = f"../{packaged[0]}" if packaged else file
    return f"[{file.rpartition('/')[2]}]({place}{anchor})"


if __name__ == "__main__":
    for page in PAGES.values():
        page.write_text(rewritten(page))
