"""Sites reach the tensor that the adapter names, eager and traced, in order, and only where the
layer is held.
"""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from site_plans import OpInputs
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from midstream.kernels import IDLE, in_family
from midstream.kernels.plan import AFTER, BEFORE, DEPTH, EDITS, EDITS_AT, NO_SLOT, SITE, Buffers
from midstream.schemas.prompts.selectors import HOOKS, Hook
from midstream.schemas.requests.interventions import PLACE
from midstream.workers.runner.hooks import sites as site_module
from midstream.workers.runner.hooks.architectures import (
    PRE_NORM,
    UNKNOWN,
    Adapter,
    Tap,
    UnsupportedArchitectureError,
    Variant,
    _materialised,
)
from midstream.workers.runner.hooks.sites import RankSite, Sizes, install, warm_up

HIDDEN = 8
TOKENS = 5
SIZES = Sizes(ring_rows=256, capacity=TOKENS, lists=256, patterns=2, configurations=2, entries=8)


class Norm(nn.Module):
    """As vLLM's norms: with a residual they add first, and give both."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(HIDDEN) + 0.5)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        s = x if residual is None else x + residual
        normed = s * torch.rsqrt(s.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight
        return normed if residual is None else (normed, s)


class PairLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = Norm()
        self.post_attention_layernorm = Norm()
        self.self_attn = nn.Linear(HIDDEN, HIDDEN)
        self.mlp = nn.Linear(HIDDEN, HIDDEN)

    def forward(
        self, positions: Any, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            residual = hidden_states
            hidden_states = self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.self_attn(hidden_states)
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        return self.mlp(hidden_states), residual


class SingleLayer(nn.Module):
    """The same mathematics on one materialised tensor; the branches give tuples."""

    def __init__(self, twin: PairLayer) -> None:
        super().__init__()
        self.ln_1 = twin.input_layernorm
        self.ln_2 = twin.post_attention_layernorm
        self.attn = Branch(twin.self_attn)
        self.mlp = twin.mlp

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        residual = hidden_states
        hidden_states = self.attn(self.ln_1(hidden_states))[0] + residual
        residual = hidden_states
        return residual + self.mlp(self.ln_2(hidden_states))


class Branch(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return self.linear(x), None


class PairModel(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(PairLayer() for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x.clone()
        residual = None
        for layer in self.layers:
            if not isinstance(layer, nn.Identity):
                hidden, residual = layer(None, hidden, residual)
        return hidden + residual


class SingleModel(nn.Module):
    def __init__(self, twin: PairModel) -> None:
        super().__init__()
        self.layers = nn.ModuleList(SingleLayer(layer) for layer in twin.layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x.clone()
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


PAIR = Adapter("Toy", Variant("layers", PRE_NORM), HIDDEN, 2)
SINGLE = Adapter("Toy", Variant("layers", _materialised("attn", "ln_2", "mlp")), HIDDEN, 2)


def toy(kind: str) -> tuple[nn.Module, Adapter]:
    torch.manual_seed(0)
    pair = PairModel().requires_grad_(False)
    return (pair, PAIR) if kind == "pair" else (SingleModel(pair), SINGLE)


def put(
    model: nn.Module, adapter: Adapter, hooks: tuple[Hook, ...] = HOOKS, always: bool = False
) -> tuple[list[RankSite], Buffers]:
    return install(
        model, adapter, SIZES, hooks, dtype=torch.float32, device=torch.device("cpu"), always=always
    )


def capture_all(sites: list[RankSite], buffers: Buffers, port: Any = BEFORE) -> None:
    """Every site's tokens to the ring, site after site."""
    for index, site in enumerate(sites):
        site.busy = True
        plan = buffers.plan[index]
        plan[SITE] = index + 1
        plan[port.COUNT] = TOKENS
        plan[port.AT] = 1
        plan[port.PLACES] = 1 + index * TOKENS
    buffers.lists[1:] = torch.arange(255)  # the tokens, and the rows of the ring


def captured(sites: list[RankSite], buffers: Buffers) -> dict[tuple[Hook, int], torch.Tensor]:
    return {
        (site.hook, site.layer): buffers.ring[i * TOKENS : (i + 1) * TOKENS].clone()
        for i, site in enumerate(sites)
    }


def launch(sites: list[RankSite], buffers: Buffers, index: int) -> None:
    """The launch of this site has something to do, as the planner says it."""
    for place in range(max(place for place in range(index + 1) if sites[place].leads), index + 1):
        sites[place].busy = True
        buffers.plan[place, SITE] = place + 1


def edit(
    sites: list[RankSite],
    buffers: Buffers,
    hook: Hook,
    layer: int,
    vector: torch.Tensor,
    token: int,
) -> None:
    """Add `vector` to one row at one site."""
    index = next(i for i, site in enumerate(sites) if (site.hook, site.layer) == (hook, layer))
    launch(sites, buffers, index)
    buffers.pool[1] = vector
    buffers.lists[0] = token
    buffers.token_rows[token, 0] = 1
    buffers.site_rows[index, PLACE["add"], 1] = 1
    buffers.plan[index, EDITS] = 1
    buffers.plan[index, EDITS_AT] = 0
    buffers.plan[index, DEPTH] = 1


#: Kinds of models, eager and traced; tracing takes seconds.
EVERY_FORWARD = pytest.mark.parametrize(
    ("kind", "traced"),
    [
        ("pair", False),
        ("single", False),
        ("pair", True),
        pytest.param("single", True, marks=pytest.mark.long),
    ],
)
X = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1))


@EVERY_FORWARD
def test_each_hook_captures_its_named_tensor(kind: str, traced: bool) -> None:
    """The streams add up, layer by layer, and the branches are what is added."""
    model, adapter = toy(kind)
    plain = model(X)
    sites, buffers = put(model, adapter)
    capture_all(sites, buffers)
    out = (torch.compile(model, fullgraph=True, backend="aot_eager") if traced else model)(X)
    rows = captured(sites, buffers)
    assert torch.allclose(out, plain)
    assert torch.equal(rows["pre_attn", 0], X)
    for layer in (0, 1):
        mid = rows["pre_attn", layer] + rows["attn_out", layer]
        assert torch.allclose(rows["post_attn", layer], mid, atol=1e-6)
        assert torch.allclose(rows["post_block", layer], mid + rows["mlp_out", layer], atol=1e-6)
        ln_2 = (
            model.layers[layer].post_attention_layernorm
            if kind == "pair"
            else model.layers[layer].ln_2
        )
        assert torch.allclose(
            rows["mlp_in", layer], type(ln_2).forward(ln_2, rows["post_attn", layer]), atol=1e-6
        )
    assert torch.equal(rows["pre_attn", 1], rows["post_block", 0])
    assert torch.allclose(rows["post_block", 1], plain)


@pytest.mark.parametrize("hook", HOOKS)
def test_an_edit_has_the_same_effect_on_a_deferred_pair_as_on_one_tensor(hook: Hook) -> None:
    results = []
    for kind in ("pair", "single"):
        model, adapter = toy(kind)
        plain = model(X)
        sites, buffers = put(model, adapter)
        edit(sites, buffers, hook, 1, torch.ones(HIDDEN), token=2)
        out = model(X)
        assert (out != plain).any(1).tolist() == [False, False, True, False, False]
        results.append(out)
    assert torch.allclose(*results, atol=1e-5)


# field case 5
@pytest.mark.parametrize(
    "backend",
    # inductor also removes what it takes for dead; it compiles for most of a minute
    ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)],
)
def test_a_traced_graph_serves_idle_and_busy_steps_and_keeps_every_site(backend: str) -> None:
    model, adapter = toy("pair")
    plain = model(X)
    sites, buffers = put(model, adapter)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    assert torch.allclose(compiled(X), plain, atol=1e-6)
    assert not buffers.ring.any()
    assert not any(site.busy for site in sites)
    capture_all(sites, buffers)
    with torch._dynamo.config.patch(error_on_recompile=True):
        with in_family(IDLE):
            idle = compiled(X)
        assert not buffers.ring.any()
        busy = compiled(X)
    assert all(rows.any() for rows in captured(sites, buffers).values())
    assert torch.equal(idle, busy)


def test_an_idle_site_calls_nothing_and_a_site_of_a_captured_graph_always_does() -> None:
    for always in (False, True):
        model, adapter = toy("pair")
        sites, buffers = put(model, adapter, always=always)
        capture_all(sites, buffers)
        for site in sites:
            site.busy = False
        model(X)
        assert buffers.ring.any().item() == always


@pytest.mark.parametrize(
    ("kind", "hooks", "wanted"),
    [
        ("pair", HOOKS, ["pair", "single", "pair behind a branch"]),
        ("pair", ("attn_out", "post_attn"), ["pair behind a branch"]),
        ("pair", ("post_block",), ["pair"]),
        ("pair", ("attn_out",), ["single"]),
        ("single", HOOKS, ["single"]),
    ],
)
def test_warm_up_runs_each_op_that_the_model_has_once(
    monkeypatch: pytest.MonkeyPatch, kind: str, hooks: tuple[Hook, ...], wanted: list[str]
) -> None:
    """With the tensors of a step, so that the kernels are compiled for their dtype and width; and
    no site is busy.
    """
    ran: list[tuple[str, torch.Size, torch.dtype]] = []
    for name in ("pair", "single"):
        op = getattr(site_module, f"{name}_site")

        def recorded(*arguments: Any, name: str = name, op: Any = op) -> None:
            behind = " behind a branch" if isinstance(arguments[-1], int) and arguments[-1] else ""
            ran.append((name + behind, arguments[0].shape, arguments[0].dtype))
            op(*arguments)

        monkeypatch.setattr(site_module, f"{name}_site", recorded)
    model, adapter = toy(kind)
    sites, buffers = install(
        model, adapter, SIZES, hooks, dtype=torch.bfloat16, device=torch.device("cpu"), always=False
    )
    warm_up(sites, buffers)
    assert sorted(ran) == sorted((name, torch.Size([1, HIDDEN]), torch.bfloat16) for name in wanted)
    assert not any(
        getattr(buffers, field.name).any()
        for field in fields(Buffers)
        if field.name != "capture_slots"
    )


def test_a_forward_that_is_not_traced_writes_to_the_ring_that_is_there_when_it_runs() -> None:
    model, adapter = toy("pair")
    sites, buffers = put(model, adapter)
    capture_all(sites, buffers)
    first = buffers.ring
    buffers.ring = torch.full_like(buffers.ring, torch.nan)
    model(X)
    assert not first.any()
    assert buffers.ring[: len(sites) * TOKENS].isfinite().all()


def test_layers_of_other_stages_have_no_sites_and_the_first_held_one_gets_a_pair() -> None:
    model = PairModel(4)
    model.layers[0] = nn.Identity()
    model.layers[1] = nn.Identity()
    sites, buffers = put(model, PAIR, ("pre_attn", "post_block"))
    assert [(site.layer, site.hook, site.kind) for site in sites] == [
        (2, "pre_attn", "pair"),
        (2, "post_block", "pair"),
        (3, "pre_attn", "pair"),
        (3, "post_block", "pair"),
    ]
    assert buffers.plan.shape[0] == 4


def test_sites_stand_in_the_order_of_layers_and_hooks() -> None:
    sites, _ = put(*toy("single"), ("post_block", "attn_out"))
    assert [(site.layer, site.hook) for site in sites] == [
        (0, "attn_out"),
        (0, "post_block"),
        (1, "attn_out"),
        (1, "post_block"),
    ]


def test_nothing_is_planned_in_fresh_buffers() -> None:
    _, buffers = put(*toy("pair"))
    assert not buffers.plan.any()
    assert not buffers.site_rows.any()
    assert not buffers.token_rows.any()
    assert (buffers.capture_slots == NO_SLOT).all()


def test_the_buffers_are_not_saved_with_the_model() -> None:
    model, adapter = toy("pair")
    before = set(model.state_dict())
    put(model, adapter)
    assert set(model.state_dict()) == before


@pytest.mark.parametrize("always", [False, True])
def test_a_model_in_which_nothing_was_found_gets_no_sites(always: bool) -> None:
    """It is refused later, by the worker, which has the reason."""
    sites, _ = put(toy("pair")[0], Adapter("Toy", UNKNOWN, HIDDEN, 2), (), always)
    assert sites == []


@pytest.mark.parametrize(
    ("variant", "words"),
    [
        (Variant("layers", {"post_attn": Tap("ln_2", "input")}), "does not match its adapter"),
        (
            Variant("layers", {"pre_attn": Tap("", "input")}, absent={"post_attn": "for a reason"}),
            "Toy has no post_attn: for a reason",
        ),
    ],
)
def test_a_hook_that_the_model_lacks_is_refused_by_name(variant: Variant, words: str) -> None:
    with pytest.raises(UnsupportedArchitectureError, match=words):
        put(toy("pair")[0], Adapter("Toy", variant, HIDDEN, 2), ("post_attn",))


def test_the_buffers_are_the_arguments_of_the_ops_in_their_order() -> None:
    assert tuple(field.name for field in fields(Buffers)) == ("ring", *OpInputs._fields)


# -- sites that share a launch
# ---------------------------------------------------------------------------------------------

HANDED_ON = Adapter("Toy", Variant("layers", PRE_NORM, chained=True), HIDDEN, 2)
SINGLE_HANDED_ON = Adapter(
    "Toy", Variant("layers", _materialised("attn", "ln_2", "mlp"), chained=True), HIDDEN, 2
)


class Launches(TorchDispatchMode):
    """Counts the calls of the ops."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "midstream":
            self.count += 1
        return func(*args, **(kwargs or {}))


def launches(adapter: Adapter, *, always: bool, layers: int = 2) -> int:
    """Ops of a forward in which every site has something to do."""
    pair = PairModel(layers).requires_grad_(False)
    model: nn.Module = pair if adapter.variant.taps is PRE_NORM else SingleModel(pair)
    sites, buffers = put(model, adapter, always=always)
    capture_all(sites, buffers)
    with Launches() as counted:
        model(X)
    return counted.count


@pytest.mark.parametrize(
    ("adapter", "always", "count"),
    [
        # the stream that enters the first layer is a launch of its own
        (HANDED_ON, True, 4 * 3 + 1),
        (HANDED_ON, False, 4 * 4),  # re-entry begins before pre_attn, which stays alone
        (PAIR, True, 4 * 4),  # not known to hand on what a layer gives
        (SINGLE_HANDED_ON, True, 4 * 5 + 1),
        (SINGLE, True, 4 * 6),
    ],
)
def test_launches_of_a_forward_before_and_after(adapter: Any, always: bool, count: int) -> None:
    assert launches(adapter, always=always, layers=4) == count


@EVERY_FORWARD
def test_shared_launches_give_the_bits_of_sites_one_by_one(
    kind: str, traced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every site captures before and after, and adds to some rows."""
    found = []
    for merged in (True, False):
        if not merged:
            monkeypatch.setattr(
                "midstream.workers.runner.hooks.sites.launch_groups",
                lambda variant, hooks, **_: [(hook,) for hook in hooks if hook in variant.taps],
            )
        model, _ = toy(kind)
        sites, buffers = put(model, HANDED_ON if kind == "pair" else SINGLE_HANDED_ON, always=True)
        assert all(site.leads for site in sites) != merged
        capture_all(sites, buffers)
        for site in sites:
            edit(sites, buffers, site.hook, site.layer, torch.linspace(-1, 1, HIDDEN), token=2)
            buffers.lists[0] = 2
        for index in range(len(sites)):
            buffers.plan[index, [AFTER.COUNT, AFTER.AT, AFTER.PLACES]] = torch.tensor(
                [TOKENS, 1, 1 + (len(sites) + index) * TOKENS]
            ).int()
        out = (torch.compile(model, fullgraph=True, backend="aot_eager") if traced else model)(X)
        found.append((out, buffers.ring, buffers.counts))
        assert buffers.counts.tolist() == [[1, TOKENS, TOKENS]] * len(sites)
    for together, apart in zip(*found, strict=True):
        assert torch.equal(together, apart)


def test_a_model_that_keeps_what_lies_between_layers_shares_nothing_between_them() -> None:
    """As for EAGLE-3: what it keeps behind a layer must not have the next one's edits."""
    model = PairModel().requires_grad_(False)
    model.aux_hidden_state_layers = (1,)
    sites, _ = put(model, HANDED_ON, always=True)
    assert [site.hook for site in sites if not site.leads] == ["post_attn", "post_block"] * 2


# -- through vLLM's compiler backend ---------------------------------------------------------------

_library = torch.library.Library("midstream_test", "FRAGMENT")
_library.define("between(Tensor x) -> Tensor")
_library.impl("between", lambda x: x * 1.5, "CPU")
_library._register_fake("between", torch.empty_like)


class Attention(nn.Module):
    """Its op stands for attention, at which vLLM splits the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.midstream_test.between(self.linear(x))


@pytest.mark.long  # half a minute of inductor
def test_pieces_of_vllms_backend_keep_every_site_and_copy_no_ring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`make test-torch` runs this with torch 2.11, where vLLM splits and caches in other ways."""
    from vllm.compilation.decorators import support_torch_compile
    from vllm.compilation.passes.utility.fix_functionalization import FixFunctionalizationPass
    from vllm.config import CompilationMode, CUDAGraphMode, VllmConfig, set_current_vllm_config
    from vllm.forward_context import set_forward_context

    class Model(PairModel):
        def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
            super().__init__()
            for layer in self.layers:
                layer.self_attn = Attention()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    # It rewrites calls of vLLM's CUDA ops, by names that a CPU build does not have.
    monkeypatch.setattr(FixFunctionalizationPass, "__call__", lambda *_: None)
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "vllm"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    config = VllmConfig()
    config.compilation_config.mode = CompilationMode.VLLM_COMPILE
    config.compilation_config.backend = "inductor"
    config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
    config.compilation_config.compile_sizes = []
    config.compilation_config.splitting_ops = ["midstream_test::between"]
    with set_current_vllm_config(config):
        torch.manual_seed(0)
        model = support_torch_compile(Model)(vllm_config=config).requires_grad_(False)
        sites, buffers = put(model, PAIR)
        capture_all(sites, buffers)
        expected = model.forward(X)
        wanted = captured(sites, buffers)
        buffers.ring.zero_()
        with set_forward_context(None, config, num_tokens=TOKENS):
            found = model(X)
            rows = captured(sites, buffers)
            buffers.ring.zero_()
            with in_family(IDLE):
                idle = model(X)
    assert torch.allclose(found, expected, atol=1e-5)
    assert all(torch.allclose(rows[place], wanted[place], atol=1e-5) for place in wanted)
    assert torch.equal(idle, found)
    assert not buffers.ring.any()
    code = "\n".join(path.read_text() for path in tmp_path.rglob("*.py"))
    assert code.count("_site.default(") >= sum(site.leads for site in sites)
    assert f"empty_strided_cpu(({len(buffers.ring)}," not in code
