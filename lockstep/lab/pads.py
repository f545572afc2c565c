"""What the rows of a pad request are: the same request computed alone, in a cache of its own.

Padding is data: a pad request is token 0 at positions 0, 1, ... and reads what this step wrote for
it. A finite result is no proof of that: the rows must have the bits of a step that holds this
request and nothing else. Called by the harness for every padded step.
"""

from __future__ import annotations

from torch import Tensor

from lockstep.attention.base import Backend
from lockstep.kv.pages import PagePool
from lockstep.kv.pool import Pool
from lockstep.kv.tables import Table
from lockstep.lab.guard import same
from lockstep.lab.options import CPU, Device
from lockstep.lab.oracle import Rows
from lockstep.plan import build as plan_build
from lockstep.plan.step import StepPlan
from lockstep.run.step import standalone
from lockstep.types import GroupSpec, Layout

Result = tuple[Tensor, Tensor]  # out [n, heads, d_v] and lse [n, heads]


class PadRows:
    """Pad requests of one model, each length computed once."""

    def __init__(
        self,
        specs: tuple[GroupSpec, ...],
        rows: list[list[Rows]],
        backend: Backend,
        device: Device = CPU,
    ) -> None:
        self.specs, self.rows, self.backend, self.device = specs, rows, backend, device
        self._known: dict[tuple[int, int, int], Result] = {}

    def differing(self, g: int, layer: int, plan: StepPlan, result: Result) -> list[int]:
        """The pad requests of `plan`, by number, whose rows are not those of the request alone.

        A decoder's cross group is not asked: its pads see one key that an earlier step left in page
        0.
        """
        if self.specs[g].layout is Layout.CROSS:
            return []
        ends = plan.q_indptr.tolist()
        found = []
        for i in range(plan.real.requests, plan.bucket.requests):
            if ends[i] == ends[i + 1]:
                continue
            want = self.alone(g, layer, ends[i + 1] - ends[i])
            mine = (tensor[ends[i] : ends[i + 1]] for tensor in result)
            if not all(map(same, mine, want)):
                found.append(i)
        return found

    def alone(self, g: int, layer: int, length: int) -> Result:
        """out and lse of a pad request of `length` rows in a step of its own."""
        key = (g, layer, length)
        if key not in self._known:
            self._known[key] = self._computed(g, layer, length)
        return self._known[key]

    def _computed(self, g: int, layer: int, length: int) -> Result:
        spec, mine = self.specs[g], self.rows[g][layer]
        num_pages = -(-length // spec.page_size) + 1
        cached = spec.layout is not Layout.FRESH
        table = Table((spec,), [PagePool(num_pages) if cached else None])
        table.reserve(length)
        work = plan_build.Work(cached_len=0, new_len=length, pages=(table.pages(0),))
        plan = plan_build.build([spec], [work])
        pool = Pool(spec, num_pages, self.device.ops) if cached else None
        step = standalone(plan, self.backend, [pool], device=self.device.place)
        first = (t[:1].to(self.device.place) for t in (mine.q, mine.k, mine.v))
        q, k, v = (t.repeat(length, 1, 1) for t in first)
        keys = step.stores[0].keys(layer, k, v)
        return self.backend.attend(q, keys, step.handles[0], spec.layers[layer])
