"""Reads what comments say of the assignments of a file, such as the fields of a record."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

COMMENT = re.compile(r" *#:? (?P<text>.+)")
#: Behind a field, on its line.
BEHIND = re.compile(r".*\S {2}# (?P<text>.+)")


def parsed(path: Path) -> tuple[list[str], list[ast.stmt]]:
    """Return the lines of a file, and its statements."""
    text = path.read_text()
    return text.splitlines(), ast.parse(text).body


def described(lines: list[str], statements: list[ast.stmt]) -> Iterator[tuple[str, str, str]]:
    """Yield the section, name and comment of each assignment: the lines above it, and the end of
    its own. A comment between blank lines begins a section.
    """
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


def of_fields(kind: type) -> dict[str, str]:
    """Return the comment of each field of a record and of those that it inherits from."""
    found: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        if each.__module__.startswith("midstream"):
            found |= _of_class(each)
    return found


def _of_class(kind: type) -> dict[str, str]:
    lines, statements = parsed(Path(sys.modules[kind.__module__].__file__ or ""))
    for node in ast.walk(ast.Module(statements, [])):
        if isinstance(node, ast.ClassDef) and node.name == kind.__name__:
            return {name: meaning for _, name, meaning in described(lines, node.body) if meaning}
    return {}
