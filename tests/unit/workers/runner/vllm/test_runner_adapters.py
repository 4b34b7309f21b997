"""Our adapters of vLLM's runners. vLLM's own dispatchers, managers and graph wrappers hold two
graphs for each shape; what stands for CUDA is fake.
"""

import contextlib
import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from plane_kit import Rig, capturing, steered
from rank_kit import HIDDEN, Request, capture, steering
from site_plans import SitePlan
from vllm.compilation import cuda_graph
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.config import CompilationMode, CUDAGraphMode, VllmConfig, set_current_vllm_config
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.gpu import cudagraph_utils
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, ModelCudaGraphManager

from midstream.kernels import IDLE, STREAM, WHOLE, family, in_family, single_site
from midstream.kernels.plan import Does
from midstream.schemas.prompts.selectors import PositionSelector, PositionWindow
from midstream.schemas.requests.specs import RankSpec, steering_rows, touched
from midstream.workers.runner.base.engine_step import RequestRows, StepView
from midstream.workers.runner.hooks.sites import RankSite
from midstream.workers.runner.probes.probe_news import NEWS, news_of
from midstream.workers.runner.vllm.graph_families import (
    Execution,
    GraphKey,
    capture_families,
    dispatch_by_family,
)
from midstream.workers.runner.vllm.quarantine import attach, non_finite_in
from midstream.workers.runner.vllm.runner_adapters import V1Adapter, V2Adapter

SIZES = [1, 2, 4, 8]
FAMILIES = (WHOLE, STREAM, IDLE)
BOTH = CUDAGraphMode.FULL_AND_PIECEWISE


class Graph:
    """Stands for a CUDA graph: remembers whether the site did anything in the forward that it was
    captured from.
    """

    captured: "list[Graph]" = []
    replayed: "list[Graph]" = []

    def __init__(self) -> None:
        self.worked = False

    def replay(self) -> None:
        Graph.replayed.append(self)


@contextlib.contextmanager
def recording(graph: Graph, *_: Any, **__: Any) -> Iterator[None]:
    Graph.captured.append(graph)
    Forward.worked = False
    yield
    graph.worked = Forward.worked


class Forward:
    """A forward with one site, whose plan has an edit, so that it shows whether the site ran."""

    worked = False

    def __init__(self) -> None:
        plan = SitePlan(HIDDEN, [{"add": Does(torch.ones(1, HIDDEN))}], {0: [1]})
        self._planned = (
            torch.zeros(1, HIDDEN),
            *plan.build(capacity=max(SIZES), dtype=torch.float32),
        )

    def __call__(self, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        stream = torch.zeros(len(input_ids), HIDDEN)
        single_site(stream, *self._planned, group=STREAM)
        Forward.worked = bool(stream.any())
        return stream


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> VllmConfig:
    made = VllmConfig()
    made.compilation_config.mode = CompilationMode.VLLM_COMPILE
    made.compilation_config.cudagraph_mode = BOTH
    made.compilation_config.splitting_ops = list(made.compilation_config._attention_ops)
    made.compilation_config.cudagraph_capture_sizes = list(SIZES)
    made.compilation_config.max_cudagraph_capture_size = max(SIZES)
    Graph.captured = []
    Graph.replayed = []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", recording)
    for module in (cuda_graph, cudagraph_utils):
        monkeypatch.setattr(module, "capture_pool", lambda *_: contextlib.nullcontext())
        monkeypatch.setattr(module, "current_stream", lambda: None)
    monkeypatch.setattr(cuda_graph, "weak_ref_tensors", lambda output: output)
    monkeypatch.setattr(cudagraph_utils.current_platform, "get_global_graph_pool", lambda: None)
    return made


@pytest.fixture
def dispatcher(config: VllmConfig) -> CudagraphDispatcher:
    made = CudagraphDispatcher(config)
    dispatch_by_family(made, FAMILIES)
    return made


@pytest.fixture
def manager(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> ModelCudaGraphManager:
    for name, stand_in in {
        "get_pp_group": lambda: SimpleNamespace(is_first_rank=True, is_last_rank=True),
        "graph_capture": lambda **_: contextlib.nullcontext(),
        "is_global_first_rank": lambda: False,
        "has_compiled_submodule": lambda _: True,
        "prepare_inputs_to_capture": lambda *_, **__: (None, None),
    }.items():
        monkeypatch.setattr(cudagraph_utils, name, stand_in)
    made = ModelCudaGraphManager(config, torch.device("cpu"), BOTH, 1)
    capture_families(made, FAMILIES)
    return made


def captured(manager: ModelCudaGraphManager, model: Any) -> None:
    buffers = SimpleNamespace(
        **{name: torch.zeros(max(SIZES)) for name in ("input_ids", "positions", "is_padding")}
    )
    state = SimpleNamespace(prepare_dummy_inputs=lambda *_: {})
    manager.capture(model, state, buffers, None, None, [], kv_cache_config=None)  # type: ignore[arg-type]


# --- the v1 runner
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mode",
    [
        BOTH,
        CUDAGraphMode.FULL,
        CUDAGraphMode.PIECEWISE,
        CUDAGraphMode.FULL_DECODE_ONLY,
        CUDAGraphMode.NONE,
    ],
)
def test_v1_dispatches_every_shape_to_a_key_of_the_family_that_runs(
    dispatcher: CudagraphDispatcher, mode: CUDAGraphMode
) -> None:
    stock = CudagraphDispatcher(dispatcher.vllm_config)
    stock.initialize_cudagraph_keys(mode)
    dispatcher.initialize_cudagraph_keys(mode)
    for kind, keys in stock.cudagraph_keys.items():
        assert len(dispatcher.cudagraph_keys[kind]) == 3 * len(keys)
    for tokens in range(1, max(SIZES) + 2):
        for uniform in (False, True):
            theirs = stock.dispatch(tokens, uniform_decode=uniform)
            for each in FAMILIES:
                with in_family(each):
                    kind, found = dispatcher.dispatch(tokens, uniform_decode=uniform)
                assert kind == theirs[0]
                assert found.num_tokens == theirs[1].num_tokens
                assert found.num_reqs == theirs[1].num_reqs
                assert found.uniform == theirs[1].uniform
                if kind == CUDAGraphMode.NONE:
                    assert found == theirs[1]
                else:
                    assert isinstance(found, GraphKey)
                    assert found.family == each
                    assert found in dispatcher.cudagraph_keys[kind]


def test_v1_captures_in_one_order_on_every_rank(dispatcher: CudagraphDispatcher) -> None:
    """A set's order differs between processes, and custom all-reduce pairs the buffers of graphs by
    the order of capture.
    """
    dispatcher.initialize_cudagraph_keys(BOTH)
    order = dispatcher.get_capture_descs()
    for keys in dispatcher.cudagraph_keys.values():
        shuffled = sorted(keys, key=lambda each: (-each.family, each.num_tokens))  # type: ignore[attr-defined]
        keys.clear()
        keys.update(shuffled)
    monkey = {mode: list(reversed(list(keys))) for mode, keys in dispatcher.cudagraph_keys.items()}
    dispatcher.cudagraph_keys = monkey  # type: ignore[assignment]
    assert dispatcher.get_capture_descs() == order
    assert [[(each.num_tokens, each.family) for each in found] for _, found in order] == [  # type: ignore[attr-defined]
        [(size, each) for size in reversed(SIZES) for each in FAMILIES]
    ] * 2


def test_v1_captures_and_replays_a_graph_of_each_family(
    dispatcher: CudagraphDispatcher, config: VllmConfig
) -> None:
    """The real wrapper finds its graphs by the forward context's descriptor."""
    dispatcher.initialize_cudagraph_keys(CUDAGraphMode.FULL)
    with set_current_vllm_config(config):
        model = CUDAGraphWrapper(Forward(), config, CUDAGraphMode.FULL)

    class Runner:
        def _warmup_and_capture(self, desc: Any, cudagraph_runtime_mode: CUDAGraphMode) -> None:
            run(desc.num_tokens)

    def run(tokens: int) -> Any:
        mode, descriptor = dispatcher.dispatch(tokens)
        with set_forward_context(
            None,
            config,
            cudagraph_runtime_mode=mode,
            batch_descriptor=descriptor,
            num_tokens=tokens,
        ):
            model(input_ids=torch.zeros(tokens))
        return descriptor

    class Midstream(V1Adapter, Runner):
        pass

    for mode, descriptors in dispatcher.get_capture_descs():
        for descriptor in descriptors:
            Midstream()._warmup_and_capture(descriptor, mode)
    assert [graph.worked for graph in Graph.captured] == [True, True, False] * len(SIZES)
    assert family() == WHOLE
    for each in (IDLE, WHOLE, STREAM, IDLE):
        with in_family(each):
            assert run(3).family == each
        assert Graph.replayed[-1].worked == (each != IDLE)
    assert len(Graph.captured) == 3 * len(SIZES)


# --- the v2 runner
# --------------------------------------------------------------------------------------------------


def test_v2_captures_and_dispatches_a_graph_of_each_family(
    manager: ModelCudaGraphManager, config: VllmConfig
) -> None:
    stock = ModelCudaGraphManager(config, torch.device("cpu"), BOTH, 1)
    with set_current_vllm_config(config):
        model = CUDAGraphWrapper(Forward(), config, CUDAGraphMode.PIECEWISE)
    before = manager.dispatch(1, 1, 1, 0)
    assert before == BatchExecutionDescriptor(CUDAGraphMode.NONE, 1, 1)  # nothing is captured yet
    captured(manager, model)
    stock._graphs_captured = True
    assert len(manager.graphs) == 3 * len(stock._capture_descs[CUDAGraphMode.FULL])
    taken = len(Graph.captured)
    assert [graph.worked for graph in Graph.captured] == [True, True, False] * 2 * len(SIZES)
    for uniform in (1, None):
        for requests in range(1, max(SIZES) + 2):
            theirs = stock.dispatch(requests, requests, uniform, 0)
            for each in FAMILIES:
                with in_family(each):
                    found = manager.dispatch(requests, requests, uniform, 0)
                if theirs.cg_mode == CUDAGraphMode.NONE:
                    assert found == theirs
                    continue
                assert isinstance(found, Execution)
                assert found.cg_mode == theirs.cg_mode
                assert found.num_tokens == theirs.num_tokens
                assert found.num_reqs == theirs.num_reqs
                assert found.family == each
                if found.cg_mode == CUDAGraphMode.FULL:
                    manager.run_fullgraph(found)
                else:
                    descriptor = BatchDescriptor(found.num_tokens)  # as the runner makes it
                    with (
                        in_family(each),
                        set_forward_context(
                            None,
                            config,
                            cudagraph_runtime_mode=found.cg_mode,
                            batch_descriptor=descriptor,
                            num_tokens=found.num_tokens,
                        ),
                    ):
                        manager.run_pw_graph(model, {"input_ids": torch.zeros(found.num_tokens)})
                assert Graph.replayed[-1].worked == (each != IDLE)
    assert len(Graph.captured) == taken, "none was captured while requests run"


@pytest.mark.parametrize("families", [True, False])
def test_v2_adapter_gives_both_families_to_every_manager_where_it_is_asked_to(
    config: VllmConfig, manager: Any, families: bool
) -> None:
    """vLLM extrapolates the memory from the first two graphs, which are those with launches."""

    class Runner:
        cudagraph_manager: Any = None

        def initialize_kv_cache(self, kv_cache: Any, is_profiling: bool = False) -> None:
            self.cudagraph_manager = kv_cache and ModelCudaGraphManager(
                config, torch.device("cpu"), BOTH, 1
            )

    class Midstream(V2Adapter, Runner):
        pass

    runner = Midstream()
    if families:
        runner.use_families(FAMILIES)
    runner.initialize_kv_cache(None)
    for profiling in (True, False):
        runner.initialize_kv_cache("cache", is_profiling=profiling)
        full = runner.cudagraph_manager._capture_descs[CUDAGraphMode.FULL]
        assert len(full) == (3 if families else 1) * len(SIZES)
        first = [getattr(each, "family", None) for each in full[:2]]
        assert first == ([WHOLE, STREAM] if families else [None, None])


# --- without families
# --------------------------------------------------------------------------------------------------


def test_without_families_v1_captures_vllms_graphs_with_their_sites(config: VllmConfig) -> None:
    """The setting `graph_families=false`: nothing of vLLM's dispatcher is replaced."""
    stock = CudagraphDispatcher(config)
    stock.initialize_cudagraph_keys(CUDAGraphMode.FULL)
    seen = []

    class Runner:
        def _warmup_and_capture(self, desc: Any, cudagraph_runtime_mode: CUDAGraphMode) -> None:
            seen.append((desc, family()))

    class Midstream(V1Adapter, Runner):
        pass

    for mode, descriptors in stock.get_capture_descs():
        for descriptor in descriptors:
            Midstream()._warmup_and_capture(descriptor, mode)
    assert [(type(each), chosen) for each, chosen in seen] == [(BatchDescriptor, WHOLE)] * len(
        SIZES
    )


@pytest.mark.parametrize(
    ("asked", "groups", "wanted"),
    [
        (True, [STREAM, WHOLE], (WHOLE, STREAM, IDLE)),
        (True, [STREAM, STREAM], (WHOLE, IDLE)),  # two families would have the same launches
        (True, [WHOLE], (WHOLE, IDLE)),
        (False, [STREAM, WHOLE], None),
    ],
)
def test_setting_and_sites_decide_which_families_a_worker_asks_its_runner_for(
    config: VllmConfig,
    monkeypatch: pytest.MonkeyPatch,
    asked: bool,
    groups: list[int],
    wanted: tuple[int, ...] | None,
) -> None:
    from midstream.workers.runner.vllm import worker_class

    class Runner(V1Adapter):
        cudagraph_dispatcher = CudagraphDispatcher(config)

    settings = SimpleNamespace(graph_families=asked)
    monkeypatch.setattr(worker_class, "plane_config", lambda: settings)
    sites = [
        RankSite(hook, 0, "pair", group=group)
        for hook, group in zip(("post_block", "mlp_in"), groups, strict=False)
    ]
    worker: Any = SimpleNamespace(model_runner=Runner())
    worker_class.MidstreamWorker._use_families(worker, sites)
    assert getattr(Runner.cudagraph_dispatcher, "families", None) == wanted


@pytest.mark.parametrize(("families", "wanted"), [(True, [IDLE, STREAM]), (False, [WHOLE, WHOLE])])
def test_without_families_all_steps_are_whole(
    tmp_path: Path, families: bool, wanted: list[int]
) -> None:
    rig = Rig(tmp_path, traced=True, graph_families=families)
    whole = capturing(1, total=7)
    rig.step()
    chosen = [rig.family]
    rig.step((whole, 0, 6), new=[whole])
    assert [*chosen, rig.family] == wanted


# --- which family a step is of
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("positions", "window"),
    [
        ("all", (0, None)),
        ("all_prompt", (0, 6)),
        ("last_prompt", (5, 6)),
        ("all_generated", (6, None)),
        ([2, 4], (2, 5)),
        (PositionWindow(start=3), (3, None)),
        (PositionWindow(start=3, stop=9), (3, 9)),
    ],
)
@pytest.mark.parametrize("how", ["rows", "captures"])
def test_a_step_is_busy_only_in_the_window_that_the_request_names(
    tmp_path: Path, how: str, positions: PositionSelector, window: tuple[int, int | None]
) -> None:
    wish: Any = (
        [capture(positions, post_block=[0])]
        if how == "captures"
        else steering_rows([steering("v", [0], positions=positions)])
    )
    spec = RankSpec(version="v", job="j", request=0, attempt=1, prompt_tokens=6, **{how: wish})
    first, stop = touched(spec)
    assert first == window[0]
    assert stop == window[1] or (window[1] is None and stop > 1 << 40)


def test_ranks_of_a_stage_choose_alike_whatever_fails_on_one(tmp_path: Path) -> None:
    """Only the first records, and here the other could neither steer nor plan: both replay the busy
    graph, then both the idle one.
    """
    ranks = [Rig(tmp_path / str(number), rank=number, world=2, traced=True) for number in range(2)]
    ranks[1].faults.switch("admit,plan")
    whole = capturing(2, total=7)
    captures = Request(1, 6, 8, [capture("all_prompt", post_block=[0])])
    steers = steered(3)
    steps: list[tuple[list[Any], dict[str, Any]]] = [
        ([(whole, 0, 6)], {"new": [whole]}),
        ([(captures, 0, 3)], {"new": [captures], "finished": [whole]}),
        ([(captures, 3, 3)], {}),
        ([(captures, 6, 1)], {}),  # its prompt is over
        ([(captures, 7, 1), (steers, 0, 6)], {"new": [steers]}),
        ([], {"finished": [captures, steers]}),
    ]
    for rig in ranks:
        chosen = []
        for windows, given in steps:
            rig.step(*windows, **given)
            chosen.append(rig.family)
        assert chosen == [STREAM, STREAM, STREAM, IDLE, WHOLE, IDLE]
    assert [{receipt.status for receipt in rig.receipts()} for rig in ranks] == [
        {"ok"},
        {"error", "ok"},
    ]


def test_a_step_of_requests_without_a_spec_is_idle(tmp_path: Path) -> None:
    rig = Rig(tmp_path, traced=True)
    plain = Request(9, 6, 8)
    beside = capturing(1)
    rig.step((plain, 0, 6))
    assert rig.family == IDLE
    rig.step((plain, 6, 1), (beside, 0, 6), new=[beside])
    assert rig.family < IDLE
    rig.step((plain, 7, 1))  # the other one waits
    assert rig.family == IDLE


def test_a_forward_that_runs_as_python_asks_its_sites(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.step((Request(9, 6, 8), 0, 6))
    assert rig.family < IDLE


def test_a_step_has_the_launches_that_its_requests_need(tmp_path: Path) -> None:
    """A capture of another hook needs all of them, and only while its rows are computed."""
    rig = Rig(tmp_path, traced=True)
    stream = capturing(1)
    other = Request(2, 6, 8, [capture("all_prompt", mlp_out=[0])])
    chosen = []
    for windows, given in [
        ([(stream, 0, 6)], {"new": [stream]}),
        ([(stream, 6, 1), (other, 0, 6)], {"new": [other]}),
        ([(other, 6, 1), (stream, 7, 1)], {}),
        ([(other, 7, 1)], {"finished": [stream]}),
    ]:
        rig.step(*windows, **given)  # type: ignore[arg-type]
        chosen.append(rig.family)
    assert chosen == [STREAM, WHOLE, STREAM, IDLE]
    rig.step(finished=[other])
    assert {receipt.status for receipt in rig.receipts()} == {"ok"}


def test_rows_in_an_idle_step_fail_their_request_alone(tmp_path: Path) -> None:
    """If a runner's rows were others than the scheduler's, they would be neither edited nor
    captured, and nothing would show it.
    """
    rig = Rig(tmp_path, traced=True)
    early = Request(1, 6, 8, [capture([2], post_block=[0])])
    beside = steered(2)
    rig.step((early, 0, 6), (beside, 0, 6), new=[early, beside])
    rig.step((early, 2, 1), told=[(early, 6, 1)])
    assert rig.family == IDLE
    rig.step(finished=[early, beside])
    receipts = rig.told()
    assert "runs without its hook sites" in receipts["j1"].message
    assert receipts["j2"].status == "ok"


# --- rows and logits of a step as they lie in the batch, with and without draft tokens
# ---------------------------------------------------------------------------------------------

#: Request → (first position, tokens, drafts among them). The second is the last token of a prompt,
#: padded with placeholder drafts.
STEP = {"chunk": (0, 5, 0), "padded": (9, 4, 3), "drafted": (20, 3, 2), "plain": (30, 1, 0)}
TOKEN_IDS = torch.arange(16, dtype=torch.int32)  # with padding
ROWS = [
    RequestRows("chunk", 0, 5, 0, 1),
    RequestRows("padded", 5, 4, 9, 4),
    RequestRows("drafted", 9, 3, 20, 3),
    RequestRows("plain", 12, 1, 30, 1),
]


def v1(views: list[StepView]) -> None:
    counts = np.array([count for _, count, _ in STEP.values()])

    class Runner:
        input_batch = SimpleNamespace(
            req_ids=[*STEP, None],
            num_computed_tokens_cpu=np.array([first for first, _, _ in STEP.values()] + [0]),
        )
        input_ids = SimpleNamespace(gpu=TOKEN_IDS)

        def _prepare_inputs(self, scheduler_output: Any, num_scheduled_tokens: Any) -> str:
            return "prepared"

    made = type("Made", (V1Adapter, Runner), {})()
    made.midstream = SimpleNamespace(plan=views.append)
    drafts = {name: [-1] * count for name, (_, _, count) in STEP.items() if count}
    assert (
        made._prepare_inputs(SimpleNamespace(scheduled_spec_decode_tokens=drafts), counts)
        == "prepared"
    )


def v2(views: list[StepView]) -> None:
    samples = [1 + drafts for _, _, drafts in STEP.values()]
    batch = SimpleNamespace(
        num_reqs=len(STEP),
        req_ids=list(STEP),
        # padded for a graph
        num_scheduled_tokens=np.array([*(count for _, count, _ in STEP.values()), 0, 0]),
        num_computed_tokens_np=np.array([first for first, _, _ in STEP.values()]),
        cu_num_logits_np=np.array([0, *np.cumsum(samples)]),
        input_ids=TOKEN_IDS,
    )

    class Runner:
        def prepare_attn(self, input_batch: Any) -> str:
            return "prepared"

    made = type("Made", (V2Adapter, Runner), {})()
    made.midstream = SimpleNamespace(plan=views.append)
    assert made.prepare_attn(batch) == "prepared"


@pytest.mark.parametrize("runner", [v1, v2])
def test_both_runners_give_the_tokens_and_count_the_logits_of_drafts(runner: Any) -> None:
    views: list[StepView] = []
    runner(views)
    (view,) = views
    assert view.requests == ROWS
    assert view.token_ids().tolist() == list(range(13))


class Output(AsyncModelRunnerOutput):
    """Output of a step that is still computed."""

    def get_output(self) -> ModelRunnerOutput:
        return ModelRunnerOutput(["r"], {"r": 0})


def test_an_output_with_findings_is_gone_once_it_was_read() -> None:
    output = attach(attach(Output(), lambda: [("r", 3)]), lambda: ["news"], NEWS)
    gone = weakref.ref(output)
    gc.disable()
    try:
        read = output.get_output()
        del output
        assert gone() is None
    finally:
        gc.enable()
    assert list(non_finite_in(read)) == [("r", 3)]
    assert list(news_of(read)) == ["news"]
