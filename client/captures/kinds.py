"""Kinds of layers in a capture's manifest: how each attends and chooses experts."""

from collections.abc import Sequence

from ...schemas.base.errors import MidstreamError
from ...schemas.model import attention, routing
from ...schemas.model.attention import AttentionKind
from ...schemas.model.layer_kinds import Kind
from ...schemas.model.routing import RoutingKind
from ...schemas.prompts.selectors import as_ranges


def attention_at(kinds: Sequence[AttentionKind], layer: int) -> AttentionKind:
    """Return how `layer` attends. Raises MidstreamError where that is not known."""
    return _at(kinds, layer, "attends")


def usable(kind: AttentionKind, layer: int) -> AttentionKind:
    """`kind`, if patterns of it can be computed. Raises MidstreamError with the reason if not."""
    if kind.refused:
        raise MidstreamError(
            "not_found", f"layer {layer} has no attention pattern: {kind.refused}", field="layer"
        )
    _readable(kind.version, attention.VERSION, f"layer {layer} attends")
    return kind


def routing_at(kinds: Sequence[RoutingKind], layer: int) -> RoutingKind:
    """Return how `layer` chooses experts. Raises MidstreamError where that is not known."""
    kind = _at(kinds, layer, "chooses experts")
    if kind.refused:
        raise MidstreamError(
            "not_found",
            f"it is not known how layer {layer} chooses experts: {kind.refused}",
            field="layer",
        )
    _readable(kind.version, routing.VERSION, f"layer {layer} chooses experts")
    return kind


def _at(kinds: Sequence[Kind], layer: int, does: str) -> Kind:
    result = [kind for kind in kinds if layer in kind.layers]
    if not result:
        known = as_ranges(number for kind in kinds for number in kind.layers)
        detail = (
            f"it is not recorded how layer {layer} {does}: it does not, or an older version "
            "of Midstream wrote this capture"
        )
        raise MidstreamError(
            "not_found",
            detail,
            field="layer",
            allowed=f"layers {known}" if known else "no layers here",
        )
    if len(result) > 1:
        raise MidstreamError("ranks_disagree", f"ranks disagree on how layer {layer} {does}")
    return result[0]


def _readable(version: int, own: int, does: str) -> None:
    if version > own:
        raise MidstreamError(
            "version_mismatch",
            f"a newer version of Midstream recorded how {does}",
            allowed="read it with that version",
        )
