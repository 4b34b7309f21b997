"""The pages that the documentation's site is rendered from, without rendering them."""

import runpy
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from tree import ROOT

from midstream.client import Client
from midstream.client.cli.main import app
from midstream.client.sdk.calls import Calls

SITE = ROOT / "docs" / "site"


@pytest.fixture(scope="module")
def build() -> Iterator[dict[str, Any]]:
    """The names of the script that builds the site. Its `reference` is not that of the engine
    tests, whose place in `sys.modules` it takes only here.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(SITE), *sys.path])
        patch.setitem(sys.modules, "reference", sys)
        del sys.modules["reference"]
        yield runpy.run_path(str(SITE / "build.py"))


@pytest.fixture(scope="module")
def pages(build: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = build["pages"]()
    return found


def test_navigation_leads_to_pages_and_links_stay_on_the_site(
    build: dict[str, Any], pages: dict[str, str]
) -> None:
    listed = [page for section in build["navigation"]().values() for page in section]
    assert set(listed) <= set(pages)
    assert len(listed) == len(set(listed))
    assert {"capture.md", "reference/python.md", "repository/benchmarks/RESULTS.md"} <= set(listed)
    assert "](repository/overview.md)" in pages["README.md"]
    assert "](../capture.md)" in pages["repository/overview.md"]
    assert "## `client.jobs`\n" in pages["reference/python.md"]
    unsearched = {page for page, text in pages.items() if text.startswith("---\nsearch:")}
    assert unsearched & {"capture.md", "decisions/0001-contracts.md"} == {
        "decisions/0001-contracts.md"
    }


def test_a_page_has_no_inline_script_and_no_other_host(build: dict[str, Any]) -> None:
    page = f'<script src="{build["SHIM"]}"></script><script>a=1</script>'
    text, scripts = build["local"](page, "reference/python.html")
    ((name, script),) = scripts.items()
    assert script == "a=1"
    assert text == (
        f'<script src="../assets/iframe-worker.js"></script><script src="../{name}"></script>'
    )


def test_the_references_have_every_route_command_and_call(pages: dict[str, str]) -> None:
    routes = [line.split()[:2] for line in (ROOT / "docs" / "routes.txt").read_text().splitlines()]
    http = pages["reference/http.md"]
    assert [route for route in routes if f"## `{' '.join(route)}`\n" not in http] == []
    group: Any = typer.main.get_command(app)
    commands = [name for name in group.list_commands(None) if not group.commands[name].hidden]
    cli = pages["reference/cli.md"]
    assert [name for name in commands if f"`midstream {name}`" not in cli] == []
    python = pages["reference/python.md"]
    groups = [
        name for name, group in vars(Client("127.0.0.1:1")).items() if isinstance(group, Calls)
    ]
    assert [name for name in groups if f"## `client.{name}`\n" not in python] == []


def test_a_field_has_the_comment_of_its_code(pages: dict[str, str]) -> None:
    http = pages["reference/http.md"]
    shape = http.partition("\n### CaptureSpec\n")[2].partition("\n### ")[0]
    run = next(line for line in shape.splitlines() if line.startswith("| `run` |"))
    assert "keep the rows as a source run of this name" in run
    positions = next(line for line in shape.splitlines() if line.startswith("| `positions` |"))
    assert "[capture.md](../capture.md#which-positions)" in positions
