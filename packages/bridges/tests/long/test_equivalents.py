"""The table of equivalents in docs/coming-from.md: TransformerLens, nnsight, `HookedModel` and our
client give the same numbers.
"""

import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from tree import ROOT

from midstream import PatchStudy
from midstream.lens import HookedModel, ops
from midstream_ops.demo_model import fetch_demo_model

#: Run by hand: an environment of its own.
pytestmark = [pytest.mark.timeout(1500), pytest.mark.packages]
SCRIPT = ROOT / "tools" / "peers" / "nnsight_calls.py"
P = "The Eiffel Tower is located in the city of"
OTHER = "The Colosseum is located in the city of"
LOOP = (19, 23, 25)
#: Of float32 rows, as a share of the largest value; of log-probabilities: nats.
ROWS = 1e-4
NATS = 2e-3
END = "<|im_end|>"


def recorded(python: Path, path: Path, *script: str) -> dict[str, np.ndarray]:
    """What a script writes that runs in the environment of TransformerLens and nnsight."""
    command = [str(python), *script, str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return load_file(path)


@pytest.fixture(scope="module")
def python(library) -> Path:
    return library("lens")


@pytest.fixture(scope="module")
def theirs(python: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """What nnsight gave."""
    rows = tmp_path_factory.mktemp("nnsight") / "rows.safetensors"
    return recorded(python, rows, str(SCRIPT), str(fetch_demo_model()))


@pytest.fixture(scope="module")
def model(serve) -> Iterator[HookedModel]:
    hooked = HookedModel(url=serve(hooks="all,inside").url)
    with hooked.client:
        yield hooked


def close(found: np.ndarray, wanted: np.ndarray) -> None:
    """The shapes are equal, and no value is farther away than `ROWS` times the largest one."""
    assert found.shape == wanted.shape
    assert float(np.abs(found - wanted).max()) <= ROWS * float(np.abs(wanted).max())


def logprobs(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    wide = wide - wide.max(-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(-1, keepdims=True))


def test_every_activation_is_that_of_transformerlens(
    model: HookedModel, python: Path, tmp_path: Path
) -> None:
    found = recorded(python, tmp_path / "lens.safetensors", "tools/peers/lens_facade.py")
    wanted = {name: array for name, array in found.items() if name.startswith("blocks.")}
    _, cache = model.run_with_cache(P)
    assert set(cache) == set(model.hook_names) == wanted.keys()
    for name in model.hook_names:
        close(cache[name], wanted[name])


#: Name in the cache → hook of the client.
READ = {
    "resid_pre": "pre_attn",
    "resid_post": "post_block",
    "attn_out": "attn_out",
    "mlp_out": "mlp_out",
    "z": "z",
}


def test_rows_are_those_of_nnsight(model: HookedModel, theirs: dict[str, np.ndarray]) -> None:
    _, cache = model.run_with_cache(P)
    job = model.client.run(
        prompts=[P],
        capture={"hooks": dict.fromkeys(READ.values(), 12), "positions": "all_prompt"},
        progress=False,
    )
    reader = model.client.capture(job)
    for name, hook in READ.items():
        rows = reader.array(12, hook)
        close(rows, theirs[name][0])
        close(cache[name, 12].reshape(1, *rows.shape), theirs[name])
    stream, below = model.run_with_cache(P, stop_at_layer=12)
    close(stream, theirs["resid_pre"])
    rows = model.client.rows(P, layers=range(12))
    np.testing.assert_array_equal(rows.array(11), below["resid_post", 11][0])
    close(reader.heads(12, "z").reshape(rows.shape), theirs["z"][0])
    close(cache["pattern", 12], theirs["pattern"])
    close(model.client.attention(P)[12], theirs["pattern"][0])


def test_predictions_are_those_of_nnsight(
    model: HookedModel, theirs: dict[str, np.ndarray]
) -> None:
    tokens = theirs["ids"].tolist()
    last = model.client.lens(P, layers=-1, positions="last_prompt", tokens=tokens)
    wanted = logprobs(theirs["logits"][0, -1])[tokens]
    assert np.abs(last.named_logprobs[0, 0] - wanted).max() < NATS
    assert np.abs(model(P)[0, -1, tokens] - wanted).max() < NATS
    middle = model.client.lens(P, layers=12, positions="all_prompt", tokens=tokens)
    assert np.abs(middle.named_logprobs[0] - logprobs(theirs["lens"][0])[:, tokens]).max() < NATS


def _patched(model: HookedModel) -> tuple[Any, dict[str, Any]]:
    _, cache = model.run_with_cache(OTHER, "blocks.8.hook_resid_post")
    hook = ("blocks.8.hook_resid_post", ops.patch(cache, pos=[3]))
    return hook, {"patch": [{"layers": 8, "positions": [3], "source": {"run": cache.job}}]}


#: Edit → (the hook of `HookedModel`, the fields of the client). (v, model) → both.
EDITS: dict[str, Callable[[np.ndarray, HookedModel], tuple[Any, dict[str, Any]]]] = {
    "add": lambda v, model: (
        ("blocks.12.hook_resid_post", ops.add(v)),
        {"steering": [{"layers": 12, "vector": v}]},
    ),
    "ablate": lambda v, model: (
        ("blocks.12.hook_resid_post", ops.ablate(v)),
        {"steering": [{"layers": 12, "op": "ablate", "vector": v}]},
    ),
    "zero_head": lambda v, model: (
        ("blocks.12.attn.hook_z", ops.zero(heads=[3])),
        {
            "patch": [
                {
                    "layers": 12,
                    "hook": "z",
                    "heads": 3,
                    "positions": "all_prompt",
                    "source": {"zeros": True},
                }
            ]
        },
    ),
    "patch": lambda v, model: _patched(model),
}


@pytest.mark.parametrize("name", EDITS)
def test_edits_are_those_of_nnsight(
    name: str, model: HookedModel, theirs: dict[str, np.ndarray]
) -> None:
    tokens = theirs["ids"].tolist()
    hook, fields = EDITS[name](theirs["v"], model)
    wanted = logprobs(theirs[name][0])[:, tokens]
    assert np.abs(wanted - logprobs(theirs["logits"][0])[:, tokens]).max() > 10 * NATS, (
        "the edit changes nothing: it shows nothing"
    )
    assert np.abs(model.run_with_hooks(P, [hook])[0, :, tokens] - wanted).max() < NATS
    found = model.client.lens(P, layers=-1, positions="all_prompt", tokens=tokens, **fields)
    assert np.abs(found.named_logprobs[0] - wanted).max() < NATS


def test_a_sweep_is_a_loop_over_traces(model: HookedModel, theirs: dict[str, np.ndarray]) -> None:
    study = PatchStudy(P, OTHER, " Paris", " Rome", client=model.client)
    study.sweep(
        hooks="resid_pre", layers=list(LOOP), positions=[9], metric="logit_diff", progress=False
    )
    paris, rome = theirs["ids"]
    wanted = theirs["grid"][:, paris] - theirs["grid"][:, rome]
    assert np.abs(study.grid().values["pre_attn"][:, 0] - wanted).max() < NATS
    assert np.ptp(wanted) > 1


def test_generation_is_that_of_nnsight(model: HookedModel, theirs: dict[str, np.ndarray]) -> None:
    (tokens,) = theirs["generated"].tolist()
    wanted = model.to_string(tokens)
    assert wanted.endswith(END), "the model ends the text within 20 tokens"
    assert model.generate(P, 20, do_sample=False) == wanted
    answer = model.client.completion(model=model.card.id, prompt=P, max_tokens=20, temperature=0)
    assert P + answer.text == wanted.removesuffix(END)


def squeezed(code: str) -> str:
    return re.sub(r"\s+", "", code)


def test_the_table_shows_the_code_that_was_run() -> None:
    table = (
        (ROOT / "docs" / "coming-from.md")
        .read_text()
        .partition("## Equivalents")[2]
        .partition("\n## ")[0]
    )
    rows = [
        re.split(r"(?<!\\) \| ", line.strip("| "))
        for line in table.splitlines()
        if line.startswith("|")
    ][2:]
    code = squeezed(SCRIPT.read_text())
    shown = [each for row in rows for each in re.findall(r"`([^`]+)`", row[2])]
    assert len(shown) > 15
    assert [each for each in shown if squeezed(each) not in code] == []
