"""What computed an answer, in one line: equal fingerprints with order = canonical promise equal
bits. Everything that may change a bit has its place here. Called by the engine at its start."""

from importlib.metadata import version
from typing import TYPE_CHECKING

from lockstep import __version__, order
from lockstep.attention.select import BACKENDS
from lockstep.kernels.select import DEVICES

if TYPE_CHECKING:
    from lockstep.llm.engine import Parts


def fingerprint(parts: "Parts", kv_dtype: str) -> str:
    """Fields as `name=value`, separated by semicolons."""
    ops, info = parts.model.ops, parts.info
    packages = ["torch", "numba", "llvmlite", *(["triton"] if ops.device.type == "cuda" else [])]
    fields = [
        f"order={parts.backend.caps.order}",
        f"backend={BACKENDS.owned(parts.attention.name)}",
        f"gemm={ops.gemm_order.name}",  # the order of its sums
        f"device={DEVICES.owned(info.device.name)}",
        f"machine={ops.machine}",  # its class
        f"sums={order.ORDER_NAMES[order.device_class(ops.machine)]}",  # that class's order
        f"dtype={str(ops.dtype).removeprefix('torch.')}",  # of activations
        f"lockstep={__version__}",
        ",".join(f"{package}={version(package)}" for package in packages),
        f"kv={kv_dtype}",
        f"weights={info.weights}",  # the digest of the tensors
        f"certificate={parts.certificate.digest}",  # of layers' kinds and what `certify` computed
    ]
    if info.rope_context is not None:  # what a dynamic rope was stretched for
        fields.append(f"rope_context={info.rope_context}")
    return ";".join(fields)
