"""An attention backend from another package: forty lines, and the lab says what they are worth.

    python examples/backend.py [options of `lockstep lab run`]

A package names its backend in its pyproject.toml, and Lockstep finds it by that name:

    [project.entry-points."lockstep.backends"]
    example = "backend:Backend"

It computes a row at a time in float32, in torch's own order: values, no promise of bits. What its
`Caps` do not state is refused: soft caps, sinks, tree rows, latent and cross layouts.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.attention import base
from lockstep.kv.pool import Keys
from lockstep.plan.address import paged
from lockstep.plan.image import PlanArrays
from lockstep.plan.step import Bucket, Group, StepPlan
from lockstep.types import AttnSpec, GroupSpec, Layout


class Backend(base.Backend):
    caps = base.Caps(
        devices=frozenset({"cpu"}),
        activation_dtypes=frozenset({"float32"}),
        kv_dtypes=frozenset({"float32", "bfloat16"}),
        layouts=frozenset({Layout.DENSE, Layout.FRESH}),
        head_max=256,
        page_sizes=base.ANY_PAGE_SIZE,
        window=True,
        non_causal=True,
    )

    def derived_len(self, spec: GroupSpec, bucket: Bucket) -> int:
        """Returns three numbers for every row."""
        return 3 * bucket.tokens

    def lower(self, plan: StepPlan, group: Group, views: PlanArrays) -> None:
        """Host: writes each row's request and the range of positions that it sees."""
        begins, ends = base.visible(plan, group)
        views.derived.reshape(3, -1)[:] = plan.request, begins, ends

    def bind(self, spec: GroupSpec, bucket: Bucket, views: PlanArrays, variant: Hashable) -> Any:
        """Returns these numbers and the page table at their addresses on the device."""
        return views.derived.reshape(3, -1).T, base.addresses(spec, views)

    def attend(self, q: Tensor, keys: Keys, handle: Any, spec: AttnSpec) -> tuple[Tensor, Tensor]:
        """Device: softmax attention of every row over its keys."""
        rows, pages = handle
        heads = q.shape[1] // keys.k.shape[1]  # query heads per kv head
        out, lse = q.new_zeros(*q.shape[:2], keys.v.shape[2]), q.new_full(q.shape[:2], -math.inf)
        for row, (request, begin, end) in enumerate(rows.tolist()):
            slots = paged(*pages, request, torch.arange(begin, end))
            k, v = (t[slots].float().repeat_interleave(heads, 1) for t in keys)
            scores = torch.einsum("hd,nhd->hn", q[row], k) * spec.scale * spec.k_scale
            if begin < end:
                lse[row] = scores.logsumexp(1)
                out[row] = torch.einsum("hn,nhd->hd", scores.softmax(1), v) * spec.v_scale
        return out, lse


def main(options: list[str]) -> int:
    """Installs what `pip install` would leave in a temporary folder, and runs the lab with it."""
    with tempfile.TemporaryDirectory() as folder:
        installed = Path(folder, "example-1.0.dist-info")
        installed.mkdir()
        (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: example\nVersion: 1.0\n")
        entry = "[lockstep.backends]\nexample = backend:Backend\n"
        (installed / "entry_points.txt").write_text(entry)
        paths = [folder, str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        command = [sys.executable, "-m", "lockstep.cli", "lab", "run", "--backend", "example"]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        return subprocess.run([*command, *options], env=environment).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["--quick"]))
