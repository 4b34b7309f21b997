"""Writes the tables of `docs/settings.md` from the settings' comments and defaults in the code.

    python tools/pages/settings_page.py

A comment between blank lines begins a section of `Settings`. A table stands below
`<!-- settings: SECTION -->`, those of the tables of the file below their names.
"""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

from midstream.schemas.base.records import Record
from midstream.schemas.base.settings import TABLES, Settings

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "settings.md"
SOURCES = sorted((ROOT / "schemas" / "base").glob("*.py"))
END = "<!-- end of the settings -->"
TABLE = re.compile(rf"<!-- settings: (?P<section>[^\n]+) -->\n.*?{END}", re.DOTALL)
LINK = re.compile(r"docs/(?P<file>(?:[\w-]+/)*[\w-]+\.md)(?P<anchor>#[\w-]+)?")
COMMENT = re.compile(r" {4}# (?P<text>.+)")
#: Behind a field, on its line.
BEHIND = re.compile(r".*\S {2}# (?P<text>.+)")


def rewritten(page: str) -> str:
    """Return the page with all of its tables as the code has them."""
    written = dict(tables())

    def table(found: re.Match[str]) -> str:
        section = found["section"]
        return f"<!-- settings: {section} -->\n\n{written[section]}\n{END}"

    return TABLE.sub(table, page)


def tables() -> Iterator[tuple[str, str]]:
    """Yield each section's name and table."""
    for prefix, record in {"": Settings, **TABLES}.items():
        sections: dict[str, list[str]] = {}
        for section, name, meaning in described(record):
            full = f"{prefix}.{name}" if prefix else name
            default = json.dumps(getattr(record(), name)).replace("null", "unset")
            sections.setdefault(section or prefix, []).append(
                f"| `{full}` | `{default}` | {LINK.sub(_link, meaning)} |\n"
            )
        for section, rows in sections.items():
            yield section, f"| setting | default | meaning |\n|---|---|---|\n{''.join(rows)}"


def described(record: type[Record]) -> Iterator[tuple[str, str, str]]:
    """Yield the section, name and comment of each setting of a record; fields that are tables have
    no comment.
    """
    lines, fields = _source(record)
    section = ""
    for name, first, last in fields:
        top = first
        while COMMENT.fullmatch(lines[top - 1]):
            top -= 1
        title = COMMENT.fullmatch(lines[top - 2])
        if title and not lines[top - 1]:
            section = title["text"]
        above = [COMMENT.fullmatch(line) for line in lines[top:first]]
        behind = [BEHIND.fullmatch(line) for line in lines[first : last + 1]]
        if name not in TABLES:
            yield section, name, " ".join(each["text"] for each in [*above, *behind] if each)


def _source(record: type[Record]) -> tuple[list[str], list[tuple[str, int, int]]]:
    """The lines of the record's module, and its fields with their first and last line."""
    for path in SOURCES:
        text = path.read_text()
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef) and node.name == record.__name__:
                return text.splitlines(), [
                    (each.target.id, each.lineno - 1, (each.end_lineno or each.lineno) - 1)
                    for each in node.body
                    if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
                ]
    raise LookupError(record.__name__)


def _link(found: re.Match[str]) -> str:
    file, anchor = found["file"], found["anchor"] or ""
    if file == PAGE.name:
        return f"[below]({anchor})"
    return f"[{file.rpartition('/')[2]}]({file}{anchor})"


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text()))
