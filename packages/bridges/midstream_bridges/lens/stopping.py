"""Runs that stop at a layer, as TransformerLens' `stop_at_layer` has them."""

from midstream.schemas.base.errors import invalid
from midstream.schemas.prompts.sites import At

from .names import SHORT, Card, NamedSite


def layer_of(stop: int, card: Card) -> int:
    """Return the first layer that is not computed: the number of layers for the whole stream.

    Raises MidstreamError for a layer that the model does not have.
    """
    layers = card.num_layers
    if isinstance(stop, bool) or not hasattr(stop, "__index__") or not -layers <= stop <= layers:
        raise invalid(
            "stop_at_layer",
            f"{str(stop)[:80]} is no layer of the model",
            allowed=f"{-layers} to {layers}",
        )
    return int(stop) + layers if stop < 0 else int(stop)


def entry_of(stop: int) -> tuple[NamedSite, At]:
    """Return where the stream that enters layer `stop` is read, and whether before or after edits
    there: hooks of layers that do not run have no effect.
    """
    # what leaves the layer below is what enters this one, which need not be computed
    if stop:
        return NamedSite(SHORT["resid_post"], stop - 1), "after"
    return NamedSite(SHORT["resid_pre"], 0), "before"
