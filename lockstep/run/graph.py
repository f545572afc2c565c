"""A launch as a CUDA graph: run plainly once, captured, and replayed afterwards.

The plain run compiles what is not compiled yet; its output is discarded. Capture and replay follow,
so the first answer comes from a graph like all others. A launch reads the arena, the weights and
the cache and writes the cache by the arena's numbers, so running it twice changes nothing. A launch
that moves keys would, and is not captured (`captures`). The graphs of a `Studio` share one memory
pool: a graph's outputs stay its own, its workspace is shared. Knows no model and no plan; the
runner keeps one graph per signature. `run.tape` is the CPU's counterpart.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from lockstep.plan.bucket import RECORDED_ROWS
from lockstep.plan.step import Bucket


class Studio:
    """The stream and the memory pool that a runner's launches are captured with."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.pool = torch.cuda.graph_pool_handle()


class Graph:
    """`record` a launch once, `replay` it afterwards. `output` is what the launch returned."""

    def __init__(self, studio: Studio) -> None:
        self.studio = studio
        self.output: Any = None
        self.replays = 0
        self._graph = torch.cuda.CUDAGraph()

    def record(self, launch: Callable[[], Any]) -> None:
        """Runs a launch and captures it."""
        launch()
        torch.cuda.synchronize()
        with torch.cuda.stream(self.studio.stream):
            try:  # other threads may use the GPU meanwhile
                self._graph.capture_begin(self.studio.pool, capture_error_mode="thread_local")
                self.output = launch()
            except BaseException:
                with suppress(RuntimeError):  # what stopped the capture is the error
                    self._graph.capture_end()
                raise
            self._graph.capture_end()
        self._graph.replay()

    def replay(self) -> Any:
        """Repeats everything with the arena's current numbers, into the same output."""
        self._graph.replay()
        self.replays += 1
        return self.output


def captures(bucket: Bucket, widths: Sequence[int] = (1,)) -> bool:
    """Whether a bucket's steps are worth a graph and may run twice: all requests have one of these
    `widths`, of few rows (launches for more depend on requests' lengths), and no key is moved."""
    return bucket.width in widths and bucket.width <= RECORDED_ROWS and not any(bucket.moves)
