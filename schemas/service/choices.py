"""Adds the valid values to msgspec's validation errors, which name only the invalid one, and which
field was meant (`strength`: did you mean `scale`?).
"""

import re
from collections.abc import Iterable, Iterator
from enum import Enum
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

from ..base.errors import NO_FIELD, MidstreamError, invalid, misfit, shortened, suggestion
from ..jobs.jobs import Sampling
from ..prompts.selectors import ALIASES

#: msgspec's messages for a name that an enumeration, or the tag of a union, does not have.
_INVALID_NAME = re.compile(r"^Invalid (?:enum )?value '(?P<name>.*)'$", re.DOTALL)
#: msgspec quotes the whole pattern; `form` leaves out the anchors, and the lookahead that forbids a
#: line break at the end.
_PATTERN = re.compile(r"^Expected `str` matching regex '\^(?P<form>.*?)(?:\(\?!\\+n\))?\$'$")
#: What was written, or the field and msgspec's complaint about it → a name that must be valid in
#: its place (empty: none) → advice, with the groups of the pattern. The first match counts.
_MEANT: tuple[tuple[str, str, str], ...] = (
    (
        r"extra_body",
        "model",
        "extra_body belongs to the openai client: send its content at the top level",
    ),
    ("|".join(Sampling.__struct_fields__), "sampling", "it is a field of `sampling`"),
    (r"coeff(icient)?|multiplier|strength", "scale", "did you mean 'scale'?"),
    (r"state", "mode", "did you mean 'mode'?"),
    (r"threshold", "at_least", "did you mean 'at_least'?"),
    (r"policy|guards?", "policies", "did you mean 'policies'?"),
    *(
        (name, f'{{"action": "{name}", …}}', f'such as {{"action": "{name}", "{needs}": …}}')
        for name, needs in (("steer", "module"), ("capture", "layers"), ("webhook", "url"))
    ),
    (r"sub(tract)?", "add", "use op 'add' with a negative scale"),
    (
        r"blocks\.(\d+)\.((?:\w+\.)?hook_\w+)",
        "post_block",
        r"hooks name a place, layers a number: \2, layers=\1",
    ),
    (
        r"(?:\w+\.)*(?:layers|blocks|h)\.(\d+).*",
        "post_block",
        r"hooks name a place, layers a number: such as post_block, layers=\1",
    ),
    (r"message|message_index", "turn", "did you mean 'turn'?"),
    (
        r"system|user|assistant|tool|developer",
        "last_prompt",
        r'a role is given as {"role": "\g<0>"}',
    ),
    (r"(turn|image|last|start|stop)=(-?\d+)", "last_prompt", r'write {"\1": \2}'),
    (r"(role|part|text)=(.+)", "last_prompt", r'write {"\1": "\2"}'),
    (r"last", "last_prompt", "did you mean 'last_prompt'?"),
    (r"first", "last_prompt", "the first token of the prompt is position 0"),
    (
        r".*positions(?:\[\d+\])?: Expected .*, got `slice`",
        "",
        'a range is given as {"start": 1, "stop": 3}',
    ),
    (r"(?:last|first):(\d+)", "last_prompt", r'a range is given as {"start": -\1} or {"stop": \1}'),
    (r"(?:hook_)?embed", "post_block", "not served; resid_pre of layer 0 is the embedding"),
    (r".*: Expected `(?:int|float)(?: \| null)?`, got `str`", "", "it is text: send a number"),
    (
        r"(?:.*\.)?steering(?:\[\d+\])?: Expected `(?:array|object)(?: \| null)?`, got `str`",
        "",
        'a module is named as [{"module": NAME}]',
    ),
    (
        r".*positions\[\d+\]: Expected `int \| object`, got `str`",
        "",
        'a name stands alone, not in a list: use two entries, or "all" or {"start": N}',
    ),
    (
        r"(?:.*\.)?steering\[\d+\]: Expected `object`, got `(?:float|int)`",
        "",
        'a vector is given with its layers: [{"layers": 12, "vector": …}]',
    ),
    (
        r"(?:.*\.)?trigger: Expected `object(?: \| null)?`, got `str`",
        "",
        'a text is given as {"text": "</think>", "after": "end"}',
    ),
    (
        r"(?:.*\.)?vector: Expected `object \| array(?: \| null)?`, got `str`",
        "",
        'such as {"dtype": "float32", "shape": [2], "data": BASE64}, or a list of numbers; a file '
        "is read first, such as by numpy.load",
    ),
    (r"(?:.*\.)?layers?: Expected .*, got `float`", "", "layers are whole numbers"),
    (r"layer: is required", "", 'a site is a layer and a hook, such as "layer": 12'),
    (
        r".*: does not match the pattern \[A-Za-z0-9\]\[A-Za-z0-9\._-\]\{0,127\}",
        "",
        "letters, digits, '.', '_' and '-', such as my-name.1",
    ),
    (r"\w[\w-]*(?:,\s*[\w-]+)+", "submit", "give a list; or --set scopes=… for each"),
    (
        r"prompt\[\d+\]: Expected .*, got `object`",
        "",
        "messages go to /v1/chat/completions (client.chat)",
    ),
    (
        r"messages\[\d+\]: Expected `object`, got `str`",
        "",
        'such as [{"role": "user", "content": …}]; a text goes to /v1/completions '
        "(client.completion)",
    ),
    (r"(?:.*\.)?schedule: Expected `object`, got `str`", "", 'such as {"tokens": "all"}'),
    (
        r"(?:.*\.)?limit: Expected `object(?: \| null)?`, got `(?:float|int)`",
        "",
        'such as {"relative": 0.3}',
    ),
    (
        r"effect: (?:is required|Expected `object`, got `str`)",
        "",
        'such as {"target": " good"}, or with words or probe',
    ),
    (
        r"id: does not match the pattern \[0-9a-z\]\{12\}.*",
        "",
        "`midstream list keys` shows the id of each label",
    ),
    (r".*token_ids\[\d+\]: Expected `array`, got `int`", "", "each item is a list of ids: [[198]]"),
    (
        r"(?:.*\.)?hooks: Expected `object(?: \| null)?`, got `(?:str|array)`",
        "",
        'hooks have layers, such as {"resid_pre": "all"}; or give one as `hook`',
    ),
    (
        r"messages\[\d+\]: Expected `array`, got `object`",
        "",
        'send a list of conversations: [[{"role": …, "content": …}]]',
    ),
    (
        r".*: Expected `(?:str \| object \| )?array(?: \| null)?`, got `(?:str|object|int)`",
        "",
        "send a list, also of one",
    ),
)
#: The steps of a path in msgspec's notation, `pairs[0].spans[...]`: fields, and items.
_STEP = re.compile(r"(?P<field>[^.\[\]]+)|\[.*?\]")


def refusal(
    error: msgspec.ValidationError, kind: Any, prefix: str = "", whole: str | None = None
) -> MidstreamError:
    """Convert msgspec's error of decoding `kind` to one that names the field, below `prefix`, with
    its valid values and the one that was probably meant.

    `whole`: the field to name if msgspec names none, by default the body.
    """
    detail, path = misfit(error)
    if not path and detail.partition(" ")[0] in fields_at(kind, ""):
        path, _, detail = detail.partition(" ")
    dot = "." if prefix and path and not path.startswith("[") else ""
    field = f"{prefix}{dot}{path}" or whole
    if match := _PATTERN.match(detail):
        detail = f"does not match the pattern {match['form']}"
    if field is None:
        return MidstreamError("invalid_request", f"the body: {detail}")
    word = ""
    names: tuple[str, ...] = ()
    if match := _INVALID_NAME.match(detail):
        word = match["name"]
        names = tuple(names_at(kind, path))
    elif detail == NO_FIELD:
        parent, _, word = path.rpartition(".")
        names = tuple(fields_at(kind, parent))
    return invalid(
        field,
        shortened(detail) if word else detail,
        allowed=", ".join(name for name in names if name not in ALIASES) or None,
        hint=_advice(word or f"{field}: {detail}", names) or suggestion(word, names),
    )


def _advice(written: str, names: Iterable[str]) -> str | None:
    """Return what to write instead, as far as it is known."""
    advised = (
        match.expand(advice)
        for pattern, name, advice in _MEANT
        if (not name or name in names) and (match := re.fullmatch(pattern, written))
    )
    return next(advised, None)


def fields_at(kind: Any, path: str) -> Iterable[str]:
    """Return the names of the fields of the objects at a path inside a type."""
    structs = [item for item in _types_at(kind, path) if _is_struct(item)]
    return dict.fromkeys(name for item in structs for name in item.__struct_encode_fields__)


def names_at(kind: Any, path: str) -> Iterable[str]:
    """Return the names that a path inside a type takes: a value, a key, or the tag of a union."""
    parent, _, last = path.rpartition(".")
    tagged = (item.__struct_config__ for item in _types_at(kind, parent) if _is_struct(item))
    found = [str(item.tag) for item in tagged if item.tag_field == last]
    for item in _types_at(kind, path):
        # msgspec gives an invalid key the path of its mapping
        names = _members(get_args(item)[0]) if get_origin(item) is dict else [item]
        found += (text for name in names for text in _names_of(name))
        if _is_struct(item) and (config := item.__struct_config__).tag:
            # an object is valid too
            found.append(f'{{"{config.tag_field}": "{config.tag}", …}}')
    return dict.fromkeys(found)


def _names_of(kind: Any) -> list[str]:
    if get_origin(kind) is Literal:
        return [value for value in get_args(kind) if isinstance(value, str)]
    if isinstance(kind, type) and issubclass(kind, Enum):
        return [item.value for item in kind]
    return ["a number"] if kind is int else []


def _types_at(kind: Any, path: str) -> list[Any]:
    """Return the types at a path inside a type; none if the path leads nowhere."""
    found = list(_members(kind))
    for step in _STEP.finditer(path):
        inner = _field if step["field"] else _items
        found = [
            member
            for item in found
            for part in inner(item, step["field"])
            for member in _members(part)
        ]
    return found


def _members(kind: Any) -> Iterator[Any]:
    """Yield the alternatives of a union, or the type itself, without annotations."""
    origin = get_origin(kind)
    if origin in (Union, UnionType, Annotated):
        for item in get_args(kind)[: 1 if origin is Annotated else None]:
            yield from _members(item)
    else:
        yield kind


def _field(kind: Any, name: str) -> list[Any]:
    fields = msgspec.structs.fields(kind) if _is_struct(kind) else ()
    return [field.type for field in fields if field.encode_name == name]


def _items(kind: Any, _: str | None) -> tuple[Any, ...]:
    """Return the types of the items of a list or tuple, or of the values of a mapping."""
    return get_args(kind)[1:] if get_origin(kind) is dict else get_args(kind)


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)
