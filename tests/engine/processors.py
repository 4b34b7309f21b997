"""Which quantised formats a processor serves, by its flags; and how to try older processors on this
one.

To run a test file as on a processor without AVX-512 and VNNI, in bash:

    env $(python tests/engine/processors.py avx2) pytest tests/engine/test_quantised.py
"""

import os
import sys
import tempfile
from pathlib import Path

_AMX = "amx_tile amx_bf16 amx_int8"
_AVX512 = f"avx512f avx512_bf16 avx512_vnni {_AMX}"
#: Name → the flags that it lacks, what oneDNN may use, what PyTorch may use.
OLDER = {
    "avx2": (f"{_AVX512} avx_vnni", "AVX2", "avx2"),
    "avx2_vnni": (_AVX512, "AVX2_VNNI", "avx2"),
    "avx512": (f"avx512_bf16 avx512_vnni avx_vnni {_AMX}", "AVX512_CORE", "avx512"),
    "avx512_vnni": (f"avx512_bf16 avx_vnni {_AMX}", "AVX512_CORE_VNNI", "avx512"),
}


def environment(name: str) -> dict[str, str]:
    """What a process and its children need to take this processor for the older one."""
    hidden, onednn, aten = OLDER[name]
    return {
        "HIDDEN_CPU_FLAGS": hidden.replace(" ", ","),
        "ONEDNN_MAX_CPU_ISA": onednn,
        "ATEN_CPU_CAPABILITY": aten,
        # inductor also takes code from its cache that it compiled for another processor
        "TORCHINDUCTOR_CACHE_DIR": os.path.join(tempfile.gettempdir(), f"inductor-{name}"),
        "PYTHONPATH": os.pathsep.join(
            [
                str(Path(__file__).parent / "older_processor"),
                *filter(None, [os.environ.get("PYTHONPATH")]),
            ]
        ),
    }


def flags() -> frozenset[str]:
    """Of this processor, without those that are hidden."""
    line = next(
        (
            line
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("flags")
        ),
        "",
    )
    return frozenset(line.split()) - set(os.environ.get("HIDDEN_CPU_FLAGS", "").split(","))


def refusal(form: str, dtype: str) -> str:
    """Why the format is not served on this processor; empty if it is.

    By the flags alone, without asking the code under test.
    """
    if "amx_tile" in flags() and (form == "fp8 per tensor" or "static" in form):
        return "with the checkpoint's scale"
    if form.startswith("int8") and not {"avx512_vnni", "avx_vnni"} & flags():
        # oneDNN's own reference, which is right
        slow = form == "int8 static" and dtype == "bfloat16" and "avx512f" not in flags()
        return "" if slow else "Int8 products need VNNI"
    if form == "int8 per token" and dtype == "float32" and "amx_tile" in flags():
        return "expect A to be bfloat16 or half"
    if form in ("awq", "gptq", "int4 groups") and "avx512f" not in flags():
        return "cpu_gemm_wna16"
    return ""


if __name__ == "__main__":
    print(*(f"{name}={value}" for name, value in environment(sys.argv[1]).items()))
