"""Resolution of readings: what a request wants computed from captured rows, as one capture per
prompt and reading.

A kind of reading is a row in `READINGS`. How much may come back is limited together with what the
consumer `memory` returns.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec

from ....broker.ledger.jobs.ledger import Ledger
from ....schemas.base.errors import invalid
from ....schemas.jobs.models import ModelInfo
from ....schemas.prompts.selectors import (
    RequestedPositions,
    SelectorError,
    as_ranges,
    resolve_hook,
    resolve_layers,
)
from ....schemas.requests.lens import LENS_HOOKS, FittedLens, LensSpec, NamedToken, TunedLens
from ....schemas.requests.readings import READER, StoredFeatures, StoredLens
from ....schemas.requests.specs import StoredCapture
from ..positions.captures import Bounds, apply_rules, one_hook, positions_of_each
from ..prompts.requested_features import FeatureWish
from ..prompts.tokenizer import Codec, TooLong
from .readers import resolve_reader
from .saes import wish_of
from .tuned_lenses import fitted

if TYPE_CHECKING:
    from ..prompts.request_parsing import ParsedRequest


# --- The logit lens
# --------------------------------------------------------------------------------------------------


def _hook(spec: LensSpec, bounds: Bounds) -> str:
    if resolve_hook(spec.hook or "post_block") not in LENS_HOOKS:
        raise SelectorError(
            f"rows of {spec.hook!r} do not go through the model's final norm; valid: "
            f"{', '.join(LENS_HOOKS)}"
        )
    return one_hook(spec.hook or "post_block", bounds)


def _layers(spec: LensSpec, bounds: Bounds) -> list[int]:
    return resolve_layers(spec.layers, bounds.model.num_layers)


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


LENS_RULES: tuple[tuple[str, Callable[[Any, Bounds], Any]], ...] = (
    ("hook", _hook),
    ("layers", _layers),
    ("positions", positions_of_each),
    ("top_k", _top_k),
    ("tokens", _tokens),
)


def _lens(spec: LensSpec, bounds: Bounds, at: str) -> list[StoredCapture]:
    tuned = spec.found if isinstance(spec, FittedLens) else None
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
    return [
        StoredCapture(
            sites={made["hook"]: made["layers"]},
            positions=chosen,
            tag="",
            at=spec.at,
            consumers=[READER],
            reading=reading,
        )
        for chosen in made["positions"]
    ]


def _fitted(spec: LensSpec, tuned: TunedLens, at: str) -> LensSpec:
    """With the hook of the tuned lens, and for `all` the layers that it has."""
    if spec.hook is not None and resolve_hook(spec.hook) != tuned.hook:
        raise invalid(
            f"{at}.hook", f"{tuned.name!r} reads {tuned.hook}", allowed=f"{tuned.hook}, or omit it"
        )
    return msgspec.structs.replace(
        spec, hook=tuned.hook, layers=tuned.layers if spec.layers == "all" else spec.layers
    )


# --- Features
# --------------------------------------------------------------------------------------------------


def _top_features(wish: FeatureWish, bounds: Bounds) -> int:
    if wish.spec.top_k > wish.sae.form.d_sae:
        raise SelectorError(
            f"{wish.spec.top_k} exceeds the {wish.sae.form.d_sae} features of {wish.sae.name!r}"
        )
    return wish.spec.top_k


FEATURE_RULES: tuple[tuple[str, Callable[[Any, Bounds], Any]], ...] = (
    ("positions", positions_of_each),
    ("top_k", _top_features),
)


def _features(wish: FeatureWish, bounds: Bounds, at: str) -> list[StoredCapture]:
    made = apply_rules(FEATURE_RULES, wish, bounds, at)
    sae = wish.sae
    reading = StoredFeatures(sae=sae.stored(), top_k=made["top_k"])
    return [
        StoredCapture(
            sites={sae.hook: [sae.layer]},
            positions=chosen,
            tag="",
            at=wish.spec.at,
            consumers=[READER],
            reading=reading,
        )
        for chosen in made["positions"]
    ]


# --- All readings
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReadingKind:
    """A kind of reading, and how a request's specs of it are resolved."""

    kind: str  # as workers report it
    captures: Callable[[Any, Bounds, str], list[StoredCapture]]  # one per prompt
    #: Returns a spec with the registered artifact that it names. Raises a 400 naming the field.
    find: Callable[[Any, str, ModelInfo, Ledger], Awaitable[Any]] | None = None


#: Field of a request → kind of reading. A field may hold a list.
READINGS: dict[str, ReadingKind] = {
    "lens": ReadingKind("lens", _lens, fitted),
    "features": ReadingKind("features", _features, wish_of),
    "readers": ReadingKind("reader", resolve_reader),
}


def asked(parsed: "ParsedRequest") -> dict[str, Any]:
    """Field → spec, or specs, of each reading that a request asks for."""
    return {field: spec for field in READINGS if (spec := getattr(parsed, field))}


async def with_artifacts(
    parsed: "ParsedRequest", model: ModelInfo, ledger: Ledger
) -> "ParsedRequest":
    """Return the request with the artifacts that its readings name. Raises a 400 naming one."""
    found: dict[str, Any] = {}
    for field, spec in asked(parsed).items():
        if (find := READINGS[field].find) is None:
            continue
        if isinstance(spec, list):
            specs = enumerate(spec)
            found[field] = [await find(one, f"{field}[{at}]", model, ledger) for at, one in specs]
        else:
            found[field] = await find(spec, field, model, ledger)
    return replace(parsed, **found)


def _each(parsed: "ParsedRequest") -> list[tuple[str, str, Any]]:
    """(Field, where in the body, spec) of each reading."""
    result = []
    for field, spec in asked(parsed).items():
        many = spec if isinstance(spec, list) else None
        result += (
            [(field, field, spec)]
            if many is None
            else [(field, f"{field}[{index}]", one) for index, one in enumerate(many)]
        )
    return result


def resolve_readings(
    parsed: "ParsedRequest", bounds: Bounds
) -> list[tuple[str, list[StoredCapture]]]:
    """(Where in the body, one capture per prompt) of each reading.

    Raises a 400 naming the field.
    """
    stored_captures: list[tuple[str, list[StoredCapture]]] = []
    for field, at, spec in _each(parsed):
        reading = READINGS[field]
        _check_served(reading.kind, at, bounds.model)
        captures = reading.captures(spec, bounds, at)
        if twin := next((other for other, before in stored_captures if before == captures), ""):
            raise invalid(at, f"asks the same as {twin}", allowed="omit one of them")
        stored_captures.append((at, captures))
    return stored_captures


def _check_served(kind: str, field: str, model: ModelInfo) -> None:
    why = model.readings.get(kind, "its workers run a version of Midstream without it")
    if why:
        raise invalid(field, f"{model.name} has none: {why}", allowed="omit it")


def positions_asked(parsed: "ParsedRequest") -> list[tuple[str, RequestedPositions]]:
    """(Field, positions) of each reading."""
    return [(f"{at}.positions", spec.positions) for _, at, spec in _each(parsed)]


async def with_token_ids(spec: LensSpec | None, codec: Codec) -> LensSpec | None:
    """The lens with ids in place of texts. Raises a 400 naming the text that is not one token."""
    if spec is None or all(isinstance(token, int) for token in spec.tokens):
        return spec
    texts = [token for token in spec.tokens if isinstance(token, str)]
    try:
        encoded = iter(await codec.encode(texts, special_tokens=False))
    except TooLong as error:
        raise invalid("lens.tokens", error.detail) from None
    return msgspec.structs.replace(
        spec,
        tokens=[
            await _one(token, index, encoded, codec) for index, token in enumerate(spec.tokens)
        ],
    )


async def _one(token: NamedToken, index: int, encoded: Any, codec: Codec) -> int:
    if isinstance(token, int):
        return token
    ids: Sequence[int] = next(encoded)
    if len(ids) == 1:
        return ids[0]
    _, pieces = await codec.decode(list(ids))
    raise invalid(
        f"lens.tokens[{index}]",
        f"{token!r} is {len(ids)} tokens: {', '.join(map(repr, pieces[:8]))}",
        allowed="a text that is one token, with its leading space, or a token id",
    )
