"""Can hits of a policy be looked at, marked and replayed on its page, and by whom?"""

from collections.abc import Iterator

import numpy as np
import pytest
from playwright.sync_api import Browser, expect
from web_kit import NARROW, Site, Visit, visiting

from midstream.client import Client

HIDDEN = 8
HITS = "/v1/policies/eyes/hits"
CONDITION = {"at_least": 3.0, "schedule": {"tokens": "all"}}


@pytest.fixture(scope="module", autouse=True)
def _policy(site: Site) -> Iterator[None]:
    """A policy of all traffic that turns on at token 3, and a hit of each tenant."""
    with Client(site.url, api_key=site.operator.key) as client:
        client.probes.put(
            "eyes", weight=np.ones((1, HIDDEN)), layer=1, labels=["seen"], thresholds=[None]
        )
        policy = {"probe": "eyes", "condition": CONDITION, "actions": ["flag"]}
        client.policies.put("eyes", **policy, all_traffic=True, keep_texts=True)
        site.alice.ended(("hello there",))
        site.bob.ended(("other text",))
        yield
        client.policies.delete("eyes")


def test_an_operator_marks_hits_and_replays_a_threshold(site: Site, visit: Visit) -> None:
    page = visit.log_in(site.operator, "policies/eyes")
    rows = page.get_by_role("region", name="Hits of eyes").locator("tbody tr")
    expect(rows).to_have_count(2)
    expect(rows.nth(0)).to_contain_text("bob")
    expect(rows.nth(0).locator("mark")).to_have_text("e")  # “othe”
    expect(rows.nth(1)).to_contain_text("alice")
    for row, verdict, note in ((0, "right", ""), (1, "false_alarm", "a greeting")):
        rows.nth(row).get_by_label("Mark", exact=True).select_option(verdict)
        rows.nth(row).get_by_label("Note").fill(note)
        rows.nth(row).get_by_role("button", name="Save the mark").click()
        visit.until(
            lambda row=row, verdict=verdict: (
                (site.operator.get(HITS)["hits"][row]["mark"] or {}).get("verdict") == verdict
            ),
            "the mark",
        )
    expect(page.get_by_text("Version 1: 1 of 2 marked hits right (50 %).")).to_be_visible()
    visit.check_shown()
    page.get_by_label("Marked").select_option("false_alarm")
    expect(rows).to_have_count(1)
    expect(rows.nth(0).get_by_label("Note")).to_have_value("a greeting")
    page.get_by_label("Score from").fill("100")
    expect(page.get_by_text("Choose less.")).to_be_visible()
    page.get_by_label("Threshold", exact=True).fill("50")
    page.get_by_role("button", name="Replay").click()
    expect(page.get_by_text("both turn on at 0; the new one alone at 0")).to_be_visible()
    lost = page.get_by_role("region", name="Lost").locator("tbody tr")
    expect(lost.first).to_contain_text("3 at token 3")
    visit.check_shown()


def test_a_tenant_sees_its_own_hits_and_no_control(site: Site, browser: Browser) -> None:
    with visiting(browser, site.url, NARROW) as visit:
        page = visit.log_in(site.alice, "policies/eyes")
        rows = page.get_by_role("region", name="Hits of eyes").locator("tbody tr")
        expect(rows).to_have_count(1)
        expect(rows.nth(0).locator("mark")).to_have_text("l")
        expect(page.get_by_role("button", name="Save the mark")).to_have_count(0)
        expect(page.get_by_role("button", name="Replay")).to_have_count(0)
        visit.check_shown()
