"""Gumbel noise by counter: a function of (seed, index, position of the sampled token, token id),
and of nothing else. The argmax of score + noise is a sample of softmax(score).

    words = Philox 4x32-10, counter (token id // 4, position, index, 0), key (seed mod, div 2^32)
    word  = words[token id mod 4]                    32 bits
    u     = (word + 1/2) / 2^32                      in [2^-33, 1 - 2^-33], exact in float64
    noise = float32(-ln(-ln u))                      in [-3.13, 22.88], ln written out in float64
"""

from typing import Any

import torch
from torch import Tensor

from lockstep.sample.formulas import WORD, gumbel, philox


def counter(seed: Any, index: Any, position: Any) -> tuple[Any, Any, Any, Any]:
    """What identifies a row's noise, for kernels: position, index, two words of the seed."""
    return position, index, seed & WORD, (seed >> 32) & WORD


def noise(counters: Tensor, vocab_size: int) -> Tensor:
    """float32 [S, vocab_size], on the device of `counters`, int64 [S, 4]."""
    groups = torch.arange(-(-vocab_size // 4), device=counters.device)[None]
    return _noises(counters, groups).flatten(1)[:, :vocab_size]


def noise_of(counters: Tensor, token_ids: Tensor) -> Tensor:
    """float32 [S, n]: that of some tokens alone, int64 [S, n]."""
    return _noises(counters, token_ids // 4).gather(-1, (token_ids % 4)[..., None])[..., 0]


def _noises(counters: Tensor, groups: Tensor) -> Tensor:
    """[..., 4]: that of the four tokens of every group."""
    position, index, low, high = (column[:, None] for column in counters.unbind(1))
    words: Any = philox(groups, position, index, 0, low, high)
    result: Tensor = gumbel(torch.stack(words, -1)).to(torch.float32)
    return result
