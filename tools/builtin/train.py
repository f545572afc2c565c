"""Trains the built-in model on one GPU; writes the folder that ships and a log of the losses.

Reads what `prepare.py` wrote. The model is transformers' Qwen3ForCausalLM, so the folder loads
there as well as here; the loop is plain PyTorch. Seeds are fixed and PyTorch's deterministic
algorithms are on, so a second run on the same hardware and versions gives the same weights.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import shutil
import sys
import time
from pathlib import Path

os.environ.setdefault(
    "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
)  # read when cuBLAS starts; needed for deterministic matrix products

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

# keys a sliding layer sees, the query's own included: transformers masks `key > query -
# sliding_window`
WINDOW = 128
BEGIN_ID, END_ID = 0, 1  # the order of prepare.py's special tokens
IGNORED = -100  # cross_entropy's index for targets that do not count


class Stream:
    """Documents of one kind, in an order that `shuffle` renews. Windows start anywhere, or at
    document starts."""

    def __init__(self, folder: Path, name: str, at_starts: bool) -> None:
        ids, starts = np.load(folder / f"{name}.ids.npy"), np.load(folder / f"{name}.starts.npy")
        self.texts = np.split(ids, starts[1:])
        self.at_starts = at_starts

    def shuffle(self, rng: np.random.Generator) -> None:
        """Gives every document new neighbours, so that what follows an END cannot be memorized."""
        texts = [self.texts[index] for index in rng.permutation(len(self.texts))]
        self.ids = np.concatenate(texts).astype(np.int64)
        self.starts = np.cumsum([0, *(len(text) for text in texts[:-1])])

    def draw(self, rng: np.random.Generator, rows: int, length: int) -> np.ndarray:
        """Returns ids [rows, length]."""
        last = len(self.ids) - length
        starts = (
            rng.choice(self.starts[self.starts <= last], rows)
            if self.at_starts
            else rng.integers(last + 1, size=rows)
        )
        return self.ids[starts[:, None] + np.arange(length)]


def config(corpus: dict, layers: int) -> Qwen3Config:
    """Eight query heads of 64 over a hidden size of 256: the projections are not square, as in the
    larger models of this family."""
    return Qwen3Config(
        vocab_size=corpus["vocab"],
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=corpus["context"],
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        use_sliding_window=True,
        sliding_window=WINDOW,
        max_window_layers=0,
        layer_types=["sliding_attention", "full_attention"] * (layers // 2),
        bos_token_id=BEGIN_ID,
        eos_token_id=END_ID,
        pad_token_id=END_ID,
    )


def add_dropout(model: nn.Module, rate: float) -> None:
    """Adds dropout to what each block adds to the residual stream. The corpus is small, and Qwen3
    itself has none there."""
    for layer in model.model.layers:
        for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
            projection.register_forward_hook(
                lambda module, _, out: F.dropout(out, rate, module.training)
            )


def masks(length: int, device: torch.device) -> dict[str, Tensor | None]:
    """Returns what each kind of layer may see; None is plain causal, which has a faster kernel than
    any explicit mask."""
    position = torch.arange(length, device=device)
    distance = position[:, None] - position[None, :]
    return {
        "full_attention": None,
        "sliding_attention": ((distance >= 0) & (distance < WINDOW))[None, None],
    }


def loss_of(
    model: nn.Module, ids: Tensor, targets: Tensor, seen: dict[str, Tensor | None]
) -> Tensor:
    """Returns the summed negative log-likelihood, in nats, of the targets [B, T] that count."""
    with torch.autocast(ids.device.type, torch.bfloat16):
        logits = model(input_ids=ids, attention_mask=seen, use_cache=False).logits
    return F.cross_entropy(
        logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )


@torch.no_grad()
def held_out_loss(model: nn.Module, ids: np.ndarray, length: int) -> float:
    """Returns mean nats per token over consecutive windows, each starting with an empty context."""
    was_training, device = model.training, model.device
    model.eval()
    rows = math.ceil((len(ids) - 1) / length)
    padded = np.full((2, rows * length), IGNORED, np.int64)
    padded[0], padded[0, : len(ids) - 1], padded[1, : len(ids) - 1] = END_ID, ids[:-1], ids[1:]
    inputs, targets = torch.from_numpy(padded.reshape(2, rows, length)).to(device)
    seen = masks(length, device)
    total = sum(
        loss_of(model, x, y, seen).item() for x, y in zip(inputs.split(8), targets.split(8))
    )
    model.train(was_training)
    return total / (len(ids) - 1)


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Linear warm-up, then a cosine to zero: the last steps average the noise away, so no
    checkpoint has to be picked."""
    if step < args.warmup:
        return args.lr * (step + 1) / args.warmup
    return (
        args.lr
        * 0.5
        * (1 + math.cos(math.pi * (step - args.warmup) / max(1, args.steps - args.warmup)))
    )


def optimizer_for(model: nn.Module, args: argparse.Namespace) -> torch.optim.AdamW:
    """Applies weight decay to matrices only; a norm's scale has no reason to be small."""
    groups = [
        {
            "params": [p for p in model.parameters() if p.ndim >= 2],
            "weight_decay": args.weight_decay,
        },
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)


def train(model: nn.Module, args: argparse.Namespace, length: int) -> list[dict[str, float]]:
    """Runs all steps; returns the curve: one point per `args.every` steps, its train loss the mean
    over them."""
    rng, device = np.random.default_rng(args.seed), model.device
    streams = {
        name: Stream(args.data, name, at_starts=name == "fragments")
        for name in ("library", "tests", "fragments")
    }
    held = {name: np.load(args.data / f"{name}.ids.npy") for name in ("held_library", "held_tests")}
    step_loss = loss_of if args.eager else torch.compile(loss_of)
    optimizer, seen, curve, recent = optimizer_for(model, args), masks(length, device), [], []
    model.train()
    began = time.perf_counter()
    for step in range(args.steps):
        if step % args.every == 0:
            for stream in streams.values():
                stream.shuffle(rng)
        batch = np.concatenate(
            [
                stream.draw(rng, rows, length + 1)
                for stream, rows in zip(streams.values(), args.rows)
                if rows
            ]
        )
        ids = torch.from_numpy(batch).to(device)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args)
        loss = step_loss(model, ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), seen) / (
            len(ids) * length
        )
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        recent.append(loss.detach())
        if (step + 1) % args.every == 0 or step + 1 == args.steps:
            point = {
                "step": step + 1,
                "tokens": (step + 1) * len(ids) * length,
                "train": torch.stack(recent).mean().item(),
            }
            point |= {name: held_out_loss(model, row, length) for name, row in held.items()}
            point["seconds"] = time.perf_counter() - began
            curve.append({key: round(value, 4) for key, value in point.items()})
            recent.clear()
            print(curve[-1], flush=True)
    return curve


def write_folder(model: Qwen3ForCausalLM, args: argparse.Namespace) -> None:
    """Writes the model in bfloat16 with its tokenizer. Two settings are also written under their
    older names, for readers that know only those. Every field is stated, so that Lockstep can read
    the file without transformers' defaults."""
    args.out.mkdir(parents=True, exist_ok=True)
    model = model.to(torch.bfloat16)
    model.generation_config = GenerationConfig(
        bos_token_id=BEGIN_ID, eos_token_id=END_ID, pad_token_id=END_ID
    )
    model.save_pretrained(args.out)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(args.data / name, args.out / name)
    path = args.out / "config.json"
    written = json.loads(path.read_text())
    written |= {"rope_theta": written["rope_parameters"]["rope_theta"], "torch_dtype": "bfloat16"}
    written |= {"is_encoder_decoder": False, "lockstep_states_every_field": True}
    path.write_text(json.dumps(written, indent=2, sort_keys=True) + "\n")


def final_losses(
    args: argparse.Namespace, corpus: dict, device: str
) -> dict[str, dict[str, float]]:
    """Returns held-out losses of the folder as written, read back: what a user gets, rounded
    weights included."""
    model = Qwen3ForCausalLM.from_pretrained(args.out, dtype=torch.float32).to(device)
    losses = {}
    for name in ("held_library", "held_tests"):
        ids = np.load(args.data / f"{name}.ids.npy")
        nats = held_out_loss(model, ids, corpus["context"])
        bits = nats * (len(ids) - 1) / math.log(2) / corpus["streams"][name]["bytes"]
        losses[name] = {"nats_per_token": round(nats, 4), "bits_per_byte": round(bits, 4)}
    return losses


def arguments() -> argparse.Namespace:
    """Parses arguments. The defaults are the recipe of the shipped model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("build/builtin"))
    parser.add_argument("--out", type=Path, default=Path("lockstep/builtin"))
    parser.add_argument("--log", type=Path, default=Path("bench/results/builtin-training.json"))
    parser.add_argument("--steps", type=int, default=1600)
    parser.add_argument("--warmup", type=int, default=100)
    parser.add_argument("--every", type=int, default=100, help="steps between held-out losses")
    parser.add_argument(
        "--rows",
        type=int,
        nargs=3,
        default=[16, 8, 8],
        help="sequences per step from library, tests and fragments",
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument(
        "--weight-decay",
        type=float,
        default=1.0,
        help="ten times the usual, as many passes over a small corpus need",
    )
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    began = time.perf_counter()
    torch.manual_seed(args.seed)
    torch.use_deterministic_algorithms(True)
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    corpus = json.loads((args.data / "corpus.json").read_text())
    model = Qwen3ForCausalLM(config(corpus, args.layers)).to(device)
    add_dropout(model, args.dropout)
    curve = train(model, args, corpus["context"])
    write_folder(model, args)
    log = {
        "command": " ".join(["python", *sys.argv]),
        "hardware": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "versions": {
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "settings": {
            key: value for key, value in vars(args).items() if not isinstance(value, Path)
        },
        "parameters": sum(p.numel() for p in model.parameters()),
        "weights_sha256": hashlib.sha256((args.out / "model.safetensors").read_bytes()).hexdigest(),
        "corpus": corpus,
        "final": final_losses(args, corpus, device),
        "curve": curve,
        "wall_seconds": round(time.perf_counter() - began, 1),
    }
    args.log.parent.mkdir(parents=True, exist_ok=True)
    args.log.write_text(json.dumps(log, indent=1) + "\n")
    print({key: log[key] for key in ("parameters", "weights_sha256", "final", "wall_seconds")})


if __name__ == "__main__":
    main()
