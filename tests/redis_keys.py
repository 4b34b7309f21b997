"""The key families of `docs/machines.md`: `job` → `hash`."""

import re

from tree import ROOT


def documented() -> dict[str, str]:
    rows = re.findall(
        r"^\| `ms:([a-z-]+)(?::[^`]*)?` \| (\w+) \|",
        (ROOT / "docs/machines.md").read_text(),
        re.MULTILINE,
    )
    assert len(rows) == len(dict(rows)), "a family stands twice in docs/machines.md"
    return dict(rows)
