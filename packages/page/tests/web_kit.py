"""A browser on the page of a real stack: real Redis, API, Celery, relay, and a worker with the fake
engine.

    def test_something(site: Site, visit: Visit) -> None:
        with held(site):
        # work stays under way until the block ends
            job = site.alice.submit()
            visit.log_in(site.alice)
            expect(visit.page.get_by_text("running")).to_be_visible()

Conditions are waited for (`expect`, `until`), for up to `LONG_S`; nothing depends on how fast the
machine is.
"""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from shutil import which
from typing import Any, TypeVar

import httpx2
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, Page, Playwright, expect
from stack import Stack
from wait_kit import wait_until

from midstream.broker.ledger.people.keys import LedgerKeys, new_key
from midstream.schemas.access.keys import CreatedKey, KeyRequest

T = TypeVar("T")

#: Only ends what hangs.
LONG_S = 60.0
expect.set_options(timeout=LONG_S * 1000)

ADMIN = new_key()
MODEL = "fake-model"
PNG = b"\x89PNG"  # the beginning of such a file
WIDE = (1280, 900)
NARROW = (390, 844)


def saved(page: Page, title: str, kind: str) -> bytes:
    """The file of this kind that the page makes of the figure whose title begins so."""
    with page.expect_download() as saving:
        page.get_by_role("button", name=re.compile(f"^Save {title}.* as {kind}$")).click()
    return Path(saving.value.path()).read_bytes()


def chromium() -> str:
    """Its path. Fails the test where there is none: a skip would hide that the page is untested."""
    path = which("chromium")
    if path is None:
        pytest.fail(
            (
                "the browser tests need Debian's Chromium: apt-get install -y "
                "--no-install-recommends chromium"
            ),
            pytrace=False,
        )
    return path


def launched(playwright: Playwright) -> Browser:
    return playwright.chromium.launch(
        executable_path=chromium(), args=["--no-sandbox", "--disable-dev-shm-usage"]
    )


class ThreadedStack(Stack):
    """Its ledger's loop runs in a thread of its own: Playwright has this one's."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        self._executor = ThreadPoolExecutor(1)
        super().__init__(*arguments, **settings)

    def do(self, call: Any) -> Any:
        return self._executor.submit(super().do, call).result(LONG_S)

    def stop(self) -> None:
        self._executor.submit(super().stop).result()
        self._executor.shutdown()


class User:
    """Somebody with a key, and an HTTP client that shows it."""

    def __init__(
        self, site: "Site", tenant: str, *scopes: str, key: CreatedKey | None = None
    ) -> None:
        if key is None:
            request = KeyRequest(
                name=f"{tenant}'s laptop", tenant=tenant, scopes=list(scopes or ("submit", "read"))
            )  # type: ignore[arg-type]
            key = site.stack.do(lambda ledger: LedgerKeys(ledger).create(request))
        self.tenant = tenant
        self.key = key.key
        self.id = key.id
        self.http = httpx2.Client(
            base_url=site.url, headers={"Authorization": f"Bearer {key.key}"}, timeout=LONG_S
        )

    def submit(self, prompts: tuple[str, ...] = ("the sky is",), **body: Any) -> str:
        """A job's id."""
        answer = self.http.post("/v1/jobs", json={"model": MODEL, "prompts": list(prompts), **body})
        assert answer.status_code == 202, answer.text
        return str(answer.json()["id"])

    def ended(self, prompts: tuple[str, ...] = ("the sky is",), **body: Any) -> str:
        """A job that has succeeded."""
        job = self.submit(prompts, **body)
        assert self.wait(job)["state"] == "succeeded"
        return job

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        answer = self.http.post(path, json=body)
        assert answer.is_success, answer.text
        return dict(answer.json())

    def get(self, path: str, **parameters: Any) -> dict[str, Any]:
        answer = self.http.get(path, params=parameters or None)  # {} drops the path's own
        assert answer.is_success, answer.text
        return dict(answer.json())

    def wait(self, job_id: str) -> dict[str, Any]:
        """The job, once it is over."""
        over = {"succeeded", "failed", "aborted", "cancelled"}
        return until(
            lambda: view if (view := self.get(f"/v1/jobs/{job_id}"))["state"] in over else None,
            f"{job_id} to end",
        )


class Site:
    """A stack that asks for keys, with users of two tenants and an admin."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        self.directory = directory
        self.turnstile = directory / "turnstile"
        chosen: dict[str, Any] = {
            "auth": "keys",
            "admin_key": ADMIN,
            "fault": f"turnstile:file={self.turnstile}",
            "lease_s": LONG_S,
            "tuning.visibility_timeout_s": int(
                2 * LONG_S
            ),  # a machine that stalls for seconds repeats no job
        }
        self.stack = ThreadedStack(directory, api=True, callbacks=False, **{**chosen, **settings})
        self.url = self.stack.url

    def __enter__(self) -> "Site":
        self.stack.start()
        self.alice = User(self, "alice")
        self.bob = User(self, "bob")
        self.operator = User(self, "default", "admin")
        until(lambda: self.alice.get("/v1/models")["data"], "a model")
        return self

    def __exit__(self, *_: object) -> None:
        self.turnstile.unlink(missing_ok=True)
        self.stack.stop()

    def user(self, tenant: str, *scopes: str) -> User:
        return User(self, tenant, *scopes)

    def let(self, steps: int) -> None:
        """Of the work that `held` holds, each job may take so many steps in all (tokens, cells)."""
        fresh = self.turnstile.with_suffix(".new")
        fresh.write_text(str(steps))
        fresh.replace(self.turnstile)


@contextmanager
def held(site: Site, steps: int = 0) -> Iterator[Site]:
    """Inside, the engine takes `steps` steps of each job and no more (see `Site.let`); work that
    was begun ends after the block.
    """
    site.let(steps)
    try:
        yield site
    finally:
        site.turnstile.unlink(missing_ok=True)


def until(condition: Callable[[], T], what: str, pause: Callable[[float], None] = time.sleep) -> T:
    """What `condition` returns, once that is true. See also `Visit.until`."""
    why = f"waited {LONG_S} s for {what}"
    return wait_until(condition, LONG_S, why=why, pause_s=0.05, pause=pause)


class Visit:
    """A browser's page, and what went wrong in it: errors of the console and of scripts must be
    expected (`allow`).
    """

    def __init__(self, context: BrowserContext, url: str) -> None:
        self.context = context
        self.url = url
        self.page: Page = context.new_page()
        self.errors: list[str] = []
        self._allowed: list[str] = []
        self.page.on(
            "console",
            lambda message: (
                self.errors.append(f"{message.text} {message.location}")
                if message.type == "error"
                else None
            ),
        )
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))

    def allow(self, pattern: str) -> None:
        """Errors of the console that match are part of this test, such as `401`."""
        self._allowed.append(pattern)

    def open(self, view: str = "jobs") -> None:
        """`view`: what follows `#/`."""
        self.page.goto(f"{self.url}/#/{view}")

    def log_in(self, user: User, view: str = "jobs") -> Page:
        """Show `view` to `user`; returns the page."""
        self.open(view)
        self.page.get_by_label("API key").fill(user.key)
        self.page.get_by_role("button", name="Log in").click()
        # the bar at the top has its height, and the feed has begun; a phone hides these figures
        expect(self.page.locator(".figures")).to_contain_text("1 of 1 healthy")
        return self.page

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until `condition` holds; events of the page, such as requests, arrive meanwhile."""
        until(
            condition,
            what,
            lambda seconds: self.page.wait_for_timeout(seconds * 1000),
        )

    def run_code(self, user: User, language: str) -> str:
        """Run the code in one of the tabs as the user pastes it; returns what it printed."""
        self.page.get_by_role("tab", name=language, exact=True).click()
        code = self.page.locator(f'pre[data-code="{language}"]').text_content()
        assert code
        assert user.key not in code
        done = subprocess.run(
            [sys.executable, "-c", code] if language == "Python" else ["bash", "-ec", code],
            env={
                **os.environ,
                "MIDSTREAM_API_KEY": user.key,
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                "PYTHONIOENCODING": "utf-8",
                "COLUMNS": "200",
            },
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 0, f"{language}:\n{code}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def check(self) -> None:
        """Nothing has gone wrong that was not expected."""
        assert [
            error
            for error in self.errors
            if not any(re.search(pattern, error) for pattern in self._allowed)
        ] == []

    def press(self, *keys: str) -> None:
        for key in keys:
            self.page.keyboard.press(key)

    def check_shown(self) -> None:
        self.check_accessible()
        self.check_fits()
        self.check_hints()

    def check_accessible(self) -> None:
        """axe finds nothing in the page as it is shown now."""
        results = Axe().run(self.page)
        assert results.violations_count == 0, results.generate_report()

    def check_fits(self) -> None:
        """No horizontal scrolling of the whole page."""
        wide, shown = self.page.evaluate(
            "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
        )
        assert wide <= shown, f"{wide} pixels on {shown}"

    def check_hints(self) -> None:
        """No hint in an empty input is cut."""
        cut = self.page.evaluate(
            """() => [...document.querySelectorAll("input[placeholder]")].filter((input) => {
              const pen = document.createElement("canvas").getContext("2d");
              const style = getComputedStyle(input);
              pen.font = style.font;
              const inside = input.clientWidth - parseFloat(style.paddingLeft)
                - parseFloat(style.paddingRight);
              // a search field keeps room for the button that clears it
              const room = inside - (input.type === "search" ? 20 : 0);
              return input.clientWidth > 0 && pen.measureText(input.placeholder).width > room;
            }).map((input) => input.placeholder)"""
        )
        assert cut == []

    def check_apart(self) -> None:
        """No text of a figure lies on another, or on a point."""
        lying = self.page.evaluate(
            """() => [...document.querySelectorAll(".plot svg")].flatMap((figure) => {
              const of = (what) => [...figure.querySelectorAll(what)];
              const box = (each) => [each, each.getBoundingClientRect()];
              const boxes = new Map(of("text, .dot").map(box));
              const across = (a, b) => a.left < b.right && b.left < a.right;
              const meet = (a, b) => across(a, b) && a.top < b.bottom && b.top < a.bottom;
              return of("text").flatMap((text) => [...boxes]
                .filter(([other, box]) => other !== text && meet(boxes.get(text), box))
                .map(([other]) => `${text.textContent} on ${other.textContent || "a point"}`));
            })"""
        )
        assert lying == []


@contextmanager
def visiting(
    browser: Browser, url: str, size: tuple[int, int] = WIDE, scheme: str = "light"
) -> Iterator[Visit]:
    """A fresh browser profile at `url`; at the end nothing unexpected may have gone wrong."""
    context = browser.new_context(
        viewport={"width": size[0], "height": size[1]}, color_scheme=scheme
    )  # type: ignore[arg-type]
    context.set_default_timeout(LONG_S * 1000)
    with closing(context):
        visit = Visit(context, url)
        yield visit
        visit.check()
