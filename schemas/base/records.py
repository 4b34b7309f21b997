"""Base class and serialization of all records."""

import re
import threading
import time
from array import array
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar, dataclass_transform

import msgspec

T = TypeVar("T")
K = TypeVar("K")
#: An object of JSON, decoded.
JsonObject = dict[str, Any]


#: Calls a function of `client.render.notebook` by its name. Set by the client (`client.notebook`).
plotter: Callable[..., Any] | None = None
#: First guess at an attribute of a result → what it may mean, which errors name.
_MEANT: dict[str, tuple[str, ...]] = {
    "text": ("outputs[0].text",),
    "texts": ("outputs",),
    "output": ("outputs", "text"),
    "outputs": ("texts",),
    "choices": ("outputs", "texts"),
    **dict.fromkeys(("draw", "figure", "heatmap", "imshow", "line", "show"), ("plot()",)),
}


#: The most characters of a field where a result is printed in one line, and the most numbers by
#: name.
_SHOWN = 60
_FEW = 4


class Suggesting:
    """A result whose errors for unknown attributes name the one that was probably meant."""

    __slots__ = ()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            names = {*dir(type(self)), *getattr(type(self), "__annotations__", ())}
            meant = [use for use in _MEANT.get(name, ()) if re.match(r"\w+", use)[0] in names]
            hint = f": use {meant[0]}" if meant else ""
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}{hint}")


def drawn(function: str, value: Any, *arguments: Any, **options: Any) -> Any:
    """Return what a function of `client.render.notebook` makes of a result."""
    if plotter is None:
        raise RuntimeError("`import midstream.client` before drawing")
    return plotter(function, value, *arguments, **options)


def html_of(result: Any) -> str | None:
    """Return HTML for notebooks; None, as without the client, makes them show the plain text."""
    html: str | None = None if plotter is None else plotter("record_html", result)
    return html


def _png(result: Any) -> bytes | None:
    """Return a PNG for notebooks, if its class has one; None without the client."""
    png: bytes | None = None if plotter is None else plotter("result_png", result)
    return png


class Result(Suggesting):
    """A result whose numbers become a data frame, and which is printed in one line."""

    __slots__ = ()

    _repr_html_ = html_of

    def to_pandas(self, *arguments: Any, **options: Any) -> Any:
        """Return a data frame (extra `notebook`); `docs/client.md` says what a line is of each kind
        of result. Raises MidstreamError without pandas.
        """
        return drawn("frame", self, *arguments, **options)

    def __repr__(self: Any) -> str:
        """Return the fields that are numbers or texts, or name a few; of other lists how many, of
        records the name.
        """
        shown = []
        for name in getattr(self, "__struct_fields__", None) or self.__dataclass_fields__:
            value = getattr(self, name)
            few = value if isinstance(value, dict) and len(value) <= _FEW else {}
            numbers = {key: round(it, 4) for key, it in few.items() if isinstance(it, int | float)}
            many = len(value) if isinstance(value, list | dict) else getattr(value, "name", value)
            value = numbers or many
            if isinstance(value, str | int | float | dict) and value not in ("", 0):
                text = str(value)[:_SHOWN]
                shown.append(f"{name}={text!r}" if isinstance(value, str) else f"{name}={text}")
        return f"{type(self).__name__}({', '.join(shown)})"


class Plotted(Result):
    """A result that can be drawn."""

    __slots__ = ()

    _repr_png_ = _png

    def plot(self, path: Any = None, **options: Any) -> Any:
        """Draw the result with matplotlib (extra `plots`), and return the figure.

        `path`: save it there too, in the format of the extension. `options`: those of the result's
        kind, see `docs/client.md`. Raises MidstreamError without matplotlib or for an unknown
        format, OSError.
        """
        return drawn("plot", self, path, **options)


# Type checkers do not inherit `frozen` and `kw_only` from a base class; these declare them.
@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(msgspec.field,))
class Record(
    msgspec.Struct,
    forbid_unknown_fields=True,
    kw_only=True,
    frozen=True,
    repr_omit_defaults=True,
):
    """A JSON object of the public schemas: immutable, keyword-only, unknown fields rejected."""

    _repr_html_ = html_of


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(msgspec.field,))
class Published(Record, forbid_unknown_fields=False):
    """A process's report for other processes; unknown fields of newer versions are ignored."""


@dataclass_transform(frozen_default=True, field_specifiers=(msgspec.field,))
class Wire(msgspec.Struct, array_like=True, frozen=True):
    """A message between Midstream's processes: a MessagePack array, fields in declared order.

    New fields are added at the end with a default, so that an older peer's messages still decode.
    """


def _plain(value: Any) -> Any:
    """Convert an `array` to a list: the only encoded type that msgspec does not support."""
    if isinstance(value, array):
        return value.tolist()
    raise NotImplementedError


_json_encoder = msgspec.json.Encoder()
_msgpack_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
#: Held while msgspec learns the fields of a class, at its first use: two threads that do so at once
#: crash the process (msgspec 0.22).
_learning = threading.RLock()


@cache
def _json_decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    with _learning:
        return msgspec.json.Decoder(kind)


@cache
def _msgpack_decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    with _learning:
        return msgspec.msgpack.Decoder(kind)


def learn_records() -> None:
    """Let msgspec learn the fields of all records that are imported: before a library uses them on
    several threads.
    """
    kinds: list[type] = [Record, Wire]
    for kind in kinds:
        kinds += kind.__subclasses__()
        with suppress(TypeError):  # some are only encoded
            _json_decoder(kind)


def to_json(value: Any) -> bytes:
    """Encode `value` as UTF-8 JSON; bytes become base64."""
    return _json_encoder.encode(value)


def from_json(raw: bytes | str, kind: type[T]) -> T:
    """Decode JSON into `kind`; raises `msgspec.ValidationError` naming the field path."""
    decoded: T = _json_decoder(kind).decode(raw)  # type: ignore[arg-type]  # types are hashable
    return decoded


def json_or_text(text: str) -> Any:
    """Return the JSON that a text is: a number, true, a list, an object; other text unchanged."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


def to_msgpack(value: Any) -> bytes:
    """Encode `value` as MessagePack."""
    return _msgpack_encoder.encode(value)


def from_msgpack(raw: bytes, kind: type[T]) -> T:
    """Decode MessagePack into `kind`; raises `msgspec.ValidationError`."""
    decoded: T = _msgpack_decoder(kind).decode(raw)  # type: ignore[arg-type]  # types are hashable
    return decoded


def fields_of(source: Any, kind: Any) -> dict[str, Any]:
    """Return the fields of the struct `kind` that are attributes of `source`, too, with its
    values.
    """
    names = (name for name in kind.__struct_fields__ if hasattr(source, name))
    return {name: getattr(source, name) for name in names}


def now() -> float:
    """Return the time from the clock that all records use: seconds since the Unix epoch."""
    return time.time()


def by_key(pairs: Iterable[tuple[K, T]]) -> dict[K, list[T]]:
    """Return key → the values that are paired with it, both in their order."""
    result: dict[K, list[T]] = {}
    for key, value in pairs:
        result.setdefault(key, []).append(value)
    return result
