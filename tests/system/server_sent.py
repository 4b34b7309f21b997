"""What a body of server-sent events says."""

import json
from typing import Any


def parse(text: str) -> list[dict[str, Any]]:
    """Its events, without comments and `retry`; the id is None of one without."""
    found = []
    for block in text.split("\n\n"):
        fields = dict(
            line.split(": ", 1) for line in block.splitlines() if line and not line.startswith(":")
        )
        if "data" in fields:
            found.append(
                {
                    "id": fields.get("id"),
                    "event": fields["event"],
                    "data": json.loads(fields["data"]),
                }
            )
    return found
