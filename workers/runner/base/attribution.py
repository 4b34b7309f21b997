"""Which edits of a request could have reached a row."""

from ....schemas.prompts.selectors import FORWARD
from ....schemas.requests.specs import RankSpec

_ORDER: dict[str, int] = {hook: place for place, hook in enumerate(FORWARD)}


def precedes_edits(
    spec: RankSpec, position: int, place: tuple[str, int] | None, *, after: bool
) -> bool:
    """Return whether no edit of the request could reach this row, so that the unedited model
    computed it.

    `place`: (hook, layer), whose row is taken before its edits or `after` them; None: after the
    last layer.
    """
    entries = spec.steering
    if not entries or spec.first_affected < 0 or position < spec.first_affected:
        return True
    if position > spec.first_affected or place is None:
        return False
    hook, layer = place
    lowest = min((number, _ORDER[entry.hook]) for entry in entries for number in entry.layers)
    site = layer, _ORDER[hook]
    return site < lowest or (site == lowest and not after)
