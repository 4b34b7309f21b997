"""Rejects, when a process starts, an artifact store that lacks a feature that captures need."""

import logging

from ...schemas.settings.settings import Settings, SettingsError
from ...storage.store import Demanding, open_store

log = logging.getLogger(__name__)


def require(settings: Settings) -> None:
    """Raise SettingsError with the reason if the store is unfit.

    An unreachable store passes: its `trouble` is checked while the process runs.
    """
    try:
        store = open_store(settings.artifacts)
        why = store.unfit() if isinstance(store, Demanding) else ""
    except ValueError as error:
        raise SettingsError(
            f"MIDSTREAM_ARTIFACT_STORE={settings.artifact_store}: {error}"
        ) from error
    except OSError as error:
        log.warning("the artifact store could not be examined: %s", error.strerror or error)
        return
    if why:
        raise SettingsError(f"MIDSTREAM_ARTIFACT_STORE={settings.artifact_store}: {why}")
