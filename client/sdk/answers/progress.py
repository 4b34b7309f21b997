"""Progress bars (tqdm) of jobs, on a terminal or in a notebook."""

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ....schemas.jobs.jobs import Event
from ...notebook import in_notebook

#: Seconds before a bar appears: jobs that end sooner show none.
DELAY_S = 1.0


@contextmanager
def prompts_bar(total: int) -> Iterator[Callable[[Event], None] | None]:
    """Yield a bar to call with a job's events, or None as `drawn_bar` does. It counts finished
    prompts, and appears after `DELAY_S`.
    """
    with drawn_bar(desc="prompts", unit="prompt", total=total, delay=DELAY_S) as drawn:
        seen: set[int] = set()

        def show(event: Event) -> None:
            # each prompt once, also when another worker runs the job again
            if event.event == "output" and event.data["index"] not in seen:
                seen.add(event.data["index"])
                drawn.update(1)

        yield None if drawn is None else show


@contextmanager
def drawn_bar(**options: Any) -> Iterator[Any]:
    """Yield a bar of tqdm with these options; None if standard error is not a terminal and this is
    not a notebook.
    """
    if not (sys.stderr.isatty() or in_notebook()):
        yield None
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # without ipywidgets, tqdm warns and draws a text bar
        from tqdm.auto import tqdm
    with tqdm(leave=in_notebook(), **options) as drawn:
        yield drawn
