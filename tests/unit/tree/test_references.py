"""Files and modules that docstrings and comments of the product name exist."""

import re

from tree import PACKAGES, ROOT, tracked

#: `workers/serving/attempts.py`, `lua/jobs/reap.lua`: the end of a tracked file's path.
PATH = re.compile(r"`([\w./-]+\.(?:py|lua))`")
#: `schemas.jobs.jobs.Job`, `runner.rows.buffers`: a module, and perhaps a name in it.
MODULE = re.compile(r"`(?:midstream\.)?((?:[a-z_0-9]+\.)+\w+)`")
#: The folders that such a name may begin with.
FIRST = {*PACKAGES, "runner", "engine", "serving", "ledger"}
#: These are no modules.
OTHERS = {"api.committed", "midstream.api.access", "_version.py"}
FILES = [path for path in tracked() if path.suffix in {".py", ".lua"}]
#: The end of every file's path, and of every module's or package's, in dots.
ENDS = {"/".join(path.parts[start:]) for path in FILES for start in range(len(path.parts))}
NAMES = {
    ".".join(place.parts[start:])
    for path in FILES
    for place in (path.with_suffix(""), *path.parents)
    for start in range(len(place.parts))
}


def leads_nowhere(name: str) -> bool:
    """Whether neither `name` nor what it begins with, of two parts at least, is a module."""
    parts = name.split(".")
    return not any(".".join(parts[:count]) in NAMES for count in range(2, len(parts) + 1))


def test_references_in_the_product_lead_somewhere() -> None:
    stale = []
    for file in FILES:
        if file.parts[0] in PACKAGES:
            text = (ROOT / file).read_text()
            paths = set(PATH.findall(text))
            modules = {name for name in MODULE.findall(text) if name.partition(".")[0] in FIRST}
            stale += [f"{file}: {path}" for path in paths - ENDS - OTHERS]
            stale += filter(leads_nowhere, modules - paths - OTHERS)
    assert stale == []
