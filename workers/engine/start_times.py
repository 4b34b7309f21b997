"""What a worker's start takes its time for: one part after the other, in seconds."""

import time

_begun: list[tuple[str, float]] = []


def begin(part: str) -> None:
    """Begin a part; the one before it is over. The line is what `midstream up` shows meanwhile."""
    _begun.append((part, time.monotonic()))
    print(f"worker begins {part}", flush=True)


def told() -> str:
    """Return how long the start has taken, and for what: `31.2 s: imports 9.1 s, …`."""
    if not _begun:
        return ""
    ends = [*(at for _, at in _begun[1:]), time.monotonic()]
    parts = [f"{name} {end - at:.1f} s" for (name, at), end in zip(_begun, ends, strict=True)]
    return f"{ends[-1] - _begun[0][1]:.1f} s: {', '.join(parts)}"
