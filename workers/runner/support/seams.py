"""Checks a version of vLLM: it has the names that Midstream relies on, and Midstream's functions
accept the calls that it makes.

The table in `seam_table` is checked against the installed version's source before an engine starts
and by `midstream doctor`, and against a version that is not installed by `python -m
midstream.workers.runner.support.seams FOLDER`. `docs/vllm-versions.md` describes upgrades.
"""

import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from .replacements import refusals, replacements
from .seam_table import SEAMS, Seam
from .vllm_source import Source, installed

#: Versions whose runners the adapters were tested with, newest first. Other versions are refused,
#: see `allowlist`.
WINDOW: tuple[str, ...] = ("0.32.0",)
#: Later versions whose source has every seam, but with whose builds no test ran: accepted with the
#: setting `engine_unproven`, and with a caveat in manifests.
READ: tuple[str, ...] = ("0.33.0",)


class SeamError(RuntimeError):
    """The installed vLLM is not built as the adapters expect."""


def mismatches(source: Source) -> Iterator[str]:
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


@cache
def _missing(seams: tuple[Seam, ...]) -> tuple[str, ...]:
    """Return what the installed vLLM lacks, as `mismatches` does; a second of work, and the same
    answer while the process runs.

    `seams`: `SEAMS`, of which the answer is kept.
    """
    return tuple(mismatches(installed()))


def verify(source: Source | None = None, *, unproven: bool = False) -> list[str]:
    """Return caveats for the installed vLLM; raises SeamError for an unsupported version, or one
    that lacks seams, with all of their names.

    `unproven`: also accept a version in `READ`.
    """
    version = (source or installed()).version.partition("+")[0]
    if version not in (*WINDOW, *READ) or (version in READ and not unproven):
        more = (
            (
                ", or this one with `engine_unproven`: its source has every seam, but no test "
                "ran with its builds"
            )
            if version in READ
            else ""
        )
        raise SeamError(
            f"vLLM {version} is not supported; install one of {', '.join(WINDOW)}{more} "
            "(docs/vllm-versions.md)"
        )
    if result := _missing(SEAMS) if source is None else tuple(mismatches(source)):
        raise SeamError(
            f"vLLM {version} is not built as Midstream expects (docs/vllm-versions.md): "
            f"{'; '.join(result)}"
        )
    return (
        [f"vLLM {version} has every seam, but no test ran with its builds: rows may be wrong"]
        if version in READ
        else []
    )


def table() -> Iterator[str]:
    """Yield the lines of a Markdown table of all seams, for `docs/vllm-versions.md`."""
    yield "| place in vLLM | names | used by |"
    yield "|---|---|---|"
    for seam in SEAMS:
        names = ", ".join(f"`{name}`" for name in seam.names) or "(itself)"
        yield (
            f"| `{seam.where}` | {names} | "
            f"{', '.join(f'`{user}`' for user in seam.by.split(', '))} |"
        )


def main(arguments: list[str]) -> int:
    """Print the mismatches of vLLM's package in a folder, or of the installed package; return exit
    code 1 if there are any.

    With `--table`, print all seams instead.
    """
    if arguments == ["--table"]:
        print("\n".join(table()))
        return 0
    source = Source(Path(arguments[0])) if arguments else installed()
    result = list(mismatches(source))
    names = sum(len(seam.has) or 1 for seam in SEAMS)
    print(
        "\n".join(
            [
                *result,
                (
                    f"vLLM {source.version}: {len(result)} of {names} names in {len(SEAMS)} places "
                    "differ"
                ),
            ]
        )
    )
    return 1 if result else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
