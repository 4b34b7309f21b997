"""Names of files that processes of one installation agree on."""

import hashlib
import re


def file_stem(worker: str) -> str:
    """Return a valid file name for any worker's name; different workers get different ones."""
    safe = re.sub(r"[^A-Za-z0-9._-]", "_", worker)
    return (
        safe
        if safe == worker and len(safe) <= 100
        else f"{safe[:100]}-{hashlib.sha256(worker.encode()).hexdigest()[:12]}"
    )
