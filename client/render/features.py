"""Features of sparse autoencoders for people: each token with its most active ones."""

from rich.table import Table
from rich.text import Text

from ..sdk.readings import Features
from .lens import shown


def table(features: Features, most: int = 5) -> Table:
    """One line per token: how many features are active, how far the reconstruction is off, and the
    `most` most active ones.
    """
    reading = features.reading
    title = f"features of {reading.sae} at {reading.hook} of layer {reading.layer}"
    drawn = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), title=title, title_justify="left")
    for name in ("position", "token", "active", "error", "feature: activation"):
        drawn.add_column(
            name, justify="left" if name in ("token", "feature: activation") else "right"
        )
    for place, position in enumerate(reading.positions):
        top = "  ".join(
            f"{feature}: {value:.2f}" for feature, value in list(features.of(place).items())[:most]
        )
        word, active, error = (
            Text(shown(features.word(place))),
            str(reading.active[place]),
            f"{reading.errors[place]:.2f}",
        )
        drawn.add_row(str(position), word, active, error, Text(top))
    return drawn
