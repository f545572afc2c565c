"""Checks docs/builtin-model.md's claims about the shipped folder: limits, completions, loss curve.

Reads the folder through transformers on the CPU, as any user can, and the training log. Prints
completions and draws the curve. Exits at the first check that fails.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import re
import sys
from pathlib import Path

import torch
from prepare import END, PATTERN
from tokenizers import pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils import logging

PARAMETER_LIMIT, FOLDER_LIMIT_BYTES = 8_000_000, 16_000_000
WINDOW = 128
PROMPTS = (
    "def binary_search(items, target):",
    "def read_lines(path):\n",
    "class Queue:\n    def __init__(self):\n",
)
TEMPERATURES = (0.0, 0.8)
COLOURS = {"train": "#888888", "held_library": "#0b6bcb", "held_tests": "#c2571a"}
LABELS = {
    "train": "training batches (dropout on)",
    "held_library": "held-out library files",
    "held_tests": "held-out test files",
}


def keys_seen(config: Qwen3Config, cached: bool, length: int = 300) -> int:
    """Counts the positions whose token changes the last logits of one sliding layer: the window,
    measured and not looked up."""
    settings = config.to_dict() | {
        "num_hidden_layers": 1,
        "layer_types": ["sliding_attention"],
        "dtype": "float32",
    }
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config.from_dict(settings)).eval()
    changed = torch.randint(2, config.vocab_size, (length,)).repeat(length + 1, 1)
    changed[torch.arange(length), torch.arange(length)] ^= (
        1  # row i differs at position i, the last row at none
    )
    with torch.no_grad():
        if cached:
            past = model(changed[:, :-1], use_cache=True, logits_to_keep=1).past_key_values
            logits = model(changed[:, -1:], past_key_values=past).logits[:, -1]
        else:
            logits = model(changed, logits_to_keep=1).logits[:, -1]
    return int((logits[:-1] != logits[-1]).any(dim=1).sum())


def check_tokenizer(tokenizer: PreTrainedTokenizerFast) -> None:
    """Checks that every byte has a token, any text round-trips, and Python's `re` splits it as the
    tokenizer does."""
    vocabulary, split = tokenizer.get_vocab(), tokenizer.backend_tokenizer.pre_tokenizer
    assert set(pre_tokenizers.ByteLevel.alphabet()) <= set(vocabulary), "a byte has no token"
    rng = random.Random(0)
    planes = (range(0x80), range(0x100), range(0xD800), range(0xE000, 0x110000))
    texts = [
        "".join(chr(rng.choice(rng.choice(planes))) for _ in range(rng.randrange(60)))
        for _ in range(2000)
    ]
    texts += [
        "\r\n\t x  = 10\n\n\n    é日本語🙂\x00",
        "def f(a_b, *, c=1e-9) -> 'x':\n        return a_b[::-1]\n",
    ]
    for text in texts:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text, text
        pieces = re.findall(PATTERN, text)
        assert "".join(pieces) == text, text
        spans = [span for _, span in split.pre_tokenize_str(text)]
        assert [text[start:end] for start, end in spans] == pieces, text


def check(folder: Path) -> None:
    """Checks the limits of the issue that requested this model."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    parameters, size = (
        sum(p.numel() for p in model.parameters()),
        sum(path.stat().st_size for path in folder.iterdir() if path.is_file()),
    )
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert all(p.isfinite().all() for p in model.parameters())
    assert parameters <= PARAMETER_LIMIT and size <= FOLDER_LIMIT_BYTES, (parameters, size)
    seen = {cached: keys_seen(model.config, cached) for cached in (False, True)}
    assert set(seen.values()) == {WINDOW}, seen
    check_tokenizer(AutoTokenizer.from_pretrained(folder))
    print(
        f"{parameters} parameters, {size} bytes, all finite; a sliding layer sees {WINDOW} keys, "
        "with and without a cache"
    )


def complete(folder: Path, prompt: str, temperature: float, count: int = 1) -> list[str]:
    """Returns the prompt with the model's completion, `count` times in one batch; weights widened
    to float32, seed 0, at most 160 new tokens."""
    tokenizer, model = (
        AutoTokenizer.from_pretrained(folder),
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
    )
    torch.manual_seed(0)
    how = (
        {"do_sample": True, "temperature": temperature, "top_k": 0}
        if temperature
        else {"do_sample": False}
    )
    ids = model.generate(
        **tokenizer(prompt, return_tensors="pt"),
        max_new_tokens=160,
        num_return_sequences=count,
        **how,
    )
    return [tokenizer.decode(row) for row in ids]


def parses(text: str) -> bool:
    """Returns whether a finished completion is Python."""
    try:
        ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    return True


def polyline(curve: list[dict[str, float]], name: str, scale: tuple[float, float]) -> str:
    """Returns one loss over the steps as SVG; the plot's origin is (60, 300), upwards is larger."""
    points = " ".join(
        f"{60 + point['step'] * scale[0]:.1f},{300 - point[name] * scale[1]:.1f}" for point in curve
    )
    return f'<polyline points="{points}" fill="none" stroke="{COLOURS[name]}" stroke-width="2"/>'


def draw(log: dict, path: Path) -> None:
    """Writes the curve as plain SVG text: no plotting library is needed to view or redraw it."""
    curve, top = log["curve"], 6
    steps = curve[-1]["step"]
    scale = (560 / steps, 270 / top)
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 350" font-family="sans-serif" '
        'font-size="12">'
    ]
    parts.append('<rect width="640" height="350" fill="white"/>')
    for nats in range(top + 1):
        y = 300 - nats * scale[1]
        parts.append(f'<line x1="60" x2="620" y1="{y:.1f}" y2="{y:.1f}" stroke="#dddddd"/>')
        parts.append(f'<text x="50" y="{y + 4:.1f}" text-anchor="end">{nats}</text>')
    for step in range(0, steps + 1, max(1, steps // 4)):
        parts.append(
            f'<text x="{60 + step * scale[0]:.1f}" y="318" text-anchor="middle">{step}</text>'
        )
    for row, name in enumerate(COLOURS):
        parts.append(polyline(curve, name, scale))
        parts.append(
            f'<text x="330" y="{60 + 18 * row}" fill="{COLOURS[name]}">{LABELS[name]}: '
            f"{curve[-1][name]:.2f} at the end</text>"
        )
    parts.append('<text x="340" y="340" text-anchor="middle">step (65 536 tokens each)</text>')
    parts.append(
        '<text x="16" y="165" text-anchor="middle" transform="rotate(-90 16 165)">loss, nats per '
        "token</text></svg>"
    )
    path.write_text("\n".join(parts) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("lockstep/builtin"))
    parser.add_argument("--log", type=Path, default=Path("bench/results/builtin-training.json"))
    parser.add_argument("--svg", type=Path, default=Path("docs/builtin-loss.svg"))
    parser.add_argument(
        "--count", type=int, default=64, help="completions of the first prompt to parse"
    )
    args = parser.parse_args()
    logging.disable_progress_bar()
    draw(json.loads(args.log.read_text()), args.svg)
    check(args.folder)
    for prompt in PROMPTS:
        for temperature in TEMPERATURES:
            sys.stdout.write(
                f"\n--- temperature {temperature}, prompt "
                f"{prompt!r}\n{complete(args.folder, prompt, temperature)[0]}\n"
            )
    texts = complete(args.folder, PROMPTS[0], TEMPERATURES[-1], args.count)
    ended = [text.split(END)[0] for text in texts if END in text]
    good = sum(map(parses, ended))
    print(
        f"\nof {len(texts)} completions of the first prompt at {TEMPERATURES[-1]}, {len(ended)} "
        f"end; {good} of these parse"
    )


if __name__ == "__main__":
    main()
