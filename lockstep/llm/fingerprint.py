"""What computed an answer, in one line: equal fingerprints with order = canonical promise equal
bits. Everything that may change a bit has its place here. Called by the engine at its start."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING

from lockstep import __version__, order
from lockstep.attention.select import BACKENDS
from lockstep.kernels.select import DEVICES

if TYPE_CHECKING:
    from lockstep.llm.engine import Parts


def fingerprint(parts: Parts, kv_dtype: str) -> str:
    """Fields as `name=value`, separated by semicolons.

    order, backend and device (with distribution and version where they are somebody else's), gemm
    (the order of its sums), dtype of activations, class of machine, sums (the name of that class's
    order in `order.py`) and versions, kv (the cache's dtype), weights (the digest of the tensors),
    certificate (the digest of the layers' kinds and of what `certify` computed), and rope_context
    where a dynamic rope was stretched.
    """
    ops, info = parts.model.ops, parts.info
    packages = ["torch", "numba", "llvmlite"]
    if ops.device.type == "cuda":
        packages.append("triton")
    versions = [f"{package}={version(package)}" for package in packages]
    fields = [
        f"order={parts.backend.caps.order}",
        f"backend={owned(parts.attention.name, BACKENDS.origin(parts.attention.name))}",
        f"gemm={ops.gemm_order.name}",
        f"device={owned(info.device.name, DEVICES.origin(info.device.name))}",
        f"machine={ops.machine}",
        f"sums={order.ORDER_NAMES[order.device_class(ops.machine)]}",
        f"dtype={str(ops.dtype).removeprefix('torch.')}",
        f"lockstep={__version__}",
        ",".join(versions),
        f"kv={kv_dtype}",
        f"weights={info.weights}",
        f"certificate={parts.certificate.digest}",
    ]
    if info.rope_context is not None:
        fields.append(f"rope_context={info.rope_context}")
    return ";".join(fields)


def owned(name: str, origin: str) -> str:
    """A name, with the distribution of whoever else it belongs to."""
    return f"{name}({origin})" if origin else name
