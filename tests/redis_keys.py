"""The key families of `docs/redis.md`: `job` → `hash`."""

import re
from functools import cache

from tree import ROOT


@cache
def documented() -> dict[str, str]:
    rows = re.findall(
        r"^\| `ms:([a-z-]+)(?::[^`]*)?` \| (\w+) \|",
        (ROOT / "docs/redis.md").read_text(),
        re.MULTILINE,
    )
    assert len(rows) == len(dict(rows)), "a family stands twice in docs/redis.md"
    return dict(rows)


def family(key: str) -> str:
    """`ms:job:42` → `job`."""
    return key.split(":", 2)[1]
