"""Figures of Python and of the page have the same colours for the same values."""

import re
from pathlib import Path

import numpy as np

import midstream_page
from midstream.client.render.drawing import shades

ASSETS = Path(midstream_page.__file__).parent / "assets"


def test_python_draws_in_the_shades_of_the_page() -> None:
    source = (ASSETS / "lib" / "heatmap.js").read_text()
    light = source.partition("const SHADES = {")[2].partition("dark:")[0]
    found = re.findall(r"\[(\d+), (\d+), (\d+)\]", light)
    stops = np.array(found, dtype=int)
    drawn = shades()(np.linspace(0, 1, len(stops)))[:, :3] * 255
    np.testing.assert_allclose(drawn, stops, atol=1)  # of 256 steps
