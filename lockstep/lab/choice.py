"""A second text of the sampler: the token that a row of logits leads to, straight from the
definition, one row at a time, in numpy and Python floats.

    bias, penalties, min_tokens, temperature, top-k, top-p, min-p, noise, argmax; ties by the lower
    id

Of `lockstep.sample` it knows only the parameters. The oracle of the engine's cells chooses tokens
with it, and the sampler's cells compare with it.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lockstep.sample.params import SamplingParams

Floats = NDArray[np.float32]
Ids = Sequence[int]
WORD = 0xFFFFFFFF


def choose(
    logits: Floats, params: SamplingParams, tokens: Ids, prompt_len: int, eos_ids: Ids = ()
) -> int:
    """Returns the next token after `tokens`, of which the first `prompt_len` are the prompt."""
    scores = logits.astype(np.float32)
    for token, bias in params.biases:
        scores[token] += np.float32(bias)
    repetition = np.float32(params.repetition_penalty)
    for token in set(tokens) if params.penalised else ():
        times = list(tokens[prompt_len:]).count(token)
        score = scores[token] / repetition if scores[token] > 0 else scores[token] * repetition
        penalty = times * params.frequency_penalty + (times > 0) * params.presence_penalty
        scores[token] = score - np.float32(penalty)
    if len(tokens) - prompt_len < params.min_tokens:
        scores[[*params.stop_token_ids, *(() if params.ignore_eos else eos_ids)]] = -np.inf
    if params.temperature == 0:
        return int(np.argmax(scores))
    scores = scores / np.float32(params.temperature)
    noisy = scores + noise(params.seed or 0, params.sample_index, len(tokens), len(scores))
    return int(np.argmax(np.where(kept(scores, params), noisy, -np.inf)))


def kept(scores: Floats, params: SamplingParams) -> NDArray[np.bool_]:
    """Returns a mask of the tokens that remain after top-k, then top-p, and min-p."""
    possible = [i for i in range(len(scores)) if scores[i] > -np.inf]
    order = sorted(possible, key=lambda i: (-scores[i], i))
    order = order[: params.top_k] if params.top_k > 0 else order
    weights = [math.exp(float(scores[i]) - float(scores[order[0]])) for i in order]
    wanted, mass, count = params.top_p * math.fsum(weights), 0.0, 0
    while count < len(order) and (params.top_p >= 1 or mass < wanted):
        mass, count = mass + weights[count], count + 1
    out = np.zeros(len(scores), np.bool_)
    out[[i for i, w in zip(order[:count], weights, strict=False) if w >= params.min_p]] = True
    return out


def noise(seed: int, index: int, position: int, vocab_size: int) -> Floats:
    """Returns the Gumbel noise of every token, as defined."""
    words = [
        w
        for group in range(-(-vocab_size // 4))
        for w in philox((group, position, index, 0), (seed & WORD, seed >> 32 & WORD))
    ]
    return np.array([gumbel(word) for word in words[:vocab_size]], np.float32)


def gumbel(word: int) -> float:
    """Returns -ln(-ln u), with u in the middle of the word's interval."""
    return -math.log(-math.log((word + 0.5) / 2**32))


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox 4x32-10."""
    (a, b, c, d), (k, m) = counter, key
    for _ in range(10):
        p, q = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = q >> 32 ^ b ^ k, q & WORD, p >> 32 ^ d ^ m, p & WORD
        k, m = k + 0x9E3779B9 & WORD, m + 0xBB67AE85 & WORD
    return a, b, c, d
