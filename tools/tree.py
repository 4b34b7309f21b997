"""The files that the project consists of, and what each imports: for tests that hold the shape of
the tree. Run as a program, it prints a line for each product file (`make files`), or with `rooms`
for each folder (`make rooms`).
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("api", "broker", "client", "kernels", "schemas", "storage", "workers")
#: Calls that import what their first argument names.
DYNAMIC = {"importlib.import_module", "import_module", "__import__"}


@dataclass(frozen=True)
class Import:
    where: str  # file:line
    module: str  # absolute: `midstream.broker.ledger.jobs.ledger`, `torch.nn`
    lazy: bool  # inside a function
    typing: bool  # under `if TYPE_CHECKING`


def tracked() -> list[Path]:
    """Files that git tracks or would track, relative to the root."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [Path(line) for line in listing.stdout.splitlines() if (ROOT / line).is_file()]


@cache
def imports_of(path: Path) -> tuple[Import, ...]:
    """Every import in the file at `path`, relative ones made absolute."""
    relative = path.relative_to(ROOT)
    package = ["midstream", *relative.parent.parts]

    def walk(node: ast.AST, lazy: bool, typing: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(f"{relative}:{node.lineno}", alias.name, lazy, typing)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield Import(f"{relative}:{node.lineno}", f"{stem}.{alias.name}", lazy, typing)
        elif (
            isinstance(node, ast.Call)
            and node.args
            and isinstance(node.args[0], ast.Constant)
            and ast.unparse(node.func) in DYNAMIC
        ):
            yield Import(f"{relative}:{node.lineno}", str(node.args[0].value), lazy, typing)
        inside = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        hidden = typing or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
        for child in ast.iter_child_nodes(node):
            yield from walk(child, inside, hidden)

    return tuple(walk(ast.parse(path.read_text(), str(path)), lazy=False, typing=False))


def sources(*folders: str) -> list[Path]:
    found = [ROOT / path for path in tracked() if path.suffix == ".py" and path.parts[0] in folders]
    assert found, f"no source in {folders}"
    return found


def summary(path: Path) -> str:
    """The first paragraph of a module's docstring, or of a script's comment, on one line."""
    text = (ROOT / path).read_text()
    if path.suffix == ".js":
        return text.partition("\n")[0].removeprefix("//").strip()
    if path.suffix == ".lua":
        lines = re.match(r"(?:--.*\n)*", text)[0].splitlines()  # type: ignore[index]
        lines = [line.removeprefix("--").strip() for line in lines]
        lines = lines[
            : next(
                (
                    n
                    for n, line in enumerate(lines)
                    if ": " in line[:9] or line.startswith("returns")
                ),
                len(lines),
            )
        ]
        return " ".join(lines)
    document = ast.get_docstring(ast.parse(text)) or ""
    return " ".join(document.partition("\n\n")[0].split())


def files() -> list[Path]:
    """Product files, Lua and the page's included, without the `__init__` of rooms."""
    return [
        path
        for path in sorted(tracked())
        if path.parts[0] in PACKAGES
        and path.suffix in (".py", ".lua", ".js")
        and path.name not in ("__init__.py", "preact.js")
    ]


def rooms() -> str:
    """A line for each folder of product code, from the docstring of its `__init__`."""
    folders = sorted(path.parent for path in sources(*PACKAGES) if path.name == "__init__.py")
    relative = [folder.relative_to(ROOT) for folder in folders]
    return "".join(
        f"{'  ' * (len(room.parts) - 1) + room.name:16} {summary(room / '__init__.py')}\n"
        for room in relative
    )


if __name__ == "__main__":
    if sys.argv[1:] == ["rooms"]:
        print(rooms(), end="")
    else:
        print(*(f"{file}: {summary(file)}" for file in files()), sep="\n")
