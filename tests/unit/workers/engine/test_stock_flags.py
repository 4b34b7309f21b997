"""Does stock vLLM's server get the engine options as flags that it takes?"""

from midstream.workers.engine.proof.stock import flags


def test_engine_options_become_flags_of_vllms_server() -> None:
    options = {
        "max_num_seqs": 4,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "max_model_len": None,
        "limit_mm_per_prompt": {"image": 0},
        "allowed_names": ["a", "b"],
    }
    assert list(flags(options)) == [
        *("--max-num-seqs", "4", "--enforce-eager", "--no-enable-prefix-caching"),
        *("--limit-mm-per-prompt", '{"image": 0}', "--allowed-names", "a", "b"),
    ]
