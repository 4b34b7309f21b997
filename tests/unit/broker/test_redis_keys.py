"""docs/reference/redis.md lists every key family that code and scripts name, and no others.

(System tests check the types.)
"""

import re

from redis_keys import documented
from tree import ROOT, part_of, tracked

from midstream.schemas.requests.artifact_kinds import OWN

#: A channel, and prefixes of ACL patterns.
NO_KEYS = {"changed", "hook-"}


def named() -> dict[str, str]:
    """Family → one place that names it."""
    found: dict[str, str] = {}
    for path in tracked():
        if not part_of(path) or path.suffix not in (".py", ".lua"):
            continue
        text = (ROOT / path).read_text()
        families = re.findall(r"\bms:([a-z][a-z-]*)", text)
        if path.suffix == ".lua":
            families += re.findall(r"\b(?:key|turn)\('([a-z-]+)'", text)
        found |= dict.fromkeys(families, str(path))
    found |= dict.fromkeys((row.plural for row in OWN), "schemas/requests/artifact_kinds.py")
    return {name: place for name, place in found.items() if name not in NO_KEYS}


def test_the_key_table_lists_the_families_that_the_code_names() -> None:
    places = named()
    assert documented().keys() == places.keys(), places
