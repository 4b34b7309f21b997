"""Resolution of the logit lens, with or without the maps of a tuned or Jacobian lens, and of the
registration of tuned lenses.
"""

from collections.abc import Mapping

import msgspec

from ....broker.ledger.named.registry import Lookup
from ....schemas.artifacts.jacobian_lenses import JACOBIAN_LENSES, JacobianLens
from ....schemas.artifacts.tuned_lenses import LENS_HOOKS, TunedLens, TunedLensRequest
from ....schemas.base.errors import Translated, invalid
from ....schemas.jobs.models import ModelInfo
from ....schemas.prompts.selectors import (
    PositionSelector,
    SelectorError,
    Sites,
    as_ranges,
    resolve_hook,
    resolve_layers,
)
from ....schemas.readings.lens import LensSpec, NamedToken, StoredLens
from ....storage.formats.lens_files import check_on, folder_of
from ..positions.captures import Bounds, Rules, apply_rules, one_hook, recorded_of_each
from ..prompts.tokenizer import Codec, TooLong

# --- Registration --------------------------------------------------------------------------------


def resolve_tuned(
    tuned_lens_request: TunedLensRequest, name: str, model: ModelInfo, root: str
) -> TunedLens:
    """Return what should be registered.

    Raises a 400 naming the field. Reads the file: not for the event loop.
    """
    hook = resolve_hook(tuned_lens_request.hook)
    present = [item for item in LENS_HOOKS if item in model.hooks]
    if hook not in present:
        raise invalid(
            "hook",
            f"{tuned_lens_request.hook!r} is not a hook point that a lens of this model reads",
            allowed=", ".join(present),
        )
    digest, layers, size = check_on(
        folder_of(root, tuned_lens_request.path), model.num_layers, model.hidden_size
    )
    return tuned_lens_request.registered(
        TunedLens,
        name,
        model.name,
        digest=digest,
        hook=hook,
        residual=tuned_lens_request.residual,
        layers=layers,
        hidden_size=model.hidden_size,
        bytes=size,
    )


# --- What a request names -------------------------------------------------------------------------


def _maps(spec: LensSpec, bounds: Bounds, at: str) -> TunedLens | None:
    """Return the tuned or Jacobian lens that a lens names.

    Raises a 400 naming a field below `at`, with the names that exist.
    """
    named = spec.references
    if not named:
        return None
    if len(named) > 1:
        raise invalid(f"{at}.jacobian", "is not valid together with tuned", hint="omit one")
    ((kind, name),) = named
    lens: TunedLens = bounds.found.known(kind, name, f"{at}.{kind.short}")
    check_shape(lens, bounds.model, f"{at}.{kind.short}")
    return lens


def check_shape(lens: TunedLens, model: ModelInfo, at: str) -> None:
    """Raises a 400 naming `at` for a lens of another shape: the model may have been restarted since
    it was registered, with other settings or another checkpoint.
    """
    if lens.hidden_size != model.hidden_size or lens.layers[-1] >= model.num_layers:
        raise invalid(
            at,
            f"{lens.name!r} was registered for a model of another shape",
            hint="register it again",
        )


def named_jacobian(name: str, field: str, model: ModelInfo, found: Lookup) -> JacobianLens:
    """Return the lens whose directions a request's `field` names; it must have an output matrix.

    Raises a 400 with the registered names.
    """
    lens = found.known(JACOBIAN_LENSES, name, field)
    check_shape(lens, model, field)
    if not lens.vocabulary:
        raise invalid(
            field,
            f"the file of {name!r} has no output matrix, so tokens have no directions",
            hint="convert it with the model's checkpoint, and register it again",
        )
    return lens


async def with_token_ids(spec: LensSpec, codec: Codec) -> LensSpec:
    """Return the lens with ids in place of texts. Raises a 400 for a text that is not one token."""
    named = {f"lens.tokens[{index}]": token for index, token in enumerate(spec.tokens)}
    return msgspec.structs.replace(spec, tokens=list((await single_tokens(named, codec)).values()))


async def single_tokens(named: Mapping[str, NamedToken], codec: Codec) -> dict[str, int]:
    """Return field → token id, for ids and texts. Raises a 400 for a text that is not one token."""
    texts = {field: token for field, token in named.items() if isinstance(token, str)}
    with Translated(
        TooLong, lambda error: invalid(list(texts)[error.index], error.detail), hidden=True
    ):
        encoded = await codec.encode(list(texts.values()), special_tokens=False) if texts else []
    result = {field: token for field, token in named.items() if isinstance(token, int)}
    for (field, text), ids in zip(texts.items(), encoded, strict=True):
        if len(ids) != 1:
            _, pieces = await codec.decode(list(ids))
            raise invalid(
                field,
                f"{text!r} is {len(ids)} tokens: {', '.join(map(repr, pieces[:8]))}",
                allowed="a text that is one token, with its leading space, or a token id",
            )
        result[field] = ids[0]
    return {field: result[field] for field in named}


# --- Rules


def _hook(spec: LensSpec, bounds: Bounds) -> str:
    if resolve_hook(spec.hook or "post_block") not in LENS_HOOKS:
        raise SelectorError(
            f"rows of {spec.hook!r} do not go through the model's final norm; valid: "
            f"{', '.join(LENS_HOOKS)}"
        )
    return one_hook(spec.hook or "post_block", bounds)


def _tokens(spec: LensSpec, bounds: Bounds) -> list[int]:
    """Texts have become ids before."""
    ids = [token for token in spec.tokens if isinstance(token, int)]
    for index, token in enumerate(ids):
        if token >= bounds.model.vocab_size:
            raise SelectorError(
                (
                    f"token id {token} is outside the vocabulary; valid: 0 to "
                    f"{bounds.model.vocab_size - 1}"
                ),
                f"[{index}]",
            )
        if token in ids[:index]:
            raise SelectorError(f"token {token} is named twice", f"[{index}]")
    return ids


def _top_k(spec: LensSpec, bounds: Bounds) -> int:
    if spec.top_k > bounds.model.vocab_size:
        raise SelectorError(
            f"{spec.top_k} exceeds the vocabulary's {bounds.model.vocab_size} tokens"
        )
    return spec.top_k


LENS_RULES: Rules = (
    ("hook", _hook),
    ("layers", lambda spec, bounds: resolve_layers(spec.layers, bounds.model.num_layers)),
    ("positions", recorded_of_each),
    ("top_k", _top_k),
    ("tokens", _tokens),
)


def resolve_lens(
    spec: LensSpec, bounds: Bounds, at: str
) -> tuple[StoredLens, Sites, list[PositionSelector]]:
    """Return what `readings.RULES` says. Raises a 400 naming the field below `at`."""
    tuned = _maps(spec, bounds, at)
    if tuned is not None:
        spec = _fitted(spec, tuned, at)
    made = apply_rules(LENS_RULES, spec, bounds, at)
    if tuned is not None and (lacking := sorted({*made["layers"]} - {*tuned.layers})):
        raise invalid(
            f"{at}.layers",
            f"{tuned.name!r} has no map of layer {lacking[0]}",
            allowed=as_ranges(tuned.layers),
        )
    reading = StoredLens(
        top_k=made["top_k"],
        tokens=made["tokens"],
        tuned=tuned.stored() if tuned is not None else None,
    )
    return reading, {made["hook"]: made["layers"]}, made["positions"]


def _fitted(spec: LensSpec, tuned: TunedLens, at: str) -> LensSpec:
    """With the hook of the tuned lens, and for `all` the layers that it has."""
    if spec.hook is not None and resolve_hook(spec.hook) != tuned.hook:
        raise invalid(
            f"{at}.hook", f"{tuned.name!r} reads {tuned.hook}", allowed=tuned.hook, hint="omit it"
        )
    return msgspec.structs.replace(
        spec, hook=tuned.hook, layers=tuned.layers if spec.layers == "all" else spec.layers
    )
