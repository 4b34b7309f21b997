"""Files and modules that docstrings and comments of the product name exist."""

import re

import pytest
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
PRODUCT = [path for path in FILES if path.parts[0] in PACKAGES]


def exists(parts: tuple[str, ...]) -> bool:
    """Whether a file's path, or a folder's, ends with `parts`."""
    return any(
        place.parts[-len(parts) :] == parts
        for path in FILES
        for place in (path.with_suffix(""), *path.parents)
    )


def stale(text: str) -> list[str]:
    """The references in `text` that lead nowhere."""
    paths = {found for found in PATH.findall(text) if found not in OTHERS}
    modules = {
        found
        for found in MODULE.findall(text)
        if found.partition(".")[0] in FIRST and found not in OTHERS and found not in paths
    }
    missing = [path for path in paths if not any(f"/{file}".endswith(f"/{path}") for file in FILES)]
    for module in modules:
        parts = tuple(module.split("."))
        if not any(exists(parts[:count]) for count in range(2, len(parts) + 1)):
            missing.append(module)
    return sorted(missing)


def test_a_reference_that_leads_nowhere_is_noticed() -> None:
    assert stale("see `workers/serving/gone.py` and `schemas.gone.Gone`, not `os.path.join`") == [
        "schemas.gone.Gone",
        "workers/serving/gone.py",
    ]


@pytest.mark.parametrize("package", PACKAGES)
def test_references_in_the_product_lead_somewhere(package: str) -> None:
    missing = {
        str(path): result
        for path in PRODUCT
        if path.parts[0] == package and (result := stale((ROOT / path).read_text()))
    }
    assert missing == {}
