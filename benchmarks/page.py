"""How heavy is the page, how soon is it painted, and does it stall under fast cells or 5,000 jobs?

    python benchmarks/page.py [--rounds 10]

In Debian's Chromium on a real stack on loopback: Redis, API, Celery, relay, and a worker with the
fake engine, whose sweeps send cells as fast as they can be stored. A stall is a time between two
animation frames.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / "tests" / part) for part in ("", "fake_engine", "unit", "system", "web")]

from playwright.sync_api import Browser, expect, sync_playwright  # noqa: E402
from test_web_jobs import crowd  # noqa: E402
from web_kit import MODEL, Site, User, Visit, launched, visiting  # noqa: E402

VIEWS = ("jobs", "sweep", "capture", "playground", "ops")
JOBS = 5000
WORDS = 60  # of each prompt of the sweep, whose tokens are characters

#: Notes the gaps between animation frames, in milliseconds, from now on.
WATCH = """() => {
  window.gaps = [];
  let last = performance.now();
  const frame = (now) => (gaps.push(now - last), (last = now), requestAnimationFrame(frame));
  requestAnimationFrame(frame);
}"""
GAPS = (
    "() => { const all = gaps.splice(0).sort((a, b) => a - b); return [all.length, "
    "all[Math.floor(all.length / 2)], all.at(-1)]; }"
)
PAINT = "() => performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? null"
SENT = """() => ['navigation', 'resource'].flatMap((type) => performance.getEntriesByType(type))
  .filter(({ name }) => name.endsWith('/') || name.includes('/#') || name.includes('/page/'))
  .reduce(([sent, read], { transferSize, decodedBodySize }) =>
    [sent + transferSize, read + decodedBodySize], [0, 0])"""


def weight(visit: Visit) -> None:
    """Of a browser that has just logged in, and had an empty cache."""
    for number in range(len(VIEWS)):
        visit.open(VIEWS[number])
        expect(visit.page.get_by_role("heading", level=1)).to_be_visible()
        visit.page.wait_for_timeout(500)  # its files have come
        sent, read = visit.page.evaluate(SENT)
        if number in (0, len(VIEWS) - 1):
            print(
                f"| {'all views' if number else 'the first view'} | {sent / 1000:.0f} kB sent, "
                f"{read / 1000:.0f} kB unpacked |"
            )


def paint(browser: Browser, site: Site, rounds: int) -> None:
    times = []
    for _ in range(rounds):
        with visiting(browser, site.url) as visit:
            visit.open()
            expect(visit.page.get_by_label("API key")).to_be_visible()
            visit.page.wait_for_function(f"({PAINT})() !== null")
            times.append(visit.page.evaluate(PAINT))
    print(
        f"| first contentful paint, empty cache | {statistics.median(times):.0f} ms "
        f"(most {max(times):.0f}) |"
    )


def cells(visit: Visit, site: Site) -> None:
    text = "a cat and " * (WORDS // 3)
    pair = {"clean": f"{text}x", "corrupt": f"{text}y", "answer": "x", "foil": "y"}
    body = {
        "model": MODEL,
        "pairs": [pair],
        "hooks": ["resid_pre", "attn_out", "mlp_out"],
        "positions": "all_prompt",
    }
    site.let(0)
    job = str(site.alice.post("/v1/sweeps", **body)["id"])
    visit.open(f"sweep/{job}")
    expect(visit.page.locator(".cells canvas").last).to_be_visible()
    visit.page.evaluate(WATCH)
    site.turnstile.unlink()
    expect(visit.page.locator(".sweep-state")).to_have_attribute("data-state", "succeeded")
    frames, middle, longest = visit.page.evaluate(GAPS)
    view = site.alice.get(f"/v1/jobs/{job}")
    seconds = view["finished"] - view["started"]
    seen = view["cells_expected"]
    print(
        f"| {seen} cells | {seen / seconds:.0f} cells/s; {frames} frames, {middle:.0f} "
        f"ms apart (longest {longest:.0f} ms) |"
    )


def jobs(visit: Visit, site: Site, user: User) -> None:
    crowd(site, user.tenant, JOBS)
    visit.log_in(user)
    expect(visit.page.get_by_text(f"{JOBS} of {JOBS} jobs")).to_be_visible()
    visit.page.reload()
    expect(visit.page.get_by_text(f"{JOBS} of {JOBS} jobs")).to_be_visible()
    soon = visit.page.evaluate("performance.now()")
    print(
        f"| {JOBS} jobs, from the beginning of the load to the last in the table | ≤ "
        f"{soon:.0f} ms |"
    )
    print(f"| rows of them in the document | {visit.page.locator('tr[data-id]').count()} |")
    visit.page.evaluate(WATCH)
    visit.page.locator("tr[data-id]").first.focus()
    for key in ["PageDown"] * 50 + ["End", "Home"]:
        visit.page.keyboard.press(key)
    visit.page.get_by_label("Find").press_sequentially("n4242")
    expect(visit.page.get_by_text(f"1 of {JOBS} jobs")).to_be_visible()
    visit.page.get_by_label("Find").fill("")
    later = [user.submit() for _ in range(20)]
    expect(visit.page.locator(f'tr[data-id="{later[-1]}"]')).to_contain_text("succeeded")
    frames, middle, longest = visit.page.evaluate(GAPS)
    print(
        f"| 52 keys, a search and 20 new jobs among them | {frames} frames, "
        f"{middle:.0f} ms apart (longest {longest:.0f} ms) |"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        Site(Path(folder)) as site,
        sync_playwright() as playwright,
    ):
        browser = launched(playwright)
        print("| what | measured |\n|---|---|")
        paint(browser, site, options.rounds)
        with visiting(browser, site.url) as visit:
            visit.log_in(site.alice)
            weight(visit)
            cells(visit, site)
        with visiting(browser, site.url) as visit:
            jobs(visit, site, site.user("crowd"))


if __name__ == "__main__":
    main()
