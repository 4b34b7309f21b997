"""Checks that Midstream's functions accept every call that vLLM makes of its own in their place.

vLLM's callers can only make calls that vLLM's own function accepts, so its signature is compared
with ours: that covers callers in plug-ins and in later versions too.
"""

import ast
import inspect
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from .vllm_source import VllmFolder

#: Folders of the files that the table of seams names.
_FOLDERS = (Path(__file__).parents[1], Path(__file__).parents[2])


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
        theirs, extends = (
            source.member(module, owner, function.name),
            f"super().{function.name}" in ast.unparse(function),
        )
        if theirs is None:
            if extends:
                yield f"{name} extends {function.name}, which is not there"
        elif not (extends or function.name in known or function.name == "__init__"):
            yield f"{name} hides {function.name}, which Midstream does not know"
        elif isinstance(theirs, ast.FunctionDef) and (
            call := refused_call(signature_of(theirs), signature_of(function))
        ):
            yield f"{name} does not accept {function.name}({call})"


def signature_of(function: ast.FunctionDef) -> inspect.Signature:
    """Return the parameters of a function, without `self`, annotations and values of defaults."""
    taken, one = function.args, inspect.Parameter
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
    kinds: dict[Any, list[inspect.Parameter]] = {}
    for each in function.parameters.values():
        kinds.setdefault(each.kind, []).append(each)
    one = inspect.Parameter
    only_first, either = (
        kinds.get(one.POSITIONAL_ONLY, []),
        kinds.get(one.POSITIONAL_OR_KEYWORD, []),
    )
    more, named = kinds.get(one.VAR_POSITIONAL, []), kinds.get(one.KEYWORD_ONLY, [])
    named_more = kinds.get(one.VAR_KEYWORD, [])
    for first, last in (
        ([*only_first, *either, *more], [*named, *named_more]),
        (only_first, [*either, *named, *named_more]),
    ):
        yield [each.name for each in first], [each.name for each in last]
    yield (
        [each.name for each in only_first if each.default is one.empty],
        [each.name for each in (*either, *named) if each.default is one.empty],
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
