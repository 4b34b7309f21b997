"""The core and each package keep to their budgets, and no part of them is too large."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from tree import BYTES, NODES, PACKAGES, ROOT, loaded_bytes, most, most_bytes, nodes, product

#: Bytes of scripts and styles that need no budget.
SMALL = 1_000
#: The most statements of a class, and lines of an `__init__.py`.
CLASS = 300
INIT = 60
#: Names of classes and types that may be defined more than once, and why.
TWICE: dict[str, str] = {}
TYPE_NAME = re.compile(r"[A-Z][A-Za-z0-9]*[a-z][A-Za-z0-9]*")


def files() -> Iterator[tuple[Path, ast.Module]]:
    for path in product():
        yield path.relative_to(ROOT), ast.parse(path.read_text())


def statements(tree: ast.AST) -> int:
    return sum(
        isinstance(node, ast.stmt)
        and not (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        )
        for node in ast.walk(tree)
    )


@pytest.mark.parametrize("part", ["core", *PACKAGES])
def test_the_core_and_each_package_keep_to_their_budgets_of_nodes(part: str) -> None:
    assert nodes(part) <= most(part), (
        f"{part} has {nodes(part):,} nodes, and may have {most(part):,}, "
        f"{NODES[part]:,} and 3 % (tools/tree.py)"
    )


@pytest.mark.parametrize("part", ["core", *PACKAGES])
def test_what_browsers_load_keeps_to_its_budget_of_bytes(part: str) -> None:
    loaded = loaded_bytes(part)
    if part in BYTES:
        assert loaded <= most_bytes(part), f"{part}: {loaded:,} bytes (tools/tree.py)"
    else:
        assert loaded < SMALL, f"{part} has no budget of bytes (tools/tree.py)"


def test_no_class_and_no_init_is_too_large() -> None:
    large = []
    for path, tree in files():
        large += [
            f"{path}: {node.name}"
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef) and statements(node) > CLASS
        ]
        if path.name == "__init__.py" and len((ROOT / path).read_text().splitlines()) > INIT:
            large.append(str(path))
    assert large == []


def test_a_type_s_name_means_one_thing() -> None:
    found = defaultdict(list)
    for path, tree in files():
        for node in tree.body:
            for name in _defined(node):
                if TYPE_NAME.fullmatch(name):
                    found[name].append(str(path))
    assert {
        name: paths for name, paths in found.items() if len(paths) > 1 and name not in TWICE
    } == {}


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else []
    targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
    return [target.id for target in targets if isinstance(target, ast.Name)]
