"""Looks up in a capture's manifest how a layer attends and chooses experts; refuses what a newer
version recorded.
"""

from collections.abc import Sequence

from ...schemas.base.errors import MidstreamError
from ...schemas.model import attention, routing
from ...schemas.model.attention import AttentionKind
from ...schemas.model.layer_kinds import LayerKindT
from ...schemas.model.routing import RoutingKind
from ...schemas.prompts.selectors import as_ranges


def attention_at(kinds: Sequence[AttentionKind], layer: int) -> AttentionKind:
    """Return how `layer` attends. Raises MidstreamError if that is unknown."""
    return _at(kinds, layer, "attends")


def usable(kind: AttentionKind, layer: int) -> AttentionKind:
    """Return `kind` if its patterns can be computed; otherwise raise MidstreamError with the
    reason.
    """
    if kind.refused:
        raise MidstreamError(
            "not_found", f"layer {layer} has no attention pattern: {kind.refused}", field="layer"
        )
    _readable(kind.version, attention.VERSION, f"layer {layer} attends")
    return kind


def routing_at(kinds: Sequence[RoutingKind], layer: int) -> RoutingKind:
    """Return how `layer` chooses experts. Raises MidstreamError if that is unknown."""
    kind = _at(kinds, layer, "chooses experts")
    if kind.refused:
        raise MidstreamError(
            "not_found",
            f"the experts that layer {layer} chooses cannot be computed: {kind.refused}",
            field="layer",
        )
    _readable(kind.version, routing.VERSION, f"layer {layer} chooses experts")
    return kind


def _at(kinds: Sequence[LayerKindT], layer: int, verb: str) -> LayerKindT:
    result = [kind for kind in kinds if layer in kind.layers]
    if not result:
        known = as_ranges(number for kind in kinds for number in kind.layers)
        detail = (
            f"the capture does not record how layer {layer} {verb}: either the layer never does, "
            "or an older version of Midstream wrote this capture"
        )
        raise MidstreamError(
            "not_found",
            detail,
            field="layer",
            allowed=f"layers {known}" if known else "no layers of this capture",
        )
    if len(result) > 1:
        raise MidstreamError("ranks_disagree", f"ranks disagree on how layer {layer} {verb}")
    return result[0]


def _readable(version: int, newest: int, what: str) -> None:
    if version > newest:
        raise MidstreamError(
            "version_mismatch",
            f"a newer version of Midstream recorded how {what}",
            hint="read it with that version",
        )
