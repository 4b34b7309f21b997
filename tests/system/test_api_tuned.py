"""Tuned and Jacobian lenses are registered over HTTP, from Python and on the command line, and
named by requests. The engine is a fake.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from midstream_fake_engine.model import HIDDEN_SIZE, NUM_LAYERS
from safetensors.numpy import save_file
from stack import Stack
from typer.testing import CliRunner

from midstream.client import Client
from midstream.client.cli.main import app
from midstream.schemas.artifacts.jacobian_lenses import JacobianRecord
from midstream.storage.formats import jacobian_files

ADMIN = "ms_admin0000000_" + "a" * 43


def write(folder: Path, layers: list[int], width: int = HIDDEN_SIZE, **extra: np.ndarray) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    maps = {f"{layer}.weight": np.eye(width, dtype=np.float32) for layer in layers}
    maps |= {f"{layer}.bias": np.full(width, layer, dtype=np.float32) for layer in layers}
    save_file(maps | extra, folder / "lens.safetensors")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("tuned")
    write(folder / "lenses/all", list(range(NUM_LAYERS)))
    write(folder / "lenses/some", [1, 2])
    write(folder / "lenses/wide", [1], width=HIDDEN_SIZE + 1)
    write(folder / "lenses/deep", [NUM_LAYERS])
    write(
        folder / "lenses/nan",
        [1],
        **{
            "2.weight": np.full((HIDDEN_SIZE, HIDDEN_SIZE), np.nan, np.float32),
            "2.bias": np.zeros(8, np.float32),
        },
    )
    write(folder / "lenses/half", [1], **{"2.weight": np.eye(HIDDEN_SIZE, dtype=np.float32)})
    write(folder / "lenses/other", [1], head=np.ones(3, np.float32))
    eye, head = np.eye(HIDDEN_SIZE, dtype=np.float32), np.ones((1000, HIDDEN_SIZE), np.float32)
    head[:, 0] = np.arange(1000)
    fit = JacobianRecord(method="sketched", prompts=9, errors=[0.125])
    jacobian_files.write(folder / "lenses/jacobian", {1: eye}, fit, jacobian_files.Matrix(head))
    jacobian_files.write(folder / "lenses/bare", {1: eye}, fit)
    options = {
        "lens_dir": str(folder / "lenses"),
        "auth": "keys",
        "admin_key": ADMIN,
        "lease_s": 9.0,
        "visibility_timeout_s": 60,
    }
    with Stack(folder / "stack", api=True, callbacks=False, **options) as running:
        yield running


@pytest.fixture(scope="module")
def http(stack: Stack) -> Iterator[httpx2.Client]:
    with httpx2.Client(
        base_url=stack.url, timeout=60, headers={"authorization": f"Bearer {ADMIN}"}
    ) as client:
        yield client


def test_a_tuned_lens_is_registered_replaced_listed_named_and_removed(stack: Stack) -> None:
    with Client(stack.url, api_key=ADMIN) as client:
        made = client.lenses.register("mine", "some", residual=True, description="of nothing")
        assert (
            made.layers,
            made.hook,
            made.residual,
            client.lenses.get("mine"),
            client.lenses.list(),
        ) == (
            [1, 2],
            "post_block",
            True,
            made,
            [made],
        )
        assert client.lens("hello", tuned="mine").layers == [1, 2], "`all`: those that it has"
        changed = client.lenses.register("mine", "all", hook="resid_pre")
        assert (changed.replaced, changed.hook) == (made.digest, "pre_attn")
        assert client.lens("hello", tuned="mine").hook == "pre_attn"
        job = client.submit(
            model="fake-model", prompts=["a"], lens={"tuned": "mine"}, sampling={"max_tokens": 1}
        )
        assert (job.contents, client.wait(job).global_version) == (
            {"tuned/mine": changed.digest},
            0,
        )
        assert (
            len(list(client.map(["a"], lens={"tuned": "mine"}, max_tokens=1, progress=False))) == 1
        )
        client.lenses.delete("mine")
        assert client.lenses.list() == []


def test_a_jacobian_lens_is_registered_named_steered_with_and_removed(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MIDSTREAM_API_KEY", ADMIN)
    swap = {"jacobian": "said", "token": 3, "swap": 4, "layers": "all"}
    with Client(stack.url, api_key=ADMIN) as client:
        made = client.jacobians.register("said", "jacobian")
        assert (made.layers, made.vocabulary, client.jacobians.list()) == ([1], 1000, [made])
        assert client.lens("hello", jacobian="said").layers == [1]
        job = client.submit(
            model="fake-model", prompts=["a"], steering=swap, sampling={"max_tokens": 1}
        )
        assert job.contents == {"jacobian/said": made.digest}
        assert client.wait(job).steered
        added = {"jacobian": "said", "token": "a", "layers": 1}
        (entry,) = client.modules.register("module", added).entries
        assert (entry.op, entry.layers) == ("add", [1])
        mapped = client.map(["a"], steering=swap, max_tokens=1, progress=False)
        assert len(list(mapped)) == 1
        words = ["jacobian", "show", "said", "--url", stack.url]
        shown = CliRunner().invoke(app, words).output
        assert "sketched, of 9 prompts, error up to 12.5%" in shown
        assert "1,000 tokens" in shown
        client.jacobians.delete("said")
        assert client.jacobians.list() == []


@pytest.mark.parametrize(
    ("body", "field", "says"),
    [
        ({"lens": {"jacobian": "nobody"}}, "lens.jacobian", "unknown Jacobian lens 'nobody'"),
        ({"lens": {"jacobian": "bare", "tuned": "two"}}, "lens.jacobian", "together with tuned"),
        ({"lens": {"jacobian": "bare", "layers": 2}}, "lens.layers", "no map of layer 2"),
        (
            {"steering": [{"jacobian": "bare", "token": 1, "layers": 1}]},
            "steering[0].jacobian",
            "has no output matrix",
        ),
        (
            {"steering": [{"jacobian": "mine", "token": "hello there", "layers": 1}]},
            "steering[0].token",
            "tokens:",
        ),
    ],
)
def test_a_request_that_does_not_fit_its_jacobian_lens_is_refused(
    http: httpx2.Client, body: dict[str, Any], field: str, says: str
) -> None:
    for name, path in (("bare", "bare"), ("mine", "jacobian")):
        answer = http.post("/v1/jacobians", json={"name": name, "path": path})
        assert answer.status_code in (200, 201), answer.text
    answer = http.post("/v1/jobs", json={"model": "fake-model", "prompts": ["hello"], **body})
    assert (answer.status_code, answer.json()["field"]) == (400, field), answer.text
    assert says in answer.text


def test_the_command_line_registers_lists_and_deletes(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MIDSTREAM_API_KEY", ADMIN)

    def run(*words: str) -> str:
        done = CliRunner().invoke(app, ["tuned", *words, "--url", stack.url])
        assert done.exit_code == 0, done.output
        return done.output

    assert json.loads(run("register", "cli", "some", "--residual", "--json"))["residual"] is True
    assert "post_block of layers 1-2" in run("show", "cli")
    assert "some" in run("list")
    assert "cli removed" in run("remove", "cli")


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("../lenses/all", "not a path below lens_dir"),
        ("none", "there is no folder 'none'"),
        ("wide", "has the shape [9]; this model needs [8]"),
        ("deep", "this model has no layer 4; valid: 0 to 3"),
        ("nan", "2.weight has values that are not finite"),
        ("half", "layer 2 has only weight; valid: weight and bias"),
        ("other", "'head' is not a tensor of a tuned lens"),
    ],
)
def test_a_bad_tuned_lens_is_refused_by_field(http: httpx2.Client, path: str, says: str) -> None:
    answer = http.post("/v1/lenses", json={"name": "x", "path": path})
    assert (answer.status_code, answer.json()["field"]) == (400, "path"), answer.text
    assert says in answer.text


@pytest.mark.parametrize(
    ("lens", "field", "says"),
    [
        ({"tuned": "nobody"}, "lens.tuned", "unknown tuned lens 'nobody'"),
        ({"tuned": "two", "layers": "0-2"}, "lens.layers", "'two' has no map of layer 0"),
        ({"tuned": "two", "hook": "pre_attn"}, "lens.hook", "'two' reads post_block"),
    ],
)
def test_a_request_that_does_not_fit_its_tuned_lens_is_refused(
    http: httpx2.Client, lens: dict[str, Any], field: str, says: str
) -> None:
    assert http.post("/v1/lenses", json={"name": "two", "path": "some"}).status_code in (200, 201)
    answer = http.post("/v1/jobs", json={"model": "fake-model", "prompts": ["hello"], "lens": lens})
    assert (answer.status_code, answer.json()["field"]) == (400, field), answer.text
    assert says in answer.text


def test_only_an_operator_registers_and_everybody_looks(http: httpx2.Client, stack: Stack) -> None:
    assert http.post("/v1/lenses", json={"name": "calm", "path": "all"}).status_code == 201
    key = http.post(
        "/v1/keys", json={"name": "a user", "tenant": "theirs", "scopes": ["submit", "read"]}
    ).json()["key"]
    with httpx2.Client(
        base_url=stack.url, headers={"authorization": f"Bearer {key}"}, timeout=60
    ) as user:
        assert "calm" in [lens["name"] for lens in user.get("/v1/lenses").json()["lenses"]]
        assert user.post("/v1/lenses", json={"name": "mine", "path": "all"}).status_code == 403
        assert user.delete("/v1/lenses/calm").status_code == 403
    assert http.delete("/v1/lenses/calm").status_code == 204
    assert http.delete("/v1/lenses/calm").status_code == 404
