"""Tables keep all their columns on a terminal of 80 characters."""

import dataclasses
import time
from string import ascii_uppercase

import numpy as np
import pytest
from job_kit import listed_job
from rich.console import Console, RenderableType

from midstream.client.render import records
from midstream.client.render.forms import added
from midstream.client.render.jobs import table
from midstream.client.render.readings import lens_table, named_table
from midstream.client.sdk.readings import Lens
from midstream.schemas.access.webhooks import WebhookDelivery
from midstream.schemas.jobs.jobs import ListedJob

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


def test_tokens_of_a_lens_that_do_not_fit_stand_below_with_their_layers() -> None:
    words = [f" token{number:02}" for number in range(12)]
    lines = printed(lens_table(lens(words)))
    heads = [line.split() for line in lines if line.startswith("layer ")]
    assert [head[0] for head in heads] == ["layer", "layer"]
    assert [word for head in heads for word in head[1:]] == [
        word.replace(" ", "␣") for word in words
    ]
    assert sum(line.startswith("   29 ␣token") for line in lines) == 2
    assert max(map(len, lines)) <= 80


def test_named_tokens_that_do_not_fit_stand_below() -> None:
    named = [100 + number for number in range(9)]
    shape = (2, 2, len(named))
    many = dataclasses.replace(
        lens([" a", " b"]),
        named=named,
        ranks=np.full(shape, 4864),
        named_logprobs=np.full(shape, -9.0),
        words={number: f" city{number}" for number in named},
    )
    lines = printed(named_table(many))
    assert max(map(len, lines)) <= 80
    assert sum(line.count("rank 4864, 0.01%") for line in lines) == 2 * len(named)
    assert all(f"' city{number}'" in "".join(lines) for number in named)


LISTS = {
    **{kind: shown for kind, form in added().items() if (shown := form.shown)},
    **records.SHOWN,
}


@pytest.mark.parametrize("width", [40, 80])
@pytest.mark.parametrize("kind", [kind for kind, shown in LISTS.items() if shown.columns])
def test_no_list_cuts_or_drops_a_cell(kind: type, width: int) -> None:
    columns = LISTS[kind].columns
    cells = [f"{letter * 20}-{letter * 20}" for letter in ascii_uppercase[: len(columns)]]
    drawn = "".join(printed(table("", *columns, rows=[cells]), width))
    assert {cell[0]: drawn.count(cell[0]) for cell in cells} == {cell[0]: 40 for cell in cells}


def test_a_list_of_jobs_has_prompts_and_times_beside_policies_that_triggered() -> None:
    triggered = {"prompts-about-weapons": False, "guard-of-all-traffic": True}
    prompt = "The Eiffel Tower is in the city of Paris,\nwhich is the capital of France"
    more = {"created": 1.0, "finished": 2.5, "kind": "attribution", "capture_status": "timed_out"}
    view = listed_job(id=JOB, triggered=triggered, prompt=prompt, **more)
    lines = printed(records.listed([view], ListedJob))
    shown = "\n".join(lines)
    sent = time.strftime("%m-%d", time.localtime(1.0))
    beginning = "The Eiffel Tower is in the city of Par…"
    for words in (JOB, beginning, "state", "what", "sent", sent, "in 1.50 s", "attribution"):
        assert words in shown
    assert max(map(len, lines)) <= 80


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
