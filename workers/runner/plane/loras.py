"""LoRA adapters on a rank: loads them, and checks which adapter the rows of a step were computed
with.

vLLM holds and applies the adapters. The check reads the mapping of rows to adapters that vLLM gave
to its kernels.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from vllm.lora import model_manager
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.linear import LinearBase

from ....schemas.prompts.selectors import as_ranges
from ....storage.formats.lora_files import CONFIG, WEIGHTS, digest_of, general_name, raw_files
from ..base.actions import ActionLedger
from ..base.engine_step import StepView
from .requests import Requests, WrongAdapterError

logger = logging.getLogger(__name__)


class LoadedAdapters:
    """LoRA adapters of one rank."""

    def __init__(self, manager: Any, scratch: Path) -> None:
        """`manager`: the runner's `LRUCacheWorkerLoRAManager`. `scratch`: a folder for copies of
        adapters while they are loaded.
        """
        self._worker = manager
        self._manager = manager._adapter_manager
        self._scratch = scratch
        self._digests: dict[int, str] = {0: ""}  # vLLM's number → content
        # the last step whose rows were all compared, and what `_state` was then
        self._compared: tuple[StepView, tuple[Any, ...]] | None = None
        for wrapper in self._manager.punica_wrapper_mapping.values():
            if type(wrapper) is PunicaWrapperCPU:
                wrapper.__class__ = _BySegment

    def __contains__(self, digest: str) -> bool:
        return digest in self._digests.values()

    def names(self) -> list[tuple[int, str]]:
        return sorted(self._digests.items())

    def put(self, number: int, digest: str, folder: str) -> None:
        """Load the adapter in `folder`. Raises ValueError, also if its digest is not `digest`.

        vLLM reads a copy of the bytes that were compared, because the files may change meanwhile.
        """
        config, weights = raw_files(Path(folder))
        if (current := digest_of(config, weights)) != digest:
            raise ValueError(
                f"the files have changed since they were registered: {current[:12]} instead of "
                f"{digest[:12]}"
            )
        self._scratch.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=self._scratch, prefix="lora-") as copy:
            Path(copy, CONFIG).write_bytes(config)
            Path(copy, WEIGHTS).write_bytes(weights)
            try:
                lora = self._worker._load_adapter(LoRARequest(digest, number, copy))
                self._manager.add_adapter(lora)
            except Exception as error:  # vLLM raises many types
                raise ValueError(f"vLLM cannot load it: {error}") from error
        self._digests[number] = digest

    def drop(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._manager.remove_adapter(number)
            self._digests.pop(number, None)

    def used(self, first: int, count: int) -> str:
        """Return the digest of the adapter with which rows `[first, first + count)` of the step
        were computed; empty for the model alone.

        Raises WrongAdapterError when the rows have several adapters, or one that was not loaded
        here.
        """
        mapping = self._manager._last_mapping
        numbers = (
            {int(number) for number in mapping.index_mapping[first : first + count]}
            if mapping is not None
            else set()
        )
        if len(numbers) != 1:
            raise WrongAdapterError(
                f"rows {first} to {first + count - 1} were computed with {len(numbers)} adapters"
            )
        number = numbers.pop()
        if number not in self._digests or (number and number not in self._manager.lora_index_to_id):
            raise WrongAdapterError(
                f"rows {first} to {first + count - 1} were computed with an adapter that is not "
                f"loaded (number {number})"
            )
        return self._digests[number]

    def _state(self, changes: int, rows: int) -> tuple[Any, ...]:
        """Return all that decides how `account` ends for so many rows of the same requests."""
        mapping = self._manager._last_mapping
        numbers = None if mapping is None else mapping.index_mapping[:rows]
        return changes, numbers, [*self._manager.lora_index_to_id], {*self._digests.items()}

    def account(self, view: StepView, requests: Requests, actions: ActionLedger) -> None:
        """Check that every row of the last step was computed with its request's adapter, and fold
        the adapter into the ledger once for each request.

        Raises WrongAdapterError if they differ. Steps that repeat the last one do without a look
        at each request.
        """
        state = self._state(requests.changes, view.num_rows)
        before = self._compared
        self._compared = None
        if before is None or state != before[1] or not view.is_like(before[0]):
            self._compare(view, requests, actions)
        self._compared = view, state

    def _compare(self, view: StepView, requests: Requests, actions: ActionLedger) -> None:
        """Check each request's rows, see `account`."""
        for rows in view.requests:
            request = requests.tracked.get(rows.id)
            expected = (
                request.spec.lora.digest
                if request is not None and request.spec.lora is not None
                else ""
            )
            used = self.used(rows.first_row, rows.num_rows)
            if used != expected:
                raise WrongAdapterError(
                    f"rows of request {rows.id} were computed with adapter "
                    f"{used[:12]!r} instead of "
                    f"{expected[:12]!r}"
                )
            if request is not None and expected and not request.accounted:
                request.accounted = True
                actions.fold(requests.step, "lora", *request.spec.ids, used)

    def modules(self, hf_config: Any) -> dict[str, list[dict[str, Any]]]:
        """Return the modules of this rank's layers that adapters may change, as
        `LoraSupport.modules` in plain containers. `hf_config`: of the model.
        """
        layers: dict[str, dict[tuple[int, int], set[int | None]]] = {}
        transformers_names = _transformers_names(self._manager.model, hf_config)
        for name, module in self._manager.modules.items():
            for part, inputs, outputs in _parts(name, module, self._manager.packed_modules_mapping):
                general, layer = general_name(transformers_names.get(part, part))
                layers.setdefault(general, {}).setdefault((inputs, outputs), set()).add(layer)
        return {
            name: [
                {
                    "inputs": inputs,
                    "outputs": outputs,
                    "layers": as_ranges(number for number in numbers if number is not None),
                }
                for (inputs, outputs), numbers in shapes.items()
            ]
            for name, shapes in layers.items()
        }


def _transformers_names(model: Any, hf_config: Any) -> dict[str, str]:
    """Return vLLM's name of a module → transformers' name, which adapter files use; empty if the
    names are equal or unknown.
    """
    if (mapper := getattr(model, "hf_to_vllm_mapper", None)) is None:
        return {}
    try:
        with torch.device("meta"):
            reference = getattr(transformers, hf_config.architectures[0])(hf_config)
        rename = mapper.get_rename_mapper()
        mapped_names = {
            rename._map_name(f"{name}.weight"): name for name, _ in reference.named_modules()
        }
    except Exception as error:  # transformers raises many types
        logger.warning(
            "modules of adapters have vLLM's names, because transformers cannot build %s: %s",
            hf_config.architectures,
            error,
        )
        return {}
    return {mapped.removesuffix(".weight"): name for mapped, name in mapped_names.items() if mapped}


def is_supported_lora_module(
    module_name: str, module: torch.nn.Module, supported_lora_modules: list[str]
) -> bool:
    """Return whether vLLM may replace this module by its LoRA layer.

    Adapters of experts, embeddings and `lm_head` are refused, and vLLM's LoRA layers for experts
    cannot run on CPUs, even without an adapter.
    """
    return (
        isinstance(module, LinearBase | BaseLayerWithLoRA)
        and "lm_head" not in module_name
        and _supported(module_name, module, supported_lora_modules)
    )


_supported = model_manager.is_supported_lora_module
model_manager.is_supported_lora_module = is_supported_lora_module


def _parts(
    name: str, module: BaseLayerWithLoRA, packed: dict[str, list[str]]
) -> list[tuple[str, int, int]]:
    """Return (name, inputs, outputs) of the checkpoint's linear layers that vLLM packs into this
    module; empty for other kinds of modules.
    """
    if not isinstance(module, BaseLinearLayerWithLoRA):
        return []
    base: Any = module.base_layer
    parent, _, last = name.rpartition(".")
    members = packed.get(last, [last])
    sizes = [base.output_size] if len(members) == 1 else list(base.output_sizes)
    if hasattr(base, "total_num_kv_heads") and len(members) == 3:
        # `output_sizes` counts replicated heads once for each rank
        kv = base.total_num_kv_heads
        sizes = [base.total_num_heads * base.head_size, kv * base.head_size, kv * base.v_head_size]
    if len(sizes) != len(members):
        return []
    return [
        (f"{parent}.{member}", base.input_size, size)
        for member, size in zip(members, sizes, strict=True)
    ]


class _BySegment(PunicaWrapperCPU):
    """vLLM's arithmetic on CPUs, computed for one segment of rows with one adapter at a time.

    vLLM's own code uses −1, which means no adapter, as an index into the stack of adapters: in a
    mixed batch, rows without an adapter get the last one. It also copies an adapter's weights for
    every row.
    """

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        *,
        buffer: tuple[torch.Tensor, ...] | None = None,
        **kwargs: Any,
    ) -> None:
        if self.no_lora or self.batch_size < 0:  # negative: no step has begun
            return
        rows = x.reshape(-1, x.shape[-1])
        out = y.view(-1, y.shape[-1])
        starts, lengths, slots, *_ = self.prefill_metadata
        for start, length, slot in zip(
            starts.tolist(), lengths.tolist(), slots.tolist(), strict=True
        ):
            if slot < 0:
                continue
            of_request = rows[start : start + length].float()
            column = 0
            for a, b, width in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
                shrunk = scale * (of_request @ a[slot, 0].float().T)
                out[start : start + length, column : column + width] += (
                    shrunk @ b[slot, 0].float().T
                ).to(out.dtype)
                column += width
