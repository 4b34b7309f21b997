"""Runs every block of every documentation page, in order, on a real stack with the demo model."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from docs_page import Page, environment_of, pages, parts
from extension_kit import BANK, ECHO, install_example
from ports import free_port, three_ports
from tree import ROOT
from up_kit import Up

from midstream.client import Client

#: The port that pages write for the stack. Ports of this hundred that a page starts other things on
#: are free ones here.
STACK_PORT = "8321"
#: And for the relay's metrics.
METRICS_PORT = "8360"
PORT = re.compile(r"(?<!\d)83\d\d(?!\d)")
ENGINE_START_S = 500.0
#: Pages, or parts of them, that take minutes: `make test-matrix` runs them.
SLOW = (
    "attention",
    "choose-steering",
    "client",
    "coming-from",
    "extending",
    "features",
    "harvest",
    "heads",
    "heads-study",
    "http",
    "lens",
    "lora",
    "openai-compatibility",
    "patching",
    "policies",
    "probes",
    "scheduling",
    "steering",
)
#: What pages register, which is deleted after each.
REGISTERED = ("policies", "modules", "loras", "lenses", "saes", "probes")
#: The id that `midstream up` gives its worker on a machine called `vm`.
WORKER = "vm-SmolLM2-135M-Instruct"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    data = tmp_path_factory.mktemp("stack") / ".midstream"
    data.mkdir()
    (data / "saes").symlink_to(ROOT / "examples" / "data" / "saes")
    with pytest.MonkeyPatch.context() as patch:  # also for the commands of pages
        site = install_example(tmp_path_factory.mktemp("site"))
        for example in (ECHO, BANK):
            install_example(site, example)
        patch.setenv("PYTHONPATH", str(site))
        patch.setenv("MIDSTREAM_EXTENSIONS", "row-geometry,midstream-bank")
        options = {
            "hooks": "all,inside",
            # In bfloat16 the tokens depend on the processor, in float32 they do not.
            "engine.dtype": "float32",
            "tool_parser": "hermes",
            "metrics_port": three_ports(),
            "engine.max_loras": 4,
        }
        up = Up(data, engine=None, model_name=None, worker_id=WORKER, **options)
        try:
            up.ready(ENGINE_START_S)
            yield up
        finally:
            up.close()


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("path", "part"),
    [
        pytest.param(
            path, part, id=f"{path}-{part}", marks=pytest.mark.matrix if part in SLOW else ()
        )
        for path, part in pages()
    ],
)
def test_the_blocks_of_a_page_run_in_order_and_print_what_it_shows(
    path: Path, part: str, stack: Up, tmp_path: Path
) -> None:
    (tmp_path / ".midstream").symlink_to(stack.data)
    url = stack.ready()
    ports = {
        STACK_PORT: url.rpartition(":")[2],
        METRICS_PORT: stack.environment["MIDSTREAM_METRICS_PORT"],
    }
    text = PORT.sub(
        lambda found: ports.setdefault(found[0], str(free_port())), parts(ROOT / path)[part]
    )
    page = Page(path, text, tmp_path, environment_of(url, stack.data))
    with Client(url) as client:
        try:
            wrong = page.run()
        finally:
            client.global_steering.delete()
            for registered in REGISTERED:
                part = getattr(client, registered)
                for each in part.list():
                    part.delete(each.name)
    assert page.ran
    assert not wrong, "\n\n".join(wrong)
