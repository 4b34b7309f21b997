"""Computes an engine's resources from the model's shape and the settings alone: memory, work per
step, bytes to the disk, binding limits.

Pure, without torch and vLLM, so that `midstream doctor --plan` works before anything is started.
The memory of a rank's buffers is exact (tests compare it with the buffers); times are estimates,
see `site_costs`.
"""

from collections.abc import Collection, Mapping
from typing import Any, Literal, NamedTuple

from midstream.schemas.base.dtypes import ITEM_BYTES
from midstream.schemas.base.ring import HALVES, Ring, plan_queue, plan_ring
from midstream.schemas.model.banks import BANKS, asked_hooks
from midstream.schemas.prompts.selectors import HOOKS, Hook
from midstream.schemas.requests.interventions import EVERY, FAMILIES, MAX_RANK, SCALARS
from midstream.schemas.settings.settings import Settings
from midstream.workers.runner.hooks.architectures import (
    PRE_NORM,
    UnsupportedArchitectureError,
    Variant,
    variant_of,
)

from .plan_inside import Inside, inside_of
from .site_costs import CASES, RankShape, StepCost, step_cost

#: Copies of constants in `kernels.plan`, which imports torch; a test compares them.
PLAN_COLUMNS = 17
COUNTS = 3
ROWS_PER_TOKEN = 16
#: Copy of the constant in `runner.edits.prepared_rows`, which a test compares as well.
KEPT_BYTES = 64 << 20
#: Field names in config.json → names that transformers' config classes give them.
_SPELLINGS = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
}
_SPELLINGS |= {
    "torch_dtype": "dtype",
    "ffn_dim": "intermediate_size",
    "n_inner": "intermediate_size",
}
#: transformers' defaults of missing fields that determine the hooks or the dtype.
_ASSUMED = {"use_parallel_residual": True, "do_layer_norm_before": True, "dtype": "float32"}
#: dtype of the checkpoint → dtype that vLLM chooses for `dtype` auto, where they differ.
_AUTO = {"float32": "bfloat16"}


class Linear(NamedTuple):
    """A linear layer that an adapter may change."""

    inputs: int
    outputs: int
    divided: Literal["inputs", "outputs"]  # the side that tensor parallelism divides
    ranks: int  # most tensor-parallel ranks that divide it

    def lora_width(self, ranks: int = 1) -> int:
        """Returns the weights of an adapter of rank 1 on one of `ranks` tensor-parallel ranks: vLLM
        divides the LoRA matrix on the layer's divided side.
        """
        share = min(ranks, self.ranks)
        return self.inputs // (share if self.divided == "inputs" else 1) + self.outputs // (
            share if self.divided == "outputs" else 1
        )


class ModelShape(NamedTuple):
    """A checkpoint's shape, as its config.json says."""

    architecture: str
    variant: Variant
    layers: int
    hidden_size: int
    dtype: str
    parameters: float
    max_model_len: int
    weight_bytes: float = 0.0  # mean bytes of a parameter in a quantised checkpoint; else 0
    # linear layers of one layer, as in Llama; none if adapters are refused
    linears: tuple[Linear, ...] = ()
    inside: Inside = Inside((), {}, {})

    @property
    def row_bytes(self) -> int:
        return self.hidden_size * ITEM_BYTES[self.dtype]

    @property
    def hooks(self) -> list[Hook]:
        return [hook for hook in HOOKS if hook in self.variant.taps]


class MemoryPart(NamedTuple):
    """A part of a rank's memory."""

    name: str
    bytes: int
    where: Literal["GPU", "host"]
    about: str
    setting: str = ""


class StepWork(NamedTuple):
    """Work that the sites add to a decode step of `max_num_seqs` requests."""

    hooks: str
    step: str
    cost: StepCost
    share: float  # of a step of stock vLLM


class CaptureBytes(NamedTuple):
    """Bytes that a capture of every request at every token writes."""

    captured: str
    token_bytes: int
    bytes_per_s: float


class EnginePlan(NamedTuple):
    model: ModelShape
    hooks: list[Hook]
    layers: int  # of the largest stage
    ring: Ring | None  # None on the CPU
    step_s: float  # of stock vLLM, estimated
    memory: list[MemoryPart]
    work: list[StepWork]
    streams: list[CaptureBytes]
    limits: list[str]


def model_of(config: Mapping[str, Any], dtype: str = "auto") -> ModelShape:
    """Returns the shape that a config.json describes.

    Raises UnsupportedArchitectureError, and KeyError for a missing field.
    """
    text = {**config, **config.get("text_config", {})}
    text |= {
        value: text[key]
        for key, value in _SPELLINGS.items()
        if text.get(key) is not None and value not in text
    }
    text = _ASSUMED | text
    architecture = (config.get("architectures") or [""])[0]
    variant = variant_of(architecture, text)
    if not variant.known:
        # assume Llama's layers, which most models have: the real layers are not loaded
        variant = Variant("", PRE_NORM)
    return ModelShape(
        architecture=architecture,
        variant=variant,
        layers=int(text["num_hidden_layers"]),
        hidden_size=int(text["hidden_size"]),
        dtype=_AUTO.get(text["dtype"], text["dtype"]) if dtype == "auto" else dtype,
        parameters=_parameters(text),
        max_model_len=int(text.get("max_position_embeddings") or 0),
        weight_bytes=_weight_bytes(config, text),
        linears=_layer(text) if _experts(text) == 1 else (),
        inside=inside_of(text, experts=_experts(text)),
    )


def _parameters(config: Mapping[str, Any]) -> float:
    """Returns the number of weights of the whole model without norms and biases, for estimates."""
    *attention, gate, up, down = (linear.inputs * linear.outputs for linear in _layer(config))
    return _embeddings(config) + int(config["num_hidden_layers"]) * (
        sum(attention) + _experts(config) * (gate + up + down)
    )


def _experts(config: Mapping[str, Any]) -> int:
    return int(config.get("num_experts") or config.get("num_local_experts") or 1)


def _layer(config: Mapping[str, Any]) -> tuple[Linear, ...]:
    """Return the linear layers of a layer like Llama's; with experts, those of one expert."""
    hidden = int(config["hidden_size"])
    heads = int(config["num_attention_heads"])
    shared = int(config.get("num_key_value_heads") or heads)
    size = int(config.get("head_dim") or hidden // heads)
    width = int(
        config.get("moe_intermediate_size") or config.get("intermediate_size") or 4 * hidden
    )
    query = Linear(hidden, heads * size, "outputs", heads)
    key = Linear(hidden, shared * size, "outputs", shared)
    gate = Linear(hidden, width, "outputs", width)
    return (
        query,
        key,
        key,
        Linear(heads * size, hidden, "inputs", heads),
        gate,
        gate,
        Linear(width, hidden, "inputs", width),
    )


def _embeddings(config: Mapping[str, Any]) -> float:
    return (
        int(config["vocab_size"])
        * int(config["hidden_size"])
        * (1 if config.get("tie_word_embeddings") else 2)
    )


def _weight_bytes(config: Mapping[str, Any], text: Mapping[str, Any]) -> float:
    """Return the mean bytes of a parameter in a quantised checkpoint, whose embeddings stay at 2
    bytes; 0 if the checkpoint is not quantised, or the number of bits is unknown.
    """
    raw = config.get("quantization_config") or text.get("quantization_config") or {}
    groups = [group.get("weights") or {} for group in (raw.get("config_groups") or {}).values()]
    bits = (
        raw.get("bits")
        or raw.get("w_bit")
        or next((group.get("num_bits") for group in groups), None)
    )
    if not bits:
        method = str(raw.get("quant_method"))
        if method == "fp8":
            bits = 8
        elif "mxfp4" in method:
            bits = 4
    whole = _parameters(text)
    kept = _embeddings(text)
    return (kept * 2 + (whole - kept) * int(bits) / 8) / whole if bits else 0.0


def plan(
    model: ModelShape,
    settings: Settings,
    *,
    gpu: bool = True,
    tokens_per_second: float = 5000.0,
    gpu_bytes: int = 0,
    host_bytes: int = 0,
) -> EnginePlan:
    """Plans one engine. `gpu_bytes`, `host_bytes`: memory of one GPU and its machine; 0: unknown.

    Raises UnsupportedArchitectureError for a hook that the model does not have.
    """
    hooks = _hooks(model, settings)
    inside = asked_hooks(settings.hooks)[1]
    present = [hook for hook in model.inside.hooks if hook in inside]
    layers = -(-model.layers // settings.vllm.pipeline_parallel_size)
    ring = (
        plan_ring(
            model.inside.ring_width(inside) * ITEM_BYTES[model.dtype],
            len(hooks) + len(inside),
            layers,
            step_tokens=settings.vllm.max_num_batched_tokens,
            requests=settings.vllm.max_num_seqs,
            drafts=settings.speculative_tokens,
            memory_bytes=gpu_bytes,
            size_mib=settings.tuning.capture_buffer_mib,
        )
        if gpu
        else None
    )
    shape = RankShape(
        name=model.architecture,
        variant=model.variant,
        layers=layers,
        hidden_size=model.hidden_size,
        parameters=model.parameters * layers / model.layers,
        tp=settings.vllm.tensor_parallel_size,
        item_bytes=ITEM_BYTES[model.dtype],
        weight_bytes=model.weight_bytes,
    )
    queue = plan_queue(
        ring,
        host_bytes=host_bytes,
        ranks=settings.vllm.ranks,
        size_mib=settings.tuning.capture_queue_mib,
    )
    return EnginePlan(
        model=model,
        hooks=[*hooks, *present],
        layers=layers,
        ring=ring,
        step_s=shape.step_s(),
        memory=[
            *buffers(model.row_bytes, settings, len(hooks) * layers, ring, gpu=gpu),
            *_inside(model, settings, model.inside.sites(inside, layers), ring, gpu=gpu),
            *_adapters(model, settings, layers, gpu=gpu),
            # beside the buffers, in host memory
            MemoryPart(
                "queue",
                queue,
                "host",
                "captured rows that wait for the writers, page-locked on a GPU",
                "capture_queue_mib",
            ),
            MemoryPart(
                "row store",
                settings.tuning.row_store_mib << 20,
                "host",
                "rows kept for prompts that the prefix cache serves",
                "row_store_mib",
            ),
            MemoryPart(
                "vectors",
                settings.tuning.vector_cache_mib << 20,
                "host",
                "steering vectors",
                "vector_cache_mib",
            ),
            MemoryPart(
                "prepared rows",
                KEPT_BYTES,
                "host",
                "configurations laid out for the pool, page-locked on a GPU",
            ),
            MemoryPart(
                "source runs",
                settings.tuning.run_cache_mib << 20,
                "host",
                "rows that patches read",
                "run_cache_mib",
            ),
        ],
        work=_work(shape, hooks, settings) if gpu and not settings.vllm.enforce_eager else [],
        streams=_streams(model, hooks, tokens_per_second),
        limits=_limits(
            model=model,
            settings=settings,
            hooks=[*hooks, *present],
            layers=layers,
            ring=ring,
            queue=queue,
            tokens_per_second=tokens_per_second,
        ),
    )


def _hooks(model: ModelShape, settings: Settings) -> list[Hook]:
    named, _ = asked_hooks(settings.hooks)
    if not named:
        return model.hooks
    if unknown := [name for name in named if name not in model.hooks]:
        raise UnsupportedArchitectureError(
            f"{model.architecture} has no {unknown[0]}; it has {', '.join(model.hooks)}"
        )
    return [hook for hook in model.hooks if hook in named]


# -- Memory


def buffers(
    width: int, settings: Settings, sites: int, ring: Ring | None, *, gpu: bool
) -> list[MemoryPart]:
    """Return the bytes of a rank's buffers for one bank, named as in `kernels.plan.Buffers`;
    on a CPU they are in the host's memory.

    `width`: bytes of a row.
    """
    capacity = settings.vllm.max_num_batched_tokens
    rows = settings.tuning.table_rows
    entries = 1 + settings.tuning.table_entries
    where: Literal["GPU", "host"] = "GPU" if gpu else "host"
    sizes = {
        "ring": (
            ring.step_rows * HALVES * width if ring else 0,
            "rows captured in one step, in two halves",
            "capture_buffer_mib",
        ),
        "pool": (entries * width, "vectors of steering configurations", "steering_entries"),
        "scalars": (
            entries * SCALARS * 4,
            "scalar parameters of those vectors",
            "steering_entries",
        ),
        "site_rows": (
            sites * len(FAMILIES if gpu else EVERY) * (1 + rows) * 4,
            "which vectors a configuration uses at each site",
            "steering_rows",
        ),
        "plan": (sites * PLAN_COLUMNS * 4, "what each site does in a step", "hooks"),
        "lists": (
            (1 if gpu else (4 * sites + 1) * capacity) * 8,
            "tokens that each site reads, and places of captured rows",
            "max_num_batched_tokens",
        ),
        "token_rows": (
            capacity * ROWS_PER_TOKEN * 4,
            "configurations of each token",
            "max_num_batched_tokens",
        ),
        "capture_slots": (
            (2 * sites if gpu else 1) * capacity * 4,
            "ring rows that each token's captures go to",
            "max_num_batched_tokens",
        ),
        "counts": (sites * COUNTS * 4, "what each site did", "hooks"),
        "sizes": (sites * capacity * 4, "relative sizes of edits", "max_num_batched_tokens"),
    }
    return [
        MemoryPart(name, size, where, about, setting)
        for name, (size, about, setting) in sizes.items()
    ]


def _inside(
    model: ModelShape, settings: Settings, sites: Mapping[str, int], ring: Ring | None, *, gpu: bool
) -> list[MemoryPart]:
    """Returns the ring and the tables of each bank inside attention and MLP, from `buffers`.

    `sites`: bank → number of its sites.
    """
    parts = []
    for bank, count in sites.items():
        width = (
            model.inside.width(bank, settings.vllm.tensor_parallel_size) * ITEM_BYTES[model.dtype]
        )
        rows, *tables = buffers(width, settings, count, ring, gpu=gpu)
        named = ", ".join(hook for hook in BANKS[bank] if hook in model.inside.hooks)
        parts.append(rows._replace(name=f"{bank}: ring", about=f"captured rows of {named}"))
        total = sum(part.bytes for part in tables)
        parts.append(
            MemoryPart(
                f"{bank}: tables",
                total,
                rows.where,
                "vectors, configurations and plans of these hooks",
                "hooks",
            )
        )
    return parts


def _adapters(model: ModelShape, settings: Settings, layers: int, *, gpu: bool) -> list[MemoryPart]:
    """Returns the memory that vLLM reserves for the LoRA adapters of a step, and that of the
    adapters that a rank keeps loaded, all with `max_lora_rank`.
    """
    if not settings.vllm.max_loras:
        return []
    item = settings.vllm.max_lora_rank * ITEM_BYTES[model.dtype]
    step = (
        settings.vllm.max_loras
        * layers
        * item
        * sum(linear.lora_width(settings.vllm.tensor_parallel_size) for linear in model.linears)
    )
    loaded = (
        settings.vllm.max_cpu_loras
        * model.layers
        * item
        * sum(linear.lora_width() for linear in model.linears)
    )
    return [
        MemoryPart(
            "adapters",
            step,
            "GPU" if gpu else "host",
            "LoRA matrices of the adapters of one step",
            "max_loras",
        ),
        MemoryPart(
            "loaded adapters", loaded, "host", "LoRA adapters that a rank keeps", "max_cpu_loras"
        ),
    ]


# -- Work and bytes


def _work(shape: RankShape, hooks: Collection[Hook], settings: Settings) -> list[StepWork]:
    """Returns the work with the hooks that the settings name, and with `post_block` alone, which
    most uses need.
    """
    sets: dict[str, Collection[Hook]] = {f"{len(hooks)} hooks": hooks}
    if len(hooks) > 1:
        sets |= {hook: (hook,) for hook in hooks if hook == "post_block"}
    works = []
    for name, installed in sets.items():
        for case, (edited, captured) in CASES.items():
            if not {*edited, *captured} <= {*installed}:
                continue
            rows = settings.vllm.max_num_seqs
            cost = step_cost(
                shape,
                installed,
                rows=rows,
                edited=edited,
                captured=captured,
                configurations=rows,
            )
            works.append(StepWork(name, case, cost, cost.seconds / shape.step_s()))
    return works


def _streams(
    model: ModelShape, hooks: Collection[Hook], tokens_per_second: float
) -> list[CaptureBytes]:
    """Returns the bytes of captures. The first rank of the stage that has a layer writes its rows,
    so each row counts once.
    """
    sets = {"one layer at one hook": 1, "every layer at one hook": model.layers}
    if len(hooks) > 1:
        sets[f"every layer at {len(hooks)} hooks"] = model.layers * len(hooks)
    return [
        CaptureBytes(name, sites * model.row_bytes, sites * model.row_bytes * tokens_per_second)
        for name, sites in sets.items()
    ]


# -- Limits


def _limits(
    model: ModelShape,
    settings: Settings,
    hooks: Collection[Hook],
    layers: int,
    ring: Ring | None,
    queue: int,
    tokens_per_second: float,
) -> list[str]:
    """Return the limits that users or operators reach first, as sentences that begin with the
    setting.
    """
    limits = []
    sites = len(hooks) * layers
    tokens = settings.vllm.max_num_batched_tokens
    if ring is not None:
        whole = ring.rows // tokens
        if whole < layers:
            limits.append(
                f"tuning.capture_buffer_mib: a step of {tokens} tokens captures at most {whole} of "
                f"{layers} layers at one hook; a prompt captured "
                f"at more of them is computed in steps of fewer tokens ({ring.rows // layers} "
                f"with all {layers})"
            )
        else:
            all_of = min(whole // layers, len(hooks))
            limits.append(
                f"tuning.capture_buffer_mib: a step of {tokens} tokens captures every layer at "
                f"{all_of} of {len(hooks)} hooks"
            )
        if (together := ring.rows // (sites * (1 + settings.speculative_tokens))) < 1:
            limits.append(
                f"tuning.capture_buffer_mib: a request captures at most {ring.rows} of the {sites} "
                "sites; requests for more are rejected"
            )
        elif together < settings.vllm.max_num_seqs:
            limits.append(
                f"tuning.capture_buffer_mib: requests that capture all {sites} sites: at most "
                f"{together} at a time; others wait "
                f"(max_num_seqs {settings.vllm.max_num_seqs})"
            )
    positions = (settings.tuning.capture_window_mib << 20) // (model.layers * model.row_bytes)
    long = settings.tuning.capture_memory_mib // settings.tuning.capture_window_mib
    limits.append(
        "tuning.capture_memory_mib: requests that capture every layer at one hook at more "
        f"than {positions} positions "
        f"(tuning.capture_window_mib): at most {long} at a time; others wait"
    )
    seconds = queue / (model.layers * model.row_bytes * tokens_per_second)
    after = {
        "block": "captures wait for the writers",
        "spill": "rows go to files",
        "drop": "rows are dropped",
    }[settings.capture_overload]
    limits.append(
        f"tuning.capture_queue_mib: every layer at one hook fills the queue in {seconds:.1f} s "
        f"if nothing is written; then {after}"
    )
    if settings.tuning.steering_rows <= settings.vllm.max_num_seqs:
        limits.append(
            f"tuning.steering_rows: {settings.tuning.steering_rows} is not above max_num_seqs "
            f"({settings.vllm.max_num_seqs}): while running requests use all rows, none is free to "
            "prepare the next request's steering"
        )
    limits.append(
        f"tuning.steering_entries: {settings.tuning.steering_entries} vectors at a time; a lowrank "
        f"of rank {MAX_RANK} takes {2 * MAX_RANK} of them, so "
        f"at most {settings.tuning.steering_entries // (2 * MAX_RANK)} such lowranks fit"
    )
    if asked_hooks(settings.hooks)[1]:
        limits.append(
            "hooks: hooks inside attention and MLP are counted in memory, and not in work "
            "per step or bytes to the disk"
        )
    memory = settings.tuning.memory_limit_kib * 1024 // model.row_bytes
    limits.append(
        f"tuning.memory_limit_kib: a response holds at most {memory} rows of one prompt "
        "(consumer memory)"
    )
    if memory < 1:
        limits[-1] = (
            f"tuning.memory_limit_kib: a row has {model.row_bytes} bytes, more than a response may "
            "hold (consumer memory)"
        )
    return limits
