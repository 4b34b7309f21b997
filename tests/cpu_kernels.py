"""Compares what vLLM's CPU build runs in place of Triton kernels with those kernels, interpreted.

A program that prints JSON.

The object is kernel → fault or null, for each substitute that the build registers. A substitute and
its kernel get the same arguments, of the types that vLLM passes; after it all tensors must be
equal. It is a process of its own, since vLLM decides when it is imported whether it has Triton.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parent / "engine" / "triton_cpu"))

import torch
import vllm.triton_utils
from midstream_triton_cpu.masks import mend
from vllm.platforms import current_platform
from vllm.triton_utils import dispatcher

from midstream.workers.runner.support import cpu_drafts

REQUESTS = 7
DRAFTS = 5
VOCABULARY = 50
BLOCK = 16
ROUNDS = 20
SAMPLER = "vllm.v1.sample.rejection_sampler"
EAGLE = "vllm.v1.spec_decode.utils"


class Launch(NamedTuple):
    """A launch of a kernel: grid, arguments by name, and the memory that it has as addresses."""

    grid: tuple[int, ...]
    arguments: dict[str, Any]
    memory: tuple[torch.Tensor, ...] = ()

    def tensors(self) -> list[torch.Tensor]:
        """What must be equal after the launch."""
        given = [each for each in self.arguments.values() if isinstance(each, torch.Tensor)]
        return list(self.memory) or given


def int32(values: Any) -> torch.Tensor:
    return torch.as_tensor(values).to(torch.int32)


def below(limit: int, *shape: int) -> torch.Tensor:
    return torch.randint(limit, shape)


def sums() -> torch.Tensor:
    """[requests]: drafts of each request and of those before it; some have none."""
    return int32(below(DRAFTS + 1, REQUESTS).cumsum(0))


def slots() -> Launch:
    lengths = 1 + below(20, REQUESTS)
    starts = int32([0, *lengths.cumsum(0)])
    tokens = int(starts[-1])
    return Launch(
        (REQUESTS + 1,),
        {
            "num_tokens": tokens,
            "max_num_tokens": tokens,  # padding is for CUDA graphs
            "query_start_loc_ptr": starts,
            "positions_ptr": below(4 * BLOCK, tokens),
            "block_table_ptr": int32(below(99, REQUESTS, 4)),
            "block_table_stride": 4,
            "slot_mapping_ptr": torch.full((tokens,), 7),
            "KV_CACHE_BLOCK_SIZE": BLOCK,
            "TOTAL_CP_WORLD_SIZE": 1,
            "TOTAL_CP_RANK": 0,
            "CP_KV_CACHE_INTERLEAVE_SIZE": 1,
            "PAD_ID": -1,
            "BLOCK_SIZE": 1024,
        },
    )


def next_slots() -> Launch:
    longest = 4 * BLOCK
    positions = below(longest, REQUESTS)
    positions[0] = longest - 1
    return Launch(
        (REQUESTS + 2,),
        {
            "positions_ptr": positions,
            "block_table_ptr": int32(below(99, REQUESTS, 4)),
            "block_table_stride": 4,
            "seq_lens_ptr": int32(positions + 1),
            "out_clamped_positions_ptr": torch.full((REQUESTS,), 7),
            "out_slot_mapping_ptr": torch.full((REQUESTS + 2,), 7),
            "block_size": BLOCK,
            "max_model_len": longest,
            "n_blocks_per_req": 4,
            "PAD_ID": -1,
            "batch_size": REQUESTS,
        },
    )


def last_accepted() -> Launch:
    drafted = sums()
    counts = drafted.diff(prepend=int32([0]))
    valid = int32([int(below(int(count) + 1, 1)) + 1 for count in counts])
    return Launch(
        (REQUESTS,),
        {
            "cu_num_draft_tokens_ptr": drafted,
            "valid_sampled_tokens_count_ptr": valid,
            "query_start_loc_gpu_ptr": int32([0, *(counts + 1).cumsum(0)]),
            "token_indices_to_sample_ptr": int32(torch.full((REQUESTS,), 7)),
            "num_rejected_tokens_gpu_ptr": int32(torch.full((REQUESTS,), 7)),
            "num_reqs": REQUESTS,
        },
    )


def next_tokens() -> Launch:
    sampled = below(VOCABULARY, REQUESTS, DRAFTS + 1)
    ends = below(DRAFTS + 2, REQUESTS)
    sampled[torch.arange(DRAFTS + 1) >= ends[:, None]] = -1
    return Launch(
        (REQUESTS,),
        {
            "sampled_token_ids_ptr": int32(sampled),
            "discard_request_mask_ptr": below(4, REQUESTS) == 0,
            "backup_next_token_ids_ptr": int32(below(VOCABULARY, REQUESTS)),
            "next_token_ids_ptr": int32(torch.full((REQUESTS,), 7)),
            "valid_sampled_tokens_count_ptr": int32(torch.full((REQUESTS,), 7)),
            "vocab_size": VOCABULARY,
            "num_sampled_tokens_per_req": DRAFTS + 1,
            "num_reqs": REQUESTS,
            "stride_sampled_token_ids": DRAFTS + 1,
            "BLOCK_SIZE_TOKENS": 8,
        },
    )


def greedy(every: bool = False) -> Launch:
    drafted = sums()
    chosen = below(VOCABULARY, int(drafted[-1]))
    guessed = chosen.where(below(3, len(chosen)) > 0, below(VOCABULARY, len(chosen)))
    return Launch(
        (REQUESTS,),
        {
            "output_token_ids_ptr": int32(torch.full((REQUESTS, DRAFTS + 1), -1)),
            "cu_num_draft_tokens_ptr": drafted,
            "draft_token_ids_ptr": int32(guessed),
            "target_argmax_ptr": chosen,
            "bonus_token_ids_ptr": below(VOCABULARY, REQUESTS, 1),
            "is_greedy_ptr": None if every else below(2, REQUESTS) == 0,
            "max_spec_len": DRAFTS,
            "uniform_probs_ptr": None,
            "synthetic_conditional_rates_ptr": None,
            "SYNTHETIC_MODE": False,
        },
    )


def all_greedy() -> Launch:
    return greedy(every=True)


def sampled() -> Launch:
    """Its uniform numbers have 32 bits: the substitute rounds those of 64."""
    drafted = sums()
    positions = int(drafted[-1])
    return Launch(
        (REQUESTS,),
        {
            "output_token_ids_ptr": int32(torch.full((REQUESTS, DRAFTS + 1), -1)),
            "cu_num_draft_tokens_ptr": drafted,
            "draft_token_ids_ptr": int32(below(VOCABULARY, positions)),
            "draft_probs_ptr": None,
            "target_probs_ptr": torch.rand(positions, VOCABULARY),
            "bonus_token_ids_ptr": below(VOCABULARY, REQUESTS, 1),
            "recovered_token_ids_ptr": int32(below(VOCABULARY, positions)),
            "uniform_probs_ptr": torch.rand(positions).double(),
            "is_greedy_ptr": below(2, REQUESTS) == 0,
            "max_spec_len": DRAFTS,
            "vocab_size": VOCABULARY,
            "synthetic_conditional_rates_ptr": None,
            "NO_DRAFT_PROBS": True,
            "SYNTHETIC_MODE": False,
        },
    )


def recovered() -> Launch:
    drafted = sums()
    positions = int(drafted[-1])
    return Launch(
        (REQUESTS, DRAFTS),
        {
            "output_token_ids_ptr": int32(torch.full((positions,), -1)),
            "cu_num_draft_tokens_ptr": drafted,
            "draft_token_ids_ptr": int32(below(VOCABULARY, positions)),
            "draft_probs_ptr": None,
            "target_probs_ptr": torch.rand(positions, VOCABULARY),
            "inv_q_ptr": torch.rand(REQUESTS, VOCABULARY),
            "vocab_size": VOCABULARY,
            "BLOCK_SIZE": 8192,
            "NO_DRAFT_PROBS": True,
            "USE_FP64_GUMBEL": False,
        },
    )


def copies() -> Launch:
    before = torch.rand(4, 700)
    after = torch.rand(4, 700)
    return Launch(
        (4,),
        {
            "src_ptrs": torch.tensor([row.data_ptr() for row in before]),
            "dst_ptrs": torch.tensor([row.data_ptr() for row in after]),
            "sizes": int32([0, 4, 2000, 2800]),
            "BLOCK_SIZE": 1024,
        },
        (before, after),
    )


def expanded() -> Launch:
    drafted = sums()
    dtype = [torch.float32, torch.int32, torch.int64][int(below(3, 1))]
    return Launch(
        (REQUESTS,),
        {
            "output_ptr": torch.full((int(drafted[-1]),), 7, dtype=dtype),
            "input_ptr": (below(4, REQUESTS) * 0.7).to(dtype),
            "cu_num_tokens_ptr": drafted,
            "replace_from": 0,
            "replace_to": 1,
            "MAX_NUM_TOKENS": 128,
        },
    )


CASES: dict[str, list[Callable[[], Launch]]] = {
    "vllm.v1.worker.block_table.ComputeSlotMappingKernel.kernel": [slots],
    f"{EAGLE}.eagle_step_slot_mapping_metadata_kernel": [next_slots],
    f"{EAGLE}.eagle_prepare_inputs_padded_kernel": [last_accepted],
    f"{EAGLE}.eagle_prepare_next_token_padded_kernel": [next_tokens],
    f"{SAMPLER}.rejection_greedy_sample_kernel": [greedy, all_greedy],
    f"{SAMPLER}.rejection_random_sample_kernel": [sampled],
    f"{SAMPLER}.expand_kernel": [expanded],
    f"{SAMPLER}.sample_recovered_tokens_kernel": [recovered],
    "vllm.v1.worker.mamba_utils.batch_memcpy_kernel": [copies],
}
#: Kernels of drafters that Midstream refuses, so no engine runs their substitutes.
REFUSED = {
    f"{EAGLE}.copy_and_expand_eagle_inputs_kernel",
    f"{EAGLE}.copy_and_expand_dflash_inputs_kernel",
}


def _expand(arguments: dict[str, Any]) -> None:
    output, *given, _ = arguments.values()
    values, ends, *replaced = given
    output.copy_(cpu_drafts.expand_batch_to_tokens(values, ends, len(output), *replaced))


#: Kernels whose substitutes Midstream replaces → what runs then.
OURS: dict[str, Callable[[dict[str, Any]], None]] = {f"{SAMPLER}.expand_kernel": _expand}


def substitutes() -> dict[str, Callable[..., None]]:
    """Kernel → its substitute, as a rank on a CPU registers them."""
    found: dict[str, Callable[..., None]] = {}
    with (
        mock.patch.object(vllm.triton_utils, "HAS_TRITON", False),
        mock.patch.object(dispatcher, "register_kernels", found.update),
    ):
        current_platform.register_triton_kernel_overrides()
    return found


def differences(name: str, kernel: Any, case: Callable[[], Launch]) -> Iterator[str]:
    """Yield what differs after the two launches of a case, with random arguments."""
    for seed in range(ROUNDS):
        torch.manual_seed(seed)
        right = case()
        torch.manual_seed(seed)
        found = case()
        kernel[right.grid](**right.arguments)
        if name in OURS:
            OURS[name](found.arguments)
        else:
            _kernel(name)[found.grid](**found.arguments)
        for expected, given in zip(right.tensors(), found.tensors(), strict=True):
            if not torch.equal(expected, given):
                yield f"seed {seed}: {expected.tolist()} is {given.tolist()}"


def _kernel(name: str) -> Any:
    return getattr(*dispatcher._resolve_kernel(name))


def main() -> None:
    mend()
    registered = substitutes()
    kernels = {name: _kernel(name) for name in registered.keys() - REFUSED}
    dispatcher.register_kernels(registered)
    json.dump(
        {
            name: next(
                (
                    fault
                    for case in CASES.get(name, [])
                    for fault in differences(name, kernel, case)
                ),
                None if name in CASES else "it is compared with nothing",
            )
            for name, kernel in kernels.items()
        },
        sys.stdout,
    )


if __name__ == "__main__":
    main()
