"""Do names and global steering work from Python and the command line, through the whole stack?"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from midstream_fake_engine.model import HIDDEN_SIZE
from refusal_kit import refuses
from safetensors.numpy import save_file

from midstream.client import Client
from midstream.schemas.base.errors import MidstreamError

pytest_plugins = ["shared_stack"]
pytestmark = [pytest.mark.xdist_group("shared_stack"), pytest.mark.usefixtures("nameless")]

JOY, CALM = np.ones(HIDDEN_SIZE, np.float32), np.linspace(-1, 1, HIDDEN_SIZE, dtype=np.float32)


def text(client: Client, *steering: Any) -> str:
    """What the fake engine says: steering decides it."""
    return client.completion(
        "fake-model", "once upon a time", steering=list(steering), max_tokens=12
    ).text


def test_a_module_steers_like_its_scaled_entries(client: Client) -> None:
    view = client.modules.put(
        "joy", {"post_block.2": JOY, "mlp_out.1": CALM}, description="to smile"
    )
    assert [(entry.hook, entry.layers) for entry in view.entries] == [
        ("mlp_out", [1]),
        ("post_block", [2]),
    ]
    entries = [{"layers": 1, "hook": "mlp_out", "vector": CALM}, {"layers": 2, "vector": JOY}]
    named = text(client, {"module": "joy"})
    assert named == text(client, *entries) != text(client)
    doubled = text(client, {"module": "joy", "scale": 2})
    assert doubled == text(client, *({**entry, "scale": 2.0} for entry in entries)) != named


@pytest.mark.long
def test_the_command_line_uses_and_exports_modules(
    client: Client, midstream: Callable[..., str], tmp_path: Path
) -> None:
    file = tmp_path / "joy.safetensors"
    save_file({"post_block.2": JOY}, file, {"op": "add", "scale": "0.5"})
    midstream("put", "module", "joy", str(file), "--set", "description=to smile")
    done = midstream("submit", "once upon a time", "--steer", "@joy:4", "--max-tokens=12", "--json")
    assert json.loads(done)["outputs"][0]["text"] == text(
        client, {"layers": 2, "vector": JOY, "scale": 2.0}
    )
    written = midstream("export", "module", "joy", "-o", str(tmp_path / "joy.gguf"))
    assert written == f"joy written to {tmp_path}/joy.gguf as gguf\n"


def test_the_command_line_sets_global_steering_and_shows_ranks(
    client: Client, midstream: Callable[..., str], tmp_path: Path
) -> None:
    np.save(tmp_path / "joy.npy", JOY)
    plain = text(client)
    midstream("put", "global", f"{tmp_path}/joy.npy:2:2.0")
    assert text(client) != plain
    assert "add at post_block 2" in midstream("get", "global")
    for _ in range(20):  # a worker that is too busy for two seconds does not answer
        dynamic = midstream("get", "ranks")
        if "did not answer" not in dynamic:
            break
    assert "determinism: consistent, 2 ranks in 1 stage of 1 worker, checksum " in dynamic
    midstream("delete", "global")
    assert text(client) == plain


def test_steering_of_another_width_is_refused_and_changes_nothing(client: Client) -> None:
    before = client.global_steering.get()
    for ask in (
        client.global_steering.put,
        lambda entries: client.modules.put("wide", entries),
        lambda entries: text(client, *entries),
    ):
        with refuses(kind="invalid_request", field="steering[0].vector.shape"):
            ask([{"layers": 2, "vector": [1.0, 2.0]}])
    assert (client.global_steering.get().version, client.modules.list()) == (before.version, [])


MATRICES = {
    "rotation": np.eye(2, HIDDEN_SIZE, dtype=np.float32),
    "weight": np.ones((2, HIDDEN_SIZE), np.float32),
    "bias": np.ones(2, np.float32),
}


@pytest.mark.parametrize(
    "entry",
    [
        {"layers": "0-2", "vector": JOY, "scale": 0.5, "positions": "all_generated"},
        {
            "layers": 2,
            "hook": "pre_attn",
            "vector": CALM,
            "scale": 0.1,
            "norm_match": True,
            "positions": [0, {"text": "upon"}],
        },
        {
            "layers": 1,
            "hook": "mlp_out",
            "vector": CALM.astype(np.float16),
            "op": "clamp",
            "low": -1.0,
        },
        {"layers": [0, 2], "vector": JOY, "op": "ablate", "strength": 0.5},
        {"layers": 1, "vector": JOY, "op": "replace", "alpha": 0.5},
        {"layers": 2, "op": "lowrank", **MATRICES},
    ],
)
def test_an_exported_module_is_the_same_when_registered_again(
    client: Client, tmp_path: Path, entry: dict[str, Any]
) -> None:
    view = client.modules.put("mood", [entry, {"layers": 1, "hook": "attn_out", "vector": JOY}])
    assert client.modules.export("mood", tmp_path / "mood.safetensors") == "safetensors"
    assert client.modules.put("again", tmp_path / "mood.safetensors").digest == view.digest


def test_an_export_that_cannot_be_made_is_refused(client: Client, tmp_path: Path) -> None:
    client.modules.put("joy", {"mlp_out.2": JOY})
    for name, path, says in (
        ("joy", "joy.gguf", "cannot hold mlp_out"),
        ("joy", "joy.bin", "implies no format"),
        ("no", "no.pt", "unknown module"),
    ):
        with pytest.raises(MidstreamError, match=says):
            client.modules.export(name, tmp_path / path)
    assert list(tmp_path.iterdir()) == []
