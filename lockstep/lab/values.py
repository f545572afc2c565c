"""Judges an engine's numbers by the plain float64 model. The tolerance is derived: the plain model
runs a second time with a random error in every operation, of the size that the compute dtype makes
there (`docs/lab.md` has the derivation). Where two experts' scores are closer than their error, a
device may choose the other one, so a sequence is not judged from that row on."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lockstep.lab import plain
from lockstep.lab.options import CPU, Device

NOISE = 2.0**-34  # in place of u: small enough for proportional moves, large in float64
CACHE_UNIT = {"": 0.0, "float32": 0.0, "float16": 2**-11, "bfloat16": 2**-8, "float8_e4m3": 2**-4}
CACHE_ERROR = 0.41  # root mean square of a cache's rounding, in its unit
LAMBDA = 4.0
PRODUCTS = {"matmul", "__matmul__", "einsum"}
ONE_SIGN = {"mean", "sum", "softmax", "log_softmax"}
EXACT = {
    *("double", "tensor", "arange", "zeros_like", "ones", "scatter", "gather", "masked_fill"),
    *("clamp", "cat", "stack", "flatten", "repeat_interleave", "__getitem__", "max", "abs"),
    *("where", "__neg__"),
}

Ids = tuple[int, ...]
ClaimedNumbers = set[tuple[int, int, float]]  # row, column (a token), number (its log-probability)


class Query(NamedTuple):
    ids: Ids
    source: Ids = ()  # what the encoder read
    cache_dtype: str = ""
    pooling: str = ""  # how rows are pooled, if an embedding is claimed


class Roundings(TorchFunctionMode):
    """Adds the compute dtype's error to every operation, `size` its unit; records rankings."""

    def __init__(self, size: float, device: Device = CPU, cache_dtype: str = "") -> None:
        super().__init__()
        self.size = size
        self.sum_size = size / device.unit * CPU.unit
        self.cache_size = size / device.unit * CACHE_ERROR * CACHE_UNIT[cache_dtype]
        self.generator = torch.Generator().manual_seed(1)
        self.ranked: list[tuple[Tensor, int]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        if name == "topk":
            self.ranked.append((args[0], args[1]))
        if name in PRODUCTS:  # terms [..., K] get a sum's error, keys and values the cache's
            *equation, terms, other = args
            terms = self._off(terms, self.sum_size * (terms.shape[-1] / 6) ** 0.5)
            if name == "einsum":
                other = self._off(other, self.cache_size)
            args = (*equation, terms, other)
        out = func(*args, **(kwargs or {}))
        is_number = isinstance(out, Tensor) and out.dtype is torch.float64 and not out._is_view()
        if not is_number or name in EXACT:
            return out
        terms = args[0].shape[-1] if name in ONE_SIGN else 1
        return self._off(out, self.size + self.sum_size * (terms**0.5 - 1))

    def _off(self, x: Tensor, size: float) -> Tensor:
        if size == 0:
            return x
        return x * (1 + size * torch.randn(x.shape, generator=self.generator, dtype=torch.float64))


@dataclass(frozen=True, eq=False)
class Truth:
    """Exact numbers, their tolerance, and the first row at which a device may choose otherwise."""

    values: Tensor
    tolerance: float
    decided: int


def truth(compute: Callable[[], Tensor], device: Device = CPU, cache_dtype: str = "") -> Truth:
    """Runs `compute` exactly and with errors, and derives the tolerance from the difference."""
    with torch.no_grad():
        with Roundings(0.0) as exact:
            values = compute()
        with Roundings(NOISE, device, cache_dtype) as noisy:
            moved = compute()
    scale, decided = LAMBDA * device.unit / NOISE, 1 << 30
    for (scores, k), (others, _) in zip(exact.ranked, noisy.ranked, strict=True):
        if scores.ndim == 2 and k < scores.shape[1]:  # else all are taken, or only a sum matters
            off = float((others - scores).nan_to_num(0.0).abs().max()) * scale
            ranking = scores.sort(-1, descending=True).values
            close = ranking[:, k - 1] - ranking[:, k] <= 2 * off
            decided = min([decided, *close.nonzero().flatten().tolist()])
    moves = (moved - values)[:decided].abs()  # of judged rows: others may move far
    return Truth(values, float(moves.max()) * scale if len(moves) else 0.0, decided)


@dataclass
class Verdict:
    """The outcome of the claims. `used` is the largest error as a fraction of its tolerance."""

    faults: list[str] = field(default_factory=list)
    error: float = 0.0
    used: float = 0.0
    judged: int = 0
    undecided: int = 0


class Values:
    """Claims about a model's numbers, kept until `verdict` compares them with the plain model's."""

    def __init__(self, checkpoint: plain.Checkpoint, device: Device = CPU) -> None:
        self.checkpoint, self.device = checkpoint, device
        self.claims: dict[Query, ClaimedNumbers] = {}
        self.judged: dict[Query, ClaimedNumbers] = {}  # claims of earlier verdicts

    def claim(
        self,
        ids: Sequence[int],
        begin: int,
        logprobs: Iterable[float],
        best: Iterable[Iterable[tuple[int, float]]] = (),
        source: Sequence[int] = (),
        cache_dtype: str = "",
    ) -> None:
        """Claims log-probabilities for ids[begin:], and those in `best` for other tokens there."""
        asked = Query(tuple(ids), tuple(source), cache_dtype)
        told = self.claims.setdefault(asked, set())
        scored = zip(ids[begin:], logprobs, strict=True)
        for row, (token, value) in enumerate(scored, start=begin - 1):
            told.add((row, token, float(value)))
        for row, pairs in enumerate(best, start=begin - 1):
            told.update((row, token, float(value)) for token, value in pairs)

    def claim_embedding(self, ids: Sequence[int], pooling: str, vector: Iterable[float]) -> None:
        """Claims the embedding of `ids`, of length 1, as numbers of the last row."""
        told = self.claims.setdefault(Query(tuple(ids), pooling=pooling), set())
        told.update((len(ids) - 1, column, float(x)) for column, x in enumerate(vector))

    def verdict(self) -> Verdict:
        """Judges the new claims. A sequence that begins another is computed with it."""
        verdict = Verdict()
        try:
            for asked, told in self._merged().items():
                self._judge(verdict, asked, told)
        except KeyError as missing:
            verdict.faults.append(f"the engine reads no {missing}, which the config requires")
        return verdict

    def _merged(self) -> dict[Query, ClaimedNumbers]:
        merged: dict[Query, ClaimedNumbers] = {}
        for asked, told in sorted(self.claims.items(), key=lambda item: -len(item[0].ids)):
            seen = self.judged.setdefault(asked, set())
            if told - seen:
                longer = () if asked.pooling else merged
                same = (a for a in longer if a._replace(ids=a.ids[: len(asked.ids)]) == asked)
                merged.setdefault(next(same, asked), set()).update(told - seen)
                seen |= told
        self.claims.clear()
        return merged

    def _judge(self, verdict: Verdict, asked: Query, told: ClaimedNumbers) -> None:
        def compute() -> Tensor:
            if asked.pooling:
                pooled = plain.embedding(self.checkpoint, asked.ids, asked.pooling)
                return pooled.expand(len(asked.ids), -1)
            return plain.logits(self.checkpoint, asked.ids[:-1], asked.source).log_softmax(-1)

        found = truth(compute, self.device, asked.cache_dtype)
        decided = [entry for entry in sorted(told) if entry[0] < found.decided]
        verdict.undecided += len(told) - len(decided)
        verdict.judged += len(decided)
        if not decided:
            return
        wrong = [value - float(found.values[row, column]) for row, column, value in decided]
        errors = torch.tensor(wrong, dtype=torch.float64).abs()
        worst = float(errors.nan_to_num(nan=torch.inf).max())
        used = worst / found.tolerance
        verdict.error, verdict.used = max(verdict.error, worst), max(verdict.used, used)
        if not used <= 1:
            what = f"{len(asked.ids)} tokens {asked.pooling}".rstrip()
            verdict.faults.append(f"{what}: off by {worst:.3g}, {used:.3g} of the tolerance")
