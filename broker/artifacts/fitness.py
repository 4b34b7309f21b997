"""Refuses, at the start of a process, an artifact store that lacks what captures need."""

import logging

from ...schemas.base.settings import Settings, SettingsError
from ...storage.store import Demanding, open_store

log = logging.getLogger(__name__)


def require(settings: Settings) -> None:
    """Raises SettingsError with the reason.

    A store that is unavailable may be fit: it is looked at again when it is back (`trouble`).
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
