"""Resolves steering by directions of tokens: a spec with `jacobian` becomes one plain spec for each
of its layers, with vectors computed from a registered Jacobian lens.

The direction of token t at layer l is v = J_lᵀ W_U[t] (Gurnee et al. 2026). The vectors travel with
the request, like vectors that a user supplies.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np

from ....schemas.artifacts.jacobian_lenses import JacobianLens
from ....schemas.base.errors import MidstreamError, Translated, invalid
from ....schemas.base.limits import MAX_ENTRIES
from ....schemas.base.recent import Recent
from ....schemas.base.tensors import from_numpy
from ....schemas.jobs.models import ModelInfo
from ....schemas.prompts.selectors import as_ranges, resolve_hook, resolve_layers
from ....schemas.readings.lens import NamedToken
from ....schemas.requests.specs import SteeringSpec
from ....storage.formats.lens_files import LensFiles, directions
from ....storage.formats.tensor_files import TensorFileError
from ..positions.captures import at_field
from .interventions import check_together, check_without

#: Op → its fields that are valid with `jacobian`, besides FIELDS; `swap` is the field of that name.
OPS: dict[str, tuple[str, ...]] = {
    "add": ("scale", "norm_match"),
    "ablate": ("strength",),
    "swap": ("strength", "swap"),
}
#: Fields that are valid with `jacobian` for every op.
FIELDS = ("jacobian", "token", "layers", "hook", "positions", "op")
#: Directions of two tokens are too similar to exchange coordinates if the smaller singular value of
#: their unit vectors is below this share of the larger one.
_COLLINEAR = 1e-3
#: Directions that an API process caches.
_REMEMBERED = 1024
#: Digest of a lens, layer and token → the direction.
Directions = Mapping[tuple[str, int, int], np.ndarray]


class Directed(NamedTuple):
    """A spec with `jacobian`, after its fields are checked."""

    at: str  # in the body
    spec: SteeringSpec
    lens: JacobianLens
    layers: list[int]

    @property
    def tokens(self) -> dict[str, NamedToken]:
        """Place in the body → token."""
        given = {"token": self.spec.token, "swap": self.spec.swap}
        return {f"{self.at}.{name}": token for name, token in given.items() if token is not None}


class DirectionFiles:
    """Reads directions of tokens from registered lenses, and caches those used last.

    Call it off the event loop, one call at a time.
    """

    def __init__(self, root: str) -> None:
        """`root`: the folder of lenses."""
        self._files = LensFiles(root)
        self._known = Recent[tuple[str, int, int], np.ndarray](_REMEMBERED)

    def plain_specs(self, directed: Directed, ids: Sequence[int]) -> list[SteeringSpec]:
        """Return the spec with vectors in place of tokens, for each layer. `ids`: of its tokens.

        Raises a 400 when the file is not what was registered, or for directions that the op cannot
        use.
        """
        at, spec, lens, layers = directed
        for place, token in zip(directed.tokens, ids, strict=True):
            if token >= lens.vocabulary:
                detail = f"token id {token} is outside the output matrix of {lens.name!r}"
                raise invalid(place, detail, allowed=f"0 to {lens.vocabulary - 1}")
        keys = [(lens.digest, layer, token) for layer in layers for token in ids]
        vectors = self._known.all_of(keys, partial(self._read, directed, ids))
        bare = msgspec.structs.replace(spec, jacobian=None, token=None, swap=None)
        result = []
        for layer in layers:
            pair = [vectors[lens.digest, layer, token] for token in ids]
            if not all(np.linalg.norm(vector) > 0 for vector in pair):
                raise invalid(f"{at}.token", f"its direction at layer {layer} is zero")
            fields = _exchange(pair, layer, at) if spec.swap is not None else {"vector": pair[0]}
            packed = {name: from_numpy(value) for name, value in fields.items()}
            op = "lowrank" if spec.swap is not None else spec.op
            result.append(msgspec.structs.replace(bare, layers=layer, op=op, **packed))
        return result

    def _read(self, directed: Directed, tokens: Sequence[int]) -> Directions:
        lens = directed.lens
        with (
            Translated(
                (TensorFileError, MidstreamError),
                lambda error: invalid(
                    f"{directed.at}.jacobian", f"{lens.name!r} ({lens.digest[:12]}): {error}"
                ),
            ),
            self._files.reading(lens) as file,
        ):
            found = directions(file, directed.layers, tokens)
        return {(lens.digest, *key): vector for key, vector in found.items()}


def _exchange(pair: Sequence[np.ndarray], layer: int, at: str) -> dict[str, np.ndarray]:
    """Return the tensors of the `lowrank` op that exchanges the coordinates c = V⁺ s of a row in
    the plane V of two directions: s + V (σ(c) − c) = s + (v₂ − v₁)(c₁ − c₂), which has rank 1.
    """
    basis = np.stack(pair).astype(np.float64)
    values = np.linalg.svd(basis / np.linalg.norm(basis, axis=1, keepdims=True), compute_uv=False)
    if values[-1] < _COLLINEAR * values[0]:
        raise invalid(
            f"{at}.swap", f"at layer {layer}, its direction is that of `token`: nothing to exchange"
        )
    coordinates = np.linalg.pinv(basis.T)
    difference = basis[1] - basis[0]
    length = np.linalg.norm(difference)
    rotation = (difference / length)[None]
    weight = rotation + length * (coordinates[0] - coordinates[1])[None]
    result = {"rotation": rotation, "weight": weight, "bias": np.zeros(1)}
    return {name: value.astype(np.float32) for name, value in result.items()}


def check_directed(
    specs: Sequence[SteeringSpec], lenses: Mapping[str, JacobianLens], model: ModelInfo
) -> list[Directed]:
    """Return the specs with `jacobian`. Raises a 400 naming the field of the first that is
    invalid.
    """
    result = []
    for index, spec in enumerate(specs):
        if spec.jacobian is not None:
            result.append(_checked(spec, lenses[spec.jacobian], model, f"steering[{index}]"))
        else:
            check_without(spec, f"steering[{index}]", "jacobian", ("token", "swap"))
    if (count := sum(len(directed.layers) for directed in result)) > MAX_ENTRIES:
        raise invalid(
            "steering",
            f"has directions for {count} layers in total",
            allowed=f"at most {MAX_ENTRIES}",
        )
    return result


def _checked(spec: SteeringSpec, lens: JacobianLens, model: ModelInfo, at: str) -> Directed:
    op = spec.op or ("add" if spec.swap is None else "swap")
    if op not in OPS or (spec.swap is not None and spec.op is not None):
        raise invalid(
            f"{at}.op", f"{op!r} is not valid here", allowed="add or ablate; with swap: omit it"
        )
    check_together(spec, at, f"jacobian for op {op!r}", (*FIELDS, *OPS[op]))
    if spec.token is None:
        raise invalid(f"{at}.token", "is required with jacobian: a text of one token, or its id")
    if resolve_hook(spec.hook or lens.hook) != lens.hook:
        raise invalid(f"{at}.hook", f"{lens.name!r} maps {lens.hook}", allowed=lens.hook)
    if spec.layers is None:
        raise invalid(f"{at}.layers", "is required: the layers to edit")
    with at_field(f"{at}.layers"):
        every = spec.layers == "all"
        layers = lens.layers if every else resolve_layers(spec.layers, model.num_layers)
    if lacking := sorted({*layers} - {*lens.layers}):
        raise invalid(
            f"{at}.layers",
            f"{lens.name!r} has no map of layer {lacking[0]}",
            allowed=as_ranges(lens.layers),
        )
    return Directed(at, spec, lens, layers)
