"""Does the page run a capture, and show a finished one with the numbers that the API gives?"""

import base64
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Browser, Locator, expect
from safetensors.numpy import load
from web_kit import NARROW, PNG, WIDE, Site, User, Visit, held, saved, until, visiting

HIDDEN = 8
PROMPT = "the sky is"


@pytest.fixture(scope="module")
def shown(site: Site) -> str:
    """A finished capture of two prompts at two hooks, of which the module `sea` has a vector at
    layers 1 and 2.
    """
    module(site.alice, "sea", [1, 2])
    return site.alice.ended(
        (PROMPT, "hello"),
        sampling={"max_tokens": 4},
        capture={
            "hooks": {"post_block": "all", "pre_attn": [1]},
            "positions": "all",
            "tag": "mine",
        },
    )


def module(user: User, name: str, layers: list[int]) -> None:
    data = base64.b64encode(np.arange(1, HIDDEN + 1, dtype="<f4").tobytes()).decode()
    entry = {"layers": layers, "vector": {"dtype": "float32", "shape": [HIDDEN], "data": data}}
    user.http.put(f"/v1/artifacts/modules/{name}", json={"steering": [entry]}).raise_for_status()


def chip(visit: Visit, position: int) -> Locator:
    return visit.page.locator(f'.chip[data-position="{position}"]')


def listed(visit: Visit, job: str) -> Locator:
    """Its link in the list of captures, which is called by the prompt."""
    return visit.page.locator(f'main a[href="#/capture/{job}"]')


def said(visit: Visit) -> Locator:
    return visit.page.locator(".norm-said")


def rounded(value: float) -> str:
    return f"{float(f'{value:.4g}'):g}"


@pytest.mark.smoke
def test_a_capture_is_run_from_the_form_and_shown(site: Site, visit: Visit) -> None:
    page = visit.log_in(site.alice, "capture")
    sent: list[str] = []
    page.on(
        "request", lambda request: sent.append(request.url) if request.method == "POST" else None
    )
    page.get_by_label("Prompt").fill(PROMPT)
    expect(page.get_by_label("post_block")).to_be_checked()
    with held(site):
        page.get_by_role("button", name="Capture", exact=True).evaluate(
            "button => (button.click(), button.click(), null)"
        )
        expect(page.get_by_role("status").filter(has_text="The job is")).to_be_visible()
    expect(chip(visit, 0)).to_have_text("t")
    job = re.search(r"job_\w+", page.url)
    assert job is not None
    found = site.alice.get(f"/v1/captures/{job[0]}/norms")
    assert found["tag"] == "page"
    assert len(found["positions"]) == len(PROMPT)
    expect(said(visit)).to_contain_text(f"layer 0: norm {rounded(found['norms'][0][0])}")
    assert saved(page, "Norm of rows", "PNG").startswith(PNG)
    assert len(saved(page, "Norm of rows", "CSV").splitlines()) == 1 + np.size(found["norms"])
    assert sent == [f"{site.url}/v1/jobs"], "a double click sends once"


def test_keys_and_the_slider_move_over_tokens_and_layers(
    site: Site, visit: Visit, shown: str
) -> None:
    visit.log_in(site.alice, f"capture/{shown}")
    norms = site.alice.get(f"/v1/captures/{shown}/norms")["norms"]
    visit.page.get_by_role("group", name="norm by token and layer").focus()
    visit.press("ArrowRight", "ArrowRight", "ArrowUp", "ArrowUp", "ArrowUp", "ArrowDown")
    expect(said(visit)).to_have_text(f"token 2 “e”, layer 2: norm {rounded(norms[2][2])}")
    visit.page.keyboard.press("End")
    expect(said(visit)).to_contain_text(f"token {len(norms[0]) - 1} ")
    visit.page.get_by_role("slider").fill("0")
    expect(said(visit)).to_contain_text("layer 0:")
    chip(visit, 1).click()
    expect(said(visit)).to_contain_text("token 1 “h”")
    canvas = visit.page.locator("canvas")
    canvas.hover(position={"x": canvas.evaluate("(canvas) => canvas.clientWidth") - 6, "y": 4})
    expect(said(visit)).to_contain_text("token 0 “t”, layer 3")
    visit.check_accessible()


def test_an_outlier_sets_the_scale_only_if_asked(site: Site, visit: Visit, shown: str) -> None:
    visit.log_in(site.alice, f"capture/{shown}")
    first = site.alice.get(f"/v1/captures/{shown}/norms")["norms"][0]
    ends = visit.page.locator(".legend > span")
    expect(ends.last).to_contain_text("without 1 outlier")
    expect(ends.first).to_have_text(rounded(sorted(first)[1]))
    visit.page.get_by_label("full range").check()
    expect(ends.first).to_have_text(rounded(min(first)))


def test_the_table_has_the_numbers_of_the_api(site: Site, visit: Visit, shown: str) -> None:
    visit.log_in(site.alice, f"capture/{shown}")
    visit.page.get_by_label("as a table").check()
    found = site.alice.get(f"/v1/captures/{shown}/norms")
    rows = visit.page.locator(".plain tbody tr")
    expect(rows).to_have_count(len(found["positions"]))
    cells = rows.nth(3).locator("td").all_inner_texts()
    assert [float(cell) for cell in cells[1:]] == [
        float(rounded(layer[3])) for layer in found["norms"]
    ]
    visit.check_accessible()


def test_tokens_are_coloured_by_cosine_to_a_module(site: Site, visit: Visit, shown: str) -> None:
    visit.log_in(site.alice, f"capture/{shown}")
    expect(chip(visit, 0)).to_be_visible()
    visit.page.get_by_label("Colour by").select_option("sea")
    expect(visit.page.get_by_text("The module has no vector at layer 0.")).to_be_visible()
    visit.page.get_by_role("slider").fill("2")
    own = site.alice.get(f"/v1/captures/{shown}/norms", module="sea")["cosines"]
    assert [cosines is None for cosines in own] == [True, False, False, True]
    expect(said(visit)).to_contain_text(f"layer 2: cosine {rounded(own[2][0])}")
    visit.page.get_by_label("Module vector").select_option("layer 1")
    visit.page.get_by_role("slider").fill("0")
    every = site.alice.get(f"/v1/captures/{shown}/norms", module="sea", module_layer=1)["cosines"]
    expect(said(visit)).to_contain_text(f"layer 0: cosine {rounded(every[0][0])}")
    visit.check_accessible()


def test_prompts_and_hooks_are_chosen_and_downloaded(
    site: Site, visit: Visit, shown: str, tmp_path: Path
) -> None:
    page = visit.log_in(site.alice, f"capture/{shown}")
    page.get_by_label("Prompt").select_option("1")
    expect(chip(visit, 0)).to_have_text("h")
    page.get_by_label("Hook point").select_option("pre_attn")
    expect(said(visit)).to_contain_text("layer 1")
    with page.expect_download() as begun:
        page.get_by_role("link", name="All rows of this prompt").click()
    begun.value.save_as(tmp_path / "rows.safetensors")
    rows = load((tmp_path / "rows.safetensors").read_bytes())
    with page.expect_download() as begun:
        page.get_by_role("link", name="The values shown").click()
    begun.value.save_as(tmp_path / "norms.json")
    numbers: dict[str, Any] = json.loads((tmp_path / "norms.json").read_text())
    np.testing.assert_array_equal(
        np.array(numbers["norms"][0], np.float32), np.linalg.norm(rows["pre_attn.1"], axis=1)
    )
    page.get_by_text("Files", exact=True).click()
    for name in [file["name"] for file in site.alice.get(f"/v1/captures/{shown}")["files"]]:
        expect(page.get_by_role("link", name=name)).to_be_visible()


@pytest.mark.parametrize(
    ("label", "text", "expected"),
    [
        ("Layers", "0-9", "layer"),
        ("Tokens to generate", "100000", "limit of 4096"),
        ("Tag", "a/b", "pattern"),
    ],
)
def test_an_error_of_the_capture_form_is_at_its_field(
    site: Site, visit: Visit, label: str, text: str, expected: str
) -> None:
    visit.allow("400")
    visit.log_in(site.alice, "capture")
    visit.page.get_by_label(label).fill(text)
    visit.page.get_by_role("button", name="Capture", exact=True).click()
    field = visit.page.locator(".field").filter(has=visit.page.get_by_label(label))
    expect(field.get_by_role("alert")).to_have_text(re.compile(expected))
    visit.page.get_by_label(label).fill({"Layers": "1"}.get(label, "1"))
    visit.page.get_by_role("button", name="Capture", exact=True).click()
    expect(chip(visit, 0)).to_be_visible()


def test_a_deleted_capture_says_so(site: Site, visit: Visit) -> None:
    visit.allow("410")
    job = site.alice.ended(("the sky is " * 9,), capture={"layers": "all", "tag": "gone"})
    visit.log_in(site.alice, "capture")
    expect(listed(visit, job)).to_contain_text("the sky is")
    visit.page.on("dialog", lambda dialog: dialog.accept())
    delete = visit.page.get_by_role("button", name=f"Delete {job}")
    delete.scroll_into_view_if_needed()
    box = delete.bounding_box()
    assert box is not None
    assert box["x"] + box["width"] < WIDE[0], "a long prompt leaves room for the other columns"
    delete.click()
    expect(listed(visit, job)).to_have_count(0)
    visit.open(f"capture/{job}")
    expect(visit.page.get_by_role("alert")).to_contain_text("were deleted")


def test_a_cancelled_capture_ends_the_wait(site: Site, visit: Visit) -> None:
    visit.allow("404|409|410")
    with held(site):
        job = site.alice.submit(capture={"layers": "all"})
        until(
            lambda: site.alice.get(f"/v1/jobs/{job}")["state"] == "running" or None,
            "the job to run",
        )
        visit.log_in(site.alice, f"capture/{job}")
        standing = visit.page.locator(".standing")
        expect(standing).to_contain_text(re.compile(r"The job is running …\s*(for )?\d"))
        assert visit.page.evaluate(
            """async () => {
                const { before, usual } = await import("/page/lib/jobs.js");
                const job = { state: "queued", model: "m", kind: "chat", created: 3 };
                const ran = { state: "succeeded", started: 4, finished: 6 };
                const list = [2, 4].map((created) => ({ ...job, created }));
                return [before(job, { list }), usual(job, { list: [...list, { ...job, ...ran }] })];
            }"""
        ) == [1, 2]
        site.alice.post(f"/v1/jobs/{job}/cancel")
        expect(visit.page.get_by_role("alert").first).to_contain_text("The job is cancelled")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_capture_view_fits_a_phone_and_is_accessible(
    browser: Browser, site: Site, shown: str, scheme: str
) -> None:
    with visiting(browser, site.url, NARROW, scheme) as visit:
        visit.log_in(site.alice, "capture")
        expect(listed(visit, shown)).to_be_visible()
        visit.check_shown()
        visit.open(f"capture/{shown}")
        expect(chip(visit, 0)).to_be_visible()
        visit.check_shown()
