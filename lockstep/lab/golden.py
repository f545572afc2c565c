"""Golden answers, which must not change: tokens and log-probability bits of some hundred requests,
in a file by the name of the order and the versions of the compilers.

The requests go to the built-in model and to a small model of every type, written to a folder as a
user has it. They run together in a cramped engine (small pages, short chunks, few pages), which
changes no answer but takes every path. `lockstep lab golden` and tests call it.
"""

import argparse
import json
import random
import tempfile
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep import LLM, SamplingParams, order, outfile
from lockstep.lab import document, table
from lockstep.lab.options import CPU, Device
from lockstep.lab.tiny import configs, shapes
from lockstep.progress import Progress
from lockstep.types import RuleError

# one config per model_type, every field stated: changing one would change the answers
MODELS = configs("golden_models.json")
CRAMPED, TEXTS, PARAMS = table("golden_requests.json").values()
VOCAB = 97
Answers = dict[str, dict[str, Any]]  # name of a request -> its answer
REQUESTS = 28  # per model
PATHS = ("hit_tokens", "preempted", "forked")  # must have happened for a file to be written


class GoldenRequest(NamedTuple):
    """One request. `kind` says which public call makes it."""

    name: str
    kind: str  # generate | items | embed
    prompt: str | tuple[int, ...]
    params: SamplingParams
    items: tuple[tuple[int, ...], ...] = ()


def run(args: argparse.Namespace) -> int:
    """Runs `lab golden`: compares, or records; returns 1 if a bit has changed."""
    file, device = Path(args.file), Device.of(args.device, args.dtype)
    if args.write:
        outfile.check("--file", args.file)
        read(file)
    else:  # raises before the work if the file has no answers for this key
        compare(file, {}, key(device))
    found, counters = answers(device)
    added = record(file, found, counters, key(device)) if args.write else 0
    differing = compare(file, found, key(device))
    told = {"key": key(device), "answers": len(found), "added": added, "differing": differing}
    told["paths"] = {path: counters[path] for path in PATHS}
    fine = f"{len(found)} answers, {added} of them new: no bit differs"
    document.publish(args, {**document.head(), **told}, differing[:20] or [fine])
    return int(bool(differing))


def key(device: Device = CPU) -> str:
    """Returns the key of answers: the order, or device and dtype, and its compilers' versions."""
    name, compilers = f"{device.name} {device.dtype}", ["torch", "numba", "llvmlite"]
    if device == CPU:
        name = order.ORDER_NAMES[order.CPU]
    elif device.name == "cuda":
        name, compilers = f"{order.ORDER_NAMES[order.SM90]} {device.dtype}", ["torch", "triton"]
    return "; ".join([f"order {name}", *(f"{each} {version(each)}" for each in compilers)])


def answers(device: Device = CPU) -> tuple[Answers, Counter[str]]:
    """Returns every answer on this machine, and the counters of the engines that gave them."""
    found, counters = Answers(), Counter[str]()
    options = {**CRAMPED, "device": device.name, "dtype": device.dtype}
    bar = Progress(1 + len(MODELS), "lab golden")
    with bar, tempfile.TemporaryDirectory(prefix="lockstep-golden-") as folder:
        for name in ("builtin", *MODELS):
            llm = LLM(model_folder(name, Path(folder)), **options)
            found.update(ask(llm, requests(name)))
            counters.update(llm.engine.scheduler.counters)
            llm.engine.check()
            bar.step(name)
    return found, counters


def ask(llm: LLM, asked: Sequence[GoldenRequest]) -> Answers:
    """Returns the answers of one model; everything that is generated runs together."""
    found = Answers()
    kinds = ("generate", "items", "embed")
    together, items, embeds = ([r for r in asked if r.kind == kind] for kind in kinds)
    outputs = llm.generate([r.prompt for r in together], [r.params for r in together])
    for request, output in zip(together, outputs, strict=True):
        found[request.name] = {
            "tokens": [list(c.token_ids) for c in output.completions],
            "logprobs": [bits(c.logprobs) for c in output.completions],
            "finish": [c.finish_reason for c in output.completions],
        }
        if output.prompt_logprobs is not None:
            found[request.name]["prompt_logprobs"] = bits(output.prompt_logprobs)
    for r in items:
        found[r.name] = {"logprobs": [bits(each) for each in llm.score(r.prompt, r.items)]}
    vectors = llm.embed([r.prompt for r in embeds]) if embeds else ()
    found |= {r.name: {"embedding": bits(v)} for r, v in zip(embeds, vectors, strict=True)}
    return found


def bits(values: NDArray[np.float32] | None) -> str:
    """Returns float32 numbers as hexadecimal digits, eight each."""
    return "" if values is None else np.asarray(values, "<f4").tobytes().hex()


def requests(model: str) -> list[GoldenRequest]:
    """Returns the requests to a model, a function of its name."""
    rng = random.Random(zlib.crc32(model.encode()))
    kinds = ["embed"] if model == "bert" else ["generate"] * 5 + ["items", "embed"]
    options = dict(PARAMS)  # greedy and sampled, cut, penalised, forked, scored
    if model == "bart":
        kinds.remove("embed")
        del options["prompt_logprobs"]

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(2, VOCAB) for _ in range(count))

    stems, out = [tokens(n) for n in (48, 31, 17)], []
    for i in range(REQUESTS):
        kind, stem = kinds[i % len(kinds)], rng.choice(stems)
        tail = tokens(rng.choice((0, 1, 4, 9)))
        prompt: str | tuple[int, ...] = stem[: rng.randint(1, len(stem))] + tail
        if model == "builtin":
            prompt = rng.choice(TEXTS) + rng.choice(TEXTS) * (i % 3)
        lens = [rng.randint(1, 9) for _ in range(3)]
        items = tuple(map(tokens, lens))  # drawn for every kind
        drawn = {name: rng.choice(each) for name, each in options.items()}
        params = SamplingParams.from_dict({**drawn, "seed": i * 7919 - 5, "logprobs": True})
        given = items if kind == "items" else ()
        out.append(GoldenRequest(f"{model}/{i}", kind, prompt, params, items=given))
    return out


def model_folder(name: str, parent: Path) -> str | None:
    """Writes a small model's folder as a user would have it; None is the built-in model."""
    if name == "builtin":
        return None
    from safetensors.torch import save_file

    folder = parent / name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MODELS[name]), encoding="utf-8")
    tensors = {tensor: draw_tensor(tensor, shape) for tensor, shape in shapes(MODELS[name]).items()}
    save_file(tensors, str(folder / "model.safetensors"))
    return str(folder)


def draw_tensor(name: str, shape: tuple[int, ...]) -> Tensor:
    """Draws numbers that depend on the name alone, by exact operations on the bits of a counter."""
    generator = np.random.Philox(key=zlib.crc32(name.encode()))
    raw = generator.random_raw(int(np.prod(shape))) >> np.uint64(40)
    uniform = raw.astype(np.float32) * np.float32(2.0**-23) - np.float32(1)
    scale = 0.5 if "embed" in name or len(shape) == 1 else 2.5 / float(shape[-1]) ** 0.5
    values = uniform * np.float32(2.0 ** round(np.log2(scale)))
    if "norm" in name.lower() and name.endswith("weight"):
        values = values * np.float32(0.25) + np.float32(1)
    return torch.from_numpy(values.reshape(shape).copy())


def read(file: Path) -> dict[str, Answers]:
    """Returns the recorded answers by key; empty if there is no file yet."""
    rule, remedy = "the golden file is readable JSON", "Restore it from the repository"
    try:
        found = json.loads(file.read_text("utf-8")) if file.exists() else {}
    except (ValueError, OSError, RecursionError):  # the last if it is nested too deeply
        raise RuleError(rule, str(file), remedy) from None
    if not isinstance(found, dict) or not all(isinstance(each, dict) for each in found.values()):
        raise RuleError("the golden file is an object of answers by key", str(file), remedy)
    return found


def record(file: Path, found: Answers, counters: Mapping[str, int], mine: str | None = None) -> int:
    """Adds answers that the file lacks and returns their number. A differing one is an error."""
    if missed := ", ".join(path for path in PATHS if not counters.get(path)):
        remedy = "Use a smaller cache or shorter chunks in golden_requests.json"
        raise RuleError("golden answers take every path", f"none with {missed}", remedy)
    recorded = read(file)
    there = recorded.setdefault(mine or key(), {})
    if differing := differences(there, found):
        remedy = "If bits must change, rename the order in order.py"
        raise RuleError("a recorded answer never changes", differing[0], remedy)
    added = found.keys() - there.keys()
    there |= found
    file.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return len(added)


def compare(file: Path, found: Answers, mine: str | None = None) -> list[str]:
    """Describes differences from the file; raises if the file has no answers for this key."""
    recorded, mine = read(file), mine or key()
    if mine not in recorded:
        have = f"answers for {' | '.join(recorded) or 'nothing'}"
        remedy = "Install the pinned versions, or record with --write"
        raise RuleError(f"the golden file has answers for {mine}", have, remedy)
    there = recorded[mine]
    gone = [f"{name}: recorded, but no longer requested" for name in there if name not in found]
    return [*gone, *differences(there, found)]


def differences(known: Answers, found: Answers) -> list[str]:
    """Describes answers that both have and that differ."""
    return [
        f"{name}: {part} differs"
        for name, answer in found.items()
        if name in known
        for part in sorted({*answer, *known[name]})
        if answer.get(part) != known[name].get(part)
    ]
