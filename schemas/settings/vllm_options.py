"""vLLM's own options that Midstream reads too: in the table `[engine]`, under vLLM's names."""

from typing import Literal

from ..base.dtypes import DType
from ..base.records import Record
from .tuning import Natural, PositiveInt


class VllmOptions(Record):
    """Each is set as `engine.<name>`: in the table `[engine]` of the file, by `--engine <name>=`,
    by `--set engine.<name>=`, or by `MIDSTREAM_ENGINE_<NAME>` in the environment. The table's other
    options are those that only vLLM reads: `Settings.engine_options`.
    """

    # `auto`, `float32`, `bfloat16` or `float16`; see what `auto` stands for
    # (docs/vllm.md#what-dtypeauto-stands-for)
    dtype: Literal["auto", DType] = "auto"
    # Maximum number of tokens of prompt and output together
    max_model_len: PositiveInt | None = None
    # Ranks per pipeline stage
    tensor_parallel_size: PositiveInt = 1
    # Pipeline stages
    pipeline_parallel_size: PositiveInt = 1
    # `false`: torch.compile and, on a GPU, CUDA graphs, with a slower start and faster steps;
    # `true`: the forward pass runs as Python. Unset: `true` on CPUs, `false` on a GPU
    enforce_eager: bool | None = None
    # Maximum number of requests in one engine step
    max_num_seqs: PositiveInt = 64
    # Maximum number of tokens in one engine step
    max_num_batched_tokens: PositiveInt = 2048
    # Use vLLM's prefix cache
    enable_prefix_caching: bool = True
    # Tokens in a block of the KV cache; only whole blocks are shared between requests. On CPUs, it
    # must be a multiple of 32 and is 32 by default; on accelerators, vLLM chooses the default
    block_size: PositiveInt | None = None
    # Size of the KV cache in blocks; overrides vLLM's own estimate
    num_gpu_blocks_override: PositiveInt | None = None
    # Distinct adapters in one engine step; requests with others wait for a later step. 0: no
    # adapters are served, and the engine runs without vLLM's LoRA layers
    max_loras: Natural = 0
    # Adapters that each rank keeps loaded, at least `max_loras`. A job whose adapter does not fit
    # waits until another job ends
    max_cpu_loras: PositiveInt = 16
    # Largest rank of an adapter: 8, 16, 32, 64, 128, 256, 320 or 512. Each rank reserves memory for
    # `max_loras` adapters of this rank (`midstream doctor --plan` says how much)
    max_lora_rank: Literal[8, 16, 32, 64, 128, 256, 320, 512] = 64

    @property
    def ranks(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size
