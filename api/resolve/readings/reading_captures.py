"""Captures of a reading: one for each prompt, whose rows go to the ranks' readers."""

from collections.abc import Mapping
from typing import Any

from ....schemas.prompts.selectors import Hook, PositionSelector
from ....schemas.prompts.sites import At
from ....schemas.readings.readings import AnyStoredReading
from ....schemas.readings.stored import READER
from ....schemas.requests.specs import StoredCapture


def reading_captures(
    reading: AnyStoredReading,
    sites: Mapping[Hook, list[int]],
    positions: list[PositionSelector],
    at: At,
) -> list[StoredCapture]:
    """Return one capture per prompt. `sites`: hook → layers. `positions`: those of each prompt."""
    same: dict[str, Any] = {"tag": "", "at": at, "consumers": [READER], "reading": reading}
    return [StoredCapture(sites=dict(sites), positions=chosen, **same) for chosen in positions]
