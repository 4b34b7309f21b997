"""The table of jobs: what a row opens, code that runs, cancelling, thousands of rows."""

import base64
import re
import struct
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, expect
from web_kit import MODEL, NARROW, WIDE, Site, Visit, held, until, visiting

from midstream.broker.ledger.jobs.ledger import Ledger, new_job_id
from midstream.schemas.base.records import now

VECTOR = {
    "dtype": "float32",
    "shape": [8],
    "data": base64.b64encode(struct.pack("<8f", *[0.5] * 8)).decode(),
}
CAPTURE = {"layers": [1, 2], "positions": "all_prompt", "tag": "mine"}


def row(visit: Visit, job: str) -> Locator:
    return visit.page.locator(f'tr[data-id="{job}"]')


@pytest.mark.smoke
def test_a_row_opens_with_the_keyboard_and_shows_the_job(site: Site, visit: Visit) -> None:
    job = site.alice.ended(("the sky is", "grass is"), capture=CAPTURE)
    visit.log_in(site.alice)
    expect(row(visit, job)).to_contain_text("mine")
    expect(row(visit, job)).to_contain_text("the sky is")
    expect(row(visit, job)).not_to_contain_text("alice")
    expect(visit.page.get_by_role("img", name=re.compile(r"jobs from \d\d:"))).to_be_visible()
    row(visit, job).focus()
    visit.page.keyboard.press("Enter")
    details = visit.page.locator("section.details")
    result = site.alice.get(f"/v1/jobs/{job}/result")
    expect(details.locator('[data-part="prompt"]')).to_have_text(["the sky is", "grass is"])
    expect(details.locator('[data-part="output"]')).to_have_text(
        [output["text"] for output in result["outputs"]]
    )
    expect(row(visit, job)).to_contain_text(result["outputs"][0]["text"])
    expect(details.get_by_role("heading").first).to_have_text("the sky is")
    expect(details.get_by_role("button", name=f"Copy {job}")).to_be_visible()
    expect(details).to_contain_text("All ranks agree")
    expect(details).to_contain_text(result["determinism"]["stages"][0]["ranks"][0]["checksum"])
    expect(details).to_contain_text(result["capture_results"]["files"][0]["path"])
    created = details.get_by_role("row", name="created")
    expect(created).to_contain_text(re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d$"))
    visit.page.keyboard.press("Escape")
    expect(details).to_have_count(0)
    expect(row(visit, job)).to_be_focused()


def test_an_unknown_job_has_nothing_but_its_error(site: Site, visit: Visit) -> None:
    visit.allow("404")
    visit.log_in(site.alice, f"jobs/{new_job_id()}")
    details = visit.page.locator("section.details")
    expect(details.get_by_role("alert")).to_contain_text("unknown job")
    expect(details.get_by_role("alert").locator("code")).to_contain_text(["client.jobs.list()"])
    expect(details.get_by_role("heading")).to_have_text(["Job"])


def test_a_phone_shows_two_lines_of_a_prompt(site: Site, browser: Browser) -> None:
    job = site.alice.ended(("The opposite of hot is not warm",))
    with visiting(browser, site.url, NARROW) as visit:
        visit.log_in(site.alice)
        prompt = row(visit, job).locator("strong")
        expect(prompt).to_be_visible()
        cut = prompt.evaluate("(text) => text.scrollHeight - text.clientHeight")
        assert cut <= 1
        assert row(visit, job).evaluate("(row) => row.offsetHeight") < 60
        visit.check_fits()


def test_two_jobs_are_compared_and_each_has_a_time_line(site: Site, visit: Visit) -> None:
    first = site.alice.ended(("the sky is",), capture=CAPTURE, sampling={"seed": 1})
    steering = [{"layers": [1], "vector": VECTOR}]
    second = site.alice.ended(
        ("the sky is",), capture=CAPTURE, steering=steering, sampling={"seed": 1}
    )
    page = visit.log_in(site.alice, f"jobs/{second}")
    times = page.get_by_role("list", name="Time line").get_by_role("listitem")
    expect(times).to_contain_text(["waited", "first token after", "1 receipt; files durable"])
    for job in (first, second):
        row(visit, job).get_by_role("checkbox").check()
    page.get_by_role("link", name="Compare both").click()
    asked = page.get_by_role("region", name="Differences of the requests").locator("tbody tr")
    expect(asked.filter(has_text="steering[0].layers")).to_contain_text("not given")
    expect(asked.filter(has_text="vector.data")).to_contain_text("bytes, digest ")
    expect(page.get_by_text("Rows are taken before the edits")).to_be_visible()
    texts = [
        site.alice.get(f"/v1/jobs/{job}/result")["outputs"][0]["text"] for job in (first, second)
    ]
    for side, text in zip(("first", "second"), texts, strict=True):
        shown = page.get_by_role("region", name=f"Output 0 of the {side} job").locator(".side")
        assert shown.text_content() == text
    page.locator(".cells").focus()
    expect(page.locator(".readout")).to_contain_text("%")
    visit.check_shown()


def test_sweeps_are_compared_at_the_hook_points_of_both(site: Site, visit: Visit) -> None:
    pair = {"clean": "a cat", "corrupt": "a dog", "answer": "x", "foil": "y"}
    body = {"model": MODEL, "pairs": [pair], "layers": [1]}
    both = (["resid_pre", "attn_out"], ["resid_pre"])
    jobs = [str(site.alice.post("/v1/sweeps", **body, hooks=hooks)["id"]) for hooks in both]
    for job in jobs:
        site.alice.wait(job)
    page = visit.log_in(site.alice, f"compare/{'/'.join(jobs)}")
    expect(page.locator(".cells")).to_have_count(1)
    expect(page.get_by_text("Only one of both has Attention output")).to_be_visible()


def test_closing_a_job_on_a_phone_returns_to_its_row(browser: Browser, site: Site) -> None:
    job = site.alice.ended(capture=CAPTURE)
    with visiting(browser, site.url, NARROW) as visit:
        visit.log_in(site.alice, f"jobs/{job}")
        expect(visit.page.locator("section.details")).to_contain_text("All ranks agree")
        expect(visit.page.get_by_role("table", name="Jobs")).to_be_hidden()
        visit.page.keyboard.press("Escape")
        expect(row(visit, job)).to_be_focused()
        views = visit.page.get_by_role("navigation", name="Views")
        expect(views).to_be_hidden()
        visit.page.get_by_role("button", name="Menu").click()
        views.get_by_role("link", name="Sweep").click()
        expect(visit.page.get_by_role("heading", name="New sweep")).to_be_visible()
        expect(views).to_be_hidden()


PROMPT = 'it\'s "5 $HOME" \\ é 😀\nJSON'


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "/v1/jobs",
            {
                "prompts": [PROMPT],
                "sampling": {"max_tokens": 3},
                "capture": CAPTURE,
                "metadata": {"why": "test"},
            },
        ),
        (
            "/v1/completions",
            {"prompt": PROMPT, "max_tokens": 3, "steering": [{"layers": 1, "vector": VECTOR}]},
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 3},
        ),
    ],
    ids=["job", "completion", "chat"],
)
def test_copied_code_sends_the_same_request(
    site: Site, visit: Visit, path: str, body: dict[str, Any]
) -> None:
    user = site.user(f"copy-{path.rpartition('/')[2]}-{len(path)}")
    user.post(path, model=MODEL, **body)
    [first] = user.get("/v1/jobs")["jobs"]
    asked = user.get(f"/v1/jobs/{first['id']}/request")
    assert asked["path"] == path
    assert asked["body"] == {"model": MODEL, **body}
    visit.log_in(user, f"jobs/{first['id']}")
    for language in ("Python", "curl", "CLI"):
        visit.run_code(user, language)
        newest = user.get("/v1/jobs", limit=1)["jobs"][0]["id"]
        again = user.get(f"/v1/jobs/{newest}/request")
        assert again["prompts"] == asked["prompts"]
        if language == "curl":
            assert again["path"] == asked["path"]
            assert again["body"] == asked["body"]
    assert len(user.get("/v1/jobs")["jobs"]) == 4


def test_a_double_click_cancels_once(site: Site, visit: Visit) -> None:
    calls: list[str] = []
    visit.page.on(
        "request", lambda request: calls.append(request.url) if request.method == "POST" else None
    )
    with held(site):
        job = site.alice.submit()
        visit.log_in(site.alice)
        expect(row(visit, job)).to_contain_text("running")
        calls.clear()
        row(visit, job).get_by_role("button", name="Cancel").dblclick()
        expect(row(visit, job)).to_contain_text("cancelled")
    assert [url for url in calls if url.endswith("/cancel")] == [f"{site.url}/v1/jobs/{job}/cancel"]


def test_the_progress_of_a_sweep_is_shown_while_it_runs(site: Site, visit: Visit) -> None:
    with held(site):
        body = {
            "model": MODEL,
            "pairs": [{"clean": "a cat", "corrupt": "a dog", "answer": "x", "foil": "y"}],
            "layers": [1, 2],
        }
        job = str(site.alice.post("/v1/sweeps", **body)["id"])
        visit.log_in(site.alice)
        expect(row(visit, job)).to_contain_text("0 of ")
    cells = until(
        lambda: (
            view if (view := site.alice.get(f"/v1/jobs/{job}"))["state"] == "succeeded" else None
        ),
        "the sweep",
    )["cells_expected"]
    expect(row(visit, job)).to_contain_text(f"{cells} of {cells} cells")


def crowd(site: Site, tenant: str, count: int) -> list[str]:
    """Records of jobs that are over, oldest first."""

    async def fill(ledger: Ledger) -> list[str]:
        start = now() - count
        names = [new_job_id() for _ in range(count)]
        pipe = ledger.redis.pipeline(transaction=False)
        for number, name in enumerate(names):
            record = {
                "state": "succeeded",
                "kind": "generate",
                "model": MODEL,
                "attempt": 1,
                "version": 3,
                "created": start + number,
                "finished": start + number + 1,
                "started": start + number,
                "capture_status": "not_requested",
                "receipts": 0,
                "expected": 0,
                "prompts": 1,
                "metadata": f'{{"tag":"n{number}"}}',
                "tenant": tenant,
            }
            pipe.hset(f"ms:job:{name}", mapping=record).zadd(
                f"ms:jobs:{tenant}", {name: start + number}
            )
        await pipe.execute()
        return names

    return list(site.stack.do(fill))


def test_five_thousand_jobs_are_a_table_of_a_few_rows(site: Site, visit: Visit) -> None:
    user = site.user("crowd")
    names = crowd(site, "crowd", 5000)
    # one that nobody can read
    site.stack.do(
        lambda ledger: ledger.redis.hset(f"ms:job:{names[100]}", "created", "not a number")
    )
    visit.log_in(user)
    expect(visit.page.get_by_text("4999 of 4999 jobs")).to_be_visible()
    rows = visit.page.locator("tr[data-id]")
    assert rows.count() < 100
    expect(row(visit, names[-1])).to_be_visible()
    rows.first.focus()
    visit.page.keyboard.press("End")
    expect(row(visit, names[0])).to_be_focused()
    assert rows.count() < 100
    visit.page.keyboard.press("Home")
    expect(row(visit, names[-1])).to_be_focused()
    visit.page.get_by_label("Find").fill("n4242")
    expect(visit.page.get_by_text("1 of 4999 jobs")).to_be_visible()
    visit.page.get_by_label("Find").fill("")
    later = user.submit()  # changes arrive beside so many
    expect(row(visit, later)).to_contain_text("succeeded")
    visit.page.get_by_label("State").select_option("failed")
    expect(visit.page.get_by_text("No job matches.")).to_be_visible()


def test_ops_shows_every_rank_to_those_who_may_see_it(site: Site, visit: Visit) -> None:
    visit.log_in(site.operator, "ops")
    with held(site):
        job = site.alice.submit()  # it soon is among the ten that ran the longest
        expect(
            visit.page.get_by_role("region", name="Slowest jobs").locator(f'[title="{job}"]')
        ).to_have_text("the sky is")
    expect(visit.page.get_by_role("region", name="Ranks of w1")).to_contain_text("yes")
    expect(visit.page.get_by_role("region", name="Service components")).to_contain_text("received")
    for chart in ("Tokens per second", "Jobs in the queue", "Median job time"):
        drawn = visit.page.get_by_role("img", name=re.compile(f"{chart}: .* at most "))
        expect(drawn).to_be_visible()
        expect(drawn.locator(".now")).to_have_count(1)
        expect(drawn).to_contain_text("60 min ago")
    expect(visit.page.get_by_role("main").get_by_role("link", name="Flower")).to_have_attribute(
        "href", f"http://127.0.0.1:{site.stack.settings.flower_port}"
    )


def test_ops_lists_the_caveats_of_models(site: Site, visit: Visit) -> None:
    models = site.operator.http.get("/v1/models").json()
    models["data"][0]["caveats"] = ["not compared with transformers: the setting compare=off"]
    visit.page.route("**/v1/models", lambda route: route.fulfill(json=models))
    visit.log_in(site.operator, "ops")
    expect(visit.page.get_by_role("region", name="Caveats")).to_contain_text(
        "not compared with transformers: the setting compare=off"
    )


def test_ops_shows_words_in_backticks_as_code(site: Site, visit: Visit) -> None:
    models = site.operator.http.get("/v1/models").json()
    models["data"][0]["dtype_reason"] = "set by `dtype`"
    visit.page.route("**/v1/models", lambda route: route.fulfill(json=models))
    listed = visit.log_in(site.operator, "ops").get_by_role("region", name="Models")
    expect(listed).to_contain_text("set by dtype")
    expect(listed.locator("code")).to_have_text("dtype")


def test_ops_counts_the_workers_that_the_bar_counts(site: Site, visit: Visit) -> None:
    status = site.operator.http.get("/v1/status").json()
    own = next(each for each in status["workers"] if each["worker"] == "w1")
    status["workers"] = [own, {**own, "worker": "g1", "queue": "gradients"}]
    visit.page.route("**/v1/status", lambda route: route.fulfill(json=status))
    visit.log_in(site.operator, "ops")
    expect(visit.page.get_by_text("1 of 1 healthy")).to_be_visible()
    parts = visit.page.get_by_role("region", name="Service components")
    expect(parts).to_contain_text("1 of 1")
    expect(parts).to_contain_text("healthy, and 1 gradient worker")


def test_charts_go_on_from_what_the_service_has_seen(site: Site, visit: Visit) -> None:
    points = visit.log_in(site.operator, "ops").evaluate(
        """async () => {
            const { History } = await import("/page/lib/history.js");
            const history = new History();
            history.begin({ points: [[0, 1, 2], [3590, 3, 4]] });
            for (const at of [3601, 3603, 3605]) history.take({ at, tokens_s: at, queued: 0 });
            return history.of("tokens_s");
        }"""
    )
    assert points == [[3590, 3], [3601, 3601], [3605, 3605]], "an hour, in steps of ten seconds"


def test_ops_names_the_scope_that_a_key_lacks(site: Site, visit: Visit) -> None:
    visit.log_in(site.alice, "ops")
    expect(visit.page.get_by_text("need a key with the scope observe")).to_be_visible()
    expect(visit.page.get_by_role("region", name="Ranks of w1")).to_contain_text("yes")


def test_global_steering_is_shown_to_everyone(site: Site, visit: Visit) -> None:
    visit.log_in(site.alice)
    expect(visit.page.get_by_text("1 of 1 healthy")).to_be_visible()
    expect(visit.page.get_by_text("Global steering is on")).to_have_count(0)
    site.operator.http.put(
        "/v1/steering/global", json={"model": MODEL, "steering": [{"layers": 1, "vector": VECTOR}]}
    ).raise_for_status()
    try:
        expect(
            visit.page.get_by_role("status").filter(has_text="Global steering is on")
        ).to_be_visible()
    finally:
        site.operator.http.delete("/v1/steering/global").raise_for_status()
    expect(visit.page.get_by_text("Global steering is on")).to_have_count(0)


@pytest.mark.parametrize(("scheme", "size"), [("light", WIDE), ("dark", NARROW)])
def test_views_are_accessible_and_fit(
    browser: Browser, site: Site, size: tuple[int, int], scheme: str
) -> None:
    job = site.alice.ended(capture=CAPTURE)
    with visiting(browser, site.url, size, scheme) as visit:
        visit.open()
        expect(visit.page.get_by_label("API key")).to_be_visible()
        visit.check_shown()
        page = visit.log_in(site.alice)
        for view, part, words in (
            ("jobs", row(visit, job), "succeeded"),
            ("start", page.get_by_role("region", name="Latest results"), "the sky is"),
            (f"jobs/{job}", page.locator("section.details"), "All ranks agree"),
            ("ops", page.get_by_role("region", name="Ranks of w1"), "yes"),
            ("nowhere", page.get_by_role("main"), "There is no view"),
        ):
            visit.open(view)
            if (view, size) == ("ops", NARROW):
                page.get_by_text("All ranks agree.").click()  # folded on a phone
            expect(part).to_contain_text(words)
            visit.check_shown()
