"""Checks the settings of speculative decoding's drafts and translates them for vLLM.

`workers/runner/support/drafters.py` checks what vLLM makes of them.
"""

from typing import Any

from transformers import PretrainedConfig
from vllm.config import VllmConfig

from ....schemas.settings.settings import Settings, SettingsError

#: Draft tokens are looked up in the prompt by the last 4 to 2 tokens.
_NGRAMS = {"prompt_lookup_max": 4, "prompt_lookup_min": 2}
#: Fields of a checkpoint's config that say how many layers predict further tokens.
_MTP_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")


def speculative_config(settings: Settings) -> dict[str, Any]:
    """Returns vLLM's `speculative_config` for settings with drafts."""
    options: dict[str, Any] = {
        "method": settings.drafter,
        "num_speculative_tokens": settings.speculative_tokens,
    }
    if settings.drafter == "ngram":
        return options | _NGRAMS
    return options | ({"model": settings.draft_model} if settings.drafter == "eagle3" else {})


def check_drafter(settings: Settings) -> None:
    """Raises SettingsError if the settings of drafts contradict each other or do not fit the
    checkpoints. Reads no weights.
    """
    drafter = settings.drafter
    head = settings.draft_model
    if head and drafter != "eagle3":
        raise SettingsError(
            f"draft_model is set, but drafter is {drafter!r}: only `eagle3` has a draft model"
        )
    if drafter == "ngram":
        return
    if not settings.speculative_tokens:
        raise SettingsError(
            f"drafter is {drafter!r}, but speculative_tokens is 0: set it to the number of "
            "drafts, such as 3"
        )
    if drafter == "eagle3":
        if not head:
            raise SettingsError(
                "drafter is 'eagle3', but draft_model is empty: set it to the EAGLE-3 head's "
                "folder or hub name"
            )
        if not (declared := checkpoint_config(head)):
            raise SettingsError(f"draft_model={head!r}: no checkpoint found (no config.json)")
        if not declared.get("architectures"):
            raise SettingsError(
                f"draft_model={head!r}: its config.json has no architectures, so it is no "
                "EAGLE-3 head"
            )
    elif declared := checkpoint_config(settings.model):
        sections = [
            declared,
            *(
                declared[name]
                for name in ("text_config", "mtp_config")
                if isinstance(declared.get(name), dict)
            ),
        ]
        if not any(section.get(name) for section in sections for name in _MTP_LAYERS):
            raise SettingsError(
                "drafter is 'mtp', but the checkpoint's config.json has no MTP layers "
                f"({', '.join(_MTP_LAYERS)})"
            )


def check_drafts(config: VllmConfig, settings: Settings) -> None:
    """Raises SettingsError if vLLM would make another number of drafts than the settings say: some
    checkpoints bring their own drafter.
    """
    drafts = (
        config.speculative_config.num_speculative_tokens
        if config.speculative_config is not None
        else 0
    )
    if drafts != settings.speculative_tokens:
        raise SettingsError(
            f"vLLM would make {drafts} drafts for this checkpoint, but speculative_tokens "
            f"is {settings.speculative_tokens}"
        )


def checkpoint_config(model: str) -> dict[str, Any]:
    """Returns the checkpoint's config.json; empty if there is none, which vLLM reports better."""
    try:
        return dict(PretrainedConfig.get_config_dict(model)[0])
    except (OSError, ValueError):
        return {}
