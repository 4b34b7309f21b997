"""Checks a version of vLLM: it has the names that Midstream relies on, and Midstream's functions
accept the calls that it makes.

The table in `seam_table` is checked against the installed version's source before an engine starts
and by `midstream doctor`, and against a version that is not installed by `python -m
midstream.workers.runner.support.seams FOLDER`. `docs/vllm.md` describes upgrades.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from ....schemas.jobs.certificates import UNPROVEN
from .seam_table import SEAMS
from .vllm_source import VllmFolder, installed, refusals, replacements

#: Versions with which all tests ran. Others are served with a caveat if they have every seam.
PROVEN: tuple[str, ...] = ("0.32.0",)


class SeamError(RuntimeError):
    """The installed vLLM is not built as the adapters expect."""


def mismatches(source: VllmFolder) -> Iterator[str]:
    """Yield every seam that `source` lacks: its name, what was expected, and what was found."""
    for seam in SEAMS:
        module, _, owner = seam.where.partition(":")
        where = f"{seam.where} (used by {seam.by})"
        if source.module(module) is None:
            yield f"{where}: there is no such module"
        elif owner and source.find(module, owner) is None:
            yield f"{where}: there is no {owner} in it"
        else:
            for name in seam.has:
                if problem := source.lacks(module, owner, name):
                    yield f"{where}: {problem}"
            ours = replacements(seam.by, seam.ours)
            for problem in refusals(source, module, owner, ours, set(seam.names)):
                yield f"{where}: {problem}"


def of_version(version: str) -> list[str]:
    """Return the caveat of a version of vLLM; none of a proven one."""
    name = version.partition("+")[0]
    proven = ", ".join(PROVEN)
    return [] if name in PROVEN else [f"{UNPROVEN}vLLM {name}: all tests ran with {proven} only"]


def verify(source: VllmFolder | None = None) -> list[str]:
    """Return caveats for the installed vLLM; raises SeamError for one that lacks seams, with all of
    their names.
    """
    source = source or installed()
    if result := list(mismatches(source)):
        raise SeamError(
            f"vLLM {source.version.partition('+')[0]} is not built as Midstream expects "
            f"(docs/vllm.md): {'; '.join(result)}"
        )
    return of_version(source.version)


def main(arguments: list[str]) -> int:
    """Print the mismatches of vLLM's package in a folder, or of the installed package; return exit
    code 1 if there are any.
    """
    source = VllmFolder(Path(arguments[0])) if arguments else installed()
    result = list(mismatches(source))
    names = sum(len(seam.has) or 1 for seam in SEAMS)
    total = f"{len(result)} of {names} names in {len(SEAMS)} places differ"
    print(*result, f"vLLM {source.version}: {total}", sep="\n")
    return 1 if result else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
