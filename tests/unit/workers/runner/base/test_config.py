"""A rank's config on the machines of an engine: the start is rank 0's, the places its own."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from rank_kit import plane_config

from midstream.schemas.base.records import to_json
from midstream.workers.runner.base import config
from midstream.workers.runner.base.config import PlaneConfig, join


def plane(folder: Path, **changed: Any) -> PlaneConfig:
    return plane_config(folder, steering_rows=1, steering_entries=1, step_tokens=1, **changed)


def joined(monkeypatch: pytest.MonkeyPatch, own: PlaneConfig, first: PlaneConfig) -> PlaneConfig:
    """Rank 0 has `first`, this rank `own`: what this rank has then."""
    monkeypatch.setenv(config.VARIABLE, "")
    own.export()
    join(to_json(first).decode())
    return config.plane_config()


def test_a_rank_of_another_machine_joins_the_workers_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = plane(tmp_path / "own", boot="own", step_rows=0)
    first = plane(tmp_path / "first", boot="first", step_rows=64)
    found = joined(monkeypatch, own, first)
    assert found.boot == "first"
    assert found.step_rows == 64


def test_a_rank_of_another_machine_keeps_its_own_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = plane(tmp_path / "own", cores=[7], curve_secret_file="own.key")
    found = joined(monkeypatch, own, plane(tmp_path / "first"))
    assert [getattr(found, name) for name in config.OF_MACHINE] == [
        getattr(own, name) for name in config.OF_MACHINE
    ]


def test_a_rank_with_another_model_does_not_join(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = plane(tmp_path, identity="a" * 64)
    with pytest.raises(RuntimeError, match=r"identity aaaaaaaaaaaa, but .* has bbbbbbbbbbbb"):
        joined(monkeypatch, own, msgspec.structs.replace(own, identity="b" * 64))
