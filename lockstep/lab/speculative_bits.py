"""`lockstep lab bits --speculative`: the built-in model with every draft at every temperature,
against itself without any. How many tokens, how many bits of log-probabilities differ?

Prompts are pieces of Python's own library. All three ways to sample stand in every batch. A column
counts if its draft was right sometimes and wrong sometimes. The draft model is the target with
noise on its weights, drawn by a seed. Knows engines and files; the lab's commands call it.
"""

from __future__ import annotations

import random
import shutil
import sysconfig
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from lockstep.config import EngineConfig
from lockstep.lab import document
from lockstep.llm.api import LLM
from lockstep.llm.engine import BUILTIN, Engine, Parts, load
from lockstep.llm.output import Output, Speculated
from lockstep.progress import Progress
from lockstep.sample.params import SamplingParams
from lockstep.types import RuleError

NOISE, SEED = 0.15, 11  # of the draft model's weights
LEAST_SHARE = 0.05  # of drafted tokens, accepted and rejected
GREEDY = SamplingParams(max_tokens=64, temperature=0, logprobs=True, ignore_eos=True)
WISHES = {
    "T 0": GREEDY,
    "T 0.7": replace(GREEDY, temperature=0.7),
    "T 1.0, top-p 0.9, penalties": replace(
        GREEDY,
        temperature=1.0,
        top_p=0.9,
        presence_penalty=0.2,
        frequency_penalty=0.1,
        repetition_penalty=1.05,
    ),
}
EAGLE3 = {"speculative_algorithm": "eagle3", "speculative_num_steps": 3}
DRAFTS: dict[str, dict[str, Any]] = {
    "ngram": {"speculative_algorithm": "ngram", "speculative_num_steps": 4},
    "draft": {"speculative_algorithm": "draft", "speculative_num_steps": 3},
    "eagle3 chain": EAGLE3,
    "eagle3 tree": {**EAGLE3, "speculative_eagle_topk": 4, "speculative_num_draft_tokens": 8},
}


def command(args: Namespace) -> int:
    """1 if anything differs, or a draft was never right or never wrong."""
    begin, chosen = time.perf_counter(), picked(args.speculative)
    parts = load(EngineConfig())
    requests = wanted(prompts(args.prompts))
    columns: list[dict[str, Any]] = []
    with Progress(1 + len(chosen), "lab bits") as bar, TemporaryDirectory() as folder:
        noisy_folder(Path(folder))
        want = answers(parts, requests, {})
        bar.step("plain", False)
        for name in chosen:
            got = answers(parts, requests, options_of(name, folder))
            found = [column(name, wish, requests, got, want) for wish in WISHES]
            columns += found
            bar.step(name, any(faults(each) for each in found))
    wrong = [fault for each in columns for fault in faults(each)]
    doc = {
        **document.head(),
        "prompts": args.prompts,
        "noise": NOISE,
        "noise_seed": SEED,
        "columns": columns,
        "faults": wrong,
        "seconds": round(time.perf_counter() - begin, 1),
    }
    document.publish(args, doc, [*table(columns), *wrong])
    return int(bool(wrong))


def options_of(draft: str, folder: str) -> dict[str, Any]:
    """Of an engine with this draft; the draft model lies in a folder."""
    own = {"speculative_draft_model": folder} if draft == "draft" else {}
    return {**DRAFTS[draft], **own}


def picked(names: str) -> list[str]:
    """`all`, or names with commas."""
    chosen = list(DRAFTS) if names == "all" else names.split(",")
    for name in chosen:
        if name not in DRAFTS:
            rule = f"--speculative is all, or some of {', '.join(DRAFTS)}"
            raise RuleError(rule, repr(name), "Name them with commas")
    return chosen


def prompts(count: int) -> list[str]:
    """Pieces of the standard library: which ones is a function of their number."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    out = []
    for i in range(count):
        text = files[7 * i % len(files)].read_text("utf-8", "replace")
        rng = random.Random(i)
        at = rng.randrange(max(1, len(text) - 600))
        out.append(text[at : at + rng.randrange(40, 400)] or "import os\n")
    return out


def wanted(texts: Sequence[str]) -> list[tuple[str, str, SamplingParams]]:
    """(text, name of the wish, wish) of every request, in an order that mixes them."""
    requests = [
        (text, name, replace(wish, seed=i))
        for i, text in enumerate(texts)
        for name, wish in WISHES.items()
    ]
    random.Random(5).shuffle(requests)
    return requests


def answers(
    parts: Parts, requests: Sequence[tuple[str, str, SamplingParams]], options: dict[str, Any]
) -> list[Output]:
    """All requests by one engine, as deep as its drafts may be."""
    given = {"max_total_tokens": 1 << 14, "max_running_requests": 24, **options}
    engine = Engine(EngineConfig.from_names(given), parts)
    if engine.speculation is not None:
        engine.speculation.adaptive = False
    llm = LLM.of(engine)
    return llm.generate([text for text, _, _ in requests], [wish for _, _, wish in requests])


def column(
    draft: str,
    wish: str,
    requests: Sequence[tuple[str, str, SamplingParams]],
    got: Sequence[Output],
    want: Sequence[Output],
) -> dict[str, Any]:
    """One draft at one temperature: what differs, and what was accepted."""
    tokens = other_tokens = other_bits = 0
    counts = Speculated()
    for (_, name, _), have, plain in zip(requests, got, want, strict=True):
        if name != wish:
            continue
        assert have.logprobs is not None and plain.logprobs is not None, "asked for"
        tokens += len(plain.token_ids)
        same_len = len(have.token_ids) == len(plain.token_ids)
        pairs = zip(have.token_ids, plain.token_ids, strict=False)
        other_tokens += sum(a != b for a, b in pairs) + (not same_len)
        n = min(len(have.logprobs), len(plain.logprobs))
        bits = [each.logprobs[:n].view("int32") for each in (have, plain)]  # type: ignore[index]
        other_bits += int((bits[0] != bits[1]).sum())
        counts = Speculated(*map(sum, zip(counts, have.speculated, strict=True)))
    return {
        "draft": draft,
        "sampled": wish,
        "tokens": tokens,
        "differing_tokens": other_tokens,
        "differing_logprobs": other_bits,
        "drafted": counts.drafted,
        "accepted": counts.accepted,
        "verify_steps": counts.verify_steps,
        "tokens_per_verify": round(1 + counts.accepted / max(counts.verify_steps, 1), 2),
    }


def faults(found: dict[str, Any]) -> list[str]:
    """What is wrong with a column."""
    name = f"{found['draft']}, {found['sampled']}"
    share = found["accepted"] / max(found["drafted"], 1)
    out = []
    if found["differing_tokens"] or found["differing_logprobs"]:
        counts = f"{found['differing_tokens']} tokens, {found['differing_logprobs']} bits"
        out.append(f"{name}: {counts} differ")
    if not LEAST_SHARE <= share <= 1 - LEAST_SHARE:
        out.append(f"{name}: {share:.1%} of drafted tokens were accepted")
    return out


def table(columns: Sequence[dict[str, Any]]) -> list[str]:
    """One line per column."""
    names = ["draft", "sampled", "tokens", "differing_tokens", "differing_logprobs"]
    names += ["drafted", "accepted", "tokens_per_verify"]
    rows = [[name.replace("_", " ") for name in names]]
    rows += [[str(each[name]) for name in names] for each in columns]
    return document.aligned(rows, right=range(2, len(names)))


def noisy_folder(folder: Path) -> None:
    """The built-in model with noise on its weights, as a folder."""
    for file in BUILTIN.iterdir():
        if file.is_file():
            shutil.copy(file, folder)
    generator = torch.Generator().manual_seed(SEED)
    tensors = load_file(BUILTIN / "model.safetensors")
    noisy = {}
    for name in sorted(tensors):
        weight = tensors[name].float()
        noise = torch.randn(weight.shape, generator=generator) * weight.std(correction=0)
        noisy[name] = (weight + NOISE * noise).to(tensors[name].dtype)
    save_file(noisy, folder / "model.safetensors", {"format": "pt"})
