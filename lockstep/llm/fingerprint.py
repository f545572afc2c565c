"""What computed an answer, in one line: equal fingerprints with order = canonical promise equal bits."""

from __future__ import annotations

import platform
from importlib.metadata import version

from lockstep import __version__
from lockstep.attention.base import Backend
from lockstep.run.certify import Certificate


def fingerprint(name: str, gemm: str, backend: Backend, certificate: Certificate, rope_context: int | None = None) -> str:
    """order, backend, GEMM class, device class, versions, and the digest of what `certify` computed.

    `rope_context`: the context that a dynamic rope was stretched for, if it was.
    """
    versions = ",".join(f"{package}={version(package)}" for package in ("torch", "numba", "llvmlite"))
    order = backend.caps.order
    where = f"device=cpu-{platform.machine()};lockstep={__version__};{versions}"
    stretched = "" if rope_context is None else f";rope_context={rope_context}"
    return f"order={order};backend={name};gemm={gemm};{where};certificate={certificate.digest}{stretched}"
