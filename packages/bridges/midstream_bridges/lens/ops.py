"""Edits that a served model can make at an activation; `run_with_hooks` takes them instead of
Python functions.

Each function returns an `Op`. `pos` selects the tokens: a position (a negative position counts from
the prompt's end), a list, a `slice`, a name such as `"all_prompt"`, or a span as in a request;
None: all tokens, including generated tokens. `heads`: only these heads, for activations that have
heads. The formulas are those of `docs/steering.md`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace as changed
from typing import Any, Literal

import numpy as np

from midstream.client.values import as_numpy, given
from midstream.schemas.base.errors import Translated, invalid
from midstream.schemas.requests.interventions import PLACE

from .cache import ActivationCache
from .names import BLOCK, PATTERN, Card, NamedSite

#: How a request expresses the edit: as an entry of `steering`, as an entry of `patch`, or as an
#: attention pattern.
OpKind = Literal["steering", "patch", "pattern"]


@dataclass(frozen=True, eq=False)
class Op:
    """An edit, not yet bound to an activation."""

    kind: OpKind
    name: str  # of the function in this module
    order: int  # edits of a row are applied in ascending order
    fields: Mapping[str, Any] = field(default_factory=dict)
    # float32: the values to write, for one token or for several
    rows: np.ndarray | None = None
    cache: ActivationCache | None = None
    patterns: Mapping[int, np.ndarray] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"ops.{self.name}(…)"

    def entries(self, site: NamedSite, card: Card, at: str) -> list[dict[str, Any]]:
        """Return the request's entries for one activation.

        Raises MidstreamError naming `at` if the op is not valid for the activation.
        """
        if (site.name == PATTERN) != (self.kind == "pattern"):
            allowed = (
                "ops.attend"
                if site.name == PATTERN
                else "an op other than ops.attend, which is for attn.hook_pattern"
            )
            raise invalid(at, f"ops.{self.name} cannot edit {site.name}", allowed=allowed)
        (hook, *_) = BLOCK[site.name]
        base = {**self.fields, "layers": site.layer, "hook": hook}
        if self.cache is not None:
            if site not in self.cache.sites:
                raise invalid(
                    at,
                    f"the cache has no {site.full} to patch from",
                    allowed="a cache from run_with_cache whose names_filter selects it",
                )
            return [base | {"source": {**self.fields["source"], "run": self.cache.job}}]
        if self.rows is None:
            return [base]
        shape = card.shape(hook)
        rows = _as_rows(self.rows, shape, "heads" in self.fields, at)
        if self.kind == "steering":
            if len(rows) > 1:
                raise invalid(
                    at,
                    f"ops.{self.name} takes one vector, not {len(rows)}",
                    allowed=f"shape {list(shape)}",
                )
            return [base | {"vector": rows[0]}]
        if len(rows) == 1:
            return [base | {"source": {"vector": rows[0]}}]
        places = base.pop("positions")
        places = list(range(len(rows))) if places == "all" else places
        if not isinstance(places, list) or len(places) != len(rows):
            raise invalid(
                at,
                f"{len(rows)} rows need as many positions",
                allowed="pos as a list of numbers, one for each row",
            )
        return [
            base | {"positions": [place], "source": {"vector": row}}
            for place, row in zip(places, rows, strict=True)
        ]


def _as_rows(values: np.ndarray, shape: tuple[int, ...], of_head: bool, at: str) -> np.ndarray:
    """Reshape to `[rows, width]`: the trailing axes that make up one row are joined, and so are the
    axes before them. `of_head`: a row may also be one head's.
    """
    widths = [math.prod(shape), *([shape[-1]] if of_head else [])]
    for axes in range(1, values.ndim + 1):
        if math.prod(values.shape[-axes:]) in widths:
            return values.reshape(-1, math.prod(values.shape[-axes:]))
    raise invalid(
        at,
        f"an array of shape {list(values.shape)} cannot be split into rows of this activation",
        allowed=f"rows of shape {list(shape)}",
    )


def _array(values: Any, name: str) -> np.ndarray:
    """Convert values to float32. Raises MidstreamError for anything but finite numbers."""
    with Translated(
        (TypeError, ValueError), lambda error: invalid(name, f"is not an array of numbers: {error}")
    ):
        result = np.asarray(as_numpy(values), dtype=np.float32)
    if result.ndim == 0 or not result.size:
        raise invalid(
            name,
            f"has the shape {list(result.shape)}",
            allowed="one row, or rows for several positions",
        )
    if not np.isfinite(result).all():
        raise invalid(name, "holds values that are not finite")
    return result


def positions_of(pos: Any) -> Any:
    """Convert `pos` to a request's `positions`. Raises MidstreamError."""
    if pos is None:
        return "all"
    if isinstance(pos, slice):
        if pos.step not in (None, 1):
            raise invalid(
                "pos",
                f"a slice with step {pos.step} is not a range",
                allowed="a slice without a step, or a list",
            )
        return given(start=pos.start or 0, stop=pos.stop)
    if isinstance(pos, str | Mapping):
        return pos
    result = [pos] if np.ndim(pos) == 0 else list(pos)
    if not all(hasattr(item, "__index__") for item in result):
        raise invalid(
            "pos",
            f"{str(pos)[:80]!r} does not select tokens",
            allowed="a position, a list of them, a slice, or a name such as all_prompt",
        )
    return [int(item) for item in result]


def _op(
    kind: OpKind, name: str, family: str, pos: Any, heads: Any, rows: Any = None, **fields: Any
) -> Op:
    fields = given(positions=positions_of(pos), heads=heads, **fields)
    order = PLACE[family] if kind == "steering" else -1
    return Op(kind, name, order, fields, None if rows is None else _array(rows, f"ops.{name}"))


def add(
    vector: Any, *, scale: float = 1.0, pos: Any = None, heads: Any = None, norm_match: bool = False
) -> Op:
    """Add a vector: s + scale · v.

    `vector`: one row. `norm_match`: v is first rescaled to the norm of each token's stream.
    """
    return _op(
        "steering",
        "add",
        "add_matched" if norm_match else "add",
        pos,
        heads,
        vector,
        scale=scale,
        norm_match=norm_match or None,
    )


def ablate(direction: Any, *, strength: float = 1.0, pos: Any = None, heads: Any = None) -> Op:
    """Remove the component along a direction: s − strength · (s·v̂) v̂.

    `direction`: one row, not zero.
    """
    return _op(
        "steering", "ablate", "ablate", pos, heads, direction, op="ablate", strength=strength
    )


def clamp(
    direction: Any,
    *,
    low: float | None = None,
    high: float | None = None,
    pos: Any = None,
    heads: Any = None,
) -> Op:
    """Clamp the component along a direction to `low` and `high`, in units of the stream; None: no
    bound.
    """
    return _op("steering", "clamp", "clamp", pos, heads, direction, op="clamp", low=low, high=high)


def replace(
    values: Any, *, alpha: float = 1.0, pos: Any = None, heads: Any = None, dims: Any = None
) -> Op:
    """Replace rows: (1 − alpha) · s + alpha · values; with alpha 1, exactly `values`.

    `values`: one row for all of `pos`; or `[positions, …]` with a row for each (without `pos`, from
    the first token on). `dims`: write only these dimensions, as `"0-63"` or a list; not valid
    together with `heads`.
    """
    return _op("patch", "replace", "replace", pos, heads, values, alpha=alpha, mask=dims)


def zero(*, pos: Any = None, heads: Any = None, dims: Any = None) -> Op:
    """Replace rows with zeros. `dims`: as for `replace`."""
    return _op("patch", "zero", "replace", pos, heads, source={"zeros": True}, mask=dims)


def patch(
    cache: ActivationCache,
    *,
    pos: Any = "all_prompt",
    source_pos: int | Sequence[int] | None = None,
    prompt: int | None = None,
    alpha: float = 1.0,
    heads: Any = None,
    dims: Any = None,
) -> Op:
    """Replace rows with those of another run at the same activation.

    The rows are already on the server: nothing is uploaded.

    `source_pos`: positions in the cached prompt, one for all or one for each of `pos` in ascending
    order; None: the positions of `pos`. `prompt`: index of the cached prompt, required if there are
    several.
    """
    if not isinstance(cache, ActivationCache):
        raise invalid(
            "cache",
            f"is a {type(cache).__name__}",
            allowed="a cache that run_with_cache returned; for arrays: ops.replace",
        )
    count = len(cache.prompts)
    if prompt is None and count > 1:
        raise invalid(
            "prompt", f"the cache has {count} prompts: name one", allowed=f"0 to {count - 1}"
        )
    if not 0 <= (prompt or 0) < count:
        raise invalid("prompt", f"the cache has no prompt {prompt}", allowed=f"0 to {count - 1}")
    source: dict[str, Any] = {"prompt": prompt or 0}
    if source_pos is not None:
        one_for_all = np.ndim(source_pos) == 0
        source["position"] = (
            source_pos if one_for_all else [int(each) for each in source_pos]  # type: ignore[union-attr]
        )
    op = _op("patch", "patch", "replace", pos, heads, source=source, alpha=alpha, mask=dims)
    return changed(op, cache=cache)


def attend(patterns: Mapping[int, Any]) -> Op:
    """Replace attention patterns: z ← A′·v, with the prompt's own values.

    Valid only at `attn.hook_pattern`.

    `patterns`: head → `[query, key]` over the tokens of the prompt, see `Client.patch_attention`.
    """
    result = {int(head): _array(pattern, "ops.attend") for head, pattern in patterns.items()}
    if not result:
        raise invalid("patterns", "is empty", allowed="a pattern for one head or more")
    return Op("pattern", "attend", -1, patterns=result)
