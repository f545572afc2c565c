"""A launch as a CUDA graph: run plainly, captured, and replayed from then on.

The plain run compiles what is not compiled yet and is thrown away; capture and replay follow, so
that the first answer comes from a graph like all others. A launch reads the arena, the weights and
the cache and writes the cache by the arena's numbers, so running it twice changes nothing; one that
moves keys would, and is not captured (`captures`). The graphs of a `Studio` share one pool of
memory: outputs of one stay its own, what it works with is anybody's. Knows no model and no plan;
the runner keeps one graph per signature. `run.tape` is the same on a CPU.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lockstep.plan.step import Bucket


class Studio:
    """Where a runner's launches are captured: a stream beside its own, and a pool of memory."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.pool = torch.cuda.graph_pool_handle()


class Graph:
    """`record` a launch once, `replay` it from then on. `output` is what the launch returned."""

    def __init__(self, studio: Studio) -> None:
        self.studio = studio
        self.output: Any = None
        self.replays = 0
        self._graph = torch.cuda.CUDAGraph()

    def record(self, launch: Callable[[], Any]) -> None:
        """Carries out a launch and keeps it."""
        launch()
        torch.cuda.synchronize()
        with torch.cuda.stream(self.studio.stream):
            self._graph.capture_begin(self.studio.pool)
            try:
                self.output = launch()
            finally:
                self._graph.capture_end()
        self._graph.replay()

    def replay(self) -> Any:
        """Everything again, with the arena's numbers; the output is where it was at first."""
        self._graph.replay()
        self.replays += 1
        return self.output


def captures(bucket: Bucket, widths: Sequence[int] = (1,)) -> bool:
    """Whether steps of a bucket are worth a graph and may run twice: as many rows of each request
    as decoding, drafting and verifying have (`widths`), and no keys moved."""
    return bucket.width in widths and not any(bucket.moves)
