"""The TransformerLens-style facade gives TransformerLens' numbers, and the tutorials run and show
what they show: one served model.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbclient
import numpy as np
import pytest
from notebooks import TUTORIALS, difference as differs, lines, peer_code, printed, read, shown
from safetensors import safe_open
from stack import Stack
from tree import ROOT

from midstream.lens import ActivationCache, HookedModel, Logits, ops
from midstream.schemas.base.errors import MidstreamError

#: Of `tools/peers/lens_facade.py`.
GOLDEN = ROOT / "tests" / "data" / "hooked.safetensors"
#: Of float32 rows, as a share of the largest value: other kernels, in up to thirty layers. Of
#: log-probabilities: nats.
ROWS = 1e-4
NATS = 2e-3


class Golden:
    """What TransformerLens said."""

    def __init__(self) -> None:
        with safe_open(str(GOLDEN), "np") as file:
            self.arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
            about = file.metadata()
        self.prompt = about["prompt"]
        self.other = about["other"]
        self.ids, self.tokens, self.labels = (
            json.loads(about[name]) for name in ("ids", "tokens", "labels")
        )
        #: Layer that a run stops at → the layers in its cache.
        self.stopped: dict[str, list[int]] = json.loads(about["stopped"])

    def activations(self) -> list[str]:
        return [name for name in self.arrays if name.startswith("blocks.")]


@pytest.fixture(scope="module")
def golden() -> Golden:
    return Golden()


@pytest.fixture(scope="module")
def service(serve) -> Stack:
    artifacts = str(ROOT / "examples" / "data")
    return serve(model_name="SmolLM2-135M-Instruct", hooks="all,inside", artifacts_dir=artifacts)


@pytest.fixture(scope="module")
def model(service: Stack) -> Iterator[HookedModel]:
    hooked = HookedModel(url=service.url)
    with hooked.client:
        yield hooked


@pytest.fixture(scope="module")
def run(model: HookedModel, golden: Golden) -> tuple[Logits, ActivationCache]:
    return model.run_with_cache(golden.prompt)


def close(found: Any, wanted: np.ndarray, tolerance: float) -> None:
    """The shapes are equal, and no value is farther away than `tolerance` times the largest one."""
    assert found.shape == wanted.shape
    assert float(np.abs(found - wanted).max()) <= tolerance * max(1.0, float(np.abs(wanted).max()))


def test_activations_are_those_of_transformerlens(
    run: tuple[Logits, ActivationCache], golden: Golden
) -> None:
    _, cache = run
    assert set(golden.activations()) <= set(cache)
    for name in golden.activations():
        close(cache[name], golden.arrays[name], ROWS)


@pytest.mark.parametrize("stop", [0, 17, -12])
def test_a_run_that_stops_at_a_layer_is_that_of_transformerlens(
    model: HookedModel, golden: Golden, run: tuple[Logits, ActivationCache], stop: int
) -> None:
    stream, cache = model.run_with_cache(golden.prompt, stop_at_layer=stop)
    close(stream, golden.arrays[f"stopped.{stop}"], ROWS)
    assert sorted({int(name.split(".")[1]) for name in cache}) == golden.stopped[str(stop)]
    for name in cache:
        np.testing.assert_array_equal(cache[name], run[1][name])


def test_stacks_of_the_stream_are_those_of_transformerlens(
    run: tuple[Logits, ActivationCache], golden: Golden
) -> None:
    _, cache = run
    for name, options in (("accumulated_resid", {"incl_mid": True}), ("decompose_resid", {})):
        stack, labels = getattr(cache, name)(return_labels=True, pos_slice=-1, **options)
        assert labels == golden.labels[name]
        close(stack, golden.arrays[name], ROWS)
    close(cache.decompose_resid().sum(0), cache["resid_post", -1], ROWS)
    close(cache.stack_activation("resid_post"), cache.accumulated_resid()[1:], 0.0)


def test_predictions_are_those_of_transformerlens(
    run: tuple[Logits, ActivationCache], model: HookedModel, golden: Golden
) -> None:
    logits, _ = run
    length = len(golden.ids[0])
    assert logits.shape == (1, length, model.cfg.d_vocab)
    assert np.abs(logits[0, :, golden.tokens] - golden.arrays["logprobs"]).max() < NATS
    values, ids = logits[0].topk(5)
    assert ids[:, 0].tolist() == golden.arrays["top"][:, 0].tolist() == logits.argmax()[0].tolist()
    assert (np.diff(values) <= 0).all()
    close(logits.loss(per_token=True)[0], golden.arrays["loss"], NATS)
    assert model(golden.prompt, return_type="loss") == pytest.approx(
        float(golden.arrays["loss"].mean()), abs=NATS
    )


#: Edit of `tools/peers/lens_facade.py` → the same by our ops. (direction, cache of the other
#: prompt, tokens of the prompt) → hooks.
EDITS: dict[str, Callable[[np.ndarray, ActivationCache, int], list[Any]]] = {
    "add": lambda v, other, n: [("blocks.10.hook_resid_post", ops.add(v, scale=0.5, pos=-1))],
    "ablate": lambda v, other, n: [
        ([("resid_post", layer) for layer in range(10, 20)], ops.ablate(v))
    ],
    "clamp": lambda v, other, n: [("blocks.12.hook_resid_post", ops.clamp(v, low=-1, high=1))],
    "zero_heads": lambda v, other, n: [("blocks.20.attn.hook_z", ops.zero(heads=[1, 4]))],
    "zero_attn": lambda v, other, n: [("blocks.23.hook_attn_out", ops.zero())],
    "zero_mlp": lambda v, other, n: [("blocks.5.mlp.hook_post", ops.zero())],
    "patch": lambda v, other, n: [("blocks.8.hook_resid_pre", ops.patch(other, pos=[2, 3, 4]))],
    "pattern": lambda v, other, n: [("blocks.17.attn.hook_pattern", ops.attend({3: np.eye(n)}))],
    "two": lambda v, other, n: [
        ("blocks.10.hook_resid_post", ops.add(0.5 * v, pos=-1)),
        ("blocks.23.hook_attn_out", ops.zero()),
    ],
}


@pytest.fixture(scope="module")
def other(model: HookedModel, golden: Golden) -> ActivationCache:
    return model.run_with_cache(golden.other, lambda name: "hook_resid" in name)[1]


@pytest.mark.parametrize("name", EDITS)
def test_runs_with_edits_are_those_of_transformerlens(
    name: str, model: HookedModel, other: ActivationCache, golden: Golden
) -> None:
    hooks = EDITS[name](golden.arrays["direction"], other, len(golden.ids[0]))
    wanted = golden.arrays[f"edited.{name}"]
    found = model.run_with_hooks(golden.prompt, hooks)[0, :, golden.tokens]
    assert np.abs(found - wanted).max() < NATS
    assert np.abs(wanted - golden.arrays["logprobs"]).max() > 10 * NATS, (
        "the edit changes nothing: it shows nothing"
    )


def test_rows_of_an_array_are_written_as_rows_of_a_cache_are(
    model: HookedModel, other: ActivationCache, golden: Golden
) -> None:
    (hook,) = EDITS["patch"](np.zeros(0), other, 0)
    uploaded = [(hook[0], ops.replace(other[hook[0]][:, 2:5], pos=[2, 3, 4]))]
    found = [
        model.run_with_hooks(golden.prompt, hooks)[0, -1, golden.tokens]
        for hooks in ([hook], uploaded)
    ]
    assert np.abs(found[0] - found[1]).max() < NATS


def test_cached_rows_are_those_behind_the_edits(model: HookedModel, golden: Golden) -> None:
    direction = golden.arrays["direction"]
    name = "blocks.10.hook_resid_post"
    _, plain = model.run_with_cache(golden.prompt, name)
    with model.hooks([(name, ops.add(direction, scale=2.0, pos=[1, 3]))]):
        _, edited = model.run_with_cache(golden.prompt, name, remove_batch_dim=True)
    moved = edited[name] - plain[name][0]
    wanted = np.zeros_like(moved)
    wanted[[1, 3]] = 2.0 * direction
    close(moved, wanted, ROWS)
    close(model.run_with_cache(golden.prompt, name)[1][name], plain[name], ROWS)


def test_prompts_of_one_length_are_a_batch(model: HookedModel, golden: Golden) -> None:
    logits, cache = model.run_with_cache([golden.prompt, golden.other], [("pattern", 5), ("z", 5)])
    length = len(golden.ids[0])
    assert cache["pattern", 5].shape == (2, 9, length, length)
    assert cache["z", 5].shape == (2, length, 9, 64)
    assert logits[:, -1, golden.tokens].shape == (2, len(golden.tokens))
    alone = model(golden.other)
    assert np.abs(logits[1, -1, golden.tokens] - alone[0, -1, golden.tokens]).max() < NATS


def test_tokens_and_texts_are_those_of_the_tokenizer(model: HookedModel, golden: Golden) -> None:
    ids = model.to_tokens(golden.prompt)
    assert ids.tolist() == [golden.ids[0]]
    assert model.to_string(ids) == [golden.prompt]
    assert "".join(model.to_str_tokens(golden.prompt)) == golden.prompt
    assert model.to_single_token(" Paris") == golden.tokens[0]
    assert model.to_single_str_token(golden.tokens[0]) == " Paris"
    with pytest.raises(MidstreamError, match=r"string: .* has 4 tokens"):
        model.to_single_token("The Eiffel Tower")


def test_generation_is_steered_at_generated_tokens_too(model: HookedModel, golden: Golden) -> None:
    plain = model.generate(golden.prompt, 5, do_sample=False)
    assert plain.startswith(golden.prompt + " Paris")
    with model.hooks([("blocks.20.hook_resid_post", ops.zero(pos={"start": len(golden.ids[0])}))]):
        steered = model.generate(golden.prompt, 5, do_sample=False)
    assert steered.startswith(golden.prompt + " Paris")  # the prompt's rows are as they were
    assert steered != plain
    assert model.generate(golden.ids[0], 3, do_sample=False).shape == (1, len(golden.ids[0]) + 3)


def test_the_server_deletes_the_rows_of_a_cache(
    model: HookedModel, golden: Golden, tmp_path: Path
) -> None:
    _, cache = model.run_with_cache(golden.prompt, "blocks.0.hook_resid_post")
    model.client.captures.delete(cache.job)
    with pytest.raises(MidstreamError) as caught:
        model.run_with_hooks(golden.prompt, [("blocks.0.hook_resid_post", ops.patch(cache))])
    assert caught.value.status in (400, 404, 410)


# --- Tutorials
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_runs_and_prints_what_it_shows(
    path: Path, service: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MIDSTREAM_PUBLIC_URL", service.url)  # the kernel finds the stack by it
    written = read(path)
    run = read(path)
    nbclient.NotebookClient(
        run,
        timeout=300,
        startup_timeout=300,
        kernel_name="python3",
        resources={"metadata": {"path": tmp_path}},
    ).execute()
    for cell, now in zip(written.cells, run.cells, strict=True):
        if cell.cell_type != "code":
            continue
        assert cell.outputs or "print(" not in cell.source, "run tools/peers/tutorials.py --write"
        assert differs(printed(cell), printed(now)) == ""
        assert shown(cell) == shown(now)
    assert lines(peer_code(written)) > 10
