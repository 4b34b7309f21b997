"""A model as a worker publishes it, and what bounds a request to it."""

from typing import Any

from midstream import __version__
from midstream.api.resolve.edits.steering import resolve_module
from midstream.api.resolve.positions.captures import Bounds, PromptFacts
from midstream.schemas.jobs.models import ModelInfo
from midstream.schemas.prompts.selectors import HOOKS
from midstream.schemas.requests.specs import SteeringSpec
from midstream.schemas.requests.steering import Module, content_digest

#: Of the model.
HIDDEN = 8
LAYERS = 4


def model(**changes: Any) -> ModelInfo:
    facts: dict[str, Any] = {
        "name": "m",
        "version": __version__,
        "architecture": "LlamaForCausalLM",
        "num_layers": LAYERS,
        "hidden_size": HIDDEN,
        "vocab_size": 9,
        "max_model_len": 64,
        "dtype": "float16",
        "hooks": list(HOOKS),
        "tokenizer": "",
    }
    return ModelInfo(**(facts | changes))


def module(*specs: SteeringSpec, name: str = "joy") -> Module:
    """A module of these entries."""
    content = resolve_module(specs, model())
    return Module(
        name=name,
        model="m",
        digest=content_digest(content.entries),
        entries=content.entries,
        bytes=content.size,
        created=0.0,
        hidden_size=HIDDEN,
        reach=content.reach,
    )


def bounds(*lengths: int, max_tokens: int = 4, probes: Any = (), **changes: Any) -> Bounds:
    """Of prompts of these lengths; one of six tokens if none is given."""
    prompts = [PromptFacts(length) for length in lengths or (6,)]
    return Bounds(model(**changes), prompts, max_tokens, probes=list(probes))
