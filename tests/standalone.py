"""A step in memory of its own, without an arena and without a runner."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from lockstep.attention.base import Backend
from lockstep.kv.pool import Pool
from lockstep.nn.attention import GroupLayer
from lockstep.plan.step import Ints, StepPlan
from lockstep.run.step import Step, bind, layout_of, lower

CPU = torch.device("cpu")


def standalone(
    plan: StepPlan,
    backend: Backend,
    pools: Sequence[Pool | None],
    layer_map: Sequence[GroupLayer] = (),
    ids: Sequence[int] | Ints = (),
    device: torch.device = CPU,
) -> Step:
    """Lowers and binds a plan on a device. Returns the step."""
    specs = tuple(group.spec for group in plan.groups)
    layout = layout_of(plan.bucket, specs, backend)
    image = np.zeros(layout.length, np.int32)
    variants = lower(plan, ids, backend, layout, image)
    views = layout.views(torch.from_numpy(image).to(device))
    return bind(layout, views, variants, backend, pools, layer_map)
