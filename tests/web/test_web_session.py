"""The page's login: who gets in, what the browser keeps, and when it is over."""

import re

import pytest
from playwright.sync_api import expect
from web_kit import Site, Visit, held


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
    expect(visit.page.get_by_text("1 of 1 healthy")).to_be_visible()
    stored = visit.page.evaluate(
        "JSON.stringify([localStorage, sessionStorage, document.cookie, location.href, "
        "document.body.innerHTML])"
    )
    secret = site.alice.key.rpartition("_")[2]
    assert secret not in stored
    assert addresses
    assert [url for url in addresses if secret in url or not url.startswith(site.url)] == []
    [cookie] = visit.context.cookies()
    assert (cookie["httpOnly"], cookie["sameSite"], cookie["path"], cookie["secure"]) == (
        True,
        "Strict",
        "/",
        False,
    )
    assert re.fullmatch(r"[0-9a-f]{64}", cookie["value"])


def test_a_revoked_key_ends_the_view(site: Site, visit: Visit) -> None:
    user = site.user("alice")
    visit.log_in(user)
    expect(visit.page.get_by_text("1 of 1 healthy")).to_be_visible()
    site.operator.http.delete(f"/v1/keys/{user.id}").raise_for_status()
    expect(visit.page.get_by_label("API key")).to_be_visible()
    expect(visit.page.get_by_role("alert")).to_contain_text("revoked")
    visit.allow("401")


@pytest.mark.smoke
def test_jobs_of_another_tenant_are_not_shown(site: Site, visit: Visit) -> None:
    with held(site):
        hers, his = site.alice.submit(), site.bob.submit()
        visit.log_in(site.alice)
        row = visit.page.locator(f'tr[data-id="{hers}"]')
        expect(row).to_contain_text("running")
        later = site.alice.submit()
        expect(visit.page.locator(f'tr[data-id="{later}"]')).to_be_visible()
        expect(visit.page.locator(f'tr[data-id="{his}"]')).to_have_count(0)
        row.get_by_role("button", name="Cancel").click()
        expect(row).to_contain_text("cancelled")
