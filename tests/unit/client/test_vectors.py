"""Files of steering vectors: Midstream's own format needs no other package, and those of other
tools name the one that has them.
"""

from collections.abc import Iterator
from importlib.metadata import EntryPoints
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from midstream import SteeringSpec
from midstream.client import vectors
from midstream.schemas import packages
from midstream.schemas.base.tensors import from_numpy, to_numpy

JOY = np.linspace(-1, 1, 8, dtype=np.float32)
REMEDY = r"pip install 'midstream\[bridges\]'"


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The core alone."""
    monkeypatch.setattr(packages, "entry_points", lambda **asked: EntryPoints([]))
    vectors._foreign.cache_clear()
    yield
    vectors._foreign.cache_clear()


@pytest.mark.usefixtures("bare")
def test_safetensors_files_are_read_and_written_without_other_packages(tmp_path: Path) -> None:
    specs = [SteeringSpec(layers=3, vector=from_numpy(JOY), op="ablate", strength=0.5)]
    assert vectors.write(tmp_path / "joy.safetensors", specs) == "safetensors"
    assert vectors.read(tmp_path / "joy.safetensors") == specs


@pytest.mark.usefixtures("bare")
def test_rows_of_a_safetensors_file_are_at_the_layers_that_are_named() -> None:
    raw = save({"vector": np.stack([JOY, -JOY])})
    first, second = vectors.from_bytes(raw, "4,9", scale=2.0)
    assert first.layers == 4
    assert second.layers == 9
    assert first.scale == 2.0
    assert second.scale == 2.0
    assert first.vector is not None
    assert second.vector is not None
    np.testing.assert_array_equal(to_numpy(first.vector), JOY)
    np.testing.assert_array_equal(to_numpy(second.vector), -JOY)


@pytest.mark.usefixtures("bare")
def test_a_file_of_another_tool_names_the_package_that_reads_it() -> None:
    with pytest.raises(ValueError, match=f"valid: safetensors; for .* other tools: {REMEDY}"):
        vectors.from_bytes(b"GGUF" + bytes(64))


@pytest.mark.usefixtures("bare")
def test_a_format_of_another_tool_names_the_package_that_writes_it(tmp_path: Path) -> None:
    specs = [SteeringSpec(layers=3, vector=from_numpy(JOY))]
    with pytest.raises(ValueError, match=f"no format 'gguf'; valid: safetensors; .*{REMEDY}"):
        vectors.to_bytes(specs, "gguf")
    with pytest.raises(ValueError, match=f"'.gguf' implies no format; .*{REMEDY}"):
        vectors.write(tmp_path / "joy.gguf", specs)


def test_no_file_fits_two_formats() -> None:
    """A safetensors file's first bytes are a length: it may begin like a file of another format,
    which is told apart by its ninth byte.
    """
    for first in (b"\x80", b"{", b"["):
        raw = first + bytes(7) + b'{"vector"'
        fits = [row.name for row in (*vectors._foreign(), vectors.SAFETENSORS) if row.fits(raw)]
        assert fits == ["safetensors"]
