"""`lockstep lab bits`: serves models of real shapes by every path that an engine may take and
counts the log-probabilities that differ in a bit.

The reference serves all requests together: whole prompts, nothing cached before, no launch
recorded, every step settled before the next. A path serves them again in one other way and counts
what shows that it was taken: an equality whose path was not taken proves nothing. Paths are entries
of bits.toml. Weights are drawn from a config alone. The distance to transformers in a wider dtype
is measured, too, after the engine has freed its memory. `--small` does the same on models of a few
thousand weights, which CI runs.
"""

import gc
import json
import random
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.config import EngineConfig
from lockstep.lab import document, isolate, oracle_draft, speculative_bits, table
from lockstep.lab.commands import picked
from lockstep.lab.engine_harness import InstrumentedEngine
from lockstep.lab.options import Device
from lockstep.lab.tiny import configs, shapes
from lockstep.llm.api import LLM
from lockstep.llm.engine import Parts, load
from lockstep.models.loader import STATED, random_weights
from lockstep.progress import Progress
from lockstep.sample.params import SamplingParams

MODEL_S = 900.0  # a model that takes longer has hung
SMALL = ["qwen3", "gemma3_text", "gpt_oss", "qwen3_moe", "deepseek_v3"]  # of the golden models
MOST_RATIO = 1.5  # allowed: our distance / that of transformers, in the same dtype
WIDER = {torch.float32: torch.float64, torch.bfloat16: torch.float32, torch.float16: torch.float32}
Requests = Sequence[tuple[list[int], SamplingParams]]
Answers = list[NDArray[np.int32]]  # per request [2, n]: tokens, bits of their logprobs
Scores = list[NDArray[np.float32]]  # per prompt: logprobs of all tokens but the first
Found = dict[str, Any]  # the published results of a path or a model
TABLE = table("bits.toml")
MANY, FEW = TABLE["sizes"].values()
PATHS: dict[str, Any] = TABLE["paths"]
ORACLE = "oracle"  # the path of --speculative oracle, on these shapes
ORACLE_SHAPES = ["qwen3-8b", "gemma3-4b", "deepseek-v3"]
DRAFTED = {"counters": oracle_draft.COUNTERS, "options": oracle_draft.OPTIONS, "overlap": True}
EVERY_PATH = {**PATHS, ORACLE: DRAFTED}


def serve(engine: InstrumentedEngine, requests: Requests, want: Answers) -> Answers:
    """Serves the requests, all given together."""
    prompts, params = zip(*requests, strict=True)
    outs = LLM.of(engine).generate(prompts, params)
    return [bits_of(out.token_ids, out.logprobs) for out in outs]


def serve_twice(engine: InstrumentedEngine, requests: Requests, want: Answers) -> Answers:
    """Serves the prompts for one token each, then the requests on what is cached."""
    serve(engine, [(prompt, replace(wish, max_tokens=1)) for prompt, wish in requests], want)
    return serve(engine, requests, want)


def serve_drafted(engine: InstrumentedEngine, requests: Requests, want: Answers) -> Answers:
    """Serves with drafts that know the answers and err at a fixed rate."""
    known = {f"#{i}": tokens.tolist() for i, (tokens, _) in enumerate(want)}
    oracle_draft.install(engine, known, oracle_draft.RIGHT)
    have = serve(engine, requests, want)
    engine.seen.update(engine.runner.replays)
    return have


def score(engine: InstrumentedEngine, requests: Requests, want: Answers) -> Answers:
    """Scores the reference's answers as parts of prompts: log-probabilities of prefill."""
    answers = [tokens.tolist() for tokens, _ in want]
    texts = [[*prompt, *answer] for (prompt, _), answer in zip(requests, answers, strict=True)]
    engine.seen["scored_tokens"] += sum(map(len, answers))
    found = zip(answers, prompt_scores(engine, texts), strict=True)
    return [bits_of(answer, scores[-len(answer) :]) for answer, scores in found]


def prompt_scores(engine: InstrumentedEngine, prompts: Sequence[list[int]]) -> Scores:
    """Returns log-probabilities of all tokens but the first of each prompt, given together."""
    how = SamplingParams(prompt_logprobs=True, seed=0)
    jobs = [engine.add(ids, how, scores_only=True) for ids in prompts]
    while engine.busy:
        engine.step()
    return [np.asarray(job.output("").prompt_logprobs, np.float32)[1:] for job in jobs]


def bits_of(token_ids: Sequence[int], logprobs: Any) -> NDArray[np.int32]:
    """Returns tokens and the bits of their log-probabilities [2, n], empty if these are missing."""
    if logprobs is None:
        return np.zeros((2, 0), np.int32)
    return np.array([token_ids, np.asarray(logprobs, np.float32).view(np.int32)], np.int32)


# how paths that need more than options are served
SERVE = {"prefix": serve_twice, "prefill = decode": score, ORACLE: serve_drafted}


@dataclass(frozen=True)
class Job:
    """One model by some paths, in a process of its own."""

    name: str
    config: Mapping[str, Any]
    device: Device
    sizes: Mapping[str, Any]
    paths: tuple[str, ...]


def requests_of(sizes: Mapping[str, Any], vocab: int) -> Requests:
    """Draws sampled, greedy and top-p requests of many lengths; some share their beginnings."""
    rng, out = random.Random(7), []
    stem = [rng.randrange(2, vocab) for _ in range(sizes["prompt"][1])]
    for at in range(sizes["requests"]):
        length = rng.randint(*sizes["prompt"])
        own = [rng.randrange(2, vocab) for _ in range(length)]
        prompt = [*stem[: length // 2], *own[length // 2 :]] if at % 4 == 0 else own
        params = SamplingParams(
            max_tokens=rng.randint(*sizes["new"]),
            temperature=0.0 if at % 5 == 0 else 0.6,
            top_p=0.9 if at % 8 == 3 else 1.0,
            seed=at,
            logprobs=0,
            ignore_eos=True,
        )
        out.append((prompt, params))
    return out


def engine_of(parts: Parts, config: EngineConfig, overlap: bool | None) -> InstrumentedEngine:
    """Returns a fresh engine, after the one before has freed its memory."""
    free_memory()
    return InstrumentedEngine(config, parts, overlap)


def free_memory() -> None:
    """Frees memory that is no longer referenced."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def play(job: Job) -> Found | isolate.Died:
    """Measures a model. An exception counts against it and does not end the run."""
    try:
        return measured(job)
    except Exception as error:
        return isolate.Died(f"{type(error).__name__}: {error}")


def measured(job: Job) -> Found:
    """Runs the reference, then every path, and measures the distance, except for drafts."""
    begin, sizes, far = time.perf_counter(), job.sizes, None
    most = sizes["prompt"][1] + sizes["new"][1]  # tokens a request has at most
    with TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(job.config), encoding="utf-8")
        plain = EngineConfig(
            model=folder,
            device=job.device.name,
            dtype=job.device.dtype,
            **TABLE["reference"],
            max_running_requests=sizes["requests"],
            chunked_prefill_size=8 * sizes["prompt"][1],
            max_total_tokens=sizes["requests"] * (most + 64),
            context_length=most + 1,
        )
        parts = replace(load(plain), draft=oracle_draft.random_head)
    requests = requests_of(sizes, parts.info.vocab_size)
    want = serve(engine_of(parts, plain, False), requests, [])
    paths = {name: by_path(name, sizes["name"], parts, plain, requests, want) for name in job.paths}
    if job.paths != (ORACLE,):
        count, length = sizes["judged"]
        judged = enumerate(requests[:count])
        prompts = [[i % 7 + 2, *prompt * 9][:length] for i, (prompt, _) in judged]
        scores = prompt_scores(engine_of(parts, plain, False), prompts)
        del parts
        free_memory()
        far = distance(job, prompts, scores)
    seconds = round(time.perf_counter() - begin, 1)
    return {"name": job.name, "paths": paths, "distance": far, "seconds": seconds}


def by_path(
    name: str, size: str, parts: Parts, plain: EngineConfig, requests: Requests, want: Answers
) -> Found:
    """Serves the requests by one path and compares them with the reference."""
    begin, path = time.perf_counter(), EVERY_PATH[name]
    options = {"graphs": None, **path.get("options", {}), **path.get(size, {})}
    config = replace(plain, **options)
    engine = engine_of(parts, config, path.get("overlap"))
    have = SERVE.get(name, serve)(engine, requests, want)
    counters = Counter(engine.seen) + Counter(engine.scheduler.counters)
    counters["cut_prompts"] = max(0, engine.seen["chunks"] - len(requests))
    pages = sum(int(pool.num_pages) for pool in engine.runner.pools if pool is not None)
    counters["other_pages"] = pages if config.page_size != plain.page_size else 0
    tokens = sum(each.shape[1] for each in want)
    return {
        "log_probabilities": tokens,
        "from_decode_steps": tokens - len(requests),
        "differ": sum(differing(a, b) for a, b in zip(have, want, strict=True)),
        "counters": {name: int(counters[name]) for name in (*path["counters"], "replays", "steps")},
        "seconds": round(time.perf_counter() - begin, 1),
    }


def differing(have: NDArray[np.int32], want: NDArray[np.int32]) -> int:
    """Counts log-probabilities that differ in a bit or whose tokens differ; all of them if the
    reference has a NaN or some are missing."""
    if have.shape != want.shape or bool(np.isnan(want[1].view(np.float32)).any()):
        return len(want[0])
    return int((have != want).any(0).sum())


def ratio(found: Mapping[str, Any]) -> float:
    """Returns our distance divided by that of transformers."""
    return float(found["ours"] / found["theirs"]) if found["theirs"] else float("inf")


def distance(job: Job, prompts: Sequence[list[int]], ours: Scores) -> Found:
    """Returns root mean squares over all tokens, with the same weights on the same device: of our
    log-probabilities, and of transformers' in our dtype, from transformers' in a wider dtype. In
    float32 nothing is judged: transformers casts to it inside wider models."""
    device = job.device
    weights = {
        name: random_weights(device.place, name, shape).to(device.compute).cpu()
        for name, shape in shapes(job.config).items()
    }
    exact = transformers_scores(job, weights, WIDER[device.compute], prompts)
    free_memory()
    theirs = transformers_scores(job, weights, device.compute, prompts)
    found = {"ours": rms(ours, exact), "theirs": rms(theirs, exact), "tokens": sum(map(len, ours))}
    return {**found, "judged": device.compute is not torch.float32}


def rms(a: Sequence[NDArray[Any]], b: Sequence[NDArray[Any]]) -> float:
    off = np.concatenate([x.astype(np.float64) - y for x, y in zip(a, b, strict=True)])
    return float(np.sqrt((off * off).mean()))


def transformers_scores(
    job: Job, weights: dict[str, Tensor], dtype: torch.dtype, prompts: Sequence[list[int]]
) -> list[NDArray[np.float64]]:
    """Returns log-probabilities by transformers in a dtype, given the weights as a state dict."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    config, device = job.config, job.device
    stated = {k: v for k, v in config.items() if k not in ("model_type", STATED)}
    stated["use_sliding_window"] = config["sliding_window"] is not None
    stated["head_dim"] = config.get("qk_rope_head_dim", config["head_dim"])  # the rotated part
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


def faults(found: Mapping[str, Found], least: Mapping[str, int]) -> list[str]:
    """Describes what contradicts the claim."""
    out = []
    for model, each in found.items():
        for name, path in each["paths"].items():
            where, count = f"{model}, {name}:", path["log_probabilities"]
            idle = [need for need in EVERY_PATH[name]["counters"] if path["counters"][need] == 0]
            if path["differ"]:
                out.append(f"{where} {path['differ']} of {count:,} differ")
            if idle:
                out.append(f"{where} the path was not taken: {', '.join(idle)} is 0")
            if count < least["model"]:
                out.append(f"{where} {count:,} log-probabilities, fewer than {least['model']:,}")
        far = each["distance"]
        if far and far["judged"] and ratio(far) > MOST_RATIO:
            out.append(f"{model}: {ratio(far):.2f} times the distance of transformers")
    for name, total in totals(found).items():
        if total < least["path"]:
            out.append(f"{name}: {total:,} over all models, fewer than {least['path']:,}")
    return out


def totals(found: Mapping[str, Found]) -> Counter[str]:
    """Counts the log-probabilities of each path, over all models."""
    total = Counter[str]()
    for model in found.values():
        for name, path in model["paths"].items():
            total[name] += path["log_probabilities"]
    return total


def command(args: Namespace) -> int:
    """Runs `lab bits`."""
    drafted = args.speculative == ORACLE
    if args.speculative and not drafted:
        return speculative_bits.command(args)
    every, sizes = configs("bits_models.json"), MANY
    shapes = list(every)
    if args.small:
        every, sizes, shapes = configs("golden_models.json"), FEW, SMALL
    names = picked("--model names shapes of the lab", args.model, shapes) or shapes
    paths = picked("--path names paths of bits.toml", args.path, list(PATHS)) or list(PATHS)
    if drafted:
        paths = [ORACLE]
    if drafted and not args.small:
        sizes = {**sizes, "requests": args.prompts, "new": (64, 96), "least": FEW["least"]}
        names = names if args.model else ORACLE_SHAPES
    device = Device.of(args.device, args.dtype)
    jobs = [Job(name, every[name], device, sizes, tuple(paths)) for name in names]
    found: dict[str, Found] = {}
    if args.source is not None:  # keep an earlier document's models that are not measured again
        models = document.read(args.source, "lockstep lab bits", "models", "sizes")["models"]
        found = {name: each for name, each in models.items() if name not in names}
    least = sizes["least"]
    if len(names) + len(found) < len(every):  # too few models to judge a path by
        least = {**least, "path": 0}
    died, doc = list[str](), document.head()
    doc |= {"device": asdict(device), "sizes": sizes, "models": found}
    with Progress(len(jobs), "lab bits") as bar:
        for job, answer in isolate.run(play, jobs, args.workers, lambda _: MODEL_S):
            gone = isinstance(answer, isolate.Died)
            if gone:
                died.append(f"{job.name}: {answer.reason}")
            else:
                found[job.name] = answer
            doc["log_probabilities"] = totals(found)
            doc["faults"] = [*died, *faults(found, least)]
            if args.json not in (None, "-"):
                document.write(doc, args.json)  # partial results, should a model take too long
            bar.step(job.name, gone)
    lines = document.text("bits.txt", doc=doc, paths=paths, ratio=ratio)
    document.publish(args, doc, lines)
    return int(bool(doc["faults"]))
