"""The formats of steering vectors that `midstream.client.vectors` finds here."""

from collections.abc import Sequence

from midstream.client.vectors import VectorFormat, is_safetensors, of_names
from midstream.schemas.requests.specs import SteeringSpec

from . import array_files, gguf, lens_vectors
from .plain import by_name, by_site
from .torch_values import entries_of

_ZIP = b"PK\x03\x04"


def _is_torch(raw: bytes) -> bool:
    """Return whether it is an archive of torch.save, or what torch wrote before 1.6."""
    if raw.startswith(array_files.OLD_MAGIC):
        # the first byte of a safetensors file may be the same: it is of its header's length
        return not is_safetensors(raw)
    named = raw[30:].startswith(array_files.PICKLE.encode())
    return raw.startswith(_ZIP) and (named or f"/{array_files.PICKLE}".encode() in raw)


def _read_torch(raw: bytes) -> list[SteeringSpec]:
    if raw.startswith(array_files.OLD_MAGIC):
        raise ValueError(
            "it is a pickle, or a file of torch before 1.6: save tensors with a newer "
            "torch.save, or with safetensors"
        )
    return entries_of(array_files.read_torch(raw))


def _read_npz(raw: bytes) -> list[SteeringSpec]:
    return of_names({name: each.tensor() for name, each in array_files.read_npz(raw).items()})


def _write_gguf(specs: Sequence[SteeringSpec], model: str) -> bytes:
    sites = by_site(specs, "gguf")
    if wrong := next((hook for hook, _ in sites if hook != "post_block"), None):
        raise ValueError(
            f"a GGUF control vector cannot hold {wrong}: its directions are applied at post_block"
        )
    return gguf.write({layer: vector for (_, layer), vector in sorted(sites.items())}, model)


def _is_json(raw: bytes) -> bool:
    """Return whether it begins as JSON does; so does a safetensors file whose header has a length
    of such a first byte.
    """
    return raw.lstrip()[:1] in (b"{", b"[") and not is_safetensors(raw)


FORMATS: tuple[VectorFormat, ...] = (
    VectorFormat(
        name="gguf",
        suffixes=(".gguf",),
        fits=lambda raw: raw.startswith(gguf.MAGIC),
        read=gguf.read,
        write=_write_gguf,
    ),
    VectorFormat(
        name="npz",
        suffixes=(".npz",),
        fits=lambda raw: raw.startswith(_ZIP) and not _is_torch(raw),
        read=_read_npz,
        write=lambda specs, _: array_files.write_npz(by_name(specs, "npz")),
    ),
    VectorFormat(
        name="pt",
        suffixes=(".pt", ".pth"),
        fits=_is_torch,
        read=_read_torch,
        write=lambda specs, _: array_files.write_torch(by_name(specs, "pt")),
    ),
    VectorFormat(
        name="npy",
        suffixes=(".npy",),
        fits=lambda raw: raw.startswith(array_files.NPY_MAGIC),
        read=lambda raw: of_names({"vector": array_files.read_npy(raw).tensor()}),
    ),
    VectorFormat(
        name="vllm-lens",
        suffixes=(".json",),
        fits=_is_json,
        read=lens_vectors.read,
        write=lambda specs, _: lens_vectors.write(specs),
    ),
)
