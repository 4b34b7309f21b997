"""Published faults of Redis and Valkey that an update removes, as of November 2026."""

from collections.abc import Mapping
from typing import Any

#: Kind of server → its faults, and of each series the first version without them. Other series are
#: not judged: they get no updates, or distributions keep them without a change of the version.
FAULTS = {
    "redis": ("CVE-2026-81934", "6.2.24 7.2.16 7.4.11 8.2.9 8.4.6 8.6.6 8.8.2 8.10.1"),
    "valkey": (
        "CVE-2026-56684, CVE-2026-63639, valkey-io/valkey#4342",
        "8.0.11 8.1.10 9.0.5 9.1.2",
    ),
}


def advisory(info: Mapping[str, Any]) -> str:
    """Return which published faults the server with this `INFO` has; empty if none is known."""
    kind = "valkey" if "valkey_version" in info else "redis"
    version = str(info[f"{kind}_version"])
    series, _, patch = version.rpartition(".")
    faults, fixed = FAULTS[kind]
    first = dict(each.rsplit(".", 1) for each in fixed.split()).get(series, "0")
    if not patch.isdecimal() or int(patch) >= int(first):
        return ""
    return (
        f"{kind.title()} {version} has known faults ({faults}), which {series}.{first} does not "
        "have: update it (`midstream up` takes a redis-server or valkey-server in PATH)"
    )
