"""Translates vLLM's start-up errors, which name vLLM's options, into messages that name Midstream's
settings.
"""

import re

#: Pattern of an error of vLLM 0.32, and Midstream's message; groups of the match fill the braces.
REASONS: tuple[tuple[str, str], ...] = (
    (
        r"(?<!--engine )(?:trust_remote_code|trust-remote-code)",
        "the checkpoint comes with code of its own, or its model_type is known neither "
        "to vLLM nor to transformers. If you trust "
        "that code, allow it to run: --engine trust_remote_code=true. Otherwise use a "
        "checkpoint without code",
    ),
    (
        r"max seq len \((\d+)\), \(([\d.]+) GiB KV cache is needed, which is larger "
        r"than the available KV cache memory \(([\d.]+) GiB\)"
        r"\.(?: Based on the available memory, the estimated maximum model length is "
        r"(?P<fits>\d+))?",
        "the KV cache is too small for one request of {1} tokens: it needs {2} GiB and "
        "has {3}. Increase the setting kv_cache_gib "
        "(on a CPU), or decrease max_model_len{fits}",
    ),
    (
        r"No available memory for the cache blocks",
        "no memory is left for the KV cache. Increase the setting kv_cache_gib (on a "
        "CPU), or use a smaller model or a larger "
        "tensor_parallel_size",
    ),
    (
        (
            r"Available memory on node \d+ \(([\d.]+)/([\d.]+) GiB\) on kv cache allocation "
            r"is less than requested memory for kv \(([\d.]+)"
        ),
        "the KV cache is too large for this machine: the setting kv_cache_gib asks for "
        "{3} GiB, and {1} of {2} GiB are free. Decrease "
        "kv_cache_gib, or stop other processes",
    ),
    (
        r"DefaultCPUAllocator: can't allocate memory: you tried to allocate (\d+) bytes",
        "out of memory: an allocation of {1} bytes failed. Decrease the setting "
        "kv_cache_gib, capture_buffer_mib or "
        "max_num_batched_tokens, or use a smaller model",
    ),
    (
        (
            r"User-specified max_model_len \((\d+)\) is greater than the derived "
            r"max_model_len \(\w+=(\d+)"
        ),
        "the setting engine.max_model_len={1} exceeds the model's own limit of {2}",
    ),
    (
        r"max_num_batched_tokens \((\d+)\) must be greater than or equal to max_num_seqs \((\d+)\)",
        (
            "the setting engine.max_num_batched_tokens={1} is less than "
            "engine.max_num_seqs={2}: increase the first, or decrease the second"
        ),
    ),
    (
        r"attention heads \((\d+)\) must be divisible by tensor parallel size \((\d+)\)",
        "the setting engine.tensor_parallel_size={2} does not divide the model's {1} attention "
        "heads",
    ),
)


def in_our_settings(text: str) -> str:
    """Return Midstream's message for a known error of vLLM; any other text unchanged."""
    joined = " ".join(text.split())
    for pattern, meaning in REASONS:
        if (match := re.search(pattern, joined)) is not None:
            fits = match.groupdict().get("fits")
            return meaning.replace("{fits}", f" to {fits}" if fits else "").format(
                None, *match.groups()
            )
    return text
