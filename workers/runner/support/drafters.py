"""vLLM's methods of speculative decoding: which are proven, under which conditions, and why others
are refused.

For a proven method, tests on the real engine show that a request's tokens are the same as without
drafts, that rows of accepted drafts are captured once and rows of rejected drafts never, and that
edits reach the model but not its drafter.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.model_loader.utils import get_model_cls
from vllm.model_executor.models.interfaces import supports_eagle3

from ..hooks.architectures import Adapter
from ..hooks.sites import has_sites
from .rules import SettingRule, Verdict, judge


class UnsupportedDrafterError(ValueError):
    """The drafter does not fit the model."""


#: Proven method → the proven architectures of its drafting model; empty: it has none.
PROVEN: Mapping[str, frozenset[str]] = {
    "ngram": frozenset(),
    "eagle3": frozenset(  # names of one class
        {
            "Eagle3LlamaForCausalLM",
            "LlamaForCausalLMEagle3",
            "Eagle3MiniMaxM2ForCausalLM",
            "Eagle3Qwen2_5vlForCausalLM",
            "Eagle3Qwen3vlForCausalLM",
        }
    ),
    "mtp": frozenset({"Glm4MoeMTPModel", "MiMoMTPModel"}),
}
#: Method → why it is refused.
REFUSED: Mapping[str, str] = {
    "ngram_gpu": "`ngram` finds the same drafts; with this name, vLLM would overlap steps",
    "suffix": (
        "drafts would come from the texts of other requests, so the speed of one would "
        "reveal another's text"
    ),
    "custom_class": "the drafter would be code that Midstream does not know",
    "extract_hidden_states": "it drafts nothing: use a capture",
    "dflash": "it drafts a block at once, in rows that the scheduler does not count",
    "dspark": "the GPU decides how many drafts a request has",
}
#: Conditions of every method.
CONDITIONS = (
    SettingRule(
        "speculative_config with scheduler_config.async_scheduling",
        "positions are known only on the GPU, where drafts are rejected",
        read=lambda config: bool(config.scheduler_config.async_scheduling),
    ),
    SettingRule(
        "parallel_config.pipeline_parallel_size with speculative_config",
        valid=(1,),
        read=lambda config: config.parallel_config.pipeline_parallel_size,
    ),
    SettingRule(
        "speculative_config.rejection_sample_method",
        "other methods may accept tokens that the model would not choose",
        ("standard",),
    ),
    SettingRule("speculative_config.draft_sample_method", valid=("greedy",)),
    SettingRule("speculative_config.parallel_drafting"),
    SettingRule(
        "speculative_config.enable_adaptive_verification",
        "the GPU decides how many drafts a request has",
    ),
    SettingRule("speculative_config.num_speculative_tokens_per_batch_size", valid=(None,)),
    SettingRule("speculative_config.use_heterogeneous_vocab"),
)
#: Conditions of methods whose drafting model reads what the target computed.
OF_HEADS = (
    SettingRule("speculative_config.use_local_argmax_reduction"),
    SettingRule("speculative_config.disable_padded_drafter_batch"),
    SettingRule(
        "speculative_config.disable_eagle_block_drop",
        "the drafter would read cached blocks that it has not filled",
    ),
    SettingRule(
        "speculative_config.index_share_for_mtp_iteration",
        "the drafter would write to what the target reads",
        (None, False),
    ),
    SettingRule(
        "speculative_config.draft_tensor_parallel_size other than tensor_parallel_size",
        read=lambda config: (
            config.speculative_config.draft_tensor_parallel_size
            != config.parallel_config.tensor_parallel_size
        ),
    ),
    SettingRule(
        "speculative_config with layers that have recurrent state",
        "rejected drafts would change the state",
        read=lambda config: config.model_config.is_hybrid or config.model_config.is_attention_free,
    ),
)


def verdict(config: VllmConfig) -> Verdict:
    """Return which settings of drafts are refused or unproven; none without drafts."""
    if (drafting := config.speculative_config) is None:
        return Verdict([], [])
    method = drafting.method or ""
    if why := REFUSED.get(method):
        return Verdict(
            [f"speculative_config.method is {method!r}, valid: {', '.join(PROVEN)} ({why})"], []
        )
    heads = PROVEN.get(method, frozenset())
    found = judge((*CONDITIONS, *(OF_HEADS if heads else ())), config)
    if method not in PROVEN:
        found.unproven.append(
            f"speculative_config.method is {method!r}, valid: {', '.join(PROVEN)}"
        )
    if heads:
        (architecture, *_) = drafting.draft_model_config.architectures
        found.refused.extend(_misfits(config))
        if architecture not in heads:
            found.unproven.append(
                f"the drafter is a {architecture}, valid: {', '.join(sorted(heads))}"
            )
    return found


def _misfits(config: VllmConfig) -> Iterator[str]:
    """Yield why a drafting model does not fit, judged before its weights are read."""
    drafting = config.speculative_config
    target = config.model_config
    head = drafting.draft_model_config.hf_config
    for name, needed in (
        ("hidden_size", target.get_hidden_size()),
        ("vocab_size", target.get_vocab_size()),
    ):
        trained = getattr(head, f"target_{name}", None) or getattr(head, name, needed)
        if trained != needed:
            yield (
                f"the drafter {drafting.model} is of a model with {name} {trained}, valid: {needed}"
            )
    if drafting.method == "eagle3" and not supports_eagle3(get_model_cls(target)):
        yield (
            f"vLLM's {target.architectures[0]} does not provide the rows that an EAGLE-3 head "
            "reads, valid: no drafter of method eagle3"
        )


def check_loaded(drafter: nn.Module | None, read: Sequence[int], adapter: Adapter) -> None:
    """Raises UnsupportedDrafterError for a drafter that would run hook sites of the model, or that
    cannot read the target's rows. A site in a drafter would edit the drafts and record its rows.

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
    if (offsets := getattr(drafter, "draft_id_to_target_id", None)) is not None:
        tokens = offsets.data.cpu() + torch.arange(len(offsets))
        first = int(tokens.min())
        last = int(tokens.max())
        size = int(drafter.config.vocab_size)
        if not 0 <= first <= last < size:
            raise UnsupportedDrafterError(
                f"the drafter drafts tokens {first} to {last}, valid: 0 to {size - 1}"
            )
