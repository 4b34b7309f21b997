"""The results of the walk: one JSON line per class."""

import fcntl
import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path

RESULTS = Path(__file__).with_name("results.jsonl")


#: What an error says → the reason in a reader's words; the first that is found.
REASONS: tuple[tuple[str, str], ...] = (
    (r"selective_scan_fwd", "vLLM's CPU build has no kernel for Mamba 1"),
    (
        r"Sparse Attention is not supported on CPU|sparse MLA backend",
        "vLLM has sparse attention on GPUs only",
    ),
    (
        r"(\w+) differs from transformers' by",
        "compared at the start, vLLM's {} differ from those of transformers' class",
    ),
    (r"is_act_and_mul=False", "vLLM has experts without a gate on GPUs only"),
    (r"cpu_router\.py", "vLLM's CPU experts do not implement its routing"),
    (
        r"apply_router_weight_on_input",
        "vLLM's CPU experts take the router's weight on their input for one expert only",
    ),
    (r"triton|_lib_fn_wrapper", "its kernels are Triton's, which this CPU build does not have"),
    (r"No module named 'torchvision'", "its processor needs torchvision"),
    (r"No module named '(\w+)'|requires the (\w+) library", "it needs the package {}"),
    (r"Can't load (image processor|feature extractor)", "its checkpoint must have a processor"),
    (
        r"'\w*Config' object has no attribute",
        "vLLM reads a field that the config of transformers' class does not have",
    ),
    (
        r"Unrecognized configuration class",
        "vLLM's Transformers backend finds no base model for its config",
    ),
    (r"Class validation error", "vLLM's config class does not take what transformers' gives"),
    (
        r"(did not start|KeyError at .*): 'layers\.",
        "vLLM does not know transformers' names of its weights",
    ),
    (r"weights were not initialized", "vLLM has weights that transformers' class does not"),
    (
        r"Cannot find any model weights|spk_dict",
        "vLLM looks for files that transformers does not write",
    ),
    (
        r"exceeds dimension size|split_with_sizes|for //|output_dim=",
        "vLLM derives other sizes from the generated config",
    ),
    (r"is missing special tokens", "its tokenizer must have special tokens"),
    (r"supported in vLLM until", "vLLM no longer has it"),
    (r"not supported by MLA", "vLLM's CPU kernel for latent attention takes other sizes only"),
    (
        r"cannot be run separately",
        "no residual stream was found: the layer cannot be run separately",
    ),
    (
        (
            r"AssertionError( at vllm/|$)|too many values to unpack|(did not start|KeyError "
            r"at .*): 'vllm'"
        ),
        "it fails in vLLM's Transformers backend or its own file, without a reason",
    ),
    (r"no module or parameter named", "vLLM does not know transformers' names of its weights"),
    (
        r"missing 1 required positional argument: 'pixel_values'",
        "transformers' model computes nothing without an image",
    ),
    (
        r"does not dispatch through the Transformers attention interface",
        "vLLM's Transformers backend cannot run its attention",
    ),
    (
        r"are not supported for now",
        ("vLLM has no class for it, and transformers' class does not fit its Transformers backend"),
    ),
    (
        r"Argument position_ids not found",
        "its decoder takes no positions, which vLLM's Transformers backend passes",
    ),
)


@dataclass(frozen=True)
class Result:
    """What became of one class.

    `outcome`: served, laws (served, without a reference), differs, refused, or not made.
    """

    name: str
    outcome: str
    alone: bool = False  # transformers has no class to compare it with
    why: str = ""  # of what is not served
    served_by: str = ""  # vLLM's file, or its Transformers backend
    dtype: str = "float32"
    hooks: list[str] = field(default_factory=list)  # that the certificate proves
    laws: int = 0  # that the certificate shows to hold
    absent: dict[str, str] = field(default_factory=dict)
    figure: float | None = None  # the worst of all hooks, as `fidelity_page.Figure` defines them
    figures: dict[str, str] = field(default_factory=dict)
    caveats: list[str] = field(default_factory=list)
    note: str = ""
    seconds: float = 0.0
    vllm: str = ""
    transformers: str = ""


def read() -> dict[str, Result]:
    """Name → result, in the order of names."""
    if not RESULTS.exists():
        return {}
    return {
        result.name: result
        for line in RESULTS.read_text().splitlines()
        if (result := Result(**json.loads(line)))
    }


def keep(result: Result) -> None:
    """Put the result in the place of an older one; several processes may."""
    with open(RESULTS.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        every = read() | {result.name: result}
        part = RESULTS.with_suffix(".part")
        part.write_text(
            "".join(
                json.dumps(asdict(every[name]), sort_keys=True) + "\n" for name in sorted(every)
            )
        )
        part.replace(RESULTS)


def in_our_words(text: str, alone: bool = False) -> str:
    """The reason that the text of an error stands for; empty if it is none that is known.

    `alone`: as in `Result`.
    """
    for pattern, reason in REASONS:
        if alone and "ransformers" in reason:  # which made nothing here
            continue
        if found := re.search(pattern, text, re.M):
            return reason.format(*(group for group in found.groups() if group))
    return ""
