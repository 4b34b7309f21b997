"""The dtype that `auto` stands for follows from the checkpoint and the processor."""

from typing import Any

import pytest

from midstream.workers.engine import dtype
from midstream.workers.engine.dtype import choose

QUANTISED = {"dtype": "bfloat16", "quantization_config": {"quant_method": "awq"}}


@pytest.mark.parametrize(
    ("config", "native", "other"),
    [
        ({"dtype": "bfloat16"}, "bfloat16", "float32"),
        ({"torch_dtype": "bfloat16"}, "bfloat16", "float32"),
        ({"text_config": {"dtype": "bfloat16"}}, "bfloat16", "float32"),
        ({"dtype": "float16"}, "float32", "float32"),
        ({"dtype": "float32"}, "float32", "float32"),
        ({"text_config": None}, "float32", "float32"),
        (QUANTISED, "auto", "auto"),
        ({}, "auto", "auto"),  # no config: vLLM says what is wrong
    ],
)
def test_auto_on_a_cpu(
    config: dict[str, Any], native: str, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for has_bfloat16, expected in ((True, native), (False, other)):
        monkeypatch.setattr(dtype, "computes_bfloat16", lambda has=has_bfloat16: has)
        assert choose("auto", config, gpu=False).dtype == expected
        assert choose("auto", config, gpu=True).dtype == "auto"
        assert choose("float16", config, gpu=False).dtype == "float16"


def test_the_reason_names_what_the_processor_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dtype, "computes_bfloat16", lambda: False)
    assert choose("auto", {"dtype": "bfloat16"}, gpu=False) == (
        "float32",
        "this processor has no fast bfloat16, the checkpoint's dtype",
    )
