"""Has PyTorch and vLLM take this processor for an older one: `processors.py` puts this folder in
front of the Python path.
"""

import os

import torch

_HIDDEN = os.environ["HIDDEN_CPU_FLAGS"].split(",")
for _flag, _name in {
    "avx512f": "_is_avx512_supported",
    "avx512_bf16": "_is_avx512_bf16_supported",
    "amx_tile": "_is_amx_tile_supported",
}.items():
    if _flag in _HIDDEN:
        setattr(torch.cpu, _name, lambda: False)
