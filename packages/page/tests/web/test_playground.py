"""Does the playground show what the API answers: two streams at once, steered by sliders, coloured,
stopped, copied?
"""

import base64
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Browser, Locator, Page, expect
from web_kit import MODEL, NARROW, Site, User, Visit, held, visiting

HIDDEN = 8
PROMPT = "the sky is"
TOKENS = 12
FIELDS: dict[str, Any] = {"model": MODEL, "max_tokens": TOKENS, "temperature": 0}
PATHS = re.compile(r"/v1/(chat/)?completions$")


def tensor(*rows: list[float]) -> dict[str, Any]:
    values = np.array(rows if len(rows) > 1 else rows[0], "<f4")
    return {
        "dtype": "float32",
        "shape": list(values.shape),
        "data": base64.b64encode(values.tobytes()).decode(),
    }


def module(user: User, name: str, layers: list[int] | None = None) -> None:
    entry = {
        "layers": layers or [2],
        "vector": tensor([float(len(name) + n) for n in range(HIDDEN)]),
    }
    user.http.put(f"/v1/artifacts/modules/{name}", json={"steering": [entry]}).raise_for_status()


@pytest.fixture(scope="module", autouse=True)
def _registered(site: Site) -> None:
    module(site.alice, "sea")
    module(site.alice, "land", [1, 3])
    body = {
        "weight": tensor([1.0] * HIDDEN, [2.0] * HIDDEN),
        "layer": 3,
        "labels": ["calm", "angry"],
    }
    site.operator.http.put("/v1/artifacts/probes/tone", json=body).raise_for_status()


def opened(site: Site, visit: Visit, user: User | None = None, **scales: float) -> Page:
    """The playground with a prompt, and the modules of `scales`."""
    page = visit.log_in(user or site.alice, "playground")
    page.get_by_label("Prompt").fill(PROMPT)
    page.get_by_label("Max tokens", exact=True).fill(str(TOKENS))
    for name, scale in scales.items():
        add(page, name, scale)
    return page


def add(page: Page, name: str, scale: float) -> None:
    page.get_by_role("button", name=f"Add {name}", exact=True).click()
    page.get_by_label(f"Scale of {name}, as a number").fill(str(scale))
    page.get_by_label(f"Scale of {name}, as a number").press("Tab")
    expect(page.locator("pre[data-code]")).to_contain_text(
        f'{{"module": "{name}", "scale": {scale:g}}}'
    )


def pane(page: Page, title: str) -> Locator:
    return page.get_by_role("region", name=title)


def both(page: Page, text: str) -> None:
    for title in ("Baseline", "Steered"):
        expect(pane(page, title)).to_contain_text(text)


def run(page: Page) -> None:
    """Run, and wait for the ends of both new jobs: an earlier run's may still be shown."""
    earlier = page.locator(".pane a.mono").all_inner_texts()
    page.get_by_role("button", name="Run").click()
    new = re.compile("^" + "".join(f"(?!{job})" for job in earlier) + "job_")
    for title in ("Baseline", "Steered"):
        expect(pane(page, title).get_by_role("link", name=new)).to_be_visible()
        expect(pane(page, title)).to_contain_text("finished: length, 12 tokens")


def job_of(page: Page, title: str) -> str:
    return pane(page, title).get_by_role("link", name=re.compile("^job_")).inner_text()


def said(page: Page, title: str, text: str) -> None:
    """Wait until a side has said exactly this, blanks and line ends too."""
    page.wait_for_function(
        ("([side, text]) => document.querySelector(`[data-side=${side}]`)?.textContent === text"),
        arg=[title.lower(), text],
    )


def answer(site: Site, **body: Any) -> str:
    return str(
        site.alice.post("/v1/completions", **{**FIELDS, "prompt": PROMPT, **body})["choices"][0][
            "text"
        ]
    )


def sent(visit: Visit, event: str = "request") -> list[dict[str, Any]]:
    """Bodies of the completions of whose requests the browser tells this from now on."""
    found: list[dict[str, Any]] = []
    visit.page.on(
        event,
        lambda request: found.append(request.post_data_json) if PATHS.search(request.url) else None,
    )
    return found


@contextmanager
def generating(site: Site, page: Page) -> Iterator[None]:
    """Inside, both streams have begun and do not go on."""
    with held(site):
        page.get_by_role("button", name="Run").click()
        both(page, "generating …")
        yield


# --- Two streams
# --------------------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_the_baseline_and_the_steered_stream_run_side_by_side(site: Site, visit: Visit) -> None:
    page = opened(site, visit, sea=2.5)
    bodies = sent(visit)
    with held(site):
        page.get_by_role("button", name="Run").evaluate(
            "button => (button.click(), button.click(), null)"
        )
        both(page, "generating …")
        site.let(8)
        for side in ("baseline", "steered"):
            expect(page.locator(f'[data-side="{side}"]')).not_to_be_empty()
        expect(page.get_by_role("button", name="Run")).to_be_disabled()
    for title, steering in (("Baseline", []), ("Steered", [{"module": "sea", "scale": 2.5}])):
        expect(pane(page, title)).to_contain_text("finished: length, 12 tokens")
        said(page, title, answer(site, steering=steering))
    assert [body.get("steering", []) for body in bodies] == [
        [],
        [{"module": "sea", "scale": 2.5}],
    ], "a double click sends once"
    visit.check_accessible()


def test_sliders_set_the_scales_of_several_modules(site: Site, visit: Visit) -> None:
    page = opened(site, visit, sea=1)
    page.get_by_label("Scale of sea", exact=True).fill("-3")
    add(page, "land", 7.5)
    bodies = sent(visit)
    run(page)
    assert bodies[1]["steering"] == [
        {"module": "sea", "scale": -3},
        {"module": "land", "scale": 7.5},
    ]
    said(page, "Steered", answer(site, steering=bodies[1]["steering"]))
    page.get_by_role("button", name="Remove land").click()
    page.get_by_label("Scale of sea", exact=True).fill("0")
    expect(page.get_by_text("No module is set")).to_be_visible()
    run(page)
    assert "steering" not in bodies[3]


def test_a_chat_has_the_systems_message_and_the_users(site: Site, visit: Visit) -> None:
    page = opened(site, visit)
    page.get_by_label("Kind").select_option("chat")
    page.get_by_label("System message").fill("be brief")
    add(page, "sea", 2)
    run(page)
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": PROMPT}]
    for title, steering in (("Baseline", []), ("Steered", [{"module": "sea", "scale": 2}])):
        found = site.alice.post(
            "/v1/chat/completions", **FIELDS, messages=messages, steering=steering
        )
        said(page, title, found["choices"][0]["message"]["content"])


def test_numbers_are_typed_a_key_at_a_time(site: Site, visit: Visit) -> None:
    page = opened(site, visit)
    for label, typed in (
        ("Max tokens", "64"),
        ("Temperature", "0.75"),
        ("Seed", "9007199254740991"),
    ):
        page.get_by_label(label, exact=True).fill("")
        if label != "Seed":
            expect(page.get_by_role("button", name="Run")).to_be_disabled()
        page.get_by_label(label, exact=True).press_sequentially(typed)
        expect(page.get_by_label(label, exact=True)).to_have_value(typed)
    bodies = sent(visit)
    page.get_by_role("button", name="Run").click()
    visit.until(lambda: len(bodies) == 2, "both requests")
    assert [(body["max_tokens"], body["temperature"], body["seed"]) for body in bodies] == [
        (64, 0.75, 9007199254740991)
    ] * 2


def test_more_modules_than_fit_are_searched(site: Site, visit: Visit) -> None:
    user = site.user("archive")
    for number in range(20):
        module(user, f"m{number:02}")
    page = opened(site, visit, user)
    offers = page.get_by_role("button", name=re.compile("^Add "))
    expect(offers).to_have_count(8)
    page.get_by_role("button", name="More modules").click()
    expect(offers).to_have_count(16)
    page.get_by_role("button", name="More modules").click()
    expect(offers).to_have_count(20)
    page.get_by_label("Find a module").fill("m1")
    expect(offers).to_have_count(8)
    expect(page.get_by_text("8 of 10 modules")).to_be_visible()
    page.get_by_role("button", name="Add m11").click()
    expect(page.get_by_label("Scale of m11", exact=True)).to_be_visible()
    expect(page.get_by_role("button", name="Add m11")).to_have_count(0)
    expect(page.get_by_role("button", name="Add sea")).to_have_count(0)  # it is another tenant's


# --- Colours
# --------------------------------------------------------------------------------------------------


def values(page: Page, title: str) -> dict[int, float | None]:
    """Position → what the chip says."""
    chips = (
        pane(page, title)
        .locator(".chip")
        .evaluate_all("chips => chips.map(chip => [chip.dataset.position, chip.title])")
    )
    return {
        int(position): None if said.endswith("none") else float(said.rpartition(": ")[2])
        for position, said in chips
    }


def test_tokens_are_coloured_by_a_probe_while_they_come(site: Site, visit: Visit) -> None:
    page = opened(site, visit, sea=2)
    page.get_by_label("Colour tokens by").select_option("tone: angry")
    first = len(PROMPT)
    with generating(site, page):
        site.let(10)
        for title in ("Baseline", "Steered"):
            chip = pane(page, title).locator(f'.chip[data-position="{first}"]')
            expect(chip).to_have_attribute("title", re.compile(f": {first + 1}$"))
    both(page, "finished: length")
    for title in ("Baseline", "Steered"):
        expect(pane(page, title).locator(".chip")).to_have_count(first + TOKENS)
        found = values(page, title)
        last = first + TOKENS - 1
        assert found == {**{position: position + 1 for position in range(last)}, last: None}, (
            "the last token is never fed back"
        )
        words = (
            pane(page, title).get_by_role("group", name="output").locator(".chip").all_inner_texts()
        )
        steering = [{"module": "sea", "scale": 2}] if title == "Steered" else []
        assert "".join(words).replace("·", " ") == answer(site, steering=steering)
    page.get_by_label("show values").check()
    expect(pane(page, "Baseline").locator(".chip").first).to_contain_text("1")
    visit.check_accessible()


def test_tokens_are_coloured_by_their_projection_on_a_module(site: Site, visit: Visit) -> None:
    page = opened(site, visit, land=1)
    page.get_by_label("Colour tokens by").select_option("land, layer 3 (post_block)")
    bodies = sent(visit)
    run(page)
    expect(pane(page, "Steered").locator(".chip")).to_have_count(len(PROMPT) + TOKENS)
    again = site.alice.post(
        "/v1/completions",
        **{key: value for key, value in bodies[1].items() if not key.startswith("stream")},
    )
    norms = site.alice.get(f"/v1/captures/{again['id']}/norms", module="land")
    expected = [
        float(f"{norm * cosine:.4g}")
        for norm, cosine in zip(norms["norms"][0], norms["cosines"][0], strict=True)
    ]
    found = list(values(page, "Steered").values())
    assert found[:-1] == pytest.approx(expected, rel=1e-3)
    assert found[-1] is None
    assert bodies[1]["capture"]["hooks"] == {"post_block": [3]}
    job = job_of(page, "Steered")
    assert site.alice.http.get(f"/v1/captures/{job}").status_code == 410, (
        "rows that were for the colours alone are deleted"
    )
    visit.check_accessible()


# --- Ends
# --------------------------------------------------------------------------------------------------


def test_stop_cancels_both_jobs(site: Site, visit: Visit) -> None:
    page = opened(site, visit)
    with generating(site, page):
        jobs = [job_of(page, title) for title in ("Baseline", "Steered")]
        page.get_by_role("button", name="Stop").click()
        both(page, "stopped")
    assert {site.alice.wait(job)["state"] for job in jobs} <= {"cancelled", "aborted"}
    expect(page.get_by_role("button", name="Run")).to_be_enabled()
    expect(page.get_by_role("alert")).to_have_count(0)
    run(page)


def test_leaving_the_view_closes_its_streams(site: Site, visit: Visit) -> None:
    page = opened(site, visit)
    closed = sent(visit, "requestfailed")
    with generating(site, page):
        page.get_by_role("link", name="Jobs", exact=True).click()
        expect(page.get_by_role("heading", name="Jobs")).to_be_visible()
        visit.until(lambda: len(closed) == 2, "both streams to close")


def test_another_models_late_answer_is_not_shown(site: Site, visit: Visit) -> None:
    card = site.alice.get("/v1/models")["data"][0]
    visit.page.route(
        re.compile(r"/v1/models$"),
        lambda route: route.fulfill(
            json={"object": "list", "data": [card, {**card, "id": "other"}]}
        ),
    )
    visit.page.route(
        re.compile(r"model=other"), lambda route: route.fulfill(json={"modules": [], "probes": []})
    )
    page = opened(site, visit, sea=2)
    closed = sent(visit, "requestfailed")
    with generating(site, page):
        page.get_by_label("Model").select_option("other")
        expect(page.get_by_label("Scale of sea", exact=True)).to_have_count(0)
        visit.until(lambda: len(closed) == 2, "both streams to close")
        jobs = [job["id"] for job in site.alice.get("/v1/jobs", limit=2)["jobs"]]
    for job in jobs:
        site.alice.wait(job)
    for side in ("baseline", "steered"):
        expect(page.locator(f'[data-side="{side}"]')).to_have_text("")
    expect(page.get_by_role("button", name="Run")).to_be_enabled()


# --- Errors
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("label", "text", "said"),
    [
        ("Max tokens", "100000", "exceeds the model's limit of 4096"),
        ("Temperature", "3", "2"),
        ("Seed", "1.5", "int"),
    ],
)
def test_an_error_of_the_playground_is_at_its_field(
    site: Site, visit: Visit, label: str, text: str, said: str
) -> None:
    visit.allow("400")
    page = opened(site, visit)
    page.get_by_label(label, exact=True).fill(text)
    page.get_by_role("button", name="Run").click()
    field = page.locator(".field").filter(has=page.get_by_label(label, exact=True))
    expect(field.get_by_role("alert")).to_contain_text(said)
    expect(page.get_by_role("alert")).to_have_count(1)
    page.get_by_label(label, exact=True).fill({"Max tokens": str(TOKENS)}.get(label, "1"))
    run(page)
    expect(page.get_by_role("alert")).to_have_count(0)


def test_a_module_that_is_gone_is_named_at_its_slider(site: Site, visit: Visit) -> None:
    visit.allow("400")
    module(site.alice, "brief")
    page = opened(site, visit, sea=1, brief=1)
    site.alice.http.delete("/v1/artifacts/modules/brief").raise_for_status()
    page.get_by_role("button", name="Run").click()
    expect(page.get_by_role("group", name="Module brief").get_by_role("alert")).to_contain_text(
        "unknown module 'brief'"
    )


def test_a_limit_names_itself_and_the_wait(site: Site, visit: Visit) -> None:
    visit.allow("429")
    user = site.user("hasty")
    site.operator.http.put("/v1/tenants/hasty", json={"requests_per_minute": 1}).raise_for_status()
    page = opened(site, visit, user)
    page.get_by_role("button", name="Run").click()
    refused = page.get_by_role("alert")
    expect(refused).to_have_count(1)  # the other has taken the one that is allowed
    expect(refused).to_contain_text("its limit of requests per minute (1)")
    expect(refused).to_contain_text(re.compile(r"Try again in \d+ s"))


# --- Code
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["plain", "chat"])
def test_the_copied_code_runs_and_gives_the_steered_text(
    site: Site, visit: Visit, mode: str
) -> None:
    page = opened(site, visit)
    prompt = 'it\'s a "sky"\n$HOME `id` \\ END'
    if mode == "chat":
        page.get_by_label("Kind").select_option("chat")
        page.get_by_label("System message").fill("be 'brief'")
    page.get_by_label("User message" if mode == "chat" else "Prompt").fill(prompt)
    page.get_by_label("Seed").fill("7")
    add(page, "sea", 2.5)
    page.get_by_label("Colour tokens by").select_option("tone: calm")
    run(page)
    steered = site.alice.get(f"/v1/jobs/{job_of(page, 'Steered')}/result")["outputs"][0]["text"]
    for language in ("Python", "CLI"):
        assert steered in visit.run_code(site.alice, language)
    (choice,) = json.loads(visit.run_code(site.alice, "curl"))["choices"]
    assert (choice["message"]["content"] if mode == "chat" else choice["text"]) == steered


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_playground_fits_a_phone_and_is_accessible(
    browser: Browser, site: Site, scheme: str
) -> None:
    with visiting(browser, site.url, NARROW, scheme) as visit:
        page = opened(site, visit, sea=2)
        page.get_by_label("Colour tokens by").select_option("tone: calm")
        run(page)
        visit.check_shown()
