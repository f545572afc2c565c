"""`lockstep lab bits --speculative`: the built-in model with every draft at every temperature,
against itself without any. How many tokens, how many bits of log-probabilities differ?

Prompts are pieces of Python's own library. A block of prompts, each sampled in all three ways, is
one batch, computed plainly once, then with each draft. A column counts if its draft was sometimes
right and sometimes wrong. The draft model is the target with noise on its weights, drawn by a seed.
The document is written block by block; --from resumes an interrupted run. The module knows engines
and files; the lab's commands call it.
"""

import random
import shutil
import sysconfig
import time
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from lockstep.config import EngineConfig
from lockstep.lab import document, isolate, table
from lockstep.lab.commands import picked
from lockstep.llm.api import LLM
from lockstep.llm.engine import BUILTIN, Engine, Parts, load
from lockstep.llm.output import Output
from lockstep.progress import Progress
from lockstep.run.kind import DRAFT, EXTEND, VERIFY
from lockstep.sample.params import SamplingParams
from lockstep.types import RuleError

BLOCK = 16  # prompts computed together, each at three temperatures
BLOCK_S = 1800.0  # a block that takes longer has hung
NOISE, SEED = 0.15, 11  # noise on the draft model's weights, and its seed
LEAST_SHARE = 0.05  # least share of drafted tokens that is accepted, and rejected
GREEDY = SamplingParams(max_tokens=64, temperature=0, logprobs=True, ignore_eos=True)
TABLE = table("speculative.toml")
WISHES = {name: replace(GREEDY, **wish) for name, wish in TABLE["wishes"].items()}
DRAFTS: dict[str, dict[str, Any]] = TABLE["drafts"]
COUNTS = ("tokens", "differing_tokens", "differing_logprobs", "drafted", "accepted", "verify_steps")
# replays of an engine; one engine serves all of a draft's columns
REPLAYS = {"draft_replays": DRAFT, "extend_replays": EXTEND, "verify_replays": VERIFY}
Counts = dict[str, int]  # a column's counts, by name


def command(args: Namespace) -> int:
    """Returns 1 if anything differs, or if a draft was never right or never wrong."""
    begin, chosen = time.perf_counter(), list(DRAFTS)
    if args.speculative != "all":
        rule = f"--speculative is all, oracle, or drafts among {', '.join(DRAFTS)}"
        chosen = picked(rule, [args.speculative], chosen)
    asked = {"prompts": args.prompts, "drafts": chosen, "noise": NOISE, "noise_seed": SEED}
    blocks = {} if args.source is None else earlier(args.source, asked)
    judge = partial(judged, replayed=args.device == "cuda")
    doc = {**document.head(), "device": args.device, **asked, "blocks": blocks}
    doc |= {**judge(blocks), "seconds": 0.0}
    firsts = [n for n in range(0, args.prompts, BLOCK) if str(n) not in blocks]
    todo = [range(first, min(first + BLOCK, args.prompts)) for first in firsts]
    with Progress(len(todo), "lab bits") as bar, TemporaryDirectory() as folder:
        noisy_folder(Path(folder))
        play_one = partial(play, drafts=chosen, folder=folder, device=args.device)
        for block, answer in isolate.run(play_one, todo, args.workers, lambda _: BLOCK_S):
            if isinstance(answer, isolate.Died):
                raise RuleError("every block is computed", answer.reason, "Resume with --from")
            blocks[str(block.start)] = answer
            doc |= {**judge(blocks), "seconds": round(time.perf_counter() - begin, 1)}
            if args.json not in (None, "-"):
                document.write(doc, args.json)
            bar.step(f"{len(blocks) * BLOCK} prompts", bool(doc["faults"]))
    document.publish(args, doc, [*lines(doc["columns"]), *doc["faults"]])
    return int(bool(doc["faults"]))


def earlier(where: str, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the blocks of an earlier document of the same run."""
    doc = document.read(where, "lockstep lab bits --speculative", "blocks")
    have = {name: doc.get(name) for name in asked}
    if have != asked:
        rule = "--from names a document of the same prompts and drafts"
        raise RuleError(rule, f"{have}, not {asked}", "Omit --from")
    return dict(doc["blocks"])


@lru_cache(maxsize=1)
def parts(device: str) -> Parts:
    """Returns the built-in model, loaded once per process."""
    return load(EngineConfig(device=device))


def play(block: range, drafts: Sequence[str], folder: str, device: str) -> dict[str, Counts]:
    """Returns every draft's columns for some prompts; `folder` contains the draft model."""
    requests = wanted(block)
    (want, _), found = answers(parts(device), requests, {}), dict[str, Counts]()
    for draft in drafts:
        got, replays = answers(parts(device), requests, options_of(draft, folder))
        for wish in WISHES:
            found[f"{draft}; {wish}"] = compared(wish, requests, got, want) | replays
    return found


def options_of(draft: str, folder: str) -> dict[str, Any]:
    """Returns engine options for this draft; `folder` contains the draft model."""
    if draft == "draft":
        return {**DRAFTS[draft], "speculative_draft_model": folder}
    return DRAFTS[draft]


def prompt(number: int) -> str:
    """Returns a piece of the standard library, chosen by the number."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = files[7 * number % len(files)].read_text("utf-8", "replace")
    rng = random.Random(number)
    at = rng.randrange(max(1, len(text) - 600))
    return text[at : at + rng.randrange(40, 400)] or "import os\n"


def wanted(numbers: Iterable[int]) -> list[tuple[str, str, SamplingParams]]:
    """Returns (text, name of the wish, wish) of every request, in an order that mixes them."""
    requests = [
        (prompt(i), name, replace(wish, seed=i)) for i in numbers for name, wish in WISHES.items()
    ]
    random.Random(5).shuffle(requests)
    return requests


def answers(
    parts: Parts, requests: Sequence[tuple[str, str, SamplingParams]], options: dict[str, Any]
) -> tuple[list[Output], Counts]:
    """Plays all requests on one engine, with drafts of full depth; returns outputs and replays."""
    room = {"max_total_tokens": 1 << 14, "chunked_prefill_size": 1024}
    given = {**room, "max_running_requests": 3 * BLOCK, **options}
    engine = Engine(EngineConfig.from_names(given), parts)
    if engine.speculation is not None:
        engine.speculation.adaptive = False
    llm = LLM.of(engine)
    outs = llm.generate([text for text, _, _ in requests], [wish for _, _, wish in requests])
    replays = engine.runner.replays
    return outs, {name: replays[kind] for name, kind in REPLAYS.items()}


def compared(
    wish: str,
    requests: Sequence[tuple[str, str, SamplingParams]],
    got: Sequence[Output],
    want: Sequence[Output],
) -> Counts:
    """Counts differences and accepted tokens of one draft at one temperature."""
    counts = dict.fromkeys(COUNTS, 0)
    for (_, name, _), have, plain in zip(requests, got, want, strict=True):
        if name != wish:
            continue
        assert have.logprobs is not None and plain.logprobs is not None, "asked for"
        same_len = len(have.token_ids) == len(plain.token_ids)
        pairs = zip(have.token_ids, plain.token_ids, strict=False)
        n = min(len(have.logprobs), len(plain.logprobs))
        bits = [each.logprobs[:n].view("int32") for each in (have, plain)]  # type: ignore[index]
        counts["tokens"] += len(plain.token_ids)
        counts["differing_tokens"] += sum(a != b for a, b in pairs) + (not same_len)
        counts["differing_logprobs"] += int((bits[0] != bits[1]).sum())
        for count, value in have.speculated._asdict().items():
            counts[count] += value
    return counts


def judged(blocks: Mapping[str, Mapping[str, Counts]], replayed: bool = False) -> dict[str, Any]:
    """Returns the blocks' columns and their faults; with `replayed`, missing replays are faults,
    too."""
    totals: dict[str, Counts] = {}
    for name in next(iter(blocks.values()), ()):
        each = [block[name] for block in blocks.values()]
        totals[name] = {
            count: sum(counts.get(count, 0) for counts in each) for count in (*COUNTS, *REPLAYS)
        }
    columns = []
    for name, total in totals.items():
        draft, _, wish = name.partition("; ")
        width = round(1 + total["accepted"] / max(total["verify_steps"], 1), 2)
        columns.append({"draft": draft, "sampled": wish, **total, "tokens_per_verify": width})
    wrong = [fault for each in columns for fault in faults(each, replayed)]
    return {"columns": columns, "faults": wrong}


def faults(found: dict[str, Any], replayed: bool) -> list[str]:
    """Describes what is wrong with a column."""
    name = f"{found['draft']}, {found['sampled']}"
    share = found["accepted"] / max(found["drafted"], 1)
    out = []
    if found["differing_tokens"] or found["differing_logprobs"]:
        counts = f"{found['differing_tokens']} tokens, {found['differing_logprobs']} bits"
        out.append(f"{name}: {counts} differ")
    if not LEAST_SHARE <= share <= 1 - LEAST_SHARE:
        out.append(f"{name}: {share:.1%} of drafted tokens were accepted")
    launched = REPLAYS if found["draft"] != "ngram" else ["verify_replays"]
    out += [f"{name}: {each} is 0" for each in launched if replayed and not found[each]]
    return out


def lines(columns: Sequence[dict[str, Any]]) -> list[str]:
    """Formats one line per column."""
    names = ["draft", "sampled", "tokens", "differing_tokens", "differing_logprobs"]
    names += ["drafted", "accepted", "tokens_per_verify"]
    rows = [[name.replace("_", " ") for name in names]]
    rows += [[str(each[name]) for name in names] for each in columns]
    return document.aligned(rows, right=range(2, len(names)))


def noisy_folder(folder: Path) -> None:
    """Writes the built-in model with noise on its weights as a folder."""
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
