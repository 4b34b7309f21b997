"""The first view: examples that run with one click, what runs, and the latest results."""

import re

import pytest
from playwright.sync_api import expect
from web_kit import MODEL, Site, Visit, held


@pytest.mark.smoke
def test_the_examples_start_with_one_click(site: Site, visit: Visit) -> None:
    page = visit.page
    visit.log_in(site.user("newcomer"), "")
    expect(page.get_by_text("is ready: 4 layers")).to_be_visible()
    expect(page.get_by_text("Nothing is running or waiting.")).to_be_visible()
    with held(site):
        page.get_by_role("button", name="Run the example sweep").dblclick()
        expect(page).to_have_url(re.compile(r"#/sweep/job_"))
        visit.open("start")
        running = page.get_by_role("region", name="Running now")
        expect(running.get_by_role("link")).to_have_text(["Where is the Eiffel Tower?"])
        expect(running).to_contain_text(re.compile(r"\d+ of 468 cells"))
    results = page.get_by_role("region", name="Latest results")
    expect(results.get_by_role("link", name="Where is the Eiffel Tower?")).to_have_count(1)
    page.get_by_role("button", name="Run the example capture").click()
    expect(page.locator(".chip").first).to_be_visible()
    expect(page.get_by_role("heading", level=1)).to_have_text("Every layer of one sentence")


def test_results_are_shown_by_prompt_and_output(site: Site, visit: Visit) -> None:
    user = site.user("start")
    jobs = [user.submit((f"prompt {number}",)) for number in range(4)]
    outputs = [user.wait(job) and user.get(f"/v1/jobs/{job}/result") for job in jobs]
    visit.log_in(user, "start")
    cards = visit.page.get_by_role("region", name="Latest results").locator(".result")
    expect(cards.locator("strong")).to_have_text(["prompt 3", "prompt 2", "prompt 1"])
    expect(cards.first).to_contain_text(outputs[3]["outputs"][0]["text"])
    cards.first.click()
    expect(visit.page).to_have_url(re.compile(f"#/jobs/{jobs[3]}"))


def test_chats_and_token_ids_are_called_by_what_was_said(site: Site, visit: Visit) -> None:
    user = site.user("chats")
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Which river?"}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "Which hill?"}]}]
    ids = user.post("/v1/tokenize", model=MODEL, prompt="the sea is")["tokens"]
    for body in (
        {"messages": [said]},
        {"messages": [parts]},
        {"prompts": [ids]},
        {"prompts": [ids]},
    ):
        user.wait(user.post("/v1/jobs", model=MODEL, sampling={"max_tokens": 2}, **body)["id"])
    visit.log_in(user, "start")
    cards = visit.page.get_by_role("region", name="Latest results").locator(".result")
    expect(cards.locator("strong")).to_have_text(["the sea is", "Which hill?", "Which river?"])
    expect(cards.first).to_contain_text("2 runs")


def test_a_key_that_may_not_submit_says_so(site: Site, visit: Visit) -> None:
    visit.log_in(site.user("reader", "read"), "start")
    expect(visit.page.get_by_text("Examples need a key with the scope submit.")).to_be_visible()
    expect(visit.page.get_by_role("button", name="Run the example sweep")).to_be_disabled()
    expect(visit.page.get_by_text("No results yet.")).to_be_visible()
