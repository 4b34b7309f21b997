"""Converts Python arguments to a schema's plain values: numpy, torch, ranges, and a single item in
place of a list.

Every request body of both clients goes through `checked`, so a new field needs no conversion code.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

import msgspec
import numpy as np
from msgspec import inspect

from ..schemas.base.errors import NO_FIELD, MidstreamError, Translated, invalid, suggestion
from ..schemas.base.records import Record, by_key
from ..schemas.base.tensors import Tensor, from_numpy
from ..schemas.jobs.jobs import JobRequest, Sampling
from ..schemas.prompts.selectors import HookName, full_name
from ..schemas.requests.specs import CaptureSpec, PatchSource, SteeringSpec
from ..schemas.service.choices import refusal
from .durations import seconds

T = TypeVar("T")

#: msgspec's types, except lists and tuples → the Python classes that they accept.
_TAKES: dict[type[inspect.Type], tuple[type, ...]] = {
    inspect.StrType: (str,),
    inspect.LiteralType: (str,),
    inspect.EnumType: (str,),
    inspect.IntType: (int,),
    inspect.FloatType: (float, int),
    inspect.BoolType: (bool,),
    inspect.NoneType: (type(None),),
    inspect.BytesType: (bytes,),
    inspect.AnyType: (object,),
    inspect.StructType: (Mapping, msgspec.Struct),
    inspect.DictType: (Mapping,),
}
#: Fields in seconds that also accept a text such as `90d`.
_DURATIONS = frozenset({"expires_in", "keep_former_s"})
_LISTS = (inspect.ListType, inspect.VarTupleType, inspect.TupleType)
_PAIRS = {"pairs": "give the prompts as pairs=[{'clean': …, 'corrupt': …}]"}
#: First guess at a keyword → field of the request that it may mean → advice.
_MEANT: dict[str, dict[str, str]] = {
    "text": {"prompts": "give the text as prompt=…", "prompt": "give the text as prompt=…"}
    | _PAIRS,
    "prompt": {"messages": "use messages=[{'role': 'user', 'content': …}], or completion"} | _PAIRS,
    "layer": {"capture": "`capture`, `steering` and `patch` have layers"},
    "extra_body": {"model": "its fields are arguments of the call"},
    **dict.fromkeys(("clean", "corrupt", "corrupted"), _PAIRS),
    **{
        f"guided_{kind}": {"structured_outputs": f"use structured_outputs={{'{kind}': …}}"}
        for kind in ("json", "regex", "choice", "grammar")
    },
}
#: Most fields of a request that a message lists.
_LISTED = 30


class UnknownArgument(MidstreamError, TypeError):
    """The call has no such keyword argument; the message suggests the closest name."""


def checked(value: Any, kind: type[T], prefix: str = "") -> T:
    """Return `value` converted to `kind`. Raises MidstreamError with the path of the invalid field,
    below `prefix`.
    """
    with Translated(
        msgspec.ValidationError,
        lambda error: refusal(error, kind, prefix, getattr(kind, "__name__", "value")),
        hidden=True,
    ):
        return msgspec.convert(plain(value, kind, prefix), kind)


def given(**values: Any) -> dict[str, Any]:
    """Return the arguments that are not None."""
    return {name: value for name, value in values.items() if value is not None}


def request(body: T | None, fields: dict[str, Any], kind: type[T]) -> T:
    """Build a request body from a struct or from keyword arguments.

    Raises UnknownArgument for an unknown keyword, MidstreamError naming an invalid field.
    """
    if body is not None:
        if not isinstance(body, kind | Mapping):
            raise invalid(
                "request",
                f"expected a {kind.__name__}, got {type(body).__name__}",
                hint=_advice("text", getattr(kind, "__struct_fields__", ()))
                if isinstance(body, str)
                else None,
            )
        if fields:
            raise invalid(
                next(iter(fields)), f"give either a {kind.__name__} or keyword arguments, not both"
            )
        converted: T = plain(body, kind)
        return converted
    known_keywords(fields, kind)
    return checked(given(**fields), kind)


def known_keywords(fields: Iterable[str], kind: Any, own: Iterable[str] = ()) -> None:
    """Raise UnknownArgument for the first name that is neither a field of `kind` nor an alias.

    `own`: other keywords of the call, which the message may suggest.
    """
    names = [*kind.__struct_fields__, *(Sampling.__struct_fields__ if kind is JobRequest else ())]
    for name in fields:
        if name not in names and not (kind is JobRequest and name == "prompt"):
            raise unknown_argument(name, names, own)


def unknown_argument(name: str, names: Sequence[str], own: Iterable[str] = ()) -> UnknownArgument:
    """Return the error for a keyword that is not among `names`: it suggests one, also of `own`, or
    lists `names`.
    """
    hint = suggestion(name, own) or _advice(name, names)
    if hint is None and len(names) > _LISTED:
        hint = "the reference lists its fields"
    allowed = None if hint else ", ".join(names)
    return UnknownArgument("invalid_request", NO_FIELD, field=name, allowed=allowed, hint=hint)


def _advice(name: str, names: Iterable[str]) -> str | None:
    """Return what to use instead of an unknown name, as far as it can be guessed."""
    meant = [advice for field, advice in _MEANT.get(name, {}).items() if field in names]
    return meant[0] if meant else suggestion(name, names)


def plain(value: Any, kind: Any, field: str = "") -> Any:
    """Convert numpy, torch and other values inside `value` to what `kind` accepts; leave invalid
    values for msgspec to reject.
    """
    return _plain(value, _members(_info(kind)), field)


@cache
def _info(kind: Any) -> inspect.Type:
    return inspect.type_info(kind)


def _members(info: Any) -> list[Any]:
    """Return the alternatives of a union, or the type itself, without metadata."""
    if isinstance(info, inspect.UnionType):
        return [member for item in info.types for member in _members(item)]
    return _members(info.type) if isinstance(info, inspect.Metadata) else [info]


def _plain(value: Any, kinds: list[Any], field: str, listed: bool = True) -> Any:
    """Convert one value. `listed`: a single item may replace a list of one."""
    structs = {kind.cls: kind for kind in kinds if isinstance(kind, inspect.StructType)}
    if structs and isinstance(value, Mapping):
        names = {item.name for kind in structs.values() for item in kind.fields}
        value = _split_names(value, names, field)
    for cls, convert in _CONVERTERS.items():
        if cls in structs:
            value = convert(value, field)
    if isinstance(value, msgspec.Struct):
        if type(value) in structs:
            return _struct(value, structs[type(value)], field)
        return _plain([value], kinds, field) if _wants_list(value, kinds, listed) else value
    value = _builtin(value)
    lists = [kind for kind in kinds if isinstance(kind, _LISTS)]
    items = [item for kind in lists for item in _items(kind)]
    if isinstance(value, str) and any(getattr(item, "cls", None) is SteeringSpec for item in items):
        # as on the command line, where a text also has a scale and positions
        name = value.removeprefix("@").partition(":")[0]
        raise invalid(
            field, "expected interventions, got a text", hint=f"give [{{'module': {name!r}}}]"
        )
    if isinstance(value, list):
        # a shortcut for lists of integers and strings, which may be long
        if all(type(item) in (int, str) for item in value) or not items:
            return value
        return [
            _plain(item, items, f"{field}[{number}]", listed=False)
            for number, item in enumerate(value)
        ]
    if _wants_list(value, kinds, listed):
        return _plain([value], kinds, field)
    return _mapping(value, kinds, structs, field) if isinstance(value, Mapping) else value


def _struct(value: Any, kind: inspect.StructType, field: str) -> Any:
    """Convert arrays inside a struct: its constructor takes any value."""
    changed = {}
    for item in kind.fields:
        given = getattr(value, item.name)
        path = f"{field}.{item.name}" if field else item.name
        if (converted := _plain(given, _members(item.type), path)) is not given:
            changed[item.name] = converted
    return msgspec.structs.replace(value, **changed) if changed else value


def _wants_list(value: Any, kinds: list[Any], listed: bool) -> bool:
    """Return whether `value` is valid only as the single item of a list."""
    items = [
        item
        for kind in kinds
        if listed and isinstance(kind, inspect.ListType)
        for item in _items(kind)
    ]
    return _takes(value, items) and not _takes(value, kinds)


def _takes(value: Any, kinds: list[Any]) -> bool:
    """Return whether any of the types, lists excluded, accepts the value's class."""
    return any(isinstance(value, _TAKES.get(type(kind), ())) for kind in kinds)


def _items(kind: Any) -> list[Any]:
    one = kind.item_types if isinstance(kind, inspect.TupleType) else [kind.item_type]
    return [member for item in one for member in _members(item)]


def _mapping(
    value: Mapping[Any, Any], kinds: list[Any], structs: dict[type, Any], field: str
) -> dict[Any, Any]:
    fields = {kind.name: kind.type for struct in structs.values() for kind in struct.fields}
    values = next(
        (_members(kind.value_type) for kind in kinds if isinstance(kind, inspect.DictType)), []
    )
    converted = {}
    for given, item in value.items():
        name = _builtin(given)
        path = f"{field}.{name}" if field else str(name)
        if name in _DURATIONS and name in fields:
            item = seconds(item, path)
        converted[name] = _plain(item, _members(fields[name]) if name in fields else values, path)
    return converted


def _builtin(value: Any) -> Any:
    """Convert numbers, arrays, ranges and sets to built-in types; return other values unchanged."""
    if type(value) in (str, int, float, bool, list, dict):
        return value
    if is_torch(value):
        value = as_numpy(value)
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, range | tuple):
        return list(value)
    if isinstance(value, set | frozenset):
        return sorted(value)
    # str.__str__ returns the value of an enum's member, not its name
    return str.__str__(value) if isinstance(value, str) else value


# --- Fields that accept other forms than their schema's


def is_array(values: Any) -> bool:
    """Return whether `values` is a list, a numpy array or a torch tensor."""
    return isinstance(values, list | tuple | np.ndarray) or is_torch(values)


def is_torch(values: Any) -> bool:
    return type(values).__module__.partition(".")[0] == "torch"


def as_numpy(values: Any) -> np.ndarray:
    """Return an array or a torch tensor, which may be anywhere, as a numpy array."""
    if is_torch(values):
        values = values.detach().cpu()
        if str(values.dtype) == "torch.bfloat16":  # numpy has none
            values = values.float()
    return np.asarray(values)


def packed(values: Any, field: str) -> Tensor:
    """Pack an array for sending: float16 stays, other dtypes become float32. `values`: what
    `is_array` accepts.
    """
    # rows of different lengths
    with Translated(ValueError, lambda error: invalid(field, f"is not an array: {error}")):
        array = as_numpy(values)
    if array.dtype.name == "bfloat16":  # of ml_dtypes, which jax brings: numpy has no such kind
        array = array.astype(np.float32)
    if array.dtype.kind not in "fiu":
        raise invalid(
            field,
            f"must be numeric, not an array of {array.dtype}",
            hint="convert it with .astype('float32')",
        )
    return from_numpy(array)


def _split_names(value: Mapping[Any, Any], names: set[str], field: str) -> Mapping[Any, Any]:
    """Split TransformerLens' full names, such as `blocks.3.hook_resid_post`, at `hook` and `hooks`
    into hook points and layers. `names`: the object's fields.
    """
    key = "hook" if value.get("hooks") is None else "hooks"
    given = _builtin(value.get(key))
    sites = [full_name(name) for name in (given if isinstance(given, list) else [given])]
    if key not in names or not any(sites):
        return value
    path = f"{field}.{key}" if field else key
    layers = "layers" if "layers" in names else "layer"
    if layers not in names or value.get(layers) is not None or not all(sites):
        raise invalid(path, f"a full name has its layer: give only full names, and no `{layers}`")
    by_hook = by_key(filter(None, sites))
    ((hook, first), *more) = by_hook.items()
    rest = {name: item for name, item in value.items() if name not in (key, layers)}
    if key == "hook":
        return rest | {"hook": hook, layers: first[0]}
    if "hook" in names:  # each hook may have its own layers
        return rest | {"hooks": by_hook}
    if any(set(others) != set(first) for _, others in more):
        raise invalid(path, "every hook must be named at the same layers")
    return rest | {"hooks": list(by_hook), "layers": first}


def _tensor(value: Any, field: str) -> Any:
    return packed(value, field) if is_array(value) else value


def job_id(job: Any) -> Any:
    """Return the id of what a call returned about a job; any other value is returned unchanged."""
    ids = (getattr(job, name, None) for name in ("id", "job"))
    return next((given for given in ids if isinstance(given, str)), job)


def _source(value: Any, field: str) -> Any:
    """Convert the name of a source run, a job, or a vector, to a patch source."""
    if isinstance(value, PatchSource):
        return msgspec.structs.replace(value, run=job_id(value.run))
    if isinstance(value, Mapping):
        return {**value, "run": job_id(value["run"])} if "run" in value else value
    run = job_id(value)
    if isinstance(run, str):
        return {"run": run}
    return {"vector": packed(value, f"{field}.vector")} if is_array(value) else value


def _capture(value: Any, field: str) -> Any:
    """Convert `hooks` given as a list of names (as in a sweep) to a mapping of name → `layers`."""
    if (
        not isinstance(value, Mapping)
        or "hooks" not in value
        or isinstance(value["hooks"], Mapping | None)
    ):
        return value
    layers = value.get("layers")
    hooks = checked(value["hooks"], list[HookName], f"{field}.hooks" if field else "hooks")
    return {name: item for name, item in value.items() if name != "layers"} | {
        "hooks": dict.fromkeys(hooks, "all" if layers is None else layers)
    }


def _job(value: Any, field: str) -> Any:
    """Convert a job's short forms: `prompt` for a single prompt, one conversation for a list, and
    fields of `sampling` at the top level.
    """
    if not isinstance(value, Mapping):
        return value
    fields = dict(value)
    if "prompt" in fields:
        if "prompts" in fields:
            raise invalid("prompt", "give either `prompt` or `prompts`, not both")
        prompt = _builtin(fields.pop("prompt"))
        is_tokens = (
            isinstance(prompt, list)
            and bool(prompt)
            and all(isinstance(item, int | np.integer) for item in prompt)
        )
        fields["prompts"] = [prompt] if is_tokens else prompt
    messages = _builtin(fields.get("messages"))
    if isinstance(messages, Mapping) or (
        isinstance(messages, list) and messages and isinstance(messages[0], Mapping)
    ):
        fields["messages"] = [messages]  # one conversation
    top_level = {
        name: fields.pop(name)
        for name in Sampling.__struct_fields__
        if name in fields and name not in JobRequest.__struct_fields__
    }
    if top_level:
        sampling = fields.get("sampling") or {}
        if isinstance(sampling, Sampling):
            sampling = msgspec.structs.asdict(sampling)
        elif repeated := [name for name in top_level if name in sampling]:
            raise invalid(repeated[0], "is also in `sampling`: give it once")
        fields["sampling"] = {**sampling, **top_level}
    return fields


_CONVERTERS: dict[type[Record], Callable[[Any, str], Any]] = {
    Tensor: _tensor, PatchSource: _source, CaptureSpec: _capture, JobRequest: _job,
}  # fmt: skip
