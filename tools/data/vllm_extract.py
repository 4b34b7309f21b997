"""A copy of what the seams need of a version of vLLM that is not installed: its names and its
functions' parameters.

`python tools/data/vllm_extract.py FOLDER` writes it for vLLM's package in a folder, such as an
unpacked wheel, to `tests/data`.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from midstream.workers.runner.support.seam_table import SEAMS, Seam
from midstream.workers.runner.support.vllm_source import VllmFolder, replacements

DATA = Path(__file__).resolve().parents[2] / "tests" / "data"


def file_of(version: str) -> Path:
    return DATA / f"vllm-{version}.txt"


def lines(source: VllmFolder) -> Iterator[str]:
    """Yield the lines of an extract: each place, and below it what it has."""
    for seam in SEAMS:
        yield seam.where
        for name in dict.fromkeys([*seam.names, *(ours.name for _, ours in _ours(seam))]):
            module, _, owner = seam.where.partition(":")
            found = source.member(module, owner, name)
            if isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"    def {name}({_parameters(found.args)}): ..."
            elif found is not None:
                yield f"    {name} = ..."


def unpack(version: str, folder: Path) -> VllmFolder:
    """Write an extract's names as a package into `folder`."""
    made: dict[str, list[str]] = {"vllm._version": [f"version = '{version}'"]}
    for line in file_of(version).read_text().splitlines():
        if not line.startswith(" "):
            module, _, owner = line.partition(":")
            target = made.setdefault(module, [])
            target += [f"class {owner}:", "    ..."] if owner else []
        else:
            target.append(line if owner else line.strip())
    for module, text in made.items():
        path = folder.joinpath(*module.split("."))
        is_package = any(other.startswith(f"{module}.") for other in made)
        path = path / "__init__.py" if is_package else path.with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(text))
    return VllmFolder(folder / "vllm")


def _ours(seam: Seam) -> list[tuple[str, ast.FunctionDef]]:
    return list(replacements(seam.by, seam.ours))


def _parameters(arguments: ast.arguments) -> str:
    """Return the parameters without annotations and values of defaults."""
    for node in ast.walk(arguments):
        if isinstance(node, ast.arg):
            node.annotation = None
    arguments.defaults = [ast.Constant(...) for _ in arguments.defaults]
    arguments.kw_defaults = [item and ast.Constant(...) for item in arguments.kw_defaults]
    return ast.unparse(arguments)


if __name__ == "__main__":
    package = VllmFolder(Path(sys.argv[1]))
    file_of(package.version).write_text("\n".join(lines(package)) + "\n")
