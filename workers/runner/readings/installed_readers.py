"""Installed readers: loads them, checks each when the rank starts, and calls them with the rows of
requests, for readings of type `StoredReader`. A fault or a late answer never reaches the forward.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ....schemas.extensions import Extension, ReaderTerms, Rows
from ....schemas.readings.installed import ReadArray, ReaderPart, StoredReader
from ..base.extensions import Offer, code_of, declared, digest, frozen, loading
from ..base.helper_threads import HelperThread
from ..files.consumers import rows_of
from ..files.finished_rows import FinishedCapture, ReadingError

logger = logging.getLogger(__name__)

#: Seconds that an installed reader may take for a request's rows; the thread waits for it.
PATIENCE_S = 5.0
#: Positions in each call of the check.
_CHECKED_POSITIONS = (1, 5)
_SEED = 17


class ReaderCode(Protocol):
    """An installed reader. `ReaderTerms` has its attributes; only `returns` is required."""

    def read(self, rows: Rows) -> Mapping[str, np.ndarray]:
        """Return the arrays that `returns` names. Calls come one at a time; an exception fails the
        request.
        """


@dataclass(frozen=True)
class LoadedReader:
    """A reader that passed its check."""

    facts: Extension
    terms: ReaderTerms
    thread: HelperThread[Rows, dict[str, ReadArray]]

    def read(self, rows: Rows) -> dict[str, ReadArray]:
        """Call the reader. Raises what it raises, LateError, and ValueError for an answer that does
        not match its declaration.
        """
        return self.thread.ask(rows)


def load_readers(
    offers: Iterable[Offer], hidden_size: int, num_layers: int, hooks: Sequence[str]
) -> dict[str, LoadedReader]:
    """Return the readers that trusted packages offer, by name, each checked with random rows of the
    model's shape. Raises ExtensionError.
    """
    readers = {}
    for offer in offers:
        if offer.kind != "reader":
            continue
        with loading(offer):
            readers[offer.name] = loaded = _loaded(offer)
            _check(loaded, hidden_size, num_layers, hooks)
        logger.info("%s is loaded, code %s", offer, loaded.facts.digest[:12])
    return readers


def _loaded(offer: Offer) -> LoadedReader:
    code = digest(offer)
    reader: ReaderCode = code_of(offer)
    terms = declared(reader, ReaderTerms)
    for name in terms.grows:
        if type(terms.options[name].default) is not int or terms.options[name].high is None:
            raise ValueError(f"grows: {name} is not an integer option with an upper limit")
    facts = offer.facts(
        code,
        reader=terms,
        checked=["answers as declared", "same rows, same answer", "input unchanged"],
    )

    def read(rows: Rows) -> dict[str, ReadArray]:
        return _arrays(reader.read(rows), terms, rows)

    return LoadedReader(
        facts, terms, HelperThread(f"reader {offer.name}", read, PATIENCE_S, "request")
    )


def _arrays(answer: Any, terms: ReaderTerms, rows: Rows) -> dict[str, ReadArray]:
    """Return the answer as wire arrays. Raises ValueError if it does not match the declaration."""
    if not isinstance(answer, Mapping) or set(answer) != set(terms.returns):
        shown = sorted(map(str, answer)) if isinstance(answer, Mapping) else type(answer).__name__
        raise ValueError(f"returned {shown}, but declares the arrays {sorted(terms.returns)}")
    arrays = {}
    for name, dtype in terms.returns.items():
        values = answer[name]
        if not isinstance(values, np.ndarray) or values.dtype != np.dtype(dtype):
            shown = (
                f"{values.dtype} array" if isinstance(values, np.ndarray) else type(values).__name__
            )
            raise ValueError(f"{name} is a {shown}, but is declared as an array of {dtype}")
        raw = np.ascontiguousarray(values, dtype=np.dtype(dtype).newbyteorder("<"))
        arrays[name] = (dtype, list(values.shape), raw)
    size = sum(raw.nbytes for _, _, raw in arrays.values())
    most = terms.fixed_bytes + len(rows.positions) * len(rows.sites) * terms.size(rows.options)
    if size > most:
        raise ValueError(
            f"returned {size} bytes for {len(rows.positions) * len(rows.sites)} rows, but "
            f"declares at most {most}"
        )
    return {
        name: ReadArray(dtype=dtype, shape=shape, data=raw.tobytes())
        for name, (dtype, shape, raw) in arrays.items()
    }


def _check(loaded: LoadedReader, hidden_size: int, num_layers: int, hooks: Sequence[str]) -> None:
    """Check that the reader's answer for random rows matches its declaration and is the same twice,
    and that the rows are unchanged.

    Raises ValueError, or what the reader raises.
    """
    generator = np.random.default_rng(_SEED)
    sites = [(hook, layer) for hook in hooks[:2] for layer in sorted({0, num_layers - 1})]
    options = {name: option.default for name, option in loaded.terms.options.items()}
    for count in _CHECKED_POSITIONS:
        values = {
            site: generator.standard_normal((count, hidden_size), dtype=np.float32)
            for site in sites
        }
        answers = []
        for _ in range(2):
            rows = Rows(
                sites={site: frozen(value.copy()) for site, value in values.items()},
                positions=frozen(np.arange(count, dtype=np.int64)),
                token_ids=frozen(np.arange(count, dtype=np.int64) + 1),
                prompt_tokens=count,
                options=dict(options),
                num_layers=num_layers,
            )
            answers.append(loaded.read(rows))
            for site, value in values.items():
                if rows.sites.get(site) is None or rows.sites[site].tobytes() != value.tobytes():
                    raise ValueError(f"changes its input: the rows of {site[0]}, layer {site[1]}")
        if answers[0] != answers[1]:
            raise ValueError("gives different answers for the same rows")


class InstalledReaders:
    """Installed readers of a rank.

    Called from writer threads; each reader takes one call at a time, with a time limit.
    """

    def __init__(self, loaded: Mapping[str, LoadedReader]) -> None:
        self._loaded = dict(loaded)

    def __call__(self, capture: FinishedCapture, number: int) -> ReaderPart:
        """Call the reader that the capture names. `number`: index of the capture in the request.

        Raises ReadingError with the reader's name and the reason.
        """
        reading = capture.capture.reading
        assert isinstance(reading, StoredReader)
        if (reader := self._loaded.get(reading.name)) is None:
            raise ReadingError(f"{reading.name}: this rank has no reader of this name")
        facts = reader.facts
        if facts.digest != reading.digest:
            raise ReadingError(
                f"{reading.name}: the job was accepted for the code {reading.digest[:12]}, but "
                f"this rank has {facts.package} "
                f"{facts.version}, code {facts.digest[:12]}: submit it again"
            )
        try:
            arrays = reader.read(_rows(capture, reading)) if capture.positions else {}
        except Exception as error:
            raise ReadingError(f"{reading.name}: {type(error).__name__}: {error}") from error
        return ReaderPart(
            capture=number,
            name=reading.name,
            package=facts.package,
            version=facts.version,
            digest=facts.digest,
            options=reading.options,
            sites=capture.sites,
            of=capture.capture.num_sites,
            positions=capture.positions,
            token_ids=capture.token_ids,
            arrays=arrays,
        )


def _rows(capture: FinishedCapture, stored_reader: StoredReader) -> Rows:
    """Return copies of the capture's rows for a reader, in float32, which holds every capture dtype
    exactly.
    """
    sites = {
        (hook, layer): rows_of(capture, hook, layer)
        for hook, layers in capture.sites.items()
        for layer in layers
    }
    return Rows(
        sites={site: frozen(rows.astype(np.float32, copy=True)) for site, rows in sites.items()},
        positions=frozen(np.array(capture.positions, dtype=np.int64)),
        token_ids=frozen(np.array(capture.token_ids, dtype=np.int64)),
        prompt_tokens=capture.spec.prompt_tokens,
        options=stored_reader.options | stored_reader.contents,
        num_layers=capture.num_layers,
        stage=capture.pp,
        stages=capture.stages,
    )
