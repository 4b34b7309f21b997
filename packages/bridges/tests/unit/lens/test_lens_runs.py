"""What `HookedModel` asks the server for: which edits, tokens, captures and sampling each call
sends, and what its cache gives: stacks of activations, their labels and bounds.
"""

from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from job_kit import job_result
from refusal_kit import refuses

from midstream.lens import HookedModel, ops
from midstream.schemas.jobs.jobs import Output
from midstream.schemas.jobs.results import JobResult
from midstream.schemas.prompts.selectors import HOOKS
from midstream.schemas.prompts.tokens import Detokenized, Tokenized
from midstream_bridges.lens.cache import ActivationCache
from midstream_bridges.lens.names import BLOCK, Card, NamedSite, chosen

CARD = {
    "id": "m",
    "architecture": "LlamaForCausalLM",
    "num_layers": 2,
    "hidden_size": 2,
    "vocab_size": 99,
    "max_model_len": 9,
    "dtype": "float32",
    "hooks": ["pre_attn", "post_block"],
}
BOS = 1
ADD = ops.add([1.0, 2.0])
ZERO = ops.zero()
POST = "blocks.1.hook_resid_post"
PRE = "blocks.0.hook_resid_pre"


class Served:
    """A client of a model whose tokens are letters, with a token that its tokenizer puts before a
    text unless `bare`.
    """

    url = "http://127.0.0.1:1"

    def __init__(self, bare: bool = False) -> None:
        self.bare = bare
        self.asked = list[dict[str, Any]]()

    def models(self) -> list[str]:
        return ["m"]

    def model(self, name: str) -> dict[str, Any]:
        return CARD

    def tokenize(self, model: str, text: str, add_special_tokens: bool = True) -> Tokenized:
        tokens = [ord(letter) for letter in text]
        if add_special_tokens and not self.bare:
            tokens.insert(0, BOS)
        return Tokenized(
            count=len(tokens),
            max_model_len=9,
            tokens=tokens,
            token_strs=[chr(token) for token in tokens],
        )

    def detokenize(self, model: str, tokens: list[int]) -> Detokenized:
        letters = [chr(token) for token in tokens if token != BOS]
        return Detokenized(prompt="".join(letters), token_strs=letters)

    def run(self, **request: Any) -> JobResult:
        self.asked.append(request)
        outputs = [
            Output(
                index=number,
                text="z",
                token_ids=[ord("z")] * (1 + number),
                finish_reason="length",
                prompt_tokens=1,
            )
            for number in range(len(request["prompts"]))
        ]
        return job_result(outputs=outputs)

    def capture(self, result: JobResult) -> JobResult:
        return result

    @property
    def edits(self) -> list[str]:
        """Of the last request: where."""
        last = self.asked[-1]
        return [
            f"{entry['hook']}.{entry['layers']}"
            for kind in ("steering", "patch")
            for entry in last.get(kind, [])
        ]


def served(bare: bool = False) -> tuple[HookedModel, Served]:
    client = Served(bare)
    return HookedModel(client=client), client  # type: ignore[arg-type]


def test_hooks_of_a_block_end_with_it() -> None:
    model, client = served()
    model.add_hook(PRE, ZERO)
    with model.hooks([(POST, ADD)]):
        model("a")
        assert client.edits == ["post_block.1", "pre_attn.0"]
        with (
            refuses("no activation"),
            model.hooks([("blocks.0.hook_none", ADD)]),
        ):
            pass
        model.run_with_cache("a", POST)
        assert client.edits == ["post_block.1", "pre_attn.0"]
        model.generate("a")
        assert client.edits == ["post_block.1", "pre_attn.0"]
    model("a")
    assert client.edits == ["pre_attn.0"]
    model.run_with_hooks("a", [(POST, ADD)])
    assert client.edits == ["post_block.1", "pre_attn.0"]
    model.reset_hooks()
    model("a")
    assert client.edits == []


def test_backward_hooks_and_edits_of_gradients_are_refused() -> None:
    model, client = served()
    with refuses("no gradients"):
        model.run_with_hooks("a", bwd_hooks=[(POST, ADD)])
    with refuses("no gradients"), model.hooks(bwd_hooks=[(POST, ADD)]):
        pass
    assert client.asked == []
    with refuses("unedited"):
        model.run_with_cache(
            "a", fwd_hooks=[(POST, ADD)], return_type=None, incl_bwd=True, scalar={"kind": "loss"}
        )
    assert client.asked == []


def test_a_run_captures_the_prompt_behind_its_edits_and_generates_no_token() -> None:
    model, client = served()
    _, cache = model.run_with_cache("ab", [("resid_post", 1), ("resid_pre", -1)], lora="l")
    (asked,) = client.asked
    assert asked["capture"] == {
        "hooks": {"pre_attn": [1], "post_block": [1]},
        "positions": "all_prompt",
        "at": "after",
    }
    assert asked["prompts"] == ["ab"]
    assert asked["sampling"] == {"max_tokens": 0}
    assert asked["lora"] == "l"
    assert asked["model"] == "m"
    assert cache.prompts == [[BOS, ord("a"), ord("b")]]
    with refuses("sampling"):
        model("ab", sampling={"seed": 1})


@pytest.mark.parametrize(
    ("stop", "hooks", "at", "cached"),
    [
        (0, {"pre_attn": [0]}, "before", []),
        (1, {"pre_attn": [0], "post_block": [0]}, "after", [PRE, "blocks.0.hook_resid_post"]),
        (-1, {"pre_attn": [0], "post_block": [0]}, "after", [PRE, "blocks.0.hook_resid_post"]),
        (2, {"pre_attn": [0, 1], "post_block": [0, 1]}, "after", 4),
    ],
)
def test_a_run_that_stops_at_a_layer_asks_for_the_layers_below_alone(
    stop: int, hooks: Any, at: str, cached: Any
) -> None:
    model, client = served()
    rows = np.ones((2, 2), np.float32)
    client.capture = lambda result: SimpleNamespace(job="j", array=lambda *_, **__: rows)  # type: ignore[assignment, return-value]
    stream, cache = model.run_with_cache("a", stop_at_layer=stop, remove_batch_dim=True)
    (asked,) = client.asked
    assert asked["capture"] == {"hooks": hooks, "positions": "all_prompt", "at": at}
    assert asked["sampling"] == {"max_tokens": 0}
    assert "lens" not in asked
    assert stream.shape == (1, 2, 2)
    assert list(cache) == cached or len(cache) == cached
    assert model("a", stop_at_layer=stop).shape == (1, 2, 2)
    name, layers = [*hooks.items()][-1]
    entry = {name: layers[-1:]}
    assert client.asked[-1]["capture"] == {"hooks": entry, "positions": "all_prompt", "at": at}


@pytest.mark.parametrize("stop", [3, -3, True, "1", 0.5])
def test_a_run_stops_at_a_layer_of_the_model(stop: Any) -> None:
    model, client = served()
    with refuses(field="stop_at_layer", allowed="-2 to 2"):
        model.run_with_cache("a", stop_at_layer=stop)
    with refuses(field="incl_bwd"):
        model.run_with_cache("a", stop_at_layer=1, incl_bwd=True, return_type="loss")
    assert client.asked == []


@pytest.mark.parametrize(
    ("options", "sampling"),
    [
        ({}, {"max_tokens": 10, "temperature": 1.0, "ignore_eos": False}),
        (
            {"do_sample": False, "temperature": 3.0},
            {"max_tokens": 10, "temperature": 0.0, "ignore_eos": False},
        ),
        (
            {
                "max_new_tokens": 2,
                "temperature": 0.5,
                "top_k": 3,
                "top_p": 0.9,
                "seed": 0,
                "stop_at_eos": False,
            },
            {
                "max_tokens": 2,
                "temperature": 0.5,
                "ignore_eos": True,
                "top_k": 3,
                "top_p": 0.9,
                "seed": 0,
            },
        ),
    ],
)
def test_generation_samples_as_it_was_told_to(
    options: dict[str, Any], sampling: dict[str, Any]
) -> None:
    model, client = served()
    assert model.generate("ab", **options) == "abz"
    assert client.asked[-1]["sampling"] == sampling


def test_what_is_generated_has_the_form_of_the_prompt() -> None:
    model, _ = served()
    assert model.generate(["a", "abc"]) == ["az", "abczz"]
    assert model.generate([7, 8]).tolist() == [[7, 8, ord("z")]]
    assert model.generate([[7, 8], [9, 7]]) == [[7, 8, ord("z")], [9, 7, ord("z"), ord("z")]]
    assert model.generate("a", return_type="tokens").tolist() == [[BOS, ord("a"), ord("z")]]
    assert model.generate([ord("a")], return_type="str") == ["az"]
    with refuses("return_type"):
        model.generate("a", return_type="text")


def test_tokens_before_a_text_are_the_tokenizers() -> None:
    model, client = served()
    assert (
        model.to_tokens("a").tolist()
        == model.to_tokens("a", prepend_bos=True).tolist()
        == [[BOS, ord("a")]]
    )
    assert model.to_tokens(["a", "b"], prepend_bos=False).tolist() == [[ord("a")], [ord("b")]]
    model("a", prepend_bos=False)
    # as tokens: the server would add one to the text
    assert client.asked[-1]["prompts"] == [[ord("a")]]
    model("a")
    assert client.asked[-1]["prompts"] == ["a"]
    with refuses("adds no token"):
        served(bare=True)[0].to_tokens("a", prepend_bos=True)


@pytest.mark.parametrize(
    ("input", "said"),
    [
        (["a", "bc"], "2, 3. tokens"),
        ([[1, 2], [3]], "differ in length"),
        ([], "shape .0."),
        ([1.5], "shape .1."),
        (np.zeros((1, 1, 1), int), "shape .1, 1, 1."),
    ],
)
def test_prompts_that_do_not_fit_together_are_refused(input: Any, said: str) -> None:
    model, client = served()
    with refuses(match=said):
        model(input)
    assert client.asked == []


def test_a_model_without_a_lens_says_so_when_logits_are_asked_for() -> None:
    client = Served()
    client.model = lambda name: CARD | {"readings": {"lens": "the head is split"}}  # type: ignore[method-assign]
    hooked = HookedModel("m", client=client)  # type: ignore[arg-type]
    logits = hooked("a")
    assert "lens" not in client.asked[-1]
    assert client.asked[-1]["sampling"] == {"max_tokens": 1}
    with refuses("the head is split"):
        logits[0, -1, 5]
    assert hooked("a", return_type=None) is None


def test_incl_bwd_captures_gradients_of_a_scalar_in_a_second_job() -> None:
    model, client = served()
    with refuses("return_type 'logits' is no scalar"):
        model.run_with_cache("abc", incl_bwd=True)
    assert client.asked == []
    scalar = {"kind": "logit", "token": "x"}
    _, cache = model.run_with_cache(["abc", "abd"], POST, incl_bwd=True, scalar=scalar)
    _, asked = client.asked
    assert asked["capture"] == {
        "hooks": {"post_block": [1]},
        "positions": "all_prompt",
        "of": "gradient",
        "scalar": scalar,
    }
    assert cache.gradients is not None
    assert cache.gradients.scale == 1.0


# --- Lens cache ---


DEPTH = 3
TOKENS = 4
WIDTH = 2
WIDE_CARD = Card(
    id="tiny",
    architecture="LlamaForCausalLM",
    num_layers=DEPTH,
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
    return ActivationCache(Rows(), WIDE_CARD, chosen(names, WIDE_CARD), [[5] * TOKENS] * prompts)  # type: ignore[arg-type]


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
    assert found == labels
    assert stack.shape == (len(labels), 2, TOKENS, WIDTH)
    hooks = {"pre": "pre_attn", "mid": "post_attn"}
    parts = [label.split("_") for label in labels]
    wanted = [
        value("post_block", DEPTH - 1) if at == "final" else value(hooks[kind], int(at))
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


def test_parts_that_do_not_sum_to_the_stream_are_no_decomposition() -> None:
    granite = cache()
    granite.card = msgspec.structs.replace(WIDE_CARD, multiplied=["attn_out", "mlp_out"])
    with refuses(
        "the model multiplies attn_out, mlp_out before it adds them", field="decompose_resid"
    ):
        granite.decompose_resid()


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


def test_a_cache_holds_what_was_captured_with_or_without_a_batch_axis() -> None:
    found = cache([("resid_post", 1), ("mlp_out", -1)])
    assert list(found) == ["blocks.1.hook_resid_post", "blocks.2.hook_mlp_out"]
    assert ("resid_post", 1) in found
    assert ("mlp_out", 2) in found
    assert ("resid_post", 0) not in found
    assert "blocks.1.no_such" not in found
    assert len(cache()) == DEPTH * sum(WIDE_CARD.has(name) for name in BLOCK)
    alone = cache(prompts=1).remove_batch_dim()
    assert alone["resid_post", 0].shape == (TOKENS, WIDTH)
    assert alone.accumulated_resid(pos_slice=-1).shape == (DEPTH + 1, WIDTH)


def test_rows_are_patched_from_one_of_the_cached_prompts() -> None:
    found = cache("blocks.1.hook_resid_post")
    entry = {"layers": 1, "hook": "post_block", "positions": [2], "alpha": 1.0}
    for prompt in range(2):
        (made,) = ops.patch(found, pos=2, source_pos=3, prompt=prompt).entries(
            NamedSite("hook_resid_post", 1), WIDE_CARD, "fwd_hooks[0]"
        )
        assert made == entry | {"source": {"prompt": prompt, "position": 3, "run": "job_1"}}
    with refuses("name one"):
        ops.patch(found, pos=2)
    with refuses("has no blocks.0.hook_resid_post"):
        ops.patch(found, prompt=0).entries(
            NamedSite("hook_resid_post", 0), WIDE_CARD, "fwd_hooks[0]"
        )


def test_gradients_have_the_names_of_their_activations_with_grad_at_the_end() -> None:
    sites = chosen([("resid_post", 1)], WIDE_CARD)
    prompts = [[5] * TOKENS]
    gradients = ActivationCache(Rows(), WIDE_CARD, sites, prompts, scale=0.5)  # type: ignore[arg-type]
    both = ActivationCache(Rows(), WIDE_CARD, sites, prompts, gradients=gradients)  # type: ignore[arg-type]
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
