"""The reader of `StoredReader`: gives a request's rows to the installed reader that it names, and reports which code answered."""

from collections.abc import Mapping

import numpy as np

from ...schemas.extensions import Rows
from ...schemas.readings import ReaderPart, StoredReader
from .consumers import rows_of
from .extensions import LoadedReader, frozen
from .finished import FinishedCapture, ReadingError


class InstalledReaders:
    """Those of a rank. Called from writer threads; each reader takes one call at a time, with a time limit."""

    def __init__(self, loaded: Mapping[str, LoadedReader]) -> None:
        self._loaded = dict(loaded)

    def __call__(self, capture: FinishedCapture, number: int) -> ReaderPart:
        """`number`: the capture's place among the request's. Raises ReadingError with the reader's name and its reason."""
        wanted = capture.capture.reading
        assert isinstance(wanted, StoredReader)
        reader = self._loaded.get(wanted.name)
        if reader is None:
            raise ReadingError(f"{wanted.name}: this rank has no reader of this name")
        facts = reader.facts
        if facts.digest != wanted.digest:
            raise ReadingError(
                f"{wanted.name}: the job was accepted for the code {wanted.digest[:12]}, but this rank has {facts.package} "
                f"{facts.version}, code {facts.digest[:12]}: submit it again"
            )
        try:
            arrays = reader.read(_rows(capture, wanted)) if capture.positions else {}
        except Exception as error:
            raise ReadingError(f"{wanted.name}: {type(error).__name__}: {error}") from error
        return ReaderPart(
            capture=number,
            name=wanted.name,
            package=facts.package,
            version=facts.version,
            digest=facts.digest,
            options=wanted.options,
            sites=capture.sites,
            of=capture.capture.num_sites,
            positions=capture.positions,
            token_ids=capture.token_ids,
            arrays=arrays,
        )


def _rows(capture: FinishedCapture, wanted: StoredReader) -> Rows:
    """float32 of their own: what is read is exact in any dtype that rows are captured in."""
    sites = {(hook, layer): rows_of(capture, hook, layer) for hook, layers in capture.sites.items() for layer in layers}
    return Rows(
        sites={site: frozen(rows.astype(np.float32, copy=True)) for site, rows in sites.items()},
        positions=frozen(np.array(capture.positions, dtype=np.int64)),
        token_ids=frozen(np.array(capture.token_ids, dtype=np.int64)),
        prompt_tokens=capture.spec.prompt_tokens,
        options=dict(wanted.options),
        num_layers=capture.num_layers,
        stage=capture.pp,
        stages=capture.stages,
    )
