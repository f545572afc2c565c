"""How far a model's log-probabilities are from transformers in a wider dtype, and how far those of
transformers are in ours: root mean squares over the tokens of some prompts.

The weights are those that `--load-format dummy` draws, rounded to the dtype of activations;
transformers gets them as a state dict. `lab bits` calls it, when the engine has given back its
memory.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.lab.options import Device
from lockstep.lab.tiny import shapes
from lockstep.models.loader import STATED, drawn

MOST_RATIO = 1.5  # of our distance to that of transformers, in the same dtype
WIDER = {torch.float32: torch.float64, torch.bfloat16: torch.float32, torch.float16: torch.float32}

Config = Mapping[str, Any]
Prompts = Sequence[list[int]]
Scores = list[NDArray[np.float32]]  # of every prompt: its tokens but the first


def ratio(found: Mapping[str, Any]) -> float:
    """Our distance by that of transformers."""
    return float(found["ours"] / found["theirs"]) if found["theirs"] else float("inf")


def measure(config: Config, device: Device, prompts: Prompts, ours: Scores) -> dict[str, Any]:
    """Both distances over so many tokens, of the same weights on the same device. In float32
    nothing is judged: transformers casts to it inside wider models."""
    weights = draw(config, device)
    exact = scores(config, weights, WIDER[device.compute], device, prompts)
    if device.place.type == "cuda":
        torch.cuda.empty_cache()
    theirs = scores(config, weights, device.compute, device, prompts)
    judged, tokens = device.compute is not torch.float32, sum(map(len, ours))
    return {
        "ours": rms(ours, exact),
        "theirs": rms(theirs, exact),
        "tokens": tokens,
        "judged": judged,
    }


def rms(a: Sequence[NDArray[Any]], b: Sequence[NDArray[Any]]) -> float:
    off = np.concatenate([x.astype(np.float64) - y for x, y in zip(a, b, strict=True)])
    return float(np.sqrt((off * off).mean()))


def draw(config: Config, device: Device) -> dict[str, Tensor]:
    """What a checkpoint of the model would hold: drawn on the device, kept in the host's memory."""
    asked, dtype = shapes(config).items(), device.compute
    return {n: drawn(device.place, n, shape).to(dtype).cpu() for n, shape in asked}


def scores(
    config: Config, weights: dict[str, Tensor], dtype: torch.dtype, device: Device, prompts: Prompts
) -> list[NDArray[np.float64]]:
    """Log-probabilities by transformers in a dtype."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    stated = {k: v for k, v in config.items() if k not in ("model_type", STATED)}
    stated["use_sliding_window"] = config["sliding_window"] is not None
    stated["head_dim"] = config.get("qk_rope_head_dim", config["head_dim"])  # of what it rotates
    theirs = AutoConfig.for_model(config["model_type"], **stated)
    placed = {} if device.place.type == "cpu" else {"device_map": {"": device.place}}
    family: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(theirs)]
    model = family.from_pretrained(
        None,
        config=theirs,
        state_dict=dict(weights),
        dtype=dtype,
        attn_implementation="eager",
        experts_implementation="eager",
        **placed,
    ).eval()
    out = []
    with torch.no_grad():
        for ids in prompts:
            given = torch.tensor([ids], device=device.place)
            logits = model(given, use_cache=False).logits[0, :-1]
            each = logits.double().log_softmax(1).gather(1, given[0, 1:, None])[:, 0]
            out.append(each.cpu().numpy())
    return out
