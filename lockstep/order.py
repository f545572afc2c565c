"""The canonical order of every reduction: constants of the engine, never arguments; nothing here
may depend on the batch, the chunk, the page size or the number of processors. `docs/numerics.md`
states the order in words. Each device class names its own; one that changes a bit is renamed."""

from dataclasses import dataclass
from typing import Any, NamedTuple

LANES = 16  # of a row's sum: lane j adds keys j, j+16, ...; then lanes fold 8+8, 4+4, 2+2, 1+1
SPLIT_LEN = 512  # keys per split on the CPU, whole tiles: online softmax within, one fold per split
HEAD_MULTIPLE = 8  # head sizes are stored as multiples of this, padded with columns of zeros
LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453
LARGEST_ANGLE = 2.0**29  # of a rope, at most: cos and sin are accurate to 1e-15 up to here


def stored_len(d: int) -> int:
    """Returns the columns of a head of `d` in the cache and in kernels; those past d are 0."""
    return -(-d // HEAD_MULTIPLE) * HEAD_MULTIPLE


def tile_len(d_qk: int, d_v: int) -> int:
    """Returns the keys per tile. Tiles are aligned to absolute position 0."""
    return 64 if stored_len(max(d_qk, d_v)) <= 256 else 32


@dataclass(frozen=True)
class Splits:
    """Where splits begin: `count0` splits of `len0` positions, then of `len1` each."""

    count0: int
    len0: int
    len1: int

    def begin(self, index: Any) -> Any:
        """Returns the first position of split `index`, an integer or an array of them."""
        first = min_of(index, self.count0)
        return first * self.len0 + (index - first) * self.len1

    def index(self, position: Any) -> Any:
        """Returns the split that contains `position`, an integer or an array of them."""
        first = min_of(position, self.count0 * self.len0)
        return first // self.len0 + (position - first) // self.len1


def min_of(a: Any, b: int) -> Any:
    """Returns the smaller of two integers; elementwise if `a` is an array."""
    return a - (a > b) * (a - b)


def even(length: int) -> Splits:
    return Splits(count0=0, len0=length, len1=length)


class AttentionOrder(NamedTuple):
    """Tile and splits of one head size on one device class."""

    tile: int
    splits: Splits


CPU, SM90 = "cpu", "sm_90"
ORDER_NAMES = {CPU: "cpu-1", SM90: "sm90-2"}  # in the fingerprint
# short splits first, so that a lone request decodes fast; then long ones, so that few are folded
SM90_SPLITS = Splits(count0=8, len0=512, len1=1024)


def device_class(machine: str) -> str:
    """Returns the device class of a `machine`, as its table of operations calls it."""
    return SM90 if machine.endswith(SM90) else CPU


def attention_order(device_class: str, d_qk: int, d_v: int) -> AttentionOrder:
    """Returns tile and splits: a function of the device class and the head sizes alone."""
    if device_class == CPU:
        return AttentionOrder(tile_len(d_qk, d_v), even(SPLIT_LEN))
    widest = stored_len(max(d_qk, d_v))
    if widest > 256:  # a split's result of a latent row is nearly as large as its keys: few splits
        return AttentionOrder(64, even(1024))
    if widest > 192:
        return AttentionOrder(32, SM90_SPLITS)
    return AttentionOrder(128 if widest <= 128 else 64, SM90_SPLITS)
