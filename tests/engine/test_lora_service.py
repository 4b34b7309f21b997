"""Adapters on the whole service with the real engine: registered over HTTP, named by requests,
merged into weights as reference.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import httpx2
import pytest
from adapters import LLAMA, make_adapter, merged
from host import prompt_of, relative_error
from reference import Edit, Reference
from refusal_kit import refuses
from stack import Stack
from tiny import LAYERS, checkpoint
from tolerances import FP32_LOGPROBS, FP32_ROWS

from midstream.client import Client

pytestmark = pytest.mark.long

ALL = list(range(LAYERS))


class Served(NamedTuple):
    stack: Stack
    client: Client
    root: Path
    base: Path
    truth: dict[str, Reference]


@pytest.fixture(scope="module")
def served(tiny_stack: Stack, llama: Path) -> Iterator[Served]:
    """Adapters `one` and `two`, registered."""
    base, root = llama, Path(tiny_stack.settings.artifacts_of("loras"))
    make_adapter(root, "first", base, LLAMA)
    make_adapter(root, "deep/second", base, LLAMA[:2], rank=4)
    make_adapter(root, "large", base, LLAMA, rank=32)
    truth = {"": Reference(base)}
    for name, path in (("one", "first"), ("two", "deep/second")):
        truth[name] = Reference(merged(base, root / path, root.parent / name))
    with Client(tiny_stack.url) as client:
        client.loras.put("one", "first")
        client.loras.put("two", "deep/second", description="attention only")
        yield Served(tiny_stack, client, root, base, truth)


def test_a_job_names_an_adapter_and_gets_the_rows_of_merged_weights(served: Served) -> None:
    prompt = prompt_of(30)
    capture = {
        "hooks": {"pre_attn": "all", "mlp_out": "all", "post_block": "all"},
        "positions": "all",
    }
    for name in ("one", "two", ""):
        result = served.client.run(
            model="tiny",
            prompts=[prompt],
            sampling={"max_tokens": 3},
            capture=capture,
            **({"lora": name} if name else {}),
        )
        tokens = prompt + result.outputs[0].token_ids
        wanted, reader = served.truth[name].rows(tokens[:-1]), served.client.capture(result)
        for hook in capture["hooks"]:
            for layer in ALL:
                assert (
                    relative_error(reader.array(layer, hook), wanted[hook, layer]) <= FP32_ROWS
                ), (name, hook, layer)
        lora = served.client.loras.get(name) if name else None
        manifest = httpx2.get(f"{served.stack.url}/v1/captures/{result.id}").json()
        for named in (result.lora, reader.manifest().lora):
            assert (named and (named.name, named.digest)) == (lora and (name, lora.digest))
        assert (manifest["lora"] or {}).get("digest") == (lora and lora.digest)


def test_what_cannot_be_served_is_refused_when_it_is_registered(served: Served) -> None:
    """Before any request runs; the message says what is valid."""
    for path, says in {
        "large": "r is 32; the worker accepts at most 16 (setting engine.max_lora_rank)",
        "../llama": "is not a path below artifacts_dir/loras",
        "missing": "there is no folder 'missing' in artifacts_dir/loras",
        "deep": "has no adapter_config.json",
        "other-base": "has the shape",
    }.items():
        if path == "other-base":
            make_adapter(
                served.root, path, checkpoint("qwen2", served.root.parent / "qwen2"), LLAMA
            )
        with refuses(kind="invalid_request", field="path") as refused:
            served.client.loras.put("bad", path)
        assert says in refused.value.detail
    assert [lora.name for lora in served.client.loras.list()] == ["one", "two"]


def test_completions_under_two_adapters_and_none_are_answered_side_by_side(served: Served) -> None:
    prompt, wanted = prompt_of(25, seed=3), {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
    for _ in range(2):  # the second time from the prefix cache
        with ThreadPoolExecutor(3) as pool:
            calls = {
                name: pool.submit(
                    served.client.completion,
                    "tiny",
                    prompt,
                    **wanted,
                    **({"lora": name} if name else {}),
                )
                for name in ("one", "two", "")
            }
        for name, call in calls.items():
            answer = call.result()
            assert (answer.determinism is not None) == bool(name), (
                "an adapter alone is accounted for"
            )
            tokens = prompt + [int(word[1:]) for word in answer.text.split()]
            served.truth[name].rows(tokens)
            assert (
                served.truth[name].logits[len(prompt) - 1 : -1].argmax(-1).tolist()
                == tokens[len(prompt) :]
            ), name


def test_a_sweep_under_an_adapter_measures_the_merged_model(served: Served) -> None:
    clean, corrupt, answer, foil = prompt_of(9, seed=1), prompt_of(9, seed=2), [40], [41]
    result = served.client.sweep(
        model="tiny",
        lora="one",
        metric="logit_diff",
        hooks=["post_block", "mlp_out"],
        layers="0,2",
        positions=[3, 8],
        pairs=[
            {
                "clean": clean,
                "corrupt": corrupt,
                "answer": answer,
                "foil": foil,
                "alignment": "left",
            }
        ],
    )
    truth = served.truth["one"]
    rows = truth.rows(clean)
    for hook in ("post_block", "mlp_out"):
        for row, layer in enumerate((0, 2)):
            for column, position in enumerate((3, 8)):
                truth.rows(
                    corrupt,
                    [Edit(layer, rows[hook, layer][position], [position], hook=hook, op="replace")],
                )
                wanted = float(truth.logits[-1][40] - truth.logits[-1][41])
                assert abs(result.pairs[0].grids[hook][row][column] - wanted) <= FP32_LOGPROBS, (
                    hook,
                    layer,
                    position,
                )
    assert not result.skipped
