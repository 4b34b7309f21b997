"""What happens at a stream site that is a deferred pair? Rows are recorded, then edited, inside the forward pass.

The residual stream is `s = hidden + residual` (vLLM fuses the addition into the next norm). One opaque op serves a
site: `counts` says how much there is to do, so that the same traced graph serves idle and busy steps.
"""

import torch

#: Columns of `counts`, int32 `[4]` for each site.
STEER, CAPTURE, CAPTURE_START, RESERVED = range(4)
#: `counts[CAPTURE_START]` when the captured tokens are not one contiguous run.
SCATTERED = -1

_library = torch.library.Library("midstream", "FRAGMENT")
_library.define(
    "pair_site(Tensor hidden, Tensor(a!) residual, Tensor(b!) captured, Tensor counts, Tensor steer_tokens, "
    "Tensor steer_rows, Tensor table, Tensor capture_tokens) -> ()"
)


def pair_site_reference(
    hidden: torch.Tensor,
    residual: torch.Tensor,
    captured: torch.Tensor,
    counts: torch.Tensor,
    steer_tokens: torch.Tensor,
    steer_rows: torch.Tensor,
    table: torch.Tensor,
    capture_tokens: torch.Tensor,
) -> None:
    """The CPU path: capture the stream, then add steering rows.

    hidden, residual: `[num_tokens, hidden_size]`; captured: `[capacity, hidden_size]`, rows `0..counts[CAPTURE]` are
    overwritten; counts: int32 `[4]`; steer_tokens, steer_rows: int64 `[slots]`; capture_tokens: int64 `[capacity]`;
    table: `[rows, hidden_size]`, row 0 zero. `residual[steer_tokens[i]] += table[steer_rows[i]]`; a token may be named
    several times. Runs in the model's dtype.
    """
    steer, capture, start, _ = counts.tolist()
    if capture:
        if start == SCATTERED:
            tokens = capture_tokens[:capture]
            torch.add(hidden[tokens], residual[tokens], out=captured[:capture])
        else:
            torch.add(hidden[start : start + capture], residual[start : start + capture], out=captured[:capture])
    if steer:
        residual.index_add_(0, steer_tokens[:steer], table[steer_rows[:steer]])


def _pair_site_device(
    hidden: torch.Tensor,
    residual: torch.Tensor,
    captured: torch.Tensor,
    counts: torch.Tensor,
    steer_tokens: torch.Tensor,
    steer_rows: torch.Tensor,
    table: torch.Tensor,
    capture_tokens: torch.Tensor,
) -> None:
    """Accelerators: fixed shapes and no host reads, so that a graph can replay it; unused slots name token 0 and row 0."""
    capacity = min(captured.shape[0], hidden.shape[0])
    tokens = capture_tokens[:capacity]
    captured[:capacity] = hidden[tokens] + residual[tokens]
    residual.index_add_(0, steer_tokens, table[steer_rows])


def _pair_site_fake(*_: torch.Tensor) -> None:
    return None


_library.impl("pair_site", pair_site_reference, "CPU")
_library.impl("pair_site", _pair_site_device, "CUDA")
_library._register_fake("pair_site", _pair_site_fake)

pair_site = torch.ops.midstream.pair_site
