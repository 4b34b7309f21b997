"""The tokenizer as data, so that the API tokenises exactly as the engine does."""

from typing import Any

from transformers import AutoTokenizer
from vllm.config import ModelConfig
from vllm.renderers.hf import resolve_chat_template, resolve_chat_template_content_format

from ....schemas.jobs.models import TokenizerBundle

#: Text that exercises special tokens, spaces, newlines and non-ASCII: both tokenizers must agree on
#: it.
_PROBE = "The quick  brown fox,\n\n\tünïcode 東京 🙂 <|im_start|>user\n1234567890"


def bundle_of(config: ModelConfig) -> TokenizerBundle:
    """Returns the tokenizer that vLLM uses with `config`. Raises as `tokenizer_bundle`."""
    options = {"revision": config.tokenizer_revision, "trust_remote_code": config.trust_remote_code}
    return tokenizer_bundle(
        config.tokenizer, config if config.is_multimodal_model else None, **options
    )


def tokenizer_bundle(
    model: str, images: ModelConfig | None = None, **options: Any
) -> TokenizerBundle:
    """Returns the tokenizer at `model`, a folder or hub name, for `tokenizers.Tokenizer.from_str`.

    `options`: arguments of `AutoTokenizer.from_pretrained`. `images`: the config, if the model
    takes images; its chat template may then belong to its processor, and may expect the content of
    a message as a list of parts.

    Raises ValueError when the tokenizer is not fast, or its serialised form tokenises differently.
    """
    from tokenizers import Tokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        model, **{name: value for name, value in options.items() if value is not None}
    )
    if not tokenizer.is_fast:
        raise ValueError(
            f"the tokenizer of {model} has no fast version (tokenizer.json), which the API requires"
        )
    text = tokenizer.backend_tokenizer.to_str()
    if Tokenizer.from_str(text).encode(_PROBE).ids != tokenizer(_PROBE)["input_ids"]:
        raise ValueError(
            f"the tokenizer of {model} does not match its tokenizer.json: text prompts "
            "cannot be served safely"
        )
    template = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else None
    parts = False
    if images is not None:
        template = resolve_chat_template(tokenizer, None, None, model_config=images)
        form = resolve_chat_template_content_format(
            template, None, "auto", tokenizer, model_config=images
        )
        parts = template is not None and form == "openai"
    special = {
        name: str(value)
        for name, value in tokenizer.special_tokens_map.items()
        if isinstance(value, str)
    }
    return TokenizerBundle(
        tokenizer_json=text,
        chat_template=template,
        parts=parts,
        special_tokens=special,
        eos_token_ids=[tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else [],
    )
