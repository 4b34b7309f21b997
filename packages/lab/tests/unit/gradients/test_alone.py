"""Does a gradient worker take the settings of a worker whose engine spans machines?"""

from midstream.schemas.settings.settings import load_settings
from midstream_lab.gradients.engine import _alone


def test_what_spreads_an_engine_over_machines_is_left_out() -> None:
    spread = {"nnodes": 2, "node_rank": 1, "master_addr": "10.0.0.1", "master_port": 29501}
    settings = load_settings(
        {},
        engine_options={**spread, "long_prefill_token_threshold": 16},
        **{"engine.tensor_parallel_size": 2},
    )
    alone = _alone(settings)
    assert alone.engine_options == {"long_prefill_token_threshold": 16}
    assert alone.vllm.tensor_parallel_size == 1
    assert alone.model == settings.model
