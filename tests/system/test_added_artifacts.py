"""A kind of registered artifacts, and a reader that takes one, which an installed package brings:
the example in `examples/bank`, with no file of the core changed. It is built and installed as its
users do, beside the stack.
"""

import base64
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from edge import refused
from extension_kit import BANK, pip_install, with_package
from midstream_fake_engine.model import HIDDEN_SIZE
from stack import Stack
from tree import ROOT, tracked

from midstream.client import CaptureReader, Client
from midstream.schemas.base.limits import MAX_DESCRIPTION, MAX_PROMPTS
from midstream.schemas.jobs.jobs import State
from midstream.schemas.requests.artifact_kinds import ARTIFACTS

pytestmark = pytest.mark.xdist_group("added_artifacts")

PATH = "/v1/artifacts/banks"
ALONG = np.eye(HIDDEN_SIZE)[0]
#: Their sum has no direction of its own.
DIRECTIONS = {"even": [2.0] * HIDDEN_SIZE, "first": ALONG.tolist()}
UNITS = np.stack([np.ones(HIDDEN_SIZE) / np.sqrt(HIDDEN_SIZE), ALONG])
READER = {"name": "bank", "layers": [0, 1], "positions": "all_prompt", "options": {"bank": "mine"}}
JOB = {"model": "fake-model", "prompts": ["hello"], "sampling": {"max_tokens": 1}}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that pip has installed the package to."""
    return pip_install(BANK, tmp_path_factory.mktemp("bank"))


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, site: Path) -> Iterator[Stack]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(site))
        # processes start anew, not as copies of one that has read the table of kinds
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("tmp")))
        folder = tmp_path_factory.mktemp("stack")
        with Stack(folder, api=True, extensions="midstream-bank") as running:
            yield running


@pytest.fixture
def http(stack: Stack) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=stack.url, timeout=60.0) as client:
        yield client


@pytest.fixture
def mine(http: httpx2.Client) -> dict[str, Any]:
    """A registered bank."""
    answer = http.put(f"{PATH}/mine", json={"directions": DIRECTIONS, "description": "of two"})
    assert answer.is_success, answer.text
    return answer.json()


def typed(stack: Stack, *words: str) -> str:
    """What a command prints."""
    return with_package("-m", "midstream.client", *words, "--url", stack.url)


def read(http: httpx2.Client, **fields: Any) -> dict[str, Any]:
    """The result of a job that reads with the bank `mine`."""
    answer = http.post(
        "/v1/jobs", json={**JOB, "readers": [READER], **fields}, headers={"Prefer": "wait=60"}
    )
    assert answer.status_code == 200, answer.text
    return answer.json()


def cosines(result: dict[str, Any]) -> np.ndarray:
    (reading,) = result["readers"]
    (part,) = reading["parts"]
    found = part["arrays"]["cosine"]
    return np.frombuffer(base64.b64decode(found["data"]), "<f4").reshape(found["shape"])


def test_the_example_has_four_files() -> None:
    assert len([path for path in tracked() if BANK.relative_to(ROOT) in path.parents]) == 4


def test_the_core_does_not_know_the_kind() -> None:
    assert "banks" not in ARTIFACTS


def test_a_name_is_put_shown_listed_replaced_and_deleted(
    http: httpx2.Client, mine: dict[str, Any]
) -> None:
    assert mine["labels"] == ["even", "first"]
    units = np.frombuffer(base64.b64decode(mine["units"]), "<f4").reshape(2, HIDDEN_SIZE)
    np.testing.assert_allclose(units, UNITS, rtol=1e-6)
    assert http.get(f"{PATH}/mine").json() == mine
    assert http.get(PATH).json() == {"banks": [mine]}
    other = http.put(f"{PATH}/mine", json={"directions": {"first": DIRECTIONS["first"]}}).json()
    assert other["replaced"] == mine["digest"]
    assert other["labels"] == ["first"]
    assert http.delete(f"{PATH}/mine").status_code == 204
    refused(http.get(f"{PATH}/mine"), 404, "name", "unknown bank of directions 'mine'")


def test_the_api_describes_its_body(http: httpx2.Client) -> None:
    described = http.get("/schema/openapi.json").json()
    put = described["paths"]["/v1/artifacts/{kind}/{name}"]["put"]
    assert "- `banks`: `directions`" in put["description"]
    assert {"Bank", "BankRequest", "BankPage"} <= described["components"]["schemas"].keys()


@pytest.mark.parametrize(
    ("directions", "field", "says"),
    [
        ({"first": [1.0]}, "directions.first", "has 1 numbers"),
        ({"none": [0.0] * HIDDEN_SIZE}, "directions.none", "has no length"),
        ({}, "directions", "length"),
        ({"first": ["x"]}, "directions", "Expected `float`"),
    ],
)
def test_what_cannot_be_registered_is_refused_by_field(
    http: httpx2.Client, directions: dict[str, Any], field: str, says: str
) -> None:
    answer = http.put(f"{PATH}/wrong", json={"directions": directions})
    problem = refused(answer, 400, None, says)
    assert problem["field"].startswith(field)


def test_python_has_its_calls(stack: Stack) -> None:
    program = (
        "import json, sys; from midstream import Client; "
        "client = Client(sys.argv[1]); "
        "made = client.banks.put('theirs', directions=json.loads(sys.argv[2])); "
        "assert client.banks.get('theirs') == made; "
        "assert made in client.banks.list(); "
        "assert 'theirs' in client.banks.list()._repr_html_(); "
        "client.banks.delete('theirs'); "
        "assert made not in client.banks.list(); "
        "print(*made.labels)"
    )
    printed = with_package("-c", program, stack.url, json.dumps(DIRECTIONS))
    assert printed.split() == ["even", "first"]


def test_the_command_line_has_its_verbs(stack: Stack, tmp_path: Path) -> None:
    body = tmp_path / "body.json"
    body.write_text(json.dumps({"directions": DIRECTIONS}))
    file = ["--file", str(body)]
    made = json.loads(typed(stack, "put", "bank", "typed", *file, "--json"))
    assert json.loads(typed(stack, "get", "bank", "typed", "--json")) == made
    assert made in json.loads(typed(stack, "list", "banks", "--json"))
    assert "['even', 'first']" in typed(stack, "get", "bank", "typed")
    assert "typed" in typed(stack, "list", "banks")
    assert "typed deleted" in typed(stack, "delete", "bank", "typed")
    assert made not in json.loads(typed(stack, "list", "banks", "--json"))


def test_the_page_has_its_row(http: httpx2.Client) -> None:
    script = http.get("/page/lib/kinds.js").text
    assert '"banks":{"short":"bank","command":"bank",' in script


def test_a_reader_reads_rows_with_the_bank_that_a_request_names(
    stack: Stack, http: httpx2.Client, mine: dict[str, Any]
) -> None:
    result = read(http, capture={"layers": [0, 1], "positions": "all_prompt"})
    (reading,) = result["readers"]
    assert reading["package"] == "midstream-bank"
    assert reading["options"] == {"bank": "mine"}
    stored = CaptureReader(stack.settings.capture_root, result["id"])
    rows = np.stack([stored.array(layer) for layer in (0, 1)]).astype(np.float32)
    wanted = rows @ UNITS.T / np.linalg.norm(rows, axis=-1, keepdims=True)
    np.testing.assert_allclose(cosines(result), wanted, rtol=1e-3, atol=1e-3)
    view = http.get(f"/v1/jobs/{result['id']}").json()
    assert view["contents"]["bank/mine"] == mine["digest"]


@pytest.mark.parametrize(
    ("options", "field", "says"),
    [
        ({"bank": "none"}, "readers[0].options.bank", "unknown bank of directions 'none'"),
        ({"bank": 3}, "readers[0].options.bank", "3 is not a text"),
        ({"banks": "mine"}, "readers[0].options.banks", "valid options of bank: bank"),
    ],
)
def test_a_reading_that_names_none_is_refused_by_field(
    http: httpx2.Client, mine: dict[str, Any], options: dict[str, Any], field: str, says: str
) -> None:
    body = JOB | {"readers": [READER | {"options": options}]}
    refused(http.post("/v1/jobs", json=body), 400, field, says)


def test_what_a_reader_is_given_for_all_prompts_is_bounded(http: httpx2.Client) -> None:
    labels = {f"{'x' * 190}-{number}": DIRECTIONS["first"] for number in range(16)}
    body = {"directions": labels, "description": "x" * MAX_DESCRIPTION}
    assert http.put(f"{PATH}/large", json=body).status_code == 201
    reader = READER | {"options": {"bank": "large"}}
    body = JOB | {"prompts": ["hello"] * MAX_PROMPTS, "readers": [reader]}
    refused(http.post("/v1/jobs", json=body), 400, "readers[0].options", "4096 prompts")
    http.delete(f"{PATH}/large")


def test_without_a_bank_the_reader_has_no_direction(http: httpx2.Client) -> None:
    found = cosines(read(http, readers=[READER | {"options": {}}]))
    assert found.shape[-1] == 0


def test_python_maps_with_a_bank_and_notices_another(
    stack: Stack, http: httpx2.Client, mine: dict[str, Any], tmp_path: Path
) -> None:
    """Its cache holds what was read with a bank of the same content."""
    program = (
        "import sys; from midstream import Client; client = Client(sys.argv[1]); "
        "found = client.map(['hello'], model='fake-model', cache=sys.argv[2], max_tokens=1, "
        "readers={'name': 'bank', 'layers': 0, 'options': {'bank': 'mine'}}); "
        "print(next(iter(found)).result.readers[0].parts[0].arrays['cosine'].shape[-1])"
    )
    cache = str(tmp_path / "cache")
    assert with_package("-c", program, stack.url, cache).split() == ["2"]
    http.put(f"{PATH}/mine", json={"directions": {"first": DIRECTIONS["first"]}})
    assert with_package("-c", program, stack.url, cache).split() == ["1"]


def test_the_command_line_and_a_notebook_show_the_reading(
    stack: Stack, http: httpx2.Client, mine: dict[str, Any]
) -> None:
    job = read(http)["id"]
    shown = typed(stack, "get", "job", job)
    assert "bank of midstream-bank 1.0" in shown
    assert "cosine" in shown
    with Client(stack.url) as client:
        (reading,) = client.result(job).readers
    drawn = reading._repr_html_()
    assert "post_block 0-1" in drawn
    assert "bank=mine" in drawn


def test_a_job_keeps_its_bank_and_banks_survive_what_is_replaced(
    stack: Stack, http: httpx2.Client, mine: dict[str, Any]
) -> None:
    stack.end("worker")
    body = JOB | {"readers": [READER]}
    waiting = http.post("/v1/jobs", json=body).json()["id"]
    http.put(f"{PATH}/beside", json={"directions": DIRECTIONS})
    assert http.delete(f"{PATH}/mine").status_code == 204
    stack.replace("api")
    stack.restart("worker")
    assert stack.wait(waiting).state is State.SUCCEEDED
    assert cosines(http.get(f"/v1/jobs/{waiting}/result").json()).shape[-1] == 2
    assert [each["name"] for each in http.get(PATH).json()["banks"]] == ["beside"]
    http.delete(f"{PATH}/beside")


def test_without_its_package_the_api_names_what_is_missing_and_keeps_banks(
    stack: Stack,
    http: httpx2.Client,
    mine: dict[str, Any],
    site: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done = read(http)["id"]
    with monkeypatch.context() as away:
        folders = os.environ["PYTHONPATH"].split(os.pathsep)
        away.setenv("PYTHONPATH", os.pathsep.join(set(folders) - {str(site)}))
        stack.replace("api")
        refused(http.get(PATH), 404, "kind", "unknown kind of artifact 'banks'")
        answer = http.post("/v1/jobs", json=JOB | {"readers": [READER]})
        refused(
            answer, 400, "readers[0].options.bank", "no package that is installed here has banks"
        )
        assert http.get(f"/v1/jobs/{done}/result").json()["readers"]
    stack.replace("api")
    assert http.get(f"{PATH}/mine").json() == mine
