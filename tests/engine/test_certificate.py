"""Does the certification run prove right adapters on the real engine, and refuse wrong ones by
name?
"""

import itertools
import re
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from draft_heads import eagle3_head, echo_target
from families import BF16_ONLY, CHANGED, FAMILIES, checkpoint, configs
from host import NO_RELAY, Host, capture_of, prompt_of
from nursery import Nursery
from own_configs import folder_of
from tiny import CHECKPOINTS, LAYERS
from wait_kit import warn_if_late

from midstream.schemas.base.records import from_json
from midstream.schemas.jobs.certificates import Certificate
from midstream.schemas.prompts.selectors import HOOKS, STREAM_HOOKS

SMALL: dict[str, Any] = {
    "certify": True,
    "engine.max_model_len": 128,
    "engine.max_num_seqs": 16,
    "kv_cache_gib": 0.125,
}
#: The stream is one tensor there, not a pair whose sum it is.
ONE_TENSOR = frozenset(
    {"gpt2", "gpt-neox", "gpt-neox-sequential", "olmo", "olmo2", "opt", "smollm3", "starcoder2"}
    | {"gemma4", "olmo3", "granite", "granite4", "cohere2", "falcon-h1"}
)
#: Its layers are one branch each, of two kinds, so no hook reads it alone; half of the pair is the
#: branch.
NO_BRANCH = frozenset({"nemotron-h"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("certificates")


@pytest.fixture
def start(nursery: Nursery, folder: Path) -> Iterator[Callable[..., Host]]:
    """Start an engine that certifies a checkpoint, unless the settings say otherwise, with a fault.

    Each ends with its test.
    """
    started: list[Host] = []

    def begin(
        name: str | Path, fault: str = "", env: dict[str, str] | None = None, **settings: Any
    ) -> Host:
        number = len(list(folder.glob("engine-*")))
        path = name if isinstance(name, Path) else checkpoint(name, folder / name)
        host = nursery.host(
            folder / f"engine-{number}", path, env, fault=fault, **(SMALL | settings)
        )
        started.append(host)
        return host

    yield begin
    for host in started:
        host.close()


def certificate_of(host: Host) -> Certificate:
    made = msgspec.convert(host.info["certificate"], Certificate)
    (file,) = (Path(host.settings.data_dir) / "certificates").iterdir()
    assert from_json(file.read_bytes(), Certificate) == made
    return made


@pytest.mark.long
def test_what_is_unproven_is_in_the_certificate_and_every_manifest(
    start: Callable[..., Host],
) -> None:
    """A hook whose neighbours are not installed, and an option with which rows were not
    compared.
    """
    host = start("llama", hooks="attn_out", engine_options={"max_logprobs": 7})
    made = certificate_of(host)
    assert made.proven == []
    assert list(made.unproven) == ["attn_out"]
    assert host.info["hooks"] == ["attn_out"]
    assert ["max_logprobs=7" in caveat for caveat in made.caveats] == [True, False, False]
    assert (
        made.caveats[1] == "attn_out is unproven: the setting hooks leaves out what would prove it"
    )
    assert made.caveats[2].startswith("not compared with transformers: the setting hooks")
    capture = capture_of([0], "all_prompt", hook="attn_out")
    job = host.job(prompt_of(9), max_tokens=1, capture=capture)
    host.run(job)
    assert host.capture(job).manifest(0).caveats == host.info["caveats"] == made.caveats


@pytest.mark.slow("an engine starts, and is certified")
def test_every_hook_is_proven_and_nothing_of_the_run_is_left(start: Callable[..., Host]) -> None:
    host = start("llama")
    made = certificate_of(host)
    assert made.proven == list(HOOKS)
    assert made.absent == {}
    assert made.not_compared == {}
    assert all(law.ok for law in made.laws)
    assert compared(made) == dict.fromkeys([*HOOKS, "logits"], True)
    names = " ".join(law.law for law in made.laws)
    wanted = [
        "post_block = post_attn + mlp_out",
        "[L+1]",
        "MLP(mlp_in)",
        "embedding",
        "EAGLE-3",
        "chunked",
        "decoding",
        "mixed",
        "ends early",
    ]
    assert [want for want in wanted if want not in names] == []
    assert {law.checked for law in made.laws if law.law.startswith("post_attn = pre_attn")} == {
        LAYERS
    }
    for norms in (made.row_norms, made.first_norms):
        assert {hook: len(of_layers) for hook, of_layers in norms.items()} == dict.fromkeys(
            HOOKS, LAYERS
        )
        assert min(map(min, norms.values())) > 0
    status = host.call("midstream_status")[0]
    assert [
        status[name]
        for name in (
            "rows_used",
            "vectors",
            "actions",
            "epoch",
            "requests",
            "outbox",
            "captured_rows",
            "token_rows",
        )
    ] == [0] * 8
    assert host.all_receipts() == []
    assert not host.root.exists() or not any(host.root.iterdir())
    job = host.job(prompt_of(20), max_tokens=3, capture=capture_of([0, 3], "all"))
    host.run(job)
    assert host.capture(job).positions(0) == list(range(22))
    rows = host.capture(job).array(3)
    typical = np.median(np.linalg.norm(rows[1:], axis=1))
    assert 0.5 < made.row_norms["post_block"][3] / typical < 2
    assert 0.5 < made.first_norms["post_block"][3] / np.linalg.norm(rows[0]) < 2


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "fault", "absent"),
    [
        ("llama", "shift_attn_out", {"attn_out"}),
        ("gpt2", "branch_post_attn", {"post_attn", "attn_out"}),
        # whose MLP has two parts, and no `mlp_out`
        ("granite4", "shift_mlp_in", {"mlp_in"}),
    ],
)
def test_a_wrong_hook_is_absent_with_its_reason(
    start: Callable[..., Host], name: str, fault: str, absent: set[str]
) -> None:
    host = start(
        name, fault, **{"engine.enable_prefix_caching": name not in FAMILIES}
    )  # vLLM caches the states of Mamba otherwise
    made = certificate_of(host)
    assert made.absent.keys() == absent
    assert not absent & set(host.info["hooks"])
    wrong = fault.split("_", 1)[1]
    assert "certification" in host.info["absent"][wrong]
    assert any(not law.ok and wrong in law.hooks for law in made.laws)


@pytest.mark.long
@pytest.mark.parametrize("drafter", ["ngram", "eagle3"])
def test_early_ends_are_proven_beside_drafts(
    start: Callable[..., Host], drafter: str, tmp_path: Path
) -> None:
    target = echo_target(tmp_path / "target")
    head = {"draft_model": str(eagle3_head(tmp_path / "head", target))}
    options = head if drafter == "eagle3" else {}
    made = certificate_of(start(target, speculative_tokens=3, drafter=drafter, **options))
    laws = [law for law in made.laws if "ends early" in law.law]
    assert laws
    assert all(law.ok and law.checked for law in laws)
    assert made.absent == {}


@pytest.mark.long
@pytest.mark.parametrize(("name", "hooks"), [("granite", ["attn_out", "mlp_out"]), ("llama", [])])
def test_outputs_that_a_model_multiplies_are_named(
    start: Callable[..., Host], name: str, hooks: list[str]
) -> None:
    assert start(name, certify=False).info["multiplied"] == hooks


@pytest.mark.long
def test_a_wrong_stream_keeps_the_engine_from_starting(start: Callable[..., Host]) -> None:
    with pytest.raises(AssertionError, match="could not be proven"):
        start("llama", "half_post_block")


@pytest.mark.matrix
@pytest.mark.parametrize("name", [*CHECKPOINTS, *FAMILIES])
def test_every_wrong_adapter_of_every_family_is_refused(
    start: Callable[..., Host], name: str
) -> None:
    """Each hook that the right adapter proves is made wrong in each way: then it is absent, or no
    engine starts.
    """
    dtype = "bfloat16" if name in BF16_ONLY else "float32"
    options = SMALL | {
        "certify": False,
        "tuning.sweep_entry": False,
        "engine.enable_prefix_caching": False,
        "engine.dtype": dtype,
    }
    host = start(
        name,
        env=CHANGED.get(name),
        **options,
        **({"engine.block_size": 32} if name in FAMILIES else {}),
    )
    right = host.call("certify_with", "")
    hooks = right["certificate"]["proven"]
    served = []
    tried = set()
    for wrong, hook in itertools.product(("shift", "branch", "half"), hooks):
        if wrong != "shift" and hook not in STREAM_HOOKS:
            continue
        made = host.call("certify_with", f"{wrong}_{hook}")
        if wrong != "shift" and made["taps"] == right["taps"]:
            continue  # one tensor is the stream: it has no half
        tried.add(wrong)
        if "refused" not in made and hook not in made["certificate"]["absent"]:
            served.append((wrong, hook))
    assert served == []
    assert tried == {"shift", "branch", "half"} - ({"branch"} if name in NO_BRANCH else set()) - (
        {"half"} if name in ONE_TENSOR else set()
    )
    assert host.call("certify_with", "")["certificate"]["proven"] == hooks


def compared(made: Certificate) -> dict[str, bool]:
    """Hook, or `logits` → whether its rows are transformers'."""
    return {
        law.law.removesuffix(" = transformers'"): law.ok
        for law in made.laws
        if law.law.endswith("transformers'")
    }


@pytest.mark.long
@pytest.mark.parametrize(
    ("architecture", "change", "hook", "dtype"),
    [
        ("OlmoeForCausalLM", {"clip_qkv": 0.5}, "attn_out", "float32"),
        pytest.param(
            "OlmoeForCausalLM", {"clip_qkv": 0.5}, "attn_out", "bfloat16", marks=pytest.mark.matrix
        ),
        pytest.param(
            "OlmoeForCausalLM",
            {"norm_topk_prob": True},
            "mlp_out",
            "float32",
            marks=pytest.mark.matrix,
        ),
        pytest.param(
            "StableLmForCausalLM",
            {"hidden_act": "relu"},
            "mlp_out",
            "float32",
            marks=pytest.mark.matrix,
        ),
        pytest.param(
            "GptOssForCausalLM",
            {"swiglu_limit": 0.3},
            "mlp_out",
            "float32",
            marks=pytest.mark.matrix,
        ),
        pytest.param(
            "GptOssForCausalLM",
            {"swiglu_limit": 0.3},
            "mlp_out",
            "bfloat16",
            marks=pytest.mark.matrix,
        ),
        pytest.param(
            "FalconH1ForCausalLM",
            {"time_step_limit": [0.0, 0.01]},
            "post_attn",
            "float32",
            marks=pytest.mark.matrix,
        ),
    ],
)
def test_a_checkpoint_that_vllm_computes_otherwise_is_refused(
    start: Callable[..., Host],
    folder: Path,
    architecture: str,
    change: dict[str, Any],
    hook: str,
    dtype: str,
) -> None:
    """The laws hold: without the comparison it is served, with a caveat and other numbers.

    See also `perturbed`.
    """
    path = configs.checkpoint(architecture, folder / f"{architecture}-{'-'.join(change)}", **change)
    options: dict[str, Any] = {
        "engine.dtype": dtype,
        "engine.block_size": 32,
        "engine.enable_prefix_caching": False,
    }
    name, value = next(iter(change.items()))
    wrong = (
        rf"{hook} of layer \d differs from transformers' by .*not transformers' "
        rf"defaults: .*{name}={re.escape(repr(value))}"
    )
    with pytest.raises(AssertionError, match=wrong):
        start(path, **options)
    served = start(path, compare="off", **options)
    assert "not compared with transformers: the setting compare=off" in served.info["caveats"]
    assert {"pre_attn", "post_block"} <= set(certificate_of(served).proven)


@pytest.mark.long
def test_vllms_transformers_backend_is_compared(start: Callable[..., Host]) -> None:
    """vLLM wraps transformers' own classes there, in the process that loads the model."""
    made = certificate_of(start("smollm3", compare="require"))
    assert compared(made) == dict.fromkeys([*HOOKS, "logits"], True)
    assert made.caveats == []


@pytest.mark.matrix
def test_a_worker_compares_vllms_transformers_backend(folder: Path) -> None:
    """Start an engine whose core is a process of its own, as a worker does."""
    directory = folder / "engine-worker"
    directory.mkdir()
    with closing(
        Host(directory, checkpoint("smollm3", folder / "smollm3-worker"), **SMALL)
    ) as host:
        made = certificate_of(host)
        assert compared(made) == dict.fromkeys([*HOOKS, "logits"], True)
        assert made.caveats == []


@pytest.mark.long
def test_what_cannot_be_compared_is_a_caveat_or_a_refusal(start: Callable[..., Host]) -> None:
    small = {"tuning.compare_memory_gib": 1e-6}
    host = start("llama", **small)
    assert [
        caveat
        for caveat in certificate_of(host).caveats
        if "not compared with transformers: its first layer" in caveat
    ]
    job = host.job(prompt_of(9), max_tokens=1, capture=capture_of([0], "all_prompt"))
    host.run(job)
    assert host.capture(job).manifest(0).caveats == host.info["caveats"]
    with pytest.raises(
        AssertionError,
        match=r"cannot be compared with transformers .setting compare=require.: its first layer",
    ):
        start("llama", compare="require", **small)


@pytest.mark.long
def test_an_engine_that_was_not_certified_says_so(start: Callable[..., Host]) -> None:
    host = start("llama", certify=False)
    assert "certificate" not in host.info or host.info["certificate"] is None
    assert [caveat for caveat in host.info["caveats"] if "not certified" in caveat]
    job = host.job(prompt_of(9), max_tokens=1, capture=capture_of([0], "all_prompt"))
    host.run(job)
    assert host.capture(job).manifest(0).caveats == host.info["caveats"]


@pytest.mark.matrix
@pytest.mark.parametrize(
    "name", ["llama", "gemma2", "gpt2", "gpt-neox", "olmo2", "mixtral", "qwen3-moe"]
)
def test_every_family_is_proven_in_bf16(start: Callable[..., Host], name: str) -> None:
    made = certificate_of(start(name, **{"engine.dtype": "bfloat16"}))
    assert made.absent == {}
    assert [law for law in made.laws if not law.ok] == []
    warn_if_late(made.seconds, 5, "a start waits for it")


@pytest.mark.matrix
def test_a_compiled_forward_is_proven(start: Callable[..., Host]) -> None:
    made = certificate_of(start("llama", **{"engine.enforce_eager": False}))
    assert made.absent == {}
    assert made.mode == "compiled"
    assert made.not_compared == {"EAGLE-3 auxiliary states": "the forward pass is compiled"}


@pytest.mark.matrix
@pytest.mark.parametrize(
    "way",
    [
        pytest.param({"engine.tensor_parallel_size": 2}, id="tp2"),
        pytest.param({"engine.pipeline_parallel_size": 2}, id="pp2"),
    ],
)
def test_ranks_are_proven_together(
    way: dict[str, int], qwen3: Path, two_ranks: None, tmp_path: Path
) -> None:
    with closing(Host(tmp_path, qwen3, **(SMALL | way))) as host:
        made = certificate_of(host)
        assert compared(made) == dict.fromkeys([*HOOKS, "logits"], True)
        assert made.absent == {}
        assert made.tp == way.get("engine.tensor_parallel_size", 1)
        assert made.pp == way.get("engine.pipeline_parallel_size", 1)
        (boundary,) = (law for law in made.laws if law.law == "pre_attn[L+1] = post_block[L]")
        assert boundary.checked == LAYERS - 1, "those between stages are among them"
        assert host.call("same_content")
        assert NO_RELAY


@pytest.mark.matrix
@pytest.mark.parametrize(
    "way",
    [{"engine.tensor_parallel_size": 2}, {"engine.pipeline_parallel_size": 2}],
    ids=["tp2", "pp2"],
)
def test_ranks_that_compute_otherwise_are_refused(
    way: dict[str, int], two_ranks: None, tmp_path: Path
) -> None:
    path = configs.checkpoint(
        "StableLmForCausalLM", tmp_path / "stablelm", hidden_act="relu"
    )  # vLLM's OLMoE does not run on two ranks
    directory = tmp_path / "engine"
    directory.mkdir()
    with pytest.raises(
        AssertionError,
        match=r"mlp_out of layer 0 differs from transformers' by .*hidden_act='relu'",
    ):
        Host(directory, path, **(SMALL | way))


@pytest.mark.matrix
def test_a_rank_that_fails_alone_ends_the_certificate_on_all(
    qwen3: Path, two_ranks: None, tmp_path: Path
) -> None:
    """The other rank waits for it in the MLP's all-reduce."""
    with pytest.raises(AssertionError, match="failed at MLP on rank 1: fault injected: lose_law"):
        Host(
            tmp_path, qwen3, **SMALL, fault="lose_law:rank=1", **{"engine.tensor_parallel_size": 2}
        )


# --- A class that transformers does not have is proven by its laws --------------------------------


NAME = "InternLM2ForCausalLM"
OPTIONS = SMALL | {"engine_options": {"load_format": "dummy"}}
DRAWN = {"DRAW_WEIGHTS": "1"}


@pytest.fixture
def begin(
    nursery: Nursery, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Host]]:
    started: list[Host] = []

    def begin(env: dict[str, str] | None = None, **settings: Any) -> Host:
        folder = tmp_path_factory.mktemp("alone")
        started.append(
            nursery.host(
                folder / "engine",
                folder_of(NAME, folder / "checkpoint"),
                env,
                **(OPTIONS | settings),
            )
        )
        return started[-1]

    yield begin
    for host in started:
        host.close()


@pytest.mark.matrix
def test_every_hook_is_proven_and_a_caveat_says_that_nothing_was_compared(
    begin: Callable[..., Host],
) -> None:
    host = begin(DRAWN)
    assert host.info["hooks"] == list(HOOKS)
    assert host.info["certificate"]["absent"] == {}
    assert "not compared with transformers: load_format=dummy" in host.info["caveats"]


@pytest.mark.matrix
def test_a_wrong_hook_is_absent(begin: Callable[..., Host]) -> None:
    assert begin(DRAWN, fault="shift_attn_out").info["certificate"]["absent"].keys() == {"attn_out"}


@pytest.mark.matrix
def test_a_branch_that_its_weights_hide_is_not_proven(begin: Callable[..., Host]) -> None:
    """vLLM's own dummy weights are so small that the MLP shows nowhere: the walk draws others."""
    assert not {"mlp_in", "mlp_out"} & set(begin().info["certificate"]["proven"])
