"""The cache of the TransformerLens-style facade: stacks of activations, their labels and bounds,
over rows that say where they are from.
"""

from typing import Any

import numpy as np
import pytest
from refusal_kit import refuses

from midstream.client.lens.cache import ActivationCache
from midstream.client.lens.names import BLOCK, Card, Site, chosen
from midstream.lens import ops
from midstream.schemas.prompts.selectors import HOOKS

LAYERS, TOKENS, WIDTH = 3, 4, 2
CARD = Card(
    id="tiny",
    architecture="LlamaForCausalLM",
    num_layers=LAYERS,
    hidden_size=WIDTH,
    vocab_size=9,
    max_model_len=9,
    dtype="float32",
    hooks=list(HOOKS),
)


class Rows:
    """A reader.

    The row of token t at hook h (its place in `HOOKS`) of layer l in prompt r is 1000·r + 100·l +
    10·h + t.
    """

    job = "job_1"

    def array(self, layer: int, hook: Any, request: int) -> np.ndarray:
        value = 1000 * request + 100 * layer + 10 * HOOKS.index(hook)
        return (value + np.arange(TOKENS, dtype=np.float32))[:, None].repeat(WIDTH, 1)


def cache(names: Any = None, prompts: int = 2) -> ActivationCache:
    return ActivationCache(Rows(), CARD, chosen(names, CARD), [[5] * TOKENS] * prompts)  # type: ignore[arg-type]


def value(hook: Any, layer: int, prompt: int = 0, token: int = 0) -> float:
    return 1000.0 * prompt + 100 * layer + 10 * HOOKS.index(hook) + token


@pytest.mark.parametrize(
    ("options", "labels"),
    [
        ({}, ["0_pre", "1_pre", "2_pre", "final_post"]),
        ({"layer": -1}, ["0_pre", "1_pre", "2_pre", "final_post"]),
        ({"layer": 1}, ["0_pre", "1_pre"]),
        ({"layer": 2, "incl_mid": True}, ["0_pre", "0_mid", "1_pre", "1_mid", "2_pre"]),
        ({"layer": 1, "mlp_input": True}, ["0_pre", "1_pre", "1_mid"]),
        ({"incl_mid": True}, ["0_pre", "0_mid", "1_pre", "1_mid", "2_pre", "2_mid", "final_post"]),
    ],
)
def test_the_accumulated_stream_goes_up_to_a_layer(
    options: dict[str, Any], labels: list[str]
) -> None:
    stack, found = cache().accumulated_resid(return_labels=True, **options)
    assert (found, stack.shape) == (labels, (len(labels), 2, TOKENS, WIDTH))
    hooks = {"pre": "pre_attn", "mid": "post_attn"}
    parts = [label.split("_") for label in labels]
    wanted = [
        value("post_block", LAYERS - 1) if at == "final" else value(hooks[kind], int(at))
        for at, kind in parts
    ]
    assert stack[:, 0, 0, 0].tolist() == wanted
    assert (stack[:, 1, 2] - stack[:, 0, 0] == 1002).all()  # of the other prompt, two tokens later


@pytest.mark.parametrize(
    ("options", "labels"),
    [
        (
            {},
            [
                "embed",
                "0_attn_out",
                "0_mlp_out",
                "1_attn_out",
                "1_mlp_out",
                "2_attn_out",
                "2_mlp_out",
            ],
        ),
        ({"layer": 1}, ["embed", "0_attn_out", "0_mlp_out"]),
        ({"layer": 1, "mlp_input": True}, ["embed", "0_attn_out", "0_mlp_out", "1_attn_out"]),
        ({"layer": 1, "mlp_input": True, "mode": "mlp"}, ["embed", "0_mlp_out"]),
        (
            {"layer": -1, "mlp_input": True, "mode": "attn"},
            ["embed", "0_attn_out", "1_attn_out", "2_attn_out"],
        ),
        ({"layer": 0}, ["embed"]),
        ({"layer": 2, "mode": "mlp", "incl_embeds": False}, ["0_mlp_out", "1_mlp_out"]),
    ],
)
def test_the_stream_is_decomposed_into_what_each_part_adds(
    options: dict[str, Any], labels: list[str]
) -> None:
    stack, found = cache().decompose_resid(return_labels=True, **options)
    assert found == labels
    wanted = [
        value("pre_attn", 0) if label == "embed" else value(label.partition("_")[2], int(label[0]))
        for label in labels
    ]
    assert stack[:, 0, 0, 0].tolist() == wanted


@pytest.mark.parametrize(
    ("chosen", "tokens"),
    [(-1, 3), ((1, 3), [1, 2]), ((2, None), [2, 3]), ([0, 3], [0, 3]), (None, [0, 1, 2, 3])],
)
def test_positions_of_a_stack_are_chosen(chosen: Any, tokens: Any) -> None:
    stack = cache().decompose_resid(pos_slice=chosen)
    assert (stack[0, 0, ..., 0] - value("pre_attn", 0)).tolist() == tokens


@pytest.mark.parametrize(("layer", "count"), [(-1, 3), (None, 3), (2, 2), (3, 3)])
def test_one_activation_of_the_layers_below_is_stacked(layer: Any, count: int) -> None:
    found = cache().stack_activation("mlp_out", layer)
    assert found[:, 1, 3, 0].tolist() == [value("mlp_out", each, 1, 3) for each in range(count)]


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (lambda c: c.stack_activation("mlp_out", 0), "no layers below"),
        (lambda c: c.stack_activation("mlp_out", 4), "4 is out of range"),
        (lambda c: c.accumulated_resid(-2), "-2 is out of range"),
        (lambda c: c.accumulated_resid(apply_ln=True), "apply_ln"),
        (lambda c: c.decompose_resid(apply_ln=True), "apply_ln"),
        (lambda c: c.decompose_resid(mode="both"), "mode"),
        (lambda c: c.decompose_resid(0, incl_embeds=False), "no components are below"),
        (lambda c: c.remove_batch_dim(), "2 prompts"),
        (
            lambda c: c.decompose_resid(),
            "was not captured .*hook_resid_pre, hook_resid_post of captured layers",
        ),
        (lambda c: c["resid_pre", 3], "out of range"),
    ],
)
def test_what_a_cache_cannot_give_is_refused(use: Any, said: str) -> None:
    with refuses(match=said):
        use(cache(lambda name: name.endswith(("hook_resid_pre", "hook_resid_post"))))


def test_a_cache_holds_what_was_captured_and_no_more() -> None:
    found = cache([("resid_post", 1), ("mlp_out", -1)])
    assert list(found) == ["blocks.1.hook_resid_post", "blocks.2.hook_mlp_out"]
    assert ("resid_post", 1) in found
    assert ("mlp_out", 2) in found
    assert ("resid_post", 0) not in found
    assert "blocks.1.no_such" not in found
    assert len(cache()) == LAYERS * sum(CARD.has(name) for name in BLOCK)


def test_one_prompt_needs_no_batch_axis() -> None:
    alone = cache(prompts=1).remove_batch_dim()
    assert alone["resid_post", 0].shape == (TOKENS, WIDTH)
    assert alone.accumulated_resid(pos_slice=-1).shape == (LAYERS + 1, WIDTH)


def test_rows_are_patched_from_one_of_the_cached_prompts() -> None:
    found = cache("blocks.1.hook_resid_post")
    entry = {"layers": 1, "hook": "post_block", "positions": [2], "alpha": 1.0}
    for prompt in range(2):
        (made,) = ops.patch(found, pos=2, source_pos=3, prompt=prompt).entries(
            Site("hook_resid_post", 1), CARD, "fwd_hooks[0]"
        )
        assert made == entry | {"source": {"prompt": prompt, "position": 3, "run": "job_1"}}
    with refuses("name one"):
        ops.patch(found, pos=2)
    with refuses("has no blocks.0.hook_resid_post"):
        ops.patch(found, prompt=0).entries(Site("hook_resid_post", 0), CARD, "fwd_hooks[0]")


def test_gradients_have_the_names_of_their_activations_with_grad_at_the_end() -> None:
    sites = chosen([("resid_post", 1)], CARD)
    prompts = [[5] * TOKENS]
    gradients = ActivationCache(Rows(), CARD, sites, prompts, scale=0.5)  # type: ignore[arg-type]
    both = ActivationCache(Rows(), CARD, sites, prompts, gradients=gradients)  # type: ignore[arg-type]
    name = "blocks.1.hook_resid_post"
    assert list(both) == [name, f"{name}_grad"]
    assert np.array_equal(both[f"{name}_grad"], both[name] / 2)
    assert np.array_equal(both["resid_post_grad", 1], both[f"{name}_grad"])
    assert both.remove_batch_dim()["resid_post_grad", 1].shape == (TOKENS, WIDTH)
    assert ("resid_post_grad", 1) in both
    assert ("resid_post_grad", 2) not in both
    with refuses("hook_mlp_out_grad was not captured"):
        both["mlp_out_grad", 1]
    with refuses("incl_bwd=True"):
        cache()["resid_post_grad", 1]
