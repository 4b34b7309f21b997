"""vLLM's methods of speculative decoding: which are served, under which conditions, and why the
others are refused.

For a served method, tests on the real engine show that a request's tokens are the same as without
drafts, that rows of accepted drafts are captured once and rows of rejected drafts never, and that
edits reach the model but not its drafter.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.model_loader.utils import get_model_cls
from vllm.model_executor.models.interfaces import supports_eagle3

from ..hooks.architectures import Adapter
from ..hooks.sites import has_sites
from .rules import Rule


class UnsupportedDrafterError(ValueError):
    """The drafter does not fit the model."""


@dataclass(frozen=True)
class Method:
    """A method of speculative decoding."""

    refused: str = ""  # why the method is refused; empty: it is served
    conditions: tuple[Rule, ...] = ()
    # served architectures of the drafting model; empty: the method has no drafting model
    drafters: frozenset[str] = frozenset()


_UNTESTED = "its rows and tokens have not been compared with those without drafts"
#: Conditions of every method.
CONDITIONS = (
    Rule(
        "speculative_config with scheduler_config.async_scheduling",
        (False,),
        "positions are known only on the GPU, where drafts are rejected",
        lambda config: bool(config.scheduler_config.async_scheduling),
    ),
    Rule(
        "parallel_config.pipeline_parallel_size with speculative_config",
        (1,),
        "untested",
        lambda config: config.parallel_config.pipeline_parallel_size,
    ),
    Rule(
        "speculative_config.rejection_sample_method",
        ("standard",),
        "`synthetic` accepts tokens that the model would not choose, `block` is untested",
    ),
    Rule(
        "speculative_config.draft_sample_method",
        ("greedy",),
        "sampled drafts are untested",
    ),
    Rule(
        "speculative_config.parallel_drafting",
        (False,),
        "parallel drafting is untested",
    ),
    Rule(
        "speculative_config.enable_adaptive_verification",
        (False,),
        "the GPU decides how many drafts a request has",
    ),
    Rule(
        "speculative_config.num_speculative_tokens_per_batch_size",
        (None,),
        "a number of drafts that changes from step to step is untested",
    ),
    Rule(
        "speculative_config.use_heterogeneous_vocab",
        (False,),
        "a drafter with another vocabulary is untested",
    ),
)
#: Conditions of methods whose drafting model reads what the target computed.
_OF_HEADS = (
    Rule("speculative_config.use_local_argmax_reduction", (False,), "it is untested"),
    Rule("speculative_config.disable_padded_drafter_batch", (False,), "it is untested"),
    Rule(
        "speculative_config.disable_eagle_block_drop",
        (False,),
        "the drafter would read cached blocks that it has not filled",
    ),
    Rule(
        "speculative_config.index_share_for_mtp_iteration",
        (None, False),
        "the drafter would write to what the target reads",
    ),
)
_LLAMA_HEAD = (
    "Eagle3LlamaForCausalLM",
    "LlamaForCausalLMEagle3",
    "Eagle3MiniMaxM2ForCausalLM",
    "Eagle3Qwen2_5vlForCausalLM",
    "Eagle3Qwen3vlForCausalLM",
)  # names of one class
_OLD_NAME = Method("vLLM calls it `mtp` now")
METHODS: Mapping[str, Method] = {
    "ngram": Method(),
    "eagle3": Method(conditions=_OF_HEADS, drafters=frozenset(_LLAMA_HEAD)),
    "mtp": Method(conditions=_OF_HEADS, drafters=frozenset({"Glm4MoeMTPModel", "MiMoMTPModel"})),
    "ngram_gpu": Method("`ngram` finds the same drafts; with this name, vLLM would overlap steps"),
    "eagle": Method(f"heads before EAGLE-3: {_UNTESTED}"),
    "medusa": Method(f"the v2 runner has no Medusa heads; on the v1 runner, {_UNTESTED}"),
    "mlp_speculator": Method("vLLM's runners no longer have it"),
    "draft_model": Method(f"a draft model has positions and KV blocks of its own: {_UNTESTED}"),
    "suffix": Method(
        "drafts would come from the texts of other requests, so the speed of one would "
        "reveal another's text"
    ),
    "custom_class": Method("the drafter would be code that Midstream does not know"),
    "extract_hidden_states": Method("it drafts nothing: use a capture"),
    "dflash": Method(
        f"it drafts a block at once, in rows that the scheduler does not count: {_UNTESTED}"
    ),
    "dspark": Method("the GPU decides how many drafts a request has"),
} | dict.fromkeys(
    (
        "bailing_hybrid_mtp",
        "bailing_hybrid_v3_mtp",
        "deepseek_mtp",
        "dots3_note_mtp",
        "ernie_mtp",
        "exaone4_5_mtp",
        "exaone_moe_mtp",
        "gemma4_mtp",
        "glm4_moe_lite_mtp",
        "glm4_moe_mtp",
        "glm5_next_mtp",
        "glm_ocr_mtp",
        "hy_v3_mtp",
        "hy_v4_mtp",
        "inkling_mtp",
        "kimi_k3_mtp",
        "longcat_flash_mtp",
        "mimo_mtp",
        "mimo_v2_mtp",
        "minimax_m3_mtp",
        "nemotron_h_mtp",
        "pangu_ultra_moe_mtp",
        "qwen3_5_mtp",
        "qwen3_next_mtp",
        "qwen4_exp_mtp",
        "step3p5_mtp",
    ),
    _OLD_NAME,
)


def served() -> list[str]:
    """Return the names of the served methods."""
    return [name for name, method in METHODS.items() if not method.refused]


def refusals(config: VllmConfig) -> list[str]:
    """Return clauses that each name a setting of speculative decoding that is refused.

    Empty without drafts.
    """
    drafting = config.speculative_config
    if drafting is None:
        return []
    method = METHODS.get(drafting.method or "", Method("Midstream does not know it"))
    if method.refused:
        return [
            (
                f"speculative_config.method is {drafting.method!r}, valid: "
                f"{', '.join(served())} ({method.refused})"
            )
        ]
    lines = [line for rule in (*CONDITIONS, *method.conditions) if (line := rule.refusal(config))]
    return lines + (_of_model(config, method) if method.drafters else [])


def _of_model(config: VllmConfig, method: Method) -> list[str]:
    """Return why a drafting model is refused, judged before its weights are read."""
    drafting, target = config.speculative_config, config.model_config
    lines = []
    (architecture, *_) = drafting.draft_model_config.architectures
    if architecture not in method.drafters:
        valid = ", ".join(sorted(method.drafters))
        lines.append(
            f"the drafter {drafting.model} is a {architecture}, valid: {valid} (of others, "
            "rows and tokens are untested)"
        )
    ranks = config.parallel_config.tensor_parallel_size
    if drafting.draft_tensor_parallel_size != ranks:
        lines.append(
            "speculative_config.draft_tensor_parallel_size is "
            f"{drafting.draft_tensor_parallel_size}, valid: {ranks} (untested)"
        )
    if target.is_hybrid or target.is_attention_free:
        lines.append(
            "the model has layers with recurrent state, which rejected drafts would change, "
            f"valid: no drafter of method {drafting.method}"
        )
    head = drafting.draft_model_config.hf_config
    for name, needed in (
        ("hidden_size", target.get_hidden_size()),
        ("vocab_size", target.get_vocab_size()),
    ):
        trained = getattr(head, f"target_{name}", None) or getattr(head, name, needed)
        if trained != needed:
            lines.append(
                f"the drafter {drafting.model} is of a model with {name} {trained}, valid: {needed}"
            )
    if drafting.method == "eagle3" and not supports_eagle3(get_model_cls(target)):
        lines.append(
            f"vLLM's {target.architectures[0]} does not provide the rows that an EAGLE-3 head "
            "reads, valid: no drafter of method eagle3"
        )
    return lines


def check_loaded(drafter: nn.Module | None, read: Sequence[int], adapter: Adapter) -> None:
    """Raises UnsupportedDrafterError for a drafter that would run hook sites of the model, or that
    cannot read the target's rows.

    Called after `sites.install`. `drafter`: the drafting model, if any; `read`: the numbers of
    layers after which an EAGLE-3 head reads the stream.
    """
    if drafter is None:
        return
    if shared := [name for name, module in drafter.named_modules() if has_sites(module)]:
        raise UnsupportedDrafterError(
            f"the drafter {type(drafter).__name__} runs modules of the model that have hook "
            f"points: {shared[0]}"
        )
    if read and not 0 <= min(read) <= max(read) <= adapter.num_layers:
        raise UnsupportedDrafterError(
            f"the drafter reads the stream after layers {read}, valid: 0 to {adapter.num_layers}"
        )
    if read:
        like = next(weight for weight in drafter.parameters() if weight.is_floating_point())
        try:
            drafter.combine_hidden_states(
                torch.zeros(
                    1, len(read) * adapter.hidden_size, dtype=like.dtype, device=like.device
                )
            )
        except (RuntimeError, AssertionError) as error:
            raise UnsupportedDrafterError(
                f"the drafter does not read {len(read)} layers (after {read}): {error}"
            ) from error
    offsets = getattr(drafter, "draft_id_to_target_id", None)
    if offsets is not None:
        tokens = offsets.data.cpu() + torch.arange(len(offsets))
        first, last, size = int(tokens.min()), int(tokens.max()), int(drafter.config.vocab_size)
        if not 0 <= first <= last < size:
            raise UnsupportedDrafterError(
                f"the drafter drafts tokens {first} to {last}, valid: 0 to {size - 1}"
            )
