"""Is the code written to be read? A statement does one thing.

The rules, each with what it allows:

- `unpacked`: no `a, b = f(), g()`, whose right side is a tuple or list display. Allowed: a swap,
  that is, a later value reads an earlier target; unpacking of one value, or of a choice.
- `chained`: `a = b = value` only where the value is a constant, a name or a number, or where one
  target is a local name for what the others keep (`found = self._found = Found()`).
- `joined`: no assert whose parts can fail alone: `assert a and b`, `assert not (a or b)`,
  `assert all([a, b])`, and a comparison of two displays of more than one part
  (`assert (a, b) == (1, 2)`).
- `walrus`: no `:=` that spans lines, or stands in a display, in an f-string or in the arguments of
  a call. Allowed: one in a comprehension (`[at for each in found if (at := places.get(each))]`).
- `nested`: no conditional expression that is a part of another, itself or below an operator.
- `arithmetic`: no truth value as an operand of `+`, `-` or `*`, nor as the index of a display.
  Truth values are `not`, `in`, `is`, `isinstance(…)` and their like, comparisons, and names that a
  function annotates as `bool` or gives nothing else. In a module that imports numpy or torch a
  comparison may be an array: there it counts where one side is a text or a length.
- `loop`: no loop over one element or none in place of an `if`: `for x in [y]`, over a choice with
  an empty or single display, or over a slice `[n : n + 1]`, `[:1]` or `[-1:]`. Allowed: one or
  many (`for x in y if isinstance(y, list) else [y]`), and in a comprehension, where no `if` can
  stand before the loop, a choice with an empty display.
- `positional`: a call of more than six arguments names them. Functions that take any number of
  things are listed in `MANY`.
- `long`: no line of the page's JavaScript above 120 characters.

`python tests/unit/tree/test_style.py FOLDER…` prints what the rules find, and how often.
"""

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[3]
#: What the rules hold, one case of the test for each.
FOLDERS = (
    "api", "benchmarks", "broker", "client", "kernels", "schemas", "storage", "tools", "workers",
    "tests/engine", "tests/fake_engine", "tests/faults", "tests/long", "tests/machines",
    "tests/system", "tests/unit/api", "tests/unit/broker", "tests/unit/client",
    "tests/unit/workers", "tests/unit", "tests", "packages",
)  # fmt: skip
PAGE = "packages/page/midstream_page/assets"
#: Functions that take any number of things of one sort: of libraries, and of ours.
MANY = {
    "print", "min", "max", "zip", "chain", "partial", "to_thread", "gather", "execute_command",
    "join", "joinpath", "pack", "debug", "info", "warning", "error", "log", "exception",
    "table", "copied", "ip", "openssl", "run", "stack", "midstream", "cli", "swept", "tokens",
    "press", "put", "watch_after", "_lanes",
}  # fmt: skip
ARRAYS = {"numpy", "torch", "triton"}
TRUE_OR_FALSE = {
    "isinstance", "issubclass", "callable", "hasattr", "bool", "any", "all", "startswith",
    "endswith", "is_file", "is_dir", "exists", "isdigit", "issubset", "issuperset", "isdisjoint",
}  # fmt: skip
DISPLAY = (ast.Tuple, ast.List, ast.Set)
COMPREHENSION = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


class Found(NamedTuple):
    path: str
    line: int
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.text}"


class Reader(ast.NodeVisitor):
    """Reads one module: what it finds is `found`, by line and rule."""

    def __init__(self, module: ast.Module) -> None:
        self._arrays = any(map(_imports_arrays, ast.walk(module)))
        self.found: list[tuple[int, str]] = []
        self._parents: list[ast.AST] = []
        self._flags: list[set[str]] = [set()]

    def visit(self, node: ast.AST) -> None:
        super().visit(node)
        self._parents.append(node)
        if isinstance(node, FUNCTION):
            self._flags.append(_flags(node))
        for child in ast.iter_child_nodes(node):
            self.visit(child)
        if isinstance(node, FUNCTION):
            self._flags.pop()
        self._parents.pop()

    def generic_visit(self, node: ast.AST) -> None:
        """Goes no deeper: `visit` does."""

    def _add(self, node: ast.expr | ast.stmt | ast.comprehension, rule: str) -> None:
        place = node.iter if isinstance(node, ast.comprehension) else node
        self.found.append((place.lineno, rule))

    def visit_Assign(self, node: ast.Assign) -> None:
        if len(node.targets) > 1 and not _shared(node):
            self._add(node, "chained")
        target = node.targets[-1]
        if _pair(target) and _pair(node.value) and not _swaps(target, node.value):
            self._add(node, "unpacked")

    def visit_Assert(self, node: ast.Assert) -> None:
        if _has_parts(node.test):
            self._add(node, "joined")

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        if node.lineno != node.end_lineno or self._buried(node):
            self._add(node, "walrus")

    def _buried(self, child: ast.AST) -> bool:
        """Returns whether a display, a call or an f-string stands around the node."""
        for parent in reversed(self._parents):
            if isinstance(parent, ast.Call) and child is not parent.func:
                return True
            if isinstance(parent, (ast.Dict, ast.JoinedStr, *DISPLAY)):
                return True
            if isinstance(parent, (ast.stmt, *COMPREHENSION, *FUNCTION)):
                return False
            child = parent
        return False

    def visit_IfExp(self, node: ast.IfExp) -> None:
        if any(map(_holds_choice, (node.test, node.body, node.orelse))):
            self._add(node, "nested")

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if isinstance(node.op, ast.Add | ast.Sub | ast.Mult) and any(
            map(self._is_truth, (node.left, node.right))
        ):
            self._add(node, "arithmetic")

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.op, ast.Add | ast.Sub | ast.Mult) and self._is_truth(node.value):
            self._add(node, "arithmetic")

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if isinstance(node.value, DISPLAY) and self._is_truth(node.slice):
            self._add(node, "arithmetic")

    def _is_truth(self, node: ast.expr) -> bool:
        match node:
            case ast.Name(name):
                return name in self._flags[-1]
            case ast.UnaryOp(ast.Not()):
                return True
            case ast.BoolOp(_, values):
                return all(map(self._is_truth, values))
            case ast.Call(function):
                return _name(function).rpartition(".")[2] in TRUE_OR_FALSE
            case ast.Compare(_, [ast.In() | ast.NotIn() | ast.Is() | ast.IsNot(), *_]):
                return True
            case ast.Compare(left, _, others):
                return not self._arrays or any(map(_plain, (left, *others)))
        return False

    def visit_For(self, node: ast.For | ast.AsyncFor) -> None:
        if _one_or_none(node.iter, fewest=0):
            self._add(node, "loop")

    visit_AsyncFor = visit_For

    def visit_comprehension(self, node: ast.comprehension) -> None:
        if _one_or_none(node.iter, fewest=1):
            self._add(node, "loop")

    def visit_Call(self, node: ast.Call) -> None:
        given = [each for each in node.args if not isinstance(each, ast.Starred)]
        if len(given) > 6 and _name(node.func).rpartition(".")[2] not in MANY:
            self._add(node, "positional")


def _pair(node: ast.expr) -> bool:
    return isinstance(node, ast.Tuple | ast.List)


def _parts(node: ast.expr) -> list[ast.expr]:
    assert isinstance(node, DISPLAY)
    return node.elts


def _reads(node: ast.AST, written: str) -> bool:
    return any(
        isinstance(each, ast.expr) and ast.unparse(each) == written for each in ast.walk(node)
    )


def _swaps(target: ast.expr, value: ast.expr) -> bool:
    """Returns whether two statements would do something else."""
    written = [ast.unparse(each) for each in _parts(target)]
    return any(
        _reads(each, name) for number, each in enumerate(_parts(value)) for name in written[:number]
    )


def _shared(node: ast.Assign) -> bool:
    if any(map(_pair, node.targets)):
        return False
    value = node.value.operand if isinstance(node.value, ast.UnaryOp) else node.value
    names = sum(isinstance(each, ast.Name) for each in node.targets)
    return names == 1 or isinstance(value, ast.Constant | ast.Name)


def _has_parts(test: ast.expr) -> bool:
    match test:
        case ast.BoolOp(ast.And()) | ast.UnaryOp(ast.Not(), ast.BoolOp(ast.Or())):
            return True
        case ast.Call(ast.Name("all"), [display]):
            return isinstance(display, DISPLAY)
        case ast.Compare(left, _, others):
            sides = (left, *others)
            return any(_several(one) and _several(other) for one, other in pairwise(sides))
    return False


def _several(side: ast.expr) -> bool:
    return isinstance(side, ast.Tuple | ast.List) and len(side.elts) > 1


def _holds_choice(node: ast.expr) -> bool:
    match node:
        case ast.IfExp():
            return True
        case ast.BinOp(left, _, right):
            return _holds_choice(left) or _holds_choice(right)
        case ast.BoolOp(_, values):
            return any(map(_holds_choice, values))
        case ast.Compare(left, _, others):
            return any(map(_holds_choice, (left, *others)))
        case ast.UnaryOp(_, value) | ast.Starred(value):
            return _holds_choice(value)
    return False


def _name(function: ast.expr) -> str:
    match function:
        case ast.Name(name):
            return name
        case ast.Attribute(value, name):
            return f"{_name(value)}.{name}"
    return ""


def _imports_arrays(node: ast.AST) -> bool:
    match node:
        case ast.Import(names):
            return any(each.name.partition(".")[0] in ARRAYS for each in names)
        case ast.ImportFrom(str(module)):
            return module.partition(".")[0] in ARRAYS
    return False


def _plain(side: ast.expr) -> bool:
    """Returns whether it is surely no array: a text, or a length."""
    match side:
        case ast.Constant(value):
            return isinstance(value, str)
        case ast.Call(function):
            return _name(function) == "len"
    return False


def _flags(function: ast.AST) -> set[str]:
    """Returns the names that hold nothing but a truth value in a function: by its annotations."""
    assert isinstance(function, FUNCTION)
    given = function.args
    named = {
        each.arg
        for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)
        if isinstance(each.annotation, ast.Name) and each.annotation.id == "bool"
    }
    if isinstance(function, ast.Lambda):
        return named
    assigned: dict[str, list[ast.expr]] = {}
    for node in ast.walk(function):
        match node:
            case ast.Assign([ast.Name(name)], value) | ast.NamedExpr(ast.Name(name), value):
                assigned.setdefault(name, []).append(value)
    return named | {name for name, values in assigned.items() if all(map(_sure, values))}


def _sure(value: ast.expr) -> bool:
    match value:
        case ast.UnaryOp(ast.Not()) | ast.Constant(True) | ast.Constant(False):
            return True
        case ast.Compare(_, [ast.In() | ast.NotIn() | ast.Is() | ast.IsNot(), *_]):
            return True
        case ast.Call(ast.Name(name)):
            return name in TRUE_OR_FALSE
    return False


def _one_or_none(node: ast.expr, fewest: int) -> bool:
    """Returns whether a loop runs once or, in a choice that may have `fewest` elements, less."""
    match node:
        case ast.Tuple() | ast.List() | ast.Set():
            return _length(node) in (0, 1)
        case ast.IfExp(ast.Call(ast.Name("isinstance"))):
            return False
        case ast.IfExp(_, body, orelse):
            return any(fewest <= _length(each) <= 1 for each in (body, orelse))
        case ast.Subscript(_, ast.Slice(lower, upper)):
            return _single(lower, upper)
    return False


def _length(node: ast.expr) -> int:
    """Returns the elements of a display, -1 of anything else."""
    if not isinstance(node, DISPLAY) or any(isinstance(each, ast.Starred) for each in node.elts):
        return -1
    return len(node.elts)


def _single(lower: ast.expr | None, upper: ast.expr | None) -> bool:
    if upper is None:
        return lower is not None and ast.unparse(lower) == "-1"
    start = "0" if lower is None else ast.unparse(lower)
    return ast.unparse(upper) in {f"{start} + 1", "1" if start == "0" else ""}


def found_in(text: str) -> list[tuple[int, str]]:
    """Returns the lines of a module's text that break a rule, with the rule."""
    module = ast.parse(text)
    reader = Reader(module)
    reader.visit(module)
    return sorted(reader.found)


def read(path: Path) -> Iterator[Found]:
    text = path.read_text()
    lines = text.splitlines()
    where = str(path.relative_to(ROOT))
    for line, rule in found_in(text):
        yield Found(where, line, rule, lines[line - 1].strip()[:100])


def read_folder(folder: str) -> Iterator[Found]:
    """Reads the modules of a folder, without folders that have a case of their own."""
    own = [ROOT / other for other in FOLDERS if other.startswith(f"{folder}/")]
    for path in sorted((ROOT / folder).rglob("*.py")):
        if not any(map(path.is_relative_to, own)):
            yield from read(path)


def long_lines(folder: str) -> Iterator[Found]:
    for path in sorted((ROOT / folder).rglob("*.js")):
        if "vendor" in path.parts:
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if len(line) > 120:
                yield Found(str(path.relative_to(ROOT)), number, "long", line.strip()[:100])


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_statement_does_one_thing(folder: str) -> None:
    assert [str(each) for each in read_folder(folder)] == []


def test_lines_of_the_page_are_short() -> None:
    assert [str(each) for each in long_lines(PAGE)] == []


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ("unpacked", "a, b = f(), g()"),
        ("unpacked", "self.a, b = [1, 2]"),
        ("chained", "a = b = f()"),
        ("chained", "a, b = pair = f()"),
        ("joined", "assert (a, b) == (1, 2)"),
        ("joined", "assert a and b"),
        ("joined", "assert not (a or b)"),
        ("joined", "assert all([a, b])"),
        ("walrus", "if isinstance(a := f(), str): pass"),
        ("walrus", "a = {1: (b := f())}"),
        ("walrus", "if (a := f(\n)): pass"),
        ("walrus", "a = f'{(b := c).d} {b.e}'"),
        ("nested", "a = 1 if b else 2 if c else 3"),
        ("nested", "a = 1 + (2 if c else 3) if b else 4"),
        ("arithmetic", "a += b in c"),
        ("arithmetic", "a = [b] * isinstance(b, str)"),
        ("arithmetic", "a = 's' * (b != 1)"),
        ("arithmetic", "import torch\na = 's' * (len(b) != 1)"),
        ("arithmetic", "def f(a: bool) -> int: return 2 + a"),
        ("arithmetic", "a = (b, c)[not d]"),
        ("loop", "for a in [b]: pass"),
        ("loop", "for a in b if c else (): pass"),
        ("loop", "a = [b for b in c[d : d + 1]]"),
        ("loop", "a = [b for b in ([c] if d else e)]"),
        ("loop", "for a in b[-1:]: pass"),
        ("positional", "f(1, 2, 3, 4, 5, 6, 7)"),
    ],
)
def test_a_rule_finds_what_it_forbids(rule: str, text: str) -> None:
    assert [each for _, each in found_in(text)] == [rule]


@pytest.mark.parametrize(
    "text",
    [
        "a, b = b, a",
        "a, b = f()",
        "a, b = (1, 2) if c else (3, 4)",
        "a = b = 0",
        "a = self.a = f()",
        "assert a == (1, 2)",
        "assert a or b",
        "if (a := f()) is None: pass",
        "if (a := f()).any(): pass",
        "a = f(b for c in d if (b := g(c)))",
        "a = 1 if b else f(2 if c else 3)",
        "import numpy as np\na = (b > c) * np.sum(e == 0)",
        "a = (b or 1) + 2",
        "for a in b or (): pass",
        "for a in [*b]: pass",
        "for a in b if isinstance(b, list) else [b]: pass",
        "c = [a for a in (b.all if b else [])]",
        "for a in b[1:]: pass",
        "print(1, 2, 3, 4, 5, 6, 7)",
        "f(*a, b=1, c=2, d=3, e=4, f=5, g=6, h=7)",
    ],
)
def test_a_rule_leaves_what_it_allows(text: str) -> None:
    assert [each for _, each in found_in(text)] == []


def main(folders: list[str]) -> None:
    found = [each for folder in folders for each in (*read_folder(folder), *long_lines(folder))]
    print(*found, sep="\n")
    print(Counter(each.rule for each in found))


if __name__ == "__main__":
    main(sys.argv[1:])
