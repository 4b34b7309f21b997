"""Is a class of vLLM that transformers does not have proven by its laws, with nothing to compare
its rows with?
"""

from collections.abc import Callable, Iterator
from typing import Any

import families  # noqa: F401 - puts the walk's folder on the path
import pytest
from host import Host
from nursery import Nursery
from own_configs import folder_of

from midstream.schemas.prompts.selectors import HOOKS

NAME = "InternLM2ForCausalLM"
OPTIONS: dict[str, Any] = {
    "certify": True,
    "engine.max_model_len": 128,
    "engine.max_num_seqs": 16,
    "kv_cache_gib": 0.125,
    "engine_options": {"load_format": "dummy"},
}
DRAWN = {"DRAW_WEIGHTS": "1"}
pytestmark = pytest.mark.matrix


@pytest.fixture
def start(
    nursery: Nursery, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Host]]:
    started: list[Host] = []

    def begin(env: dict[str, str] | None = None, **settings: Any) -> Host:
        folder = tmp_path_factory.mktemp("alone")
        started.append(
            nursery.host(
                folder / "engine",
                folder_of(NAME, folder / "checkpoint"),
                env,
                **(OPTIONS | settings),
            )
        )
        return started[-1]

    yield begin
    for host in started:
        host.close()


def test_every_hook_is_proven_and_a_caveat_says_that_nothing_was_compared(
    start: Callable[..., Host],
) -> None:
    host = start(DRAWN)
    assert (host.info["hooks"], host.info["certificate"]["absent"]) == (list(HOOKS), {})
    assert "not compared with transformers: load_format=dummy" in host.info["caveats"]


def test_a_wrong_hook_is_absent(start: Callable[..., Host]) -> None:
    assert start(DRAWN, fault="shift_attn_out").info["certificate"]["absent"].keys() == {"attn_out"}


def test_a_branch_that_its_weights_hide_is_not_proven(start: Callable[..., Host]) -> None:
    """vLLM's own dummy weights are so small that the MLP shows nowhere: the walk draws others."""
    assert not {"mlp_in", "mlp_out"} & set(start().info["certificate"]["proven"])
