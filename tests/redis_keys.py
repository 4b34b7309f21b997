"""The key families of `docs/redis.md`: `job` → `hash`."""

import re

from tree import ROOT


def documented() -> dict[str, str]:
    rows = re.findall(
        r"^\| `ms:([a-z-]+)(?::[^`]*)?` \| (\w+) \|",
        (ROOT / "docs/redis.md").read_text(),
        re.MULTILINE,
    )
    assert len(rows) == len(dict(rows)), "a family stands twice in docs/redis.md"
    return dict(rows)
