"""Validation of a fit of a module or a lens against the model: a request becomes a `StoredFit`, or
a 400 names the field.
"""

from collections.abc import Sequence

import msgspec
import numpy as np

from midstream.api.resolve.admission.admission import tokenise, too_long
from midstream.api.resolve.admission.costs import check_examples
from midstream.api.resolve.edits.steering import resolve_module
from midstream.api.resolve.positions.captures import at_field
from midstream.api.resolve.prompts.request_parsing import ParsedPrompt
from midstream.api.resolve.prompts.tokenizer import Codec, TooLong
from midstream.api.web.aside import call_aside
from midstream.schemas.artifacts.jacobian_lenses import JacobianFit, StoredLensFit
from midstream.schemas.base.errors import MidstreamError, Translated, invalid
from midstream.schemas.base.limits import (
    MAX_FIT_TOKENS,
    MAX_FIT_WORK,
    MAX_LENS_WORK,
    MAX_TARGET_TOKENS,
    MAX_TUNED_BYTES,
    MIN_FIT_EXAMPLES,
)
from midstream.schemas.base.tensors import from_numpy
from midstream.schemas.jobs.models import ModelInfo
from midstream.schemas.prompts.selectors import (
    HOOKS,
    RequestedPositions,
    SelectorError,
    resolve_layers,
    resolve_positions,
    select,
)
from midstream.schemas.requests.specs import SteeringSpec
from midstream.schemas.requests.steering import SteeringTemplate
from midstream.schemas.requests.trainings import BY_GRADIENT

from ..records.fits import FitRequest, FitTokens, LensFitRequest, StoredModuleFit
from .continuations import added_tokens

#: Lists of examples of the methods from rows.
FROM_ROWS = ("positive", "negative")


async def resolve_fit(body: FitRequest, model: ModelInfo, codec: Codec) -> StoredModuleFit:
    """Return the fit to store. Raises a 400 naming the field and what is valid."""
    _check_numbers(body)
    template = _template(body, model)
    rows = {name: await _tokens(name, "", getattr(body, name), model, codec) for name in FROM_ROWS}
    before, after = await _continued(body, model, codec)
    tokens = sum(len(ids) for listed in (*rows.values(), before) for ids in listed)
    _check_most("examples" if body.examples else "positive", "has", tokens, MAX_FIT_TOKENS)
    check_examples("read", body.read, [*rows["positive"], *rows["negative"]])
    check_examples("positions", body.positions, before)

    def resolved() -> StoredModuleFit:
        made = {
            name: [
                _example(f"{name}[{index}]", "read", body.read, ids, len(ids), model)
                for index, ids in enumerate(listed)
            ]
            for name, listed in rows.items()
        }
        return StoredModuleFit(
            request=msgspec.structs.replace(body, positive=[], negative=[], examples=[]),
            template=template,
            examples=_examples(body, before, after, model, codec),
            **made,
        )

    stored = await call_aside(resolved)
    tokens = sum(len(example.token_ids) for example in stored.every)
    _check_most("examples" if body.examples else "positive", "has", tokens, MAX_FIT_TOKENS)
    _check_most("steps", "computes", stored.tokens, MAX_FIT_WORK)
    return stored


def _check_most(field: str, what: str, tokens: int, most: int) -> None:
    if tokens > most:
        raise invalid(field, f"the fit {what} {tokens} tokens", allowed=f"at most {most}")


async def resolve_lens_fit(body: LensFitRequest, model: ModelInfo, codec: Codec) -> StoredLensFit:
    """Return the fit to store; tokens that it leaves out are not kept. Raises a 400 naming the
    field and what is valid.
    """
    width = model.hidden_size
    shortest = body.skip_first + 2
    if (body.rank or 1) > width:
        raise invalid("rank", f"is {body.rank}", allowed=f"1 to {width}, the hidden size")
    if body.max_tokens < shortest:
        raise invalid(
            "max_tokens", f"is {body.max_tokens}", allowed=f"{shortest} (`skip_first` + 2) or more"
        )
    layers = _lens_layers(body, model)
    longest = min(body.max_tokens, model.max_model_len)
    prompts = [ids[:longest] for ids in await _tokens("prompts", "", body.prompts, model, codec)]
    needed = -(-width // (body.rank or width))
    used = sum(len(ids) >= shortest for ids in prompts)
    if used < needed:
        raise invalid(
            "prompts",
            f"has {used} of {shortest} tokens or more (`skip_first` + 2)",
            allowed=f"{needed} or more (hidden size / `rank`)",
        )
    stored = StoredLensFit(
        name=body.name,
        layers=layers,
        prompts=prompts,
        fit=JacobianFit(**{name: getattr(body, name) for name in JacobianFit.__struct_fields__}),
        hidden_size=width,
        folder=body.folder or body.name,
        description=body.description,
    )
    _check_most("prompts", "has", sum(map(len, prompts)), MAX_FIT_TOKENS)
    _check_most("prompts" if body.rank else "rank", "computes", stored.tokens, MAX_LENS_WORK)
    return stored


def _lens_layers(body: LensFitRequest, model: ModelInfo) -> list[int]:
    """Return the layers of a lens: below the last, whose Jacobian is the identity."""
    last = model.num_layers - 1
    with at_field("layers"):
        layers = resolve_layers(body.layers, model.num_layers)
    if body.layers == "all":
        layers.remove(last)
    if not layers or layers[-1] == last:
        raise invalid("layers", f"{last} is the last layer", allowed=f"layers 0 to {last - 1}")
    # float32 maps, and an output matrix of at most float32
    size = 4 * model.hidden_size * (len(layers) * (model.hidden_size + 1) + model.vocab_size)
    if size > MAX_TUNED_BYTES:
        raise invalid(
            "layers", f"make a file of {size} bytes", allowed=f"at most {MAX_TUNED_BYTES} bytes"
        )
    return layers


def _check_numbers(body: FitRequest) -> None:
    """Raises a 400 for lists of examples that the method does not take, or that are too short."""
    trained = body.method in BY_GRADIENT
    for name in (*FROM_ROWS, "examples"):
        count = len(getattr(body, name))
        needed = (name == "examples") == trained
        if needed and count < MIN_FIT_EXAMPLES:
            raise invalid(
                name, f"has {count} entries", allowed=f"{body.method}: {MIN_FIT_EXAMPLES} or more"
            )
        if count and trained and not needed:
            raise invalid(name, f"is not valid for method {body.method!r}: give examples")
    if body.method == "pca" and len(body.positive) != len(body.negative):
        counts = f"{len(body.negative)} entries, but positive has {len(body.positive)}"
        raise invalid("negative", f"has {counts}: pca needs pairs")


def _template(body: FitRequest, model: ModelInfo) -> SteeringTemplate:
    """Return the module's entry without tensors. Raises a 400 as the registration of the module
    would.
    """
    zeros = from_numpy(np.zeros((body.rank, model.hidden_size)))
    fields = (
        {"op": "lowrank", "rotation": zeros, "weight": zeros, "bias": [0.0] * body.rank}
        if body.method == "reft"
        else {"vector": from_numpy(np.zeros(model.hidden_size))}
    )
    spec = SteeringSpec(layers=body.layers, hook=body.hook, positions=body.positions, **fields)
    with Translated(
        MidstreamError,
        lambda error: error.at((error.field or "").removeprefix("steering[0].") or None),
    ):
        (template,) = resolve_module([spec], model).entries
    if template.hook not in HOOKS:
        served = ", ".join(hook for hook in HOOKS if hook in model.hooks)
        raise invalid("hook", f"{body.hook} has no rows of the stream's width", allowed=served)
    return msgspec.structs.replace(template, tensors=[])


async def _tokens(
    field: str, part: str, listed: Sequence[str | list[int]], model: ModelInfo, codec: Codec
) -> list[list[int]]:
    """Return the token ids of a field's entries, or of a `part` of them."""
    parsed = [ParsedPrompt(f"{field}[{index}]{part}", value) for index, value in enumerate(listed)]
    return [list(prompt.token_ids) for prompt in await tokenise(parsed, model, codec)]


#: The token ids of each entry of a list.
Listed = list[list[int]]


async def _continued(body: FitRequest, model: ModelInfo, codec: Codec) -> tuple[Listed, Listed]:
    """Return the prompts of the examples and their targets; a text with its prompt before it."""
    prompts = []
    targets = []
    for index, (prompt, target) in enumerate((each.prompt, each.target) for each in body.examples):
        if isinstance(target, str) and not isinstance(prompt, str):
            raise invalid(
                f"examples[{index}].target",
                "is text, but its prompt is token ids",
                allowed="token ids",
            )
        prompts.append(prompt)
        targets.append(f"{prompt}{target}" if isinstance(target, str) else target)
    before = await _tokens("examples", ".prompt", prompts, model, codec)
    return before, await _tokens("examples", ".target", targets, model, codec)


def _examples(
    body: FitRequest, before: Listed, after: Listed, model: ModelInfo, codec: Codec
) -> list[FitTokens]:
    """Return the examples with their targets, see `_continued`."""
    made = []
    for index, (example, ids, target) in enumerate(zip(body.examples, before, after, strict=True)):
        field = f"examples[{index}].target"
        if isinstance(example.target, str):
            target = added_tokens(field, example.target, np.array(ids), np.array(target), codec)
        if not 0 < len(target) <= MAX_TARGET_TOKENS:
            raise invalid(
                field, f"has {len(target)} tokens", allowed=f"1 to {MAX_TARGET_TOKENS} tokens"
            )
        made.append(_example(field, "positions", body.positions, [*ids, *target], len(ids), model))
    return made


def _example(
    at: str,
    field: str,
    positions: RequestedPositions,
    ids: list[int],
    prompt_tokens: int,
    model: ModelInfo,
) -> FitTokens:
    """Return an example with its positions. Raises a 400 naming `at` if it is too long, and `field`
    if it has none of the positions.
    """
    if len(ids) > model.max_model_len:
        raise too_long(TooLong(0, len(ids)), at, model)
    with Translated(SelectorError, lambda error: invalid(field + error.at, f"{at}: {error}")):
        resolved = resolve_positions(positions, prompt_tokens)
    if not select(resolved, 0, len(ids), prompt_tokens):
        raise invalid(field, f"selects no token of {at}, which has {len(ids)}")
    return FitTokens(token_ids=ids, prompt_tokens=prompt_tokens, at=resolved)
