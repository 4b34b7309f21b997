"""vLLM's scheduler with our part, without a model: steps take a time that depends on their tokens,
and their requests get the token 9.
"""

import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from rank_kit import plane_config

from midstream.broker.processes import orphans
from midstream.schemas.requests.specs import RankSpec
from midstream.workers.runner.base import config as plane
from midstream.workers.runner.base.packed_spec import TenantShare, pack

BLOCK = 16
BLOCKS = 20_000
#: Seconds of a step, and of each of its tokens.
STEP_S = 0.004
TOKEN_S = 0.00005
SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "vocab_size": 512,
}


class Clock:
    """Stands for the module `time`."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    monotonic = perf_counter

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Steps:
    """An engine's steps."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, **options: Any) -> None:
        patch.setattr(orphans, "die_with_parent", lambda: None)
        from vllm.config import VllmConfig
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.hashing import sha256
        from vllm.v1.core import kv_cache_utils
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        from midstream.workers.runner.vllm import scheduler, tenant_steps, tenant_turns

        self.clock = Clock()
        for module in (scheduler, tenant_steps, tenant_turns):
            patch.setattr(module, "time", self.clock)
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps(SHAPE))
        given = {"max_num_seqs": 64, "max_num_batched_tokens": 2048, "max_model_len": 4096}
        made: VllmConfig = EngineArgs(
            model=str(folder / "model"),
            skip_tokenizer_init=True,
            dtype="float32",
            block_size=BLOCK,
            async_scheduling=False,
            **given | options,
        ).create_engine_config()
        made.cache_config.num_gpu_blocks = BLOCKS
        patch.setenv(plane.VARIABLE, "")
        plane_config(folder, steering_rows=8, steering_entries=8, step_tokens=2048).export()
        kv_cache_utils.init_none_hash(sha256)
        self._hasher = kv_cache_utils.get_request_block_hasher(BLOCK, sha256)
        blocks = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=None)
        self.scheduler: Any = scheduler.MidstreamScheduler(
            made,
            KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(["layers.0"], blocks)]),
            StructuredOutputManager(made),
            block_size=BLOCK,
        )
        self.numbers = Counter[str]()  # tenant → its requests so far
        self.tokens = Counter[str]()  # tenant → its tokens that were computed
        self.firsts = dict[str, int]()  # request → steps from its arrival to its first token
        self.ends = dict[str, float]()  # request → seconds from its arrival to its end
        self._arrived = dict[str, tuple[int, float]]()
        self.number = 0

    def ask(
        self,
        tenant: str,
        prompt: int,
        generated: int = 1,
        weight: int = 1,
        spec: Mapping[str, Any] | None = None,
    ) -> str:
        """Add a request, whose tokens no other has; return its id."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        self.numbers[tenant] += 1
        name = f"{tenant}.{self.numbers[tenant]}"
        known = {"version": "", "job": name, "request": 0, "attempt": 1, "prompt_tokens": prompt}
        packed = pack(
            None if spec is None else RankSpec(**known | spec), TenantShare(tenant, weight)
        )
        params = SamplingParams(max_tokens=generated, ignore_eos=True, extra_args=packed)
        ids = random.Random(name).choices(range(2, SHAPE["vocab_size"]), k=prompt)
        self.scheduler.add_request(Request(name, ids, params, None, block_hasher=self._hasher))
        self._arrived[name] = self.number, self.clock.now
        return name

    def step(self) -> dict[str, int]:
        """Run a step; return how many tokens of each request it computed."""
        from vllm.v1.outputs import ModelRunnerOutput

        output = self.scheduler.schedule()
        counts = dict(output.num_scheduled_tokens)
        self.number += 1
        self.clock.now += STEP_S + TOKEN_S * sum(counts.values())
        sampled = []
        for name, count in counts.items():
            self.tokens[name.split(".")[0]] += count
            request = self.scheduler.requests[name]
            done = request.num_computed_tokens >= request.num_tokens
            sampled.append([9] if done else [])
            if done and name not in self.firsts:
                self.firsts[name] = self.number - self._arrived[name][0]
            if done and request.num_output_tokens + 1 == request.max_tokens:
                self.ends[name] = self.clock.now - self._arrived[name][1]
        ids = list(counts)
        places = {name: place for place, name in enumerate(ids)}
        self.scheduler.update_from_output(output, ModelRunnerOutput(ids, places, sampled))
        return counts

    def steps(self, count: int) -> Sequence[dict[str, int]]:
        return [self.step() for _ in range(count)]
