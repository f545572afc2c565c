"""What computed an answer, in one line: equal fingerprints with order = canonical promise equal
bits.

Everything that may change a bit has its place here: the weights, what they run on, the cache's
dtype, and choices that depend on the context. Called by the engine at its start.
"""

from __future__ import annotations

import platform
from importlib.metadata import version

from lockstep import __version__
from lockstep.attention import select
from lockstep.attention.base import Backend
from lockstep.models.weights import Info
from lockstep.run.certify import Certificate


def fingerprint(
    name: str, backend: Backend, info: Info, kv_dtype: str, certificate: Certificate
) -> str:
    """Fields as `name=value`, separated by semicolons. `name` is the backend's.

    order, backend (with distribution and version where it is somebody else's), gemm (the GEMM
    class), device class and versions, kv (the cache's dtype), weights (the digest of the tensors),
    certificate (the digest of the layers' kinds and of what `certify` computed), and rope_context
    where a dynamic rope was stretched.
    """
    origin = select.origin(name)
    versions = [f"{package}={version(package)}" for package in ("torch", "numba", "llvmlite")]
    fields = [
        f"order={backend.caps.order}",
        f"backend={name}" if not origin else f"backend={name}({origin})",
        f"gemm={info.gemm.partition(':')[0]}",
        f"device=cpu-{platform.machine()}",
        f"lockstep={__version__}",
        ",".join(versions),
        f"kv={kv_dtype}",
        f"weights={info.weights}",
        f"certificate={certificate.digest}",
    ]
    if info.rope_context is not None:
        fields.append(f"rope_context={info.rope_context}")
    return ";".join(fields)
