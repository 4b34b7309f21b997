"""Services with a real engine, which several folders of tests start."""

from pathlib import Path
from typing import Any

from stack import Stack
from tree import ROOT

from midstream_ops.demo_model import fetch_demo_model

#: Of a service with a real engine, which may stall the process for seconds.
PATIENT: dict[str, Any] = {
    "start_timeout_s": 400,
    "lease_s": 15.0,
    "tuning.visibility_timeout_s": 30,
}


def demo_service(folder: Path) -> Stack:
    """A service with the demo model, `demo`, in fp32, that does not run yet."""
    engine = {
        "engine": "vllm",
        "model": str(fetch_demo_model()),
        "model_name": "demo",
        "engine.dtype": "float32",
        "engine.max_model_len": 1024,
        "kv_cache_gib": 0.5,
        "hooks": "all,inside",
    }
    artifacts = str(ROOT / "examples" / "data")
    options = {"artifacts_dir": artifacts, "log_format": "json", "certify": False}
    return Stack(folder, api=True, **engine, **options, **PATIENT)
