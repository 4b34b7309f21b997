"""Where hooks inside attention and MLP are found, in layers of vLLM's own module classes without
weights.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.model_executor.layers.attention import Attention, ChunkedLocalAttention
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.v1.attention.backend import AttentionType

from midstream.schemas.model.banks import RowShape
from midstream.schemas.prompts.selectors import INSIDE
from midstream.workers.runner.files.finished_rows import BankColumns
from midstream.workers.runner.hooks.layer_kinds import attention_of
from midstream.workers.runner.plane.inside_hooks import Group, Inner, _wrap, find

HIDDEN = 64
HEADS = 4
KEYS = 2
WIDTH = 16
NEURONS = 96
DENSE = [hook for hook in INSIDE if hook != "router"]


def bare(kind: type[nn.Module], **facts: Any) -> nn.Module:
    """A module of this class that has these attributes, and no weights."""
    module = kind.__new__(kind)
    nn.Module.__init__(module)
    for name, value in facts.items():
        setattr(module, name, value)
    return module


def attention(tp: int = 1, **facts: Any) -> nn.Module:
    keys = max(1, KEYS // tp)
    own = {
        "num_heads": HEADS // tp,
        "num_kv_heads": keys,
        "head_size": WIDTH,
        "head_size_v": WIDTH,
        "kv_sharing_target_layer_name": None,
    }
    return bare(Attention, **(own | facts))


def block(tp: int = 1, **facts: Any) -> nn.Module:
    """Like Llama's attention."""
    found = nn.Module()
    found.attn = attention(tp, **facts)
    sizes = [HEADS // tp * WIDTH, max(1, KEYS // tp) * WIDTH, max(1, KEYS // tp) * WIDTH]
    found.qkv_proj = bare(
        QKVParallelLinear,
        input_size=HIDDEN,
        output_size=sum(sizes) * tp,
        output_partition_sizes=sizes,
        total_num_kv_heads=KEYS,
    )
    found.o_proj = bare(
        RowParallelLinear, input_size=HEADS * WIDTH, output_size=HIDDEN, input_is_parallel=True
    )
    return found


def layer(tp: int = 1, **facts: Any) -> nn.Module:
    found = nn.Module()
    found.self_attn = block(tp, **facts)
    found.mlp = nn.Module()
    found.mlp.gate_up_proj = bare(
        MergedColumnParallelLinear, input_size=HIDDEN, output_size=2 * NEURONS
    )
    found.mlp.down_proj = bare(
        RowParallelLinear, input_size=NEURONS, output_size=HIDDEN, input_is_parallel=True
    )
    return found


def located(made: nn.Module, rank: int = 0, tp: int = 1) -> tuple[dict[str, Any], dict[str, str]]:
    found, absent = find([(0, made)], INSIDE, Group(rank, tp, HIDDEN))
    return {hook: inners[0] for hook, inners in found.items()}, absent


def test_a_layer_like_llamas_has_all_but_a_router() -> None:
    made = layer()
    found, absent = located(made)
    assert list(found) == DENSE
    assert absent == {"router": "layer 0: it has no experts"}
    assert [(found[hook].module, found[hook].side) for hook in ("q", "k", "v")] == [
        (made.self_attn.attn, place) for place in range(3)
    ]
    assert [found[hook].side for hook in ("z", "mlp_act", "q_proj", "k_proj")] == [
        0,
        0,
        "output",
        "output",
    ]
    assert found["z"].module == made.self_attn.o_proj
    assert found["mlp_act"].module == made.mlp.down_proj
    assert found["q_proj"].first == 0
    assert found["k_proj"].first == HEADS * WIDTH
    assert found["k_proj"].module == made.self_attn.qkv_proj
    assert found["z"].columns.row == RowShape(heads=HEADS, width=WIDTH)
    assert found["k"].columns.row == RowShape(heads=KEYS, width=WIDTH)
    assert found["mlp_act"].columns.row == RowShape(heads=1, width=NEURONS)


@pytest.mark.parametrize(
    ("rank", "keys", "records"),
    [(0, (0, 16), True), (1, (0, 16), False), (2, (16, 32), True), (3, (16, 32), False)],
)
def test_key_heads_that_ranks_share_are_recorded_by_the_first_of_them(
    rank: int, keys: tuple[int, int], records: bool
) -> None:
    """Four ranks with one query head each, over two key heads."""
    found, _ = located(layer(4), rank, 4)
    assert (found["k"].columns.start, found["k"].columns.stop) == keys
    assert found["k"].columns.records is records
    assert found["q"].columns.start == 16 * rank
    assert found["q"].columns.stop == 16 * rank + 16
    assert found["q"].columns.records is True
    assert found["mlp_act"].columns.start == 24 * rank
    assert found["mlp_act"].columns.stop == 24 * rank + 24


def test_what_lora_puts_around_a_projection_is_found_instead_of_it() -> None:
    made = layer()
    for holder, name in (
        (made.self_attn, "qkv_proj"),
        (made.self_attn, "o_proj"),
        (made.mlp, "down_proj"),
    ):
        wrapper = nn.Module()
        wrapper.base_layer = getattr(holder, name)
        setattr(holder, name, wrapper)
    found, _ = located(made)
    assert list(found) == DENSE
    assert found["q_proj"].module == made.self_attn.qkv_proj
    assert found["z"].module == made.self_attn.o_proj
    assert found["mlp_act"].module is made.mlp.down_proj


def test_fused_experts_have_a_router_and_no_neurons() -> None:
    made = layer()
    made.mlp = nn.Module()
    made.mlp.gate = bare(
        ReplicatedLinear, input_size=HIDDEN, output_size=8, params_dtype=None, out_dtype=None
    )
    made.mlp.experts = bare(nn.Module, moe_config=SimpleNamespace(num_logical_experts=8))
    found, absent = located(made)
    assert absent == {"mlp_act": "layer 0: its experts are fused"}
    assert found["router"].module == made.mlp.gate
    assert found["router"].columns.row == RowShape(heads=1, width=8)


def gated() -> nn.Module:
    """The projection also gives what attention's result is multiplied with."""
    made = layer()
    made.self_attn.qkv_proj.output_partition_sizes = [2 * HEADS * WIDTH, KEYS * WIDTH, KEYS * WIDTH]
    return made


def with_narrow_values() -> nn.Module:
    """`z` has a row of another width than queries: it stays, and they are absent."""
    made = layer(head_size_v=WIDTH // 2)
    made.self_attn.o_proj.input_size = HEADS * WIDTH // 2
    made.self_attn.qkv_proj.output_partition_sizes = [
        HEADS * WIDTH,
        KEYS * WIDTH,
        KEYS * WIDTH // 2,
    ]
    return made


def with_latent_attention() -> nn.Module:
    """Without heads of queries and keys."""
    made = layer()
    made.self_attn.attn = bare(MLAAttention, num_heads=HEADS, v_head_dim=WIDTH)
    return made


def with_wide_logits() -> nn.Module:
    made = layer()
    made.mlp.gate = bare(
        ReplicatedLinear,
        input_size=HIDDEN,
        output_size=8,
        params_dtype=torch.bfloat16,
        out_dtype=torch.float32,
    )
    made.mlp.experts = bare(nn.Module, moe_config=SimpleNamespace(num_logical_experts=8))
    return made


@pytest.mark.parametrize(
    ("made", "lacking", "says"),
    [
        (gated(), {"q_proj", "k_proj"}, "gives more than queries, keys and values"),
        (with_narrow_values(), {"q", "q_proj"}, "its heads have another width than those of z"),
        (with_latent_attention(), {"q", "k", "v", "q_proj", "k_proj"}, "latent"),
        (with_wide_logits(), {"router"}, "returns torch.float32, not the model's dtype"),
        (
            layer(kv_sharing_target_layer_name="model.layers.0"),
            {"k", "v"},
            "uses the keys and values of another layer",
        ),
        (layer(head_size_v=8), {"v"}, "another width"),
        (nn.Module(), set(DENSE), ""),
    ],
    ids=[
        "gated",
        "z of narrow values",
        "latent",
        "wide logits",
        "shared",
        "narrow values",
        "nothing",
    ],
)
def test_what_is_not_there_is_absent_with_the_reason(
    made: nn.Module, lacking: set[str], says: str
) -> None:
    _, absent = located(made)
    assert lacking <= absent.keys()
    assert all(says in absent[hook] for hook in lacking)


def test_layers_of_different_widths_leave_a_hook_out() -> None:
    other = layer()
    other.mlp.down_proj.input_size = 2 * NEURONS
    found, absent = find([(0, layer()), (1, other)], INSIDE, Group(0, 1, HIDDEN))
    assert "mlp_act" not in found
    assert absent["mlp_act"] == "layer 1 has rows of another width than layer 0"


@pytest.mark.parametrize("as_tuple", [False, True])
def test_edited_rows_take_the_place_of_what_a_module_gets_and_gives(as_tuple: bool) -> None:
    """Arguments by place and by name, also views of a wider tensor; of what it returns, the hook's
    columns alone.
    """
    given = torch.arange(24.0).view(2, 12)
    columns = BankColumns(RowShape(heads=1, width=4), 0, 4)

    class Doubling(nn.Module):
        def forward(self, first: torch.Tensor, second: torch.Tensor) -> Any:
            self.got = first.clone(), second.clone()
            rows = torch.cat([first, second], dim=1) * 2
            return (rows, None) if as_tuple else rows

    def visit(rows: torch.Tensor, _: Any) -> None:
        assert tuple(rows.shape) == (2, 4)
        assert rows.is_contiguous()
        rows += 100

    for always, busy in ((True, False), (False, True), (False, False)):
        module = Doubling()
        site = SimpleNamespace(busy=busy)
        inners = [Inner(module, 1, columns), Inner(module, "output", columns, first=2)]
        _wrap(module, [(inner, visit, site) for inner in inners], always)  # type: ignore[misc]
        added = 100.0 if always or busy else 0.0
        found = module(given[:, :4], second=given[:, 6:10])
        first, second = module.got
        assert torch.equal(first, given[:, :4])
        assert torch.equal(second, given[:, 6:10] + added)
        wanted = torch.cat([first, second], dim=1) * 2
        wanted[:, 2:6] += added
        assert torch.equal(found[0] if as_tuple else found, wanted)
    assert torch.equal(given, torch.arange(24.0).view(2, 12)), "the caller's tensor is its own"


# --- How a layer attends: what is not known is refused by name, never guessed

_IMPL: dict[str, Any] = {"scale": 0.25, "logits_soft_cap": 0, "alibi_slopes": None, "sinks": None}
_MODULE: dict[str, Any] = {
    "num_heads": 2,
    "head_size": 16,
    "num_kv_heads": 1,
    "sliding_window": None,
    "attn_type": AttentionType.DECODER,
    "kv_sharing_target_layer_name": None,
    "kv_cache_torch_dtype": torch.float32,
    "kv_cache_dtype": "auto",
    "dtype": torch.float32,
    "use_alibi_sqrt": False,
    "use_mm_prefix": False,
}


def attending(
    kind: type = Attention,
    backend: str = "CPUAttentionBackendImpl",
    impl: dict[str, Any] | None = None,
    **facts: Any,
) -> nn.Module:
    """A decoder layer around one attention module that says so of itself."""
    made = type(backend, (), _IMPL | (impl or {}))()
    return nn.Sequential(nn.Linear(2, 2), bare(kind, **(_MODULE | facts), impl=made))


def read(found: nn.Module, ranks: int = 1) -> Any:
    """As one of `ranks` whose others have the same values and one more each."""
    return attention_of(
        3, found, lambda own: torch.cat([own + rank for rank in range(ranks)]), ranks
    )


def test_facts_are_those_of_the_module_over_all_ranks() -> None:
    impl = {
        "logits_soft_cap": 5.0,
        "sinks": nn.Parameter(torch.tensor([0.5, -1.0], dtype=torch.bfloat16)),
    }
    kind = read(attending(impl=impl, sliding_window=7, use_mm_prefix=True), ranks=2)
    assert kind.layers == [3]
    assert kind.heads == 4
    assert kind.head_dim == 16
    assert kind.scale == 0.25
    assert kind.window == 7
    assert kind.softcap == 5.0
    assert kind.sinks == [0.5, -1.0, 1.5, 0.0]
    assert kind.slopes == []
    assert kind.text_only
    assert kind.refused == ""
    assert read(attending(ChunkedLocalAttention, attention_chunk_size=32)).chunk == 32
    assert read(attending(impl={"alibi_slopes": torch.tensor([0.5, 0.25])})).slopes == [0.5, 0.25]
    assert read(attending(impl={"logits_soft_cap": None})).softcap == 0


class Sharper(Attention):
    """Does something that nothing is known of."""


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda: attending(Sharper), "attention module Sharper is not known"),
        (lambda: attending(backend="NewImpl"), "attention backend NewImpl is not known"),
        (
            lambda: attending(attn_type=AttentionType.ENCODER_ONLY),
            "patterns need decoder attention",
        ),
        (
            lambda: attending(kv_sharing_target_layer_name="model.layers.1.attn"),
            "attends to the keys of model.layers.1.attn",
        ),
        (
            lambda: attending(kv_cache_torch_dtype=torch.uint8, kv_cache_dtype="fp8"),
            "the KV cache holds its keys as fp8",
        ),
        (lambda: attending(use_alibi_sqrt=True), "square roots of distances"),
        (
            lambda: attending(impl={"alibi_slopes": [1.0], "logits_soft_cap": 2.0}),
            "ALiBi together with a softcap",
        ),
        (lambda: attending(impl={"chunk_lookback": 1}), "its chunks look back"),
        (lambda: nn.Sequential(attending(), attending()), "2 attention modules"),
    ],
)
def test_what_is_not_known_is_refused_by_name(made: Any, words: str) -> None:
    kind = read(made())
    assert words in kind.refused
    assert kind.layers == [3]
    assert kind.heads == 0


def test_a_backend_that_does_not_say_all_is_refused() -> None:
    found = attending()
    del type(found[1].impl).sinks
    assert read(found).refused == "attention backend CPUAttentionBackendImpl has no sinks"
    assert read(nn.Linear(2, 2)) is None
