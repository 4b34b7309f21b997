"""Plans of sweeps of a tiny vocabulary."""

import asyncio
from typing import Any

import model_kit
import msgspec
from refusal_kit import refuses
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors

from midstream.api.resolve.prompts.tokenizer import Codec
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.jobs.models import ModelInfo, TokenizerBundle
from midstream.schemas.settings.settings import load_settings
from midstream_lab.admit.plan import PlannedSweep, plan_sweep
from midstream_lab.records.sweeps import SweepRequest

#: A token for each word with the space before it; " of" and "Paris" written as one word are one
#: token, as in a BPE.
VOCABULARY = [
    "<unk>",
    "<bos>",
    "The",
    " Eiffel",
    " Tower",
    " Colosseum",
    " is",
    " in",
    " of",
    " Paris",
    " Rome",
    " France",
    "Paris",
    " ofParis",
    " the",
    " old",
]
CLEAN = "The Eiffel Tower is in"
CORRUPT = "The Colosseum is in"


def codec() -> Codec:
    tokenizer = Tokenizer(
        models.WordLevel({word: index for index, word in enumerate(VOCABULARY)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(" ?[^ ]+"), "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 1)]
    )
    tokenizer.add_special_tokens(["<bos>"])
    return Codec(
        TokenizerBundle(
            tokenizer_json=tokenizer.to_str(),
            chat_template=None,
            special_tokens={},
            eos_token_ids=[],
        )
    )


CODEC = codec()


def model(**changes: Any) -> ModelInfo:
    facts: dict[str, Any] = {
        "vocab_size": len(VOCABULARY),
        "max_model_len": 32,
        "dtype": "float32",
        "hooks": ["pre_attn", "attn_out", "post_block"],
        "grades": True,
    }
    return model_kit.model(**(facts | changes))


def pair(**fields: Any) -> dict[str, Any]:
    return {"clean": CLEAN, "corrupt": CORRUPT, "answer": " Paris", "foil": " Rome"} | fields


def ablated(**fields: Any) -> dict[str, Any]:
    return {"clean": CLEAN, "answer": " Paris", "foil": " Rome"} | fields


def plan(
    *pairs: dict[str, Any],
    info: ModelInfo | None = None,
    limits: Any = None,
    **fields: Any,
) -> PlannedSweep:
    request = msgspec.convert(
        {"model": "m", "pairs": list(pairs) or [pair()], **fields}, SweepRequest
    )
    settings = load_settings({}, **(limits or {}))
    return asyncio.run(plan_sweep(request, info or model(), CODEC, settings))


def refusal(*pairs: dict[str, Any], **fields: Any) -> MidstreamError:
    with refuses(status=400) as refused:
        plan(*pairs, **fields)
    return refused.value
