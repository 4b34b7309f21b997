"""The page's sweeps: a form that shows aligned tokens, heatmaps that fill while cells arrive,
closer looks, exports.
"""

import csv
import io
import json
import re
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, expect
from web_kit import MODEL, NARROW, WIDE, Site, Visit, held, until, visiting

from midstream import PatchStudy
from midstream.schemas.base.records import from_json, to_json
from midstream.schemas.prompts.sites import renamed
from midstream_lab.client.grid import records
from midstream_lab.client.patch_study import Region
from midstream_lab.records.sweep_views import SweepView
from midstream_lab.records.sweeps import SweepRequest

PAIR = {
    "clean": "The Eiffel Tower is in",
    "corrupt": "The Colosseum is in",
    "answer": "P",
    "foil": "R",
}
BODY: dict[str, Any] = {
    "model": MODEL,
    "pairs": [PAIR],
    "hooks": ["resid_pre", "attn_out"],
    "metric": "logit_diff",
}
LAYERS = 4  # of the fake engine
TOKENS = len(PAIR["corrupt"])  # a token is a character
CELLS = 2 * LAYERS * TOKENS
#: Steps of the engine: enough for some cells after the ten that measure the unpatched prompts and
#: the noise; and for more, but not all.
SOME = 30
MORE = 60


def submitted(site: Site, **changes: Any) -> str:
    return str(site.alice.post("/v1/sweeps", **{**BODY, **changes})["id"])


def swept(site: Site, **changes: Any) -> SweepView:
    """A sweep that is over."""
    job_id = submitted(site, **changes)
    assert site.alice.wait(job_id)["state"] == "succeeded"
    return seen(site, job_id)


def seen(site: Site, job_id: str) -> SweepView:
    return from_json(site.alice.http.get(f"/v1/sweeps/{job_id}").content, SweepView)


def with_value(site: Site, job_id: str) -> int:
    """How many of its cells have a value by now."""
    return seen(site, job_id).result.summary.cells


def shown(visit: Visit, site: Site, job_id: str) -> Locator:
    """Its view, once the heatmaps are there: the first of them."""
    visit.log_in(site.alice, f"sweep/{job_id}")
    first = visit.page.locator(".cells").first
    expect(first.locator("canvas")).to_be_visible()
    return first


def drawn(page: Page) -> dict[str, int]:
    """How many cells of all heatmaps have the colour of their value, are hatched, and are empty, by
    their pixels.
    """
    return page.evaluate(
        """async () => {
          const { colour } = await import("/page/lib/heatmap.js");
          const count = { right: 0, wrong: 0, empty: 0, hatched: 0 };
          for (const canvas of document.querySelectorAll(".cells canvas")) {
            const map = canvas.heatmap, ratio = canvas.width / map.width;
            const context = canvas.getContext("2d");
            map.source.rows.forEach((_, row) => map.source.columns.forEach((_, column) => {
              const share = map.source.at(row, column), box = map.box(row, column);
              if (share === null) return (count.empty += 1);
              if (Number.isNaN(share)) return (count.hatched += 1);
              const at = [box.left + box.width / 2, box.top + box.height / 2]
                .map((part) => Math.round(part * ratio));
              const seen = [...context.getImageData(...at, 1, 1).data].slice(0, 3);
              const wanted = colour(share).match(/\\d+/g).map(Number);
              const right = seen.every((part, n) => Math.abs(part - wanted[n]) <= 2);
              count[right ? "right" : "wrong"] += 1;
            }));
          }
          return count;
        }"""
    )


def settled(page: Page, **wanted: int) -> None:
    """Wait until so many cells are drawn so."""
    until(
        lambda: True if {name: drawn(page)[name] for name in wanted} == wanted else None,
        f"cells {wanted}, not {drawn(page)}",
    )


def table_of(page: Page) -> list[list[str]]:
    """The values of the table, tokens by layers."""
    return page.evaluate(
        "[...document.querySelectorAll('.grid-table tbody tr')].map((row) => "
        "[...row.cells].slice(1).map((cell) => cell.textContent))"
    )


# --- The form
# --------------------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_an_example_is_aligned_before_it_runs_and_is_sent_once(site: Site, visit: Visit) -> None:
    bodies: list[str] = []
    visit.page.on(
        "request",
        lambda request: (
            bodies.append(request.post_data or "") if request.url.endswith("/v1/sweeps") else None
        ),
    )
    visit.log_in(site.alice, "sweep")
    bar = visit.page.locator(".run-bar")
    expect(bar).to_be_in_viewport(ratio=1)
    expect(bar).to_contain_text("Fill in clean and corrupt and answer")
    visit.page.get_by_role("button", name="Try an example").click()
    planned = visit.page.get_by_role("region", name="What will run")
    expect(planned).to_contain_text("3 hook points, 4 layers")
    rows = planned.get_by_role("row")
    expect(rows).to_have_count(2)
    expect(rows.nth(0)).to_contain_text("clean")
    assert bodies == [], "nothing has run yet"
    start = visit.page.get_by_role("button", name="Run the sweep")
    expect(start).to_be_enabled()
    start.evaluate("(button) => { button.click(); button.click(); }")
    expect(visit.page).to_have_url(re.compile(r"#/sweep/job_"))
    expect(visit.page.locator(".sweep-state")).to_contain_text("succeeded")
    assert len(bodies) == 1
    settled(visit.page, wrong=0, empty=0)


def test_tokens_are_shown_as_the_server_aligns_them(site: Site, visit: Visit) -> None:
    visit.log_in(site.alice, "sweep")
    fill(visit.page, PAIR)
    plan = site.alice.post(
        "/v1/sweeps?dry_run=true", **{**BODY, "hooks": ["post_block"], "metric": "recovered"}
    )["pairs"][0]
    table = visit.page.locator(".aligned table")
    expect(table).to_be_visible()
    columns: list[list[str | None]] = table.evaluate(
        """(table) => [...table.rows].map(
             (row) => [...row.cells].slice(1).map(
               (cell) => (cell.className === "gap" ? null : cell.className)))"""
    )
    linked = [
        n
        for n, (one, other) in enumerate(zip(*columns, strict=True))
        if {one, other} <= {"same", "swapped"}
    ]
    above, below = ([n for n, cell in enumerate(row) if cell is not None] for row in columns)
    assert [(above.index(n), below.index(n)) for n in linked] == sorted(
        (column["sources"][0], column["positions"][0])
        for column in plan["columns"]
        if column["positions"]
    )
    assert len(above) == len(PAIR["clean"]), "no token is left out"
    assert len(below) == len(PAIR["corrupt"]), "no token is left out"
    expect(visit.page.locator(".planned .note")).to_have_text(
        [f"Note: {note}" for note in plan["notes"]]
    )


def fill(page: Page, pair: dict[str, str]) -> None:
    """The answer comes last: without it the server is not asked, so what is planned is planned for
    the whole pair.
    """
    for label, name in (
        ("Clean prompt", "clean"),
        ("Corrupt prompt", "corrupt"),
        ("Foil", "foil"),
        ("Answer", "answer"),
    ):
        page.get_by_label(label, exact=True).fill(pair[name])


@pytest.mark.parametrize(
    ("view", "words"),
    [
        ("sweep", "No model is served yet"),
        ("capture", "No model is served."),
        ("playground", "No model is served."),
    ],
)
def test_a_form_opened_before_a_model_is_served_gets_it_later(
    site: Site, visit: Visit, view: str, words: str
) -> None:
    visit.page.route(
        "**/v1/models", lambda route: route.fulfill(json={"object": "list", "data": []})
    )
    visit.log_in(site.alice, view)
    if view == "sweep":
        visit.page.get_by_role("button", name="Try an example").click()
    expect(visit.page.get_by_text(words)).to_be_visible()
    visit.page.unroute("**/v1/models")
    expect(visit.page.get_by_label("Model", exact=True)).to_have_value(MODEL)


@pytest.mark.parametrize(
    ("field", "wrong", "words"),
    [
        ("layers", "9", "layer 9 is out of range"),
        ("positions", "77", "position 77 is out of range"),
        ("pairs[0].foil", "P", "same tokens as the answer"),
        ("pairs[0].corrupt", PAIR["clean"], "nothing to compare"),
    ],
)
def test_an_error_of_the_server_is_shown_at_its_field(
    site: Site, visit: Visit, field: str, wrong: str, words: str
) -> None:
    visit.allow("400")
    visit.log_in(site.alice, "sweep")
    fill(visit.page, PAIR)
    expect(visit.page.locator(".aligned")).to_be_visible()
    control = visit.page.locator(f'[data-field="{field}"]')
    right = control.input_value()
    control.fill(wrong)
    expect(control).to_have_attribute("aria-invalid", "true")
    expect(control).to_have_accessible_description(re.compile(re.escape(words)))
    expect(visit.page.get_by_text("This sweep cannot run as it is")).to_be_visible()
    expect(visit.page.locator(".aligned")).to_have_count(0)
    control.fill(right)
    expect(visit.page.locator(".aligned")).to_be_visible()
    expect(control).not_to_have_attribute("aria-invalid", "true")


def test_a_duplicate_keeps_names_of_hooks_positions_and_other_fields(
    site: Site, visit: Visit
) -> None:
    asked = {
        **BODY,
        "pairs": [{**PAIR, "alignment": [[-1, -1], [-2, -2]]}],
        "hooks": ["resid_mid", "hook_mlp_out"],
        "layers": "0-1",
        "positions": [-1, -2],
        "window": {"layers": 2},
        "alpha": 0.5,
        "metadata": {"name": "Mine", "of": "me"},
    }
    view = swept(site, **asked)
    shown(visit, site, view.job.id)
    expect(visit.page.get_by_role("heading", level=1)).to_have_text("Mine")
    with visit.page.expect_request(
        lambda request: request.url.endswith("/v1/sweeps?dry_run=true")
    ) as planned:
        visit.page.get_by_role("link", name="Duplicate").click()
    assert from_json(planned.value.post_data or "", SweepRequest) == view.request
    expect(visit.page.locator(".planned")).to_contain_text("2 hook points, 2 layers, 2 columns")
    expect(visit.page.get_by_label("Hook points")).to_have_count(0)
    expect(visit.page.locator('[data-hook="post_attn"]')).to_be_checked()
    expect(visit.page.get_by_label("Name", exact=True)).to_have_value("Mine")
    with visit.page.expect_request(lambda request: request.url.endswith("/v1/sweeps")) as sent:
        visit.page.get_by_role("button", name="Run the sweep").click()
    assert from_json(sent.value.post_data or "", SweepRequest) == view.request
    expect(visit.page).not_to_have_url(re.compile("like="))


# --- The heatmaps
# --------------------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_heatmaps_are_filled_while_the_sweep_runs(site: Site, visit: Visit) -> None:
    with held(site, SOME):
        job_id = submitted(site)
        until(lambda: with_value(site, job_id), "the first cells")
        shown(visit, site, job_id)
        expect(visit.page.locator(".sweep-state")).to_have_attribute("data-state", "running")
        until(lambda: drawn(visit.page)["right"] > 0, "cells in colour")
        assert drawn(visit.page)["empty"] > 0
        site.let(MORE)
        until(lambda: drawn(visit.page)["right"] > SOME, "cells that came later")
        assert drawn(visit.page)["empty"] > 0, "not all have come"
    expect(visit.page.locator(".sweep-state")).to_contain_text("succeeded")
    view = seen(site, job_id)
    settled(
        visit.page,
        right=view.result.summary.cells,
        hatched=view.result.summary.skipped,
        empty=0,
        wrong=0,
    )
    visit.page.reload()
    expect(visit.page.locator(".cells canvas").first).to_be_visible()
    settled(
        visit.page,
        right=view.result.summary.cells,
        hatched=view.result.summary.skipped,
        empty=0,
        wrong=0,
    )


def test_a_held_sweep_is_cancelled_and_keeps_its_cells(site: Site, visit: Visit) -> None:
    with held(site, SOME):
        job_id = submitted(site)
        until(lambda: with_value(site, job_id), "the first cells")
        shown(visit, site, job_id)
        visit.page.get_by_role("button", name="Cancel").click()
        expect(visit.page.locator(".sweep-state")).to_have_attribute("data-state", "cancelled")
    summary = seen(site, job_id).result.summary
    assert 0 < summary.cells < CELLS - summary.skipped
    left = {
        "right": summary.cells,
        "hatched": summary.skipped,
        "empty": CELLS - summary.cells - summary.skipped,
    }
    settled(visit.page, **left)
    expect(visit.page.get_by_role("button", name="Cancel")).to_have_count(0)
    visit.page.reload()
    expect(visit.page.locator(".cells canvas").first).to_be_visible()
    settled(visit.page, **left)


def test_values_of_cells_are_read_out_to_keys_and_the_mouse(site: Site, visit: Visit) -> None:
    view = swept(site)
    grid = view.result.pairs[0].grids["pre_attn"]
    first = shown(visit, site, view.job.id)
    first.focus()
    readout = visit.page.locator(".readout")
    expect(readout).to_contain_text("Residual stream before the layer, layer 0, T 0")
    visit.press("ArrowRight", "ArrowRight", "ArrowDown")
    expect(readout).to_contain_text(f"layer 2, h 1: {grid[2][1]:.3f}".replace("-", "−"))
    expect(readout).to_contain_text("± ")
    visit.page.keyboard.press("End")
    expect(readout).to_contain_text("layer 3, h 1")
    box = first.locator("canvas").evaluate("(canvas) => canvas.heatmap.box(2, 3)")
    first.locator("canvas").hover(position={"x": box["left"] + 2, "y": box["top"] + 2})
    value = re.escape(f"{grid[3][2]:.3f}".replace("-", "−"))
    expect(first.locator(".tip")).to_contain_text(re.compile(f"layer 3, e 2: {value} ± "))


def test_a_cell_without_a_value_says_why(site: Site, visit: Visit) -> None:
    view = swept(site)
    [reason] = {
        skipped.reason
        for skipped in view.result.skipped
        if skipped.column == view.result.skipped[0].column
    }
    first = shown(visit, site, view.job.id)
    assert drawn(visit.page)["hatched"] == view.result.summary.skipped > 0
    first.focus()
    for _ in range(view.result.skipped[0].column):
        visit.page.keyboard.press("ArrowDown")
    expect(visit.page.locator(".readout")).to_contain_text(f"no value, {reason}")
    visit.page.get_by_text("without a value").click()
    expect(visit.page.locator(".missing li").first).to_contain_text(reason)


def test_a_retry_says_which_attempt_and_why(site: Site, visit: Visit) -> None:
    with held(site):
        job_id = submitted(site)
        body = until(
            lambda: (
                found
                if (found := site.alice.get(f"/v1/sweeps/{job_id}"))["job"]["state"] == "running"
                else None
            ),
            "the sweep to run",
        )
        body["job"] |= {
            "state": "queued",
            "version": 1000,
            "retry_reason": "worker w1 did not renew its lease",
        }
        visit.page.route(f"**/v1/sweeps/{job_id}", lambda route: route.fulfill(json=body))
        shown(visit, site, job_id)
        state = visit.page.locator(".sweep-state")
        expect(state).to_contain_text("waiting for a worker for")
        expect(state).to_contain_text("attempt 2: worker w1 did not renew its lease")


def test_a_saved_table_has_no_text_that_a_spreadsheet_runs(site: Site, visit: Visit) -> None:
    visit.open()
    lines = visit.page.evaluate(
        """async () => (await import("/page/lib/grid.js")).csv(
          ["=1+1", "+cmd", "@SUM(A1)", "-2+3", "-2.5", "-", -1.5, " ="].map((cell) => ({ cell })),
        )"""
    )
    assert lines.split() == [
        *("cell", "'=1+1", "'+cmd", "'@SUM(A1)", "'-2+3", "-2.5", "-", "-1.5", "="),
    ]


def test_a_finding_names_tokens_layers_and_the_effect(site: Site, visit: Visit) -> None:
    """Of grids as a sweep has them: `cells` is [layer][column] at one hook."""
    visit.log_in(site.alice, "jobs")

    def found(cells: list[list[float | None]], metric: str = "recovered", **more: str) -> str:
        return visit.page.evaluate(
            """async ([cells, metric, more]) => {
              const { SweepGrid } = await import("/page/lib/grid.js");
              const { finding } = await import("/page/lib/finding.js");
              const tokens = ["The", " Tower", " of"], base = { value: -2, logprob: -2 };
              const pair = {
                labels: tokens, base_tokens: tokens, source_tokens: tokens, answer: "P", foil: "R",
                base, source: { value: 3, logprob: -1 }, noise_floor: 0.01,
                grids: { pre_attn: cells },
                notes: [], positions: [[0], [1], [2]], sources: [[0], [1], [2]], heads: [],
                neurons: {},
              };
              const result = {
                hooks: ["pre_attn"], layers: cells.map((_, n) => n), metric, axis: "position",
                direction: "denoise", ablation: null, pairs: [pair], skipped: [], ...more,
              };
              return finding(new SweepGrid({ result }), 0);
            }""",
            [cells, metric, more],
        )

    assert found([[None, None, None]]) == ""
    both: list[list[float | None]] = [[0, 0.9, 0], [0, 1.0, 0.1], [0, 0.2, 0.8], [0, 0.1, 0.9]]
    where = "“Tower” (token 1) in layers 0–1 and “of” (token 2) in layers 2–3 matter most"
    residual = "the residual stream before the layer"
    assert found(both) == f"{where}: patching {residual} there recovers up to 100 % of the answer."
    subject: list[list[float | None]] = [[0.9, 0.9, 0], [0.9, 0.9, 0], [0, 0, 1.0]]
    every = "“The” (token 0) in layers 0–1, “Tower” (token 1) in layers 0–1 and “of” (token 2)"
    assert found(subject).startswith(f"{every} in layer 2 matter most"), "the last token, too"
    assert found(both, direction="noise").endswith(
        "there moves up to 100 % of the way to the other prompt's answer."
    )
    assert found([[0, 0.01, 0]]) == (
        "No single patch matters: the strongest recovers 1 % of the answer."
    )
    assert found([[-2, -5, -2]], metric="logit_diff", ablation="zeros") == (
        f"“Tower” (token 1) in layer 0 matters most: setting {residual} to zero there changes "
        "log P(answer) − log P(foil) by up to −3.000 nats."
    )


def test_enter_on_a_cell_looks_closer_as_a_study_does(site: Site, visit: Visit) -> None:
    view = swept(site, window={"layers": 3})
    shown(visit, site, view.job.id).focus()
    visit.press("ArrowRight", "ArrowRight", "Enter")
    look = visit.page.get_by_role("region", name="Closer look")
    expect(look).to_contain_text("4 cells: layers 0 to 3, 1 column")
    start = visit.page.get_by_role("button", name="Run the closer look")
    expect(start).to_be_enabled()
    start.evaluate("(button) => { button.click(); button.click(); }")
    expect(visit.page).not_to_have_url(re.compile(view.job.id))
    new = visit.page.url.rpartition("/")[2]
    assert site.alice.wait(new)["state"] == "succeeded"
    closer = seen(site, new)
    expect(visit.page.locator(".sweep-state")).to_contain_text("4 of 4 cells")
    assert closer.result.hooks == ["pre_attn"]
    assert closer.result.layers == [0, 1, 2, 3]
    assert closer.result.pairs[0].positions == [[0]]


def test_a_box_of_cells_is_chosen_by_mouse_and_by_shift_and_arrows(
    site: Site, visit: Visit
) -> None:
    first = shown(visit, site, swept(site).job.id)
    canvas = first.locator("canvas")
    corner, other = (
        canvas.evaluate("(canvas, at) => canvas.heatmap.box(...at)", at) for at in ([0, 1], [1, 2])
    )
    place = canvas.bounding_box()
    assert place is not None
    visit.page.mouse.move(place["x"] + corner["left"] + 2, place["y"] + corner["top"] + 2)
    visit.page.mouse.down()
    visit.page.mouse.move(place["x"] + other["left"] + 2, place["y"] + other["top"] + 2)
    visit.page.mouse.up()
    look = visit.page.get_by_role("region", name="Closer look")
    expect(look).to_contain_text("layers 1 to 2, T 0 to h 1")
    expect(look).to_contain_text("4 cells")
    visit.page.get_by_role("button", name="Close", exact=True).click()
    expect(first).to_be_focused()
    visit.press(
        "Home",
        "ArrowUp",
        "ArrowUp",
        "Shift+ArrowRight",
        "Shift+ArrowDown",
        "Shift+ArrowDown",
        "Enter",
    )
    expect(look).to_contain_text("layers 0 to 1, T 0 to e 2")
    expect(look).to_contain_text("6 cells")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"direction": "noise"},
        {"ablation": "zeros"},
        {"pairs": [PAIR, PAIR | {"foil": "S"}]},
        {"axis": "together"},
    ],
)
def test_a_closer_look_is_the_one_of_the_python_client(
    site: Site, visit: Visit, changes: dict[str, Any]
) -> None:
    if "ablation" in changes:
        changes = {**changes, "pairs": [{name: PAIR[name] for name in ("clean", "answer", "foil")}]}
    view = swept(site, layers=[0, 2, 3], **changes)
    assert view.request is not None
    visit.log_in(site.alice, "jobs")
    study = PatchStudy.of(view.job.id, view.request, view.result)
    last = len(view.result.pairs[0].labels) - 1
    for layers, columns in (([0, 1], [max(0, last - 1), last]), ([2, 2], [0, last])):
        numbers = range(view.result.layers[layers[0]], view.result.layers[layers[1]] + 1)
        region = Region(
            hooks=["attn_out"],
            layers=list(numbers),
            columns=list(range(columns[0], columns[1] + 1)),
        )
        pairs, fields = study._zoomed(region, None, {})
        made = visit.page.evaluate(
            """async ([view, part]) =>
             (await import("/page/lib/sweep_request.js"))
               .closer(view.request, view.result, part)""",
            [json.loads(to_json(view)), {"hook": "attn_out", "rows": layers, "columns": columns}],
        )
        found = from_json(json.dumps({**made, "layers": list(numbers)}), SweepRequest)
        assert found == from_json(to_json({"model": MODEL, "pairs": pairs, **fields}), SweepRequest)


def test_pairs_are_shown_as_a_mean_or_one_by_one(site: Site, visit: Visit) -> None:
    view = swept(site, pairs=[PAIR, PAIR | {"foil": "S"}], hooks=["resid_pre"])
    shown(visit, site, view.job.id)
    visit.page.get_by_role("button", name="As table").click()
    expect(visit.page.locator(".sweep-title")).to_contain_text("Mean over 2 pairs")

    def wanted(grid: list[list[float | None]]) -> list[list[str]]:
        columns: list[tuple[float | None, ...]] = list(zip(*grid, strict=True))
        return [
            ["none" if value is None else f"{value:.3f}".replace("-", "−") for value in row]
            for row in columns
        ]

    until(lambda: table_of(visit.page) == wanted(view.result.mean["pre_attn"]), "the mean")
    visit.page.get_by_label("Pairs").select_option("1")
    expect(visit.page.locator(".sweep-title")).to_contain_text("foil “S”")
    until(
        lambda: table_of(visit.page) == wanted(view.result.pairs[1].grids["pre_attn"]) or None,
        "the second pair",
    )


# --- What can be taken away
# --------------------------------------------------------------------------------------------------


def downloaded(visit: Visit, name: str) -> Path:
    with visit.page.expect_download() as found:
        visit.page.get_by_role("button", name=name, exact=True).click()
    assert found.value.suggested_filename.endswith(f".{name.lower()}")
    return Path(found.value.path())


def test_exports_are_the_grid_of_the_server(site: Site, visit: Visit) -> None:
    view = swept(site)
    shown(visit, site, view.job.id)
    rows = list(csv.DictReader(io.StringIO(downloaded(visit, "CSV").read_text(), newline="")))
    wanted = records(view.result)
    assert [float(row["value"]) if row["value"] else None for row in rows] == [
        record["value"] for record in wanted
    ]
    names = ("hook", "label", "reason")
    assert [[row[name] for name in names] for row in rows] == [
        [record[name] for name in names] for record in wanted
    ]
    assert [(int(row["layer"]), int(row["column"])) for row in rows] == [
        (record["layer"], record["column"]) for record in wanted
    ]
    study = PatchStudy.load(downloaded(visit, "JSON"))
    assert study.job == view.job.id
    assert study.request == view.request
    asked = {"pre_attn": "resid_pre"}  # the name that was asked for
    assert study.result == renamed(view.result, asked)
    picture = downloaded(visit, "PNG").read_bytes()
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    assert int.from_bytes(picture[16:20]) > 800


@pytest.mark.parametrize(
    "changes",
    [{}, {"pairs": [PAIR | {"clean": 'It\'s "so" $HOME\\n `is` in', "positions": [-1]}]}],
    ids=["plain", "quoted"],
)
def test_the_copied_code_runs_the_same_sweep(
    site: Site, visit: Visit, changes: dict[str, Any]
) -> None:
    view = swept(site, **changes)
    shown(visit, site, view.job.id)
    known = {view.job.id}
    for language in ("Python", "curl", "CLI"):
        visit.run_code(site.alice, language)
        newest = site.alice.get("/v1/jobs", limit=1)["jobs"][0]["id"]
        assert newest not in known
        known.add(newest)
        assert seen(site, newest).request == view.request


# --- What goes wrong
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("broken", [{"job": None}, {"job": {}, "result": {"pairs": []}}])
def test_a_view_that_fails_shows_a_problem_until_another_is_opened(
    site: Site, visit: Visit, broken: dict[str, Any]
) -> None:
    view = json.loads(to_json(swept(site)))
    path = f"sweep/{view['job']['id']}"
    visit.page.route("**/v1/sweeps/job_*", lambda route: route.fulfill(json={**view, **broken}))
    visit.log_in(site.alice, path)
    expect(visit.page.get_by_role("alert")).to_be_visible()
    visit.open("sweep")
    expect(visit.page.get_by_role("heading", name="New sweep")).to_be_visible()
    visit.page.unroute_all()
    visit.open("sweep/%E0%A4%A")
    visit.allow("404")
    expect(visit.page.get_by_role("alert")).to_contain_text("unknown job")
    visit.open("constructor")
    expect(visit.page.get_by_role("heading", name="Not found")).to_be_visible()


def test_leaving_the_view_ends_its_stream(site: Site, visit: Visit) -> None:
    ended: list[str] = []
    visit.page.on("requestfailed", lambda request: ended.append(request.url))
    with held(site, SOME):
        job_id = submitted(site)
        with visit.page.expect_request(f"**/v1/jobs/{job_id}/events"):
            shown(visit, site, job_id)
        visit.page.goto(f"{site.url}/#/jobs")
        expect(visit.page.get_by_role("heading", name="Jobs")).to_be_visible()
        visit.until(
            lambda: any(f"{job_id}/events" in url for url in ended), "the end of the stream"
        )


# --- For everybody, on every screen
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("scheme", "size"), [("light", WIDE), ("dark", NARROW)])
def test_the_views_of_sweeps_are_accessible_and_fit(
    site: Site, browser: Browser, scheme: str, size: tuple[int, int]
) -> None:
    view = swept(site)
    with visiting(browser, site.url, size, scheme) as visit:
        visit.log_in(site.alice, "sweep")
        visit.page.get_by_role("button", name="Try an example").click()
        expect(visit.page.locator(".aligned")).to_be_visible()
        visit.page.get_by_text("More options").click()
        visit.check_shown()
        visit.page.goto(f"{site.url}/#/sweep/{view.job.id}")
        visit.page.locator(".cells").first.focus()
        visit.page.keyboard.press("Enter")
        expect(visit.page.get_by_role("region", name="Closer look")).to_contain_text("cells")
        visit.check_shown()
        visit.page.keyboard.press("Escape")
        visit.page.get_by_role("button", name="As table").click()
        expect(visit.page.get_by_role("table")).to_be_visible()
        visit.check_shown()


def test_a_fast_stream_of_cells_stalls_neither_frames_nor_input(site: Site, visit: Visit) -> None:
    """Cells come in bursts without end, far more than 60 a second: keys are handled meanwhile, and
    each frame draws once, what changed.
    """
    visit.log_in(site.alice, "jobs")
    visit.page.evaluate(
        """async () => {
          const { Heatmap } = await import("/page/lib/heatmap.js");
          const canvas = document.body.appendChild(document.createElement("canvas"));
          const [rows, columns] = [40, 60], values = new Float64Array(rows * columns).fill(NaN);
          const told = (window.told = { updates: 0, frames: 0, keys: 0, keysAt: [], going: true });
          const numbers = (length) => Array.from({ length }, (_, n) => `${n}`);
          const at = (row, column) => values[row * columns + column];
          const source = { rows: numbers(rows), columns: numbers(columns), scale: () => "", at };
          const map = (window.map = new Heatmap(canvas, source, 900));
          addEventListener("keydown", () => { told.keys += 1; told.keysAt.push(told.updates); });
          const frame = () => { told.frames += 1; if (told.going) requestAnimationFrame(frame); };
          requestAnimationFrame(frame);
          const burst = () => {
            for (let n = 0; n < 50; n += 1) {
              const at = told.updates++ % values.length;
              values[at] = Math.sin(told.updates);
              map.mark(Math.floor(at / columns), at % columns);
            }
            if (told.going) setTimeout(burst, 0);
          };
          burst();
        }"""
    )
    for count in range(1, 11):
        visit.page.keyboard.press("ArrowDown")
        visit.page.wait_for_function(
            (
                "(count) => told.keys >= count && map.frames >= 3 * count && told.updates >= "
                "300 * count"
            ),
            arg=count,
        )
    told = visit.page.evaluate(
        "(told.going = false, { ...told, drawn: map.drawn, maps: map.frames })"
    )
    assert told["keys"] == 10
    # Each key was pressed after so many updates; two may fall between the same bursts.
    assert all(at >= 300 * before for before, at in enumerate(told["keysAt"])), (
        "keys are handled between the updates"
    )
    assert told["maps"] <= told["frames"] + 1, "drawn at most once for each frame"
    assert told["drawn"] <= 40 * 60 + told["updates"], "a frame draws what has changed, not all"


# --- Attributions
# --------------------------------------------------------------------------------------------------


#: Whether the name of a point of a figure lies over a point or another name.
OVERLAPS = """(figure) => {
  const box = (each) => each.getBoundingClientRect();
  const names = [...figure.querySelectorAll(".leader + text")];
  const before = (a, b) => a.right <= b.left || a.bottom <= b.top;
  const others = [...figure.querySelectorAll("svg > .dot"), ...names];
  const apart = (a, b) => before(box(a), box(b)) || before(box(b), box(a));
  return names.some((name) => others.some((other) => other !== name && !apart(name, other)));
}"""


#: How many exact values a page knows that saw an attribution before and after they were computed.
LATER = """async ([early, later]) => {
  const { AttributionGrid } = await import("/page/lib/attribution.js");
  const grid = new AttributionGrid(early);
  grid.take(later);
  return grid.known;
}"""


def test_estimates_stand_beside_exact_values_with_disagreeing_cells_marked(
    site: Site, visit: Visit
) -> None:
    site.stack.add("worker-g", engine="gradients-fake")
    visit.log_in(site.alice, "sweep")
    fill(visit.page, PAIR)
    visit.page.get_by_label("Metric").select_option("logit_diff")
    visit.page.get_by_label("Method", exact=True).select_option("attribution")
    visit.page.get_by_label("Compute some cells exactly").select_option("defaults")
    visit.page.get_by_role("button", name="Run the sweep").click()
    expect(visit.page).to_have_url(re.compile(r"#/attribution/job_"))
    expect(visit.page.locator(".sweep-state")).to_contain_text("succeeded")
    job_id = visit.page.url.rpartition("/")[2]
    view = site.alice.get(f"/v1/attributions/{job_id}")
    answer, pair = (view["result"][name][0] for name in ("estimated", "pairs"))
    largest = max(
        abs(value - base)
        for base, grids in (
            (answer["base"], answer["estimates"]),
            (pair["base"]["value"], pair["grids"]),
        )
        for rows in grids.values()
        for value in chain.from_iterable(rows)
        if value is not None
    )
    off = sum(cell["off"] for cell in answer["checked"])
    known = len(answer["checked"])
    assert 0 < off < known
    early = json.loads(json.dumps(view))
    early["job"]["finished"] = None
    early["result"]["estimated"][0]["checked"] = []
    for rows in early["result"]["pairs"][0]["grids"].values():
        rows[:] = [[None] * len(row) for row in rows]
    assert visit.page.evaluate(LATER, [early, view]) == known
    expect(visit.page.locator(".sweep-state")).to_contain_text(f"{known} of {known} cells")
    figure = visit.page.get_by_role("figure", name="Estimate against exact")
    expect(figure.locator("text.label")).to_have_text(["estimated effect", "exact effect"])
    names = figure.locator(".leader + text")
    expect(names.first).to_have_text(re.compile(r", [a-z_]+ \d+$"))
    assert not figure.evaluate(OVERLAPS), "a name lies over a point or another name"
    expect(visit.page.locator(".scale span").first).to_have_text(f"−{largest:.3f}")
    expect(figure.locator("svg > .dot")).to_have_count(known)
    expect(figure.locator("svg > .dot.tone-bad")).to_have_count(off)
    if len(answer["checked"]) > 20:
        visit.page.get_by_role("button", name=re.compile("^All ")).click()
    rows = visit.page.locator("[data-part=checked] tbody tr")
    expect(rows).to_have_count(len(answer["checked"]))
    expect(rows.filter(has_text="off")).to_have_count(off)
    expect(visit.page.locator(".finding")).to_contain_text(f"{off} of ")
    for name in ("Estimates", "Exact values"):
        expect(visit.page.get_by_role("region", name=name).locator(".mark")).to_have_count(off)
    settled(visit.page, wrong=0, empty=0)
    visit.page.route(f"**/v1/attributions/{job_id}", lambda route: route.fulfill(json=early))
    early["job"] |= {"finished": view["job"]["finished"], "cells_expected": 0}
    visit.page.reload()
    expect(visit.page.locator(".finding")).to_have_text(
        "All values are estimates: no cell is computed exactly."
    )
    expect(visit.page.locator(".sweep-state")).to_contain_text("succeeded")
    expect(visit.page.locator(".sweep-state")).not_to_contain_text("cells")
    visit.open("jobs")
    visit.page.get_by_role("row").filter(has_text="attribution").first.click()
    expect(visit.page.get_by_role("link", name="Open the heatmap")).to_have_attribute(
        "href", f"#/attribution/{job_id}"
    )
    times = visit.page.get_by_role("list", name="Time line").get_by_role("listitem")
    expect(times).to_contain_text(["gradient worker", "waited", "ran for", "after the last token"])
