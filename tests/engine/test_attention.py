"""Attention patterns of captured queries and keys are transformers' eager attentions. Real vLLM, tiny models in fp32."""

import pytest
from host import Host
from tiny import LAYERS

from midstream.schemas.attention import AttentionKind

#: Of the tiny models whose heads have a width of their own.
HEADS, HEAD_DIM = 4, 32


@pytest.mark.parametrize("engine", ["v1", "tp2", "pp2"])
def test_the_model_reports_how_its_layers_attend(engine: str, request: pytest.FixtureRequest) -> None:
    """Once for the whole model, whatever its ranks hold."""
    host: Host = request.getfixturevalue(engine)
    (kind,) = host.info["attention"]
    assert kind == {
        name: getattr(AttentionKind(layers=list(range(LAYERS)), heads=HEADS, head_dim=HEAD_DIM, scale=HEAD_DIM**-0.5), name)
        for name in kind
    }
