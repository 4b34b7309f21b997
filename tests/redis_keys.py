"""The key families of `docs/reference/redis.md`: `job` → `hash`."""

import re

from tree import ROOT


def documented() -> dict[str, str]:
    rows = re.findall(
        r"^\| `ms:([a-z-]+)(?::[^`]*)?` \| (\w+) \|",
        (ROOT / "docs/reference/redis.md").read_text(),
        re.MULTILINE,
    )
    assert len(rows) == len(dict(rows)), "a family stands twice in docs/reference/redis.md"
    return dict(rows)
