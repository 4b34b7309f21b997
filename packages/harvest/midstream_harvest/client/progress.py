"""The progress bar of a harvest, on a terminal or in a notebook."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from midstream.client.sdk.answers.progress import drawn_bar

from ..records.harvests import HarvestView


@contextmanager
def harvest_bar() -> Iterator[Callable[[HarvestView], None] | None]:
    """Yield a bar to call with each poll of a harvest, or None as `drawn_bar` does. It shows the
    share of the source, tokens/s and time left.
    """
    with drawn_bar(total=1.0, bar_format="{desc} {percentage:5.1f}%|{bar}| {postfix}") as drawn:

        def show(view: HarvestView) -> None:
            drawn.n = view.share
            drawn.set_description_str(
                view.state + (f" ({view.reason})" if view.reason else ""), refresh=False
            )
            remaining = (
                "" if view.left_s is None else f", {drawn.format_interval(view.left_s)} left"
            )
            drawn.set_postfix_str(f"{view.rows:,} rows, {view.tokens_s:,.0f} tokens/s{remaining}")

        yield None if drawn is None else show
