"""The files that the project consists of, and what each imports: for tests that hold the shape of
the tree. Run as a program, it prints a line for each product file, and what the core and each
package may grow to (`make files`), or with `rooms` a line for each folder (`make rooms`).
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
#: Folders of the package `midstream`.
CORE = ("api", "broker", "client", "kernels", "schemas", "storage", "workers")
#: Packages beside it: `s3` is `packages/s3`, the distribution `midstream-s3`, and is imported as
#: `midstream_s3`.
PACKAGES = tuple(sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml")))
#: Nodes of the syntax trees of the core and of each package: what no change of form saves, unlike
#: lines or statements. Each may grow by `ROOM`; a commit that raises a figure says what the
#: addition is worth.
NODES = {
    "core": 493_310,
    "bridges": 19_890,
    "harvest": 41_390,
    "lab": 97_910,
    "ops": 44_200,
    "page": 7_465,
    "review": 8_400,
    "s3": 5_902,
    "webhooks": 6_460,
}
#: Bytes of what browsers load of a package: scripts, styles and documents of ours. Likewise. About
#: 57,000 are the white space of lines that can be read.
BYTES = {"page": 482_870}
ROOM = 0.03
#: The one module of the core that imports packages, for types alone: editors and type checkers read
#: there what packages add to the client.
TYPED = "client/sdk/typed.py"
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
    package = module_name(path.parent / "__init__.py").split(".")

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


def product(*parts: str) -> list[Path]:
    """The modules of the core (`core`) and of packages; of all of them, if none is named."""
    found = [path for path in tracked() if path.suffix == ".py"]
    return [ROOT / path for path in found if part_of(path) in (parts or NODES)]


def part_of(path: Path) -> str:
    """`core`, or the package that a file of the product belongs to; empty for other files."""
    top, *below = path.parts
    if top == "packages" and len(below) > 2 and below[1] == f"midstream_{below[0]}":
        return below[0]
    return "core" if top in CORE else ""


def module_name(path: Path) -> str:
    """`broker/relay.py` → `midstream.broker.relay`, a folder's `__init__.py` → the folder;
    `packages/s3/midstream_s3/store.py` → `midstream_s3.store`.
    """
    relative = path.relative_to(ROOT)
    parts = relative.with_suffix("").parts
    parts = parts[2:] if part_of(relative) in PACKAGES else ("midstream", *parts)
    return ".".join(parts).removesuffix(".__init__")


@cache
def nodes(part: str) -> int:
    """Nodes of the syntax trees of the core, or of a package."""
    return sum(1 for path in product(part) for _ in ast.walk(ast.parse(path.read_text())))


def most(part: str) -> int:
    """The most nodes that the core, or a package, may have."""
    return int(NODES[part] * (1 + ROOM))


def loaded_bytes(part: str) -> int:
    """Bytes of the files of a package that browsers load, without those of other projects."""
    return sum(
        (ROOT / path).stat().st_size
        for path in tracked()
        if part_of(path) == part
        and path.suffix in (".js", ".css", ".html")
        and "vendor" not in path.parts
    )


def most_bytes(part: str) -> int:
    """The most bytes that browsers may load of a package."""
    return int(BYTES[part] * (1 + ROOM))


def summary(path: Path) -> str:
    """The first paragraph of a module's docstring, or of a script's comment, on one line."""
    text = (ROOT / path).read_text()
    if path.suffix == ".js":
        head = re.match(r"(?://.*\n)*", text)[0]  # type: ignore[index]
        return " ".join(line.removeprefix("//").strip() for line in head.splitlines())
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
        if part_of(path)
        and path.suffix in (".py", ".lua", ".js")
        and path.name not in ("__init__.py", "preact.js")
    ]


def rooms() -> str:
    """A line for each folder of product code, from the docstring of its `__init__`."""
    inits = [path for path in product() if path.name == "__init__.py"]
    folders = sorted(path.parent.relative_to(ROOT) for path in inits)
    lines = [f"{_room(folder):16} {summary(folder / '__init__.py')}\n" for folder in folders]
    return "".join(lines)


def _room(folder: Path) -> str:
    """The name of a room, below that of the room that it is in."""
    if part_of(folder / "__init__.py") in PACKAGES:
        top, name, _, *below = folder.parts
        names = [f"{top}/{name}", *below]
    else:
        names = [*folder.parts]
    return "  " * (len(names) - 1) + names[-1]


if __name__ == "__main__":
    if sys.argv[1:] == ["rooms"]:
        print(rooms(), end="")
    else:
        print(*(f"{file}: {summary(file)}" for file in files()), sep="\n")
        for part in NODES:
            print(f"{part}: {nodes(part):,} nodes, at most {most(part):,}")
        for part in BYTES:
            print(f"{part}: {loaded_bytes(part):,} bytes in browsers, at most {most_bytes(part):,}")
