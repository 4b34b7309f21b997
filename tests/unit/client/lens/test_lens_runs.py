"""What `HookedModel` asks the server for: which edits, tokens, captures and sampling each call
sends.
"""

from typing import Any

import numpy as np
import pytest
from refusal_kit import refuses

from midstream.lens import HookedModel, ops
from midstream.schemas.jobs.jobs import CaptureResults, JobResult, Output, State
from midstream.schemas.prompts.tokens import Detokenized, Tokenized

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
ADD, ZERO = ops.add([1.0, 2.0]), ops.zero()
POST, PRE = "blocks.1.hook_resid_post", "blocks.0.hook_resid_pre"


class Served:
    """A client of a model whose tokens are letters, with a token that its tokenizer puts before a
    text unless `bare`.
    """

    url = "http://127.0.0.1:1"

    def __init__(self, bare: bool = False) -> None:
        self.bare, self.asked = bare, list[dict[str, Any]]()

    def models(self) -> list[str]:
        return ["m"]

    def model(self, name: str) -> dict[str, Any]:
        return CARD

    def tokenize(self, model: str, text: str, add_special_tokens: bool = True) -> Tokenized:
        tokens = [BOS] * (add_special_tokens and not self.bare) + [ord(letter) for letter in text]
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
        captures = CaptureResults(status="ok", job="job_1")
        return JobResult(
            id="job_1",
            model="m",
            state=State.SUCCEEDED,
            outputs=outputs,
            capture_results=captures,
            determinism=None,
            attempt=1,
        )

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


def test_hooks_of_the_backward_pass_are_refused() -> None:
    model, client = served()
    with refuses("no gradients"):
        model.run_with_hooks("a", bwd_hooks=[(POST, ADD)])
    with refuses("no gradients"), model.hooks(bwd_hooks=[(POST, ADD)]):
        pass
    assert client.asked == []


def test_a_run_captures_the_prompt_behind_its_edits_and_generates_one_token() -> None:
    model, client = served()
    _, cache = model.run_with_cache("ab", [("resid_post", 1), ("resid_pre", -1)], lora="l")
    (asked,) = client.asked
    assert asked["capture"] == {
        "hooks": {"pre_attn": [1], "post_block": [1]},
        "positions": "all_prompt",
        "at": "after",
    }
    assert (asked["prompts"], asked["sampling"], asked["lora"], asked["model"]) == (
        ["ab"],
        {"max_tokens": 1},
        "l",
        "m",
    )
    assert cache.prompts == [[BOS, ord("a"), ord("b")]]
    with refuses("sampling"):
        model("ab", sampling={"seed": 1})


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
    with refuses("the head is split"):
        logits[0, -1, 5]
    assert hooked("a", return_type=None) is None


def test_incl_bwd_captures_gradients_of_the_mean_loss_in_a_second_job() -> None:
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


def test_incl_bwd_refuses_edits() -> None:
    model, client = served()
    with refuses("unedited"):
        model.run_with_cache(
            "a", fwd_hooks=[(POST, ADD)], return_type=None, incl_bwd=True, scalar={"kind": "loss"}
        )
    assert client.asked == []
