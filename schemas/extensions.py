"""Extensions, which operators install next to Midstream: their declarations, and the records of
loaded extensions.

A package offers a reader or an op through an entry point, see `docs/extending.md`. Declarations are
data, so that the API can check requests without installing the package.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from .artifacts.registered import NamedArtifact
from .base.records import Published
from .prompts.selectors import SelectorError
from .readings.installed import ArrayDType, OptionValue, OptionValues, ReaderSpec
from .requests.artifact_kinds import ARTIFACTS

ExtensionKind = Literal["reader", "op"]


class Option(Published):
    """An option of a reader.

    Its type is that of its default: true or false, an integer, a number, or a text.
    """

    default: OptionValue
    low: float | None = None  # range of a number, inclusive
    high: float | None = None
    choices: list[str] = []  # valid texts; empty: any
    # plural of the kind of registered artifacts of which the text names one: the reader gets that
    # one's fields, by name; with an empty text, it gets that
    artifact: str = ""
    about: str = ""

    def checked(self, value: OptionValue) -> OptionValue:
        """Return the value in the option's type. Raises ValueError with the valid values."""
        kind = type(self.default)
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind or (isinstance(value, float) and not math.isfinite(value)):
            raise ValueError(f"{value!r} is not {self.valid}")
        if (
            isinstance(value, (int, float))
            and kind is not bool
            and not (
                (-math.inf if self.low is None else self.low)
                <= value
                <= (math.inf if self.high is None else self.high)
            )
        ):
            raise ValueError(f"{value!r} is out of range; valid: {self.valid}")
        if isinstance(value, str) and self.choices and value not in self.choices:
            raise ValueError(f"{value!r} is unknown; valid: {self.valid}")
        return value

    @property
    def valid(self) -> str:
        """The valid values, in words."""
        if self.choices:
            return ", ".join(self.choices)
        noun = {bool: "true or false", int: "an integer", float: "a finite number", str: "a text"}[
            type(self.default)
        ]
        bounds = list[str]()
        if self.low is not None:
            bounds.append(f"at least {self.low:g}")
        if self.high is not None:
            bounds.append(f"at most {self.high:g}")
        return f"{noun} of {' and '.join(bounds)}" if bounds else noun


class ReaderTerms(Published):
    """The declaration of a reader: its options, its returned arrays, and their largest size."""

    returns: dict[str, ArrayDType]  # name of a returned array → dtype
    row_bytes: int = 0  # the most bytes of all arrays for each captured row
    fixed_bytes: int = 0  # bytes in addition to those of the rows
    # integer option → additional bytes per captured row and unit of the option
    grows: dict[str, int] = {}
    options: dict[str, Option] = {}
    about: str = ""  # one line

    def size(self, options: OptionValues) -> int:
        """Return the most bytes for each captured row."""
        return self.row_bytes + sum(per * int(options[name]) for name, per in self.grows.items())


#: The most options of an installed op.
MAX_OP_OPTIONS = 2


class OpTerms(Published):
    """The declaration of an op."""

    vector: bool = False  # whether it takes a vector, `[hidden_size]`
    # at most `MAX_OP_OPTIONS`, all floats; the op gets them as numbers in this order
    options: dict[str, Option] = {}
    about: str = ""


class Extension(Published):
    """An extension that a model's ranks have loaded, all in the same version."""

    kind: ExtensionKind
    name: str  # as requests name it
    package: str
    version: str  # of the package
    digest: str  # SHA-256 of the package's files
    reader: ReaderTerms | None = None
    op: OpTerms | None = None
    code: int = 0  # of an op: its number in steering entries, derived from name and digest
    refused: str = ""  # why requests cannot use it with this model
    checked: list[str] = []  # properties that held at startup, tested with random rows


def checked_options(
    name: str, declared: Mapping[str, Option], given: Mapping[str, OptionValue]
) -> OptionValues:
    """Return every option that the extension of this name has declared, in its type; one that is
    not given has its default. Raises SelectorError below the options.
    """
    for option, value in given.items():
        if option not in declared:
            valid = ", ".join(declared) or "none"
            raise SelectorError(f"unknown; valid options of {name}: {valid}", f".{option}")
        try:
            declared[option].checked(value)
        except ValueError as error:
            raise SelectorError(str(error), f".{option}") from error
    return {
        option: terms.checked(given.get(option, terms.default))
        for option, terms in declared.items()
    }


def artifacts_named(
    spec: ReaderSpec, extensions: Iterable[Extension]
) -> Iterator[tuple[str, NamedArtifact]]:
    """Yield (option, artifact) of the registered artifacts that options of a reader name, as far as
    their kinds are installed here.
    """
    for extension in extensions:
        if extension.name != spec.name or extension.reader is None:
            continue
        for name, option in extension.reader.options.items():
            asked = spec.options.get(name, option.default)
            if option.artifact in ARTIFACTS and asked:
                yield name, (ARTIFACTS[option.artifact], str(asked))


@dataclass(frozen=True)
class Rows:
    """A reader's input: the rows of one request on one pipeline stage, a read-only copy."""

    # (hook, layer) → float32 `[positions, width]`; at least one site and one position
    sites: dict[tuple[str, int], np.ndarray]
    positions: np.ndarray  # int64 `[positions]`: absolute token positions, ascending
    token_ids: np.ndarray  # int64 `[positions]`: the token at each
    prompt_tokens: int  # lower positions belong to the prompt
    # every declared option, with its default if the request omits it; of an `artifact`, its fields
    options: dict[str, Any]
    num_layers: int  # of the whole model
    stage: int = 0
    # number of stages; `sites` has only this stage's sites, and each stage returns its own part
    stages: int = 1
