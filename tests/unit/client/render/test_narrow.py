"""Tables keep all their columns on a terminal of 80 characters."""

import numpy as np
import pytest
from job_kit import job_view
from rich.console import Console, RenderableType

from midstream.client.render import records
from midstream.client.render.readings import lens_table
from midstream.client.sdk.readings import Lens
from midstream.schemas.access.webhooks import WebhookDelivery
from midstream.schemas.jobs.jobs import JobView

JOB = "job_1m7wyqaqe78qxr5dmkjyqtj1ezxcg251d27"


def printed(drawn: RenderableType, width: int = 80) -> list[str]:
    console = Console(width=width, color_system=None)
    with console.capture() as captured:
        console.print(drawn)
    return captured.get().splitlines()


def lens(tokens: list[str]) -> Lens:
    shape = (2, len(tokens), 1)
    return Lens(
        job="job_x",
        hook="post_block",
        layers=[0, 29],
        positions=list(range(len(tokens))),
        token_ids=list(range(len(tokens))),
        top_ids=np.arange(len(tokens))[None, :, None].repeat(2, 0),
        logprobs=np.full(shape, -0.1),
        named=[],
        ranks=np.zeros((2, len(tokens), 0), int),
        named_logprobs=np.zeros((2, len(tokens), 0)),
        words=dict(enumerate(tokens)),
    )


@pytest.mark.parametrize("count", [2, 9, 12])
def test_a_lens_keeps_its_layers_and_marks_only_tokens_that_are_cut(count: int) -> None:
    words = [" a", " quantitative", *"bcdefghijk"][:count]
    lines = printed(lens_table(lens(words)))
    head = next(at for at, line in enumerate(lines) if line.startswith("layer ␣a "))
    last, first = lines[head + 1 : head + 3]
    assert last.startswith("   29 ␣a ")
    assert first.startswith("    0 ␣a ")
    assert last.count("…") == 1


def test_a_lens_cuts_its_tokens_before_its_layers_on_a_terminal_of_50_characters() -> None:
    lines = printed(lens_table(lens([" quantitative"] * 12)), width=50)
    assert any(line.startswith("layer ␣q") for line in lines)


def test_a_list_of_jobs_that_triggered_policies_keeps_its_columns() -> None:
    triggered = {"prompts-about-weapons": False, "guard-of-all-traffic": True}
    view = job_view(id=JOB, triggered=triggered, capture_status="ok", created=1.0, finished=2.5)
    lines = "\n".join(printed(records.listed([view], JobView)))
    for column in ("state", "what", "took", "1.50 s", "generate"):
        assert column in lines


def test_a_list_of_webhooks_keeps_its_columns_beside_a_long_url() -> None:
    sent = WebhookDelivery(
        id=f"msg_{JOB.removeprefix('job_')}_succeeded",
        event="job.succeeded",
        job=JOB,
        tenant="lab",
        url="https://receivers.example/webhooks/of/midstream/for/the/team/of/steering/hook",
        state="delivered",
        created=1.0,
        attempts=[],
    )
    lines = "\n".join(printed(records.listed([sent], WebhookDelivery)))
    for column in ("tries", "last", sent.id, "→ https://receivers.example/webhooks/of/"):
        assert column in lines


def test_a_lens_in_a_notebook_says_what_its_colours_mean() -> None:
    assert "probability from" in lens([" a", " b"])._repr_html_()
