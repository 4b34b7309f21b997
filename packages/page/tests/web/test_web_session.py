"""The page's login: who gets in, what the browser keeps, when it is over; and the first view."""

import re

import pytest
from playwright.sync_api import expect
from web_kit import MODEL, Site, Visit, held

#: Pages that Playwright drives are never hidden: this says it as the browser would.
SHOW = """(shown) => {
  Object.defineProperty(document, "hidden", { value: !shown, configurable: true });
  document.dispatchEvent(new Event("visibilitychange"));
}"""


@pytest.mark.smoke
def test_a_login_shows_the_views_and_a_logout_the_login(site: Site, visit: Visit) -> None:
    visit.log_in(site.alice)
    expect(visit.page.get_by_role("heading", name="Jobs")).to_be_visible()
    expect(visit.page.get_by_text("1 of 1 healthy")).to_be_visible()
    visit.allow("401")  # the feed, whose session ends under it, may ask once more
    visit.page.get_by_role("button", name="Log out").click()
    expect(visit.page.get_by_label("API key")).to_be_visible()
    visit.page.reload()
    expect(visit.page.get_by_label("API key")).to_be_visible()


def test_a_wrong_key_is_refused_and_the_field_stays(site: Site, visit: Visit) -> None:
    visit.allow("401")
    visit.open()
    visit.page.get_by_label("API key").fill("ms_000000000000_" + "0" * 64)
    visit.page.get_by_role("button", name="Log in").click()
    expect(visit.page.get_by_role("alert")).to_contain_text("the key is not valid")
    visit.page.get_by_label("API key").fill(site.alice.key)
    visit.page.get_by_role("button", name="Log in").click()
    expect(visit.page.get_by_role("heading", name="Jobs")).to_be_visible()


def test_the_key_is_in_no_address_and_no_storage(site: Site, visit: Visit) -> None:
    addresses: list[str] = []
    visit.page.on("request", lambda request: addresses.append(request.url))
    visit.log_in(site.alice)
    stored = visit.page.evaluate(
        "JSON.stringify([localStorage, sessionStorage, document.cookie, location.href, "
        "document.body.innerHTML])"
    )
    secret = site.alice.key.rpartition("_")[2]
    assert secret not in stored
    assert addresses
    assert [url for url in addresses if secret in url or not url.startswith(site.url)] == []
    [cookie] = visit.context.cookies()
    assert cookie["httpOnly"] is True
    assert cookie["sameSite"] == "Strict"
    assert cookie["path"] == "/"
    assert cookie["secure"] is False
    assert re.fullmatch(r"[0-9a-f]{64}", cookie["value"])


def test_a_revoked_key_ends_the_view(site: Site, visit: Visit) -> None:
    user = site.user("alice")
    visit.log_in(user)
    site.operator.http.delete(f"/v1/keys/{user.id}").raise_for_status()
    expect(visit.page.get_by_label("API key")).to_be_visible()
    expect(visit.page.get_by_role("alert")).to_contain_text("revoked")
    visit.allow("401")


@pytest.mark.smoke
def test_jobs_of_another_tenant_are_not_shown(site: Site, visit: Visit) -> None:
    with held(site):
        hers = site.alice.submit()
        his = site.bob.submit()
        visit.log_in(site.alice)
        row = visit.page.locator(f'tr[data-id="{hers}"]')
        expect(row).to_contain_text("running")
        later = site.alice.submit()
        expect(visit.page.locator(f'tr[data-id="{later}"]')).to_be_visible()
        expect(visit.page.locator(f'tr[data-id="{his}"]')).to_have_count(0)
        row.get_by_role("button", name="Cancel").click()
        expect(row).to_contain_text("cancelled")


def test_hidden_tabs_leave_the_connections_to_the_tab_that_is_seen(
    site: Site, visit: Visit
) -> None:
    page = visit.log_in(site.alice)
    for _ in range(8):
        page.evaluate(SHOW, False)
        page = visit.context.new_page()
        page.goto(f"{site.url}/#/jobs")
        expect(page.locator(".figures")).to_contain_text("1 of 1 healthy")
    page.evaluate(SHOW, False)
    job = site.alice.submit()
    visit.page.evaluate(SHOW, True)
    expect(visit.page.locator(f'tr[data-id="{job}"]')).to_be_visible()


def test_a_service_that_does_not_answer_is_reported(site: Site, visit: Visit) -> None:
    visit.log_in(site.alice)
    visit.page.route("**/v1/models", lambda _: None)
    visit.open("start")
    expect(visit.page.get_by_role("alert")).to_contain_text("The service does not answer")


# --- The first view -------------------------------------------------------------------------------


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
