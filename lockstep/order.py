"""The canonical order of every reduction: constants of the engine, never arguments; nothing here
may depend on the batch, the chunk, the page size or the number of processors. `docs/numerics.md`
states the order in words. A class of devices has a name for its own; a changed bit is a new name.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

LANES = 16  # of a row's sum: j adds keys j, j+16, ... ascending; then they fold 8+8, 4+4, 2+2, 1+1
SPLIT_LEN = 512  # keys of a CPU's split, whole tiles: online softmax inside, one fold between
HEAD_MULTIPLE = 8  # head sizes are stored as multiples of this, with zeros behind their own columns
LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453
LARGEST_ANGLE = 2.0**29  # a rope's angles stay below: cos and sin are exact to 1e-15 up to here


def stored_len(d: int) -> int:
    """Columns of a head of `d` in the cache and in kernels; those behind d are 0, in any sum."""
    return -(-d // HEAD_MULTIPLE) * HEAD_MULTIPLE


def tile_len(d_qk: int, d_v: int) -> int:
    """Keys per tile. Tiles are aligned to absolute position 0."""
    return 64 if stored_len(max(d_qk, d_v)) <= 256 else 32


@dataclass(frozen=True)
class Splits:
    """Where splits begin: `count0` splits of `len0` positions, then of `len1` each."""

    count0: int
    len0: int
    len1: int

    def begin(self, index: Any) -> Any:
        """First position of split `index`: an integer or an array of them."""
        first = min_of(index, self.count0)
        return first * self.len0 + (index - first) * self.len1

    def index(self, position: Any) -> Any:
        """The split that `position` lies in: an integer or an array of them."""
        first = min_of(position, self.count0 * self.len0)
        return first // self.len0 + (position - first) // self.len1


def min_of(a: Any, b: int) -> Any:
    """The smaller of two integers, or of every integer of an array and one."""
    return a - (a > b) * (a - b)


def even(length: int) -> Splits:
    return Splits(count0=0, len0=length, len1=length)


class AttentionOrder(NamedTuple):
    """Tile and splits of one head size on one device class."""

    tile: int
    splits: Splits


CPU, SM90 = "cpu", "sm_90"
ORDER_NAMES = {CPU: "cpu-1", SM90: "sm90-2"}  # in the fingerprint
# a lone request decodes fast, a long prompt folds little
SM90_SPLITS = Splits(count0=8, len0=512, len1=1024)


def device_class(machine: str) -> str:
    """The class of a device, by what its table of operations calls the machine."""
    return SM90 if machine.endswith(SM90) else CPU


def attention_order(device_class: str, d_qk: int, d_v: int) -> AttentionOrder:
    """Tile and splits: a function of the device class and the head sizes, and of nothing else."""
    if device_class == CPU:
        return AttentionOrder(tile_len(d_qk, d_v), even(SPLIT_LEN))
    widest = stored_len(max(d_qk, d_v))
    if widest > 256:  # a latent row's parts are nearly as large as its keys: fewer of them
        return AttentionOrder(64, even(1024))
    if widest > 192:
        return AttentionOrder(32, SM90_SPLITS)
    return AttentionOrder(128 if widest <= 128 else 64, SM90_SPLITS)
