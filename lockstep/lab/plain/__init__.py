"""Every model a second time, in plain float64 torch: what it computes, not how an engine does it.

A sequence is computed whole, by one function per idea: read it to learn what a model is. It shares
no line with the engine and imports nothing of it. `lab.values` compares the engine with it,
tests/test_plain.py compares it with transformers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.lab.plain import decoder, encoder
from lockstep.lab.plain.layers import Config, Weights

MODEL_TYPES = (*sorted(decoder.MODEL_TYPES), "bart", "bert")


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """What a model folder holds: config.json, every field stated, and the tensors by name."""

    config: Config
    tensors: Mapping[str, Tensor]


def hidden_states(checkpoint: Checkpoint, ids: Sequence[int], source: Sequence[int] = ()) -> Tensor:
    """float64 [len(ids), hidden]: the last layer's rows, after the last norm. `source` is what an
    encoder-decoder's encoder reads; `ids` are then the decoder's."""
    config, weights, rows = checkpoint.config, Weights(checkpoint.tensors), torch.tensor(ids)
    if config["model_type"] == "bert":
        return encoder.bert_hidden_states(config, weights, rows)
    if config["model_type"] == "bart":
        return encoder.bart_hidden_states(config, weights, rows, torch.tensor(source))
    return decoder.hidden_states(config, weights, rows)


def logits(checkpoint: Checkpoint, ids: Sequence[int], source: Sequence[int] = ()) -> Tensor:
    """float64 [len(ids), vocabulary]: what each row says about the token behind it."""
    hidden = hidden_states(checkpoint, ids, source)
    head = encoder.bart_logits if checkpoint.config["model_type"] == "bart" else decoder.logits
    return head(checkpoint.config, Weights(checkpoint.tensors), hidden)


def embedding(checkpoint: Checkpoint, ids: Sequence[int], pooling: str) -> Tensor:
    """float64 [hidden], of length 1: the "last", the "first" or the "mean" row."""
    hidden = hidden_states(checkpoint, ids)
    pooled = {"last": hidden[-1], "first": hidden[0], "mean": hidden.mean(0)}[pooling]
    return pooled / torch.sqrt((pooled * pooled).sum())
