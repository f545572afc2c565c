"""More recipes of the engine's cells: is what a user asks for what the engine does?

An option that is dropped on the way changes no bit and raises nothing. So these look at what an
option is for: the dtype of the cache, the requests that run at once, a cache that is not wanted,
where a text ends, what is embedded, what a folder and a text say. The harness compares every
request with its recomputation besides. `engine_recipes` puts them into the table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from lockstep.lab.engine_harness import (
    EngineHarness,
    InstrumentedEngine,
    engine_recipe,
    every_model,
    one_model,
    same_bits,
)
from lockstep.lab.recompute import Order
from lockstep.lab.tiny import CONTEXT, EOS, LLAMA, Letters, save, words
from lockstep.llm.api import LLM
from lockstep.llm.job import Generation
from lockstep.models import loader
from lockstep.run.kind import GENERATE
from lockstep.sample.params import SamplingParams
from lockstep.sched.request import ScheduledStep

PLAIN = SamplingParams(max_tokens=10, temperature=0.8, seed=21, logprobs=2, ignore_eos=True)
TORCH = {"bfloat16": torch.bfloat16, "float8_e4m3": torch.float8_e4m3fn, "float16": torch.float16}
RUNNING = 3
CLOSE = 1e-6  # of an element of an embedding in fp32 against its row divided in float64


@engine_recipe("engine-dtype", "rounded_requests", "preempted", "forked", applies_to=every_model)
def cache_dtypes(rig: EngineHarness, quick: bool) -> None:
    """A cache that rounds its keys.

    It gives another answer, the same one whatever happens: chunks, hits, forks, lost pages.
    """
    orders = [
        Order(words(21, 30), PLAIN),
        Order(words(34, 31), replace(PLAIN, n=2, seed=22), at=1),
        Order(words(9, 32), replace(PLAIN, temperature=0.0), at=2),
    ]
    rows = 11 if rig.oracle.encoder is None else 64
    narrower = [d for d in TORCH if d != rig.device.dtype]  # keys are kept as they come elsewhere
    for dtype in narrower[:1] if quick else narrower:
        engine = rig.engine(kv_cache_dtype=dtype, chunked_prefill_size=rows)
        jobs = rig.play("dtype", engine, orders)
        rig.play("dtype", engine, orders, lose_pages)
        odd = rig.engine(kv_cache_dtype=dtype, page_size=3, disable_radix_cache=True)
        rig.play("dtype", odd, orders[:2])
        for i, job in enumerate(jobs):
            same = same_bits(job.output("").logprobs, rig.oracle.completions(orders[i])[0].logprobs)
            fault = f"{dtype}: request {i} has the bits of a cache that rounds nothing"
            rig.check("rounded", not same, fault, "keys are rounded to what was asked for")
        held = {s.dtype for pool in engine.runner.pools if pool for ss in pool.storages for s in ss}
        rig.check("rounded", held == {TORCH[dtype]}, f"{dtype}: the cache has {held}")
        rig.counters["rounded_requests"] += len(jobs)


def lose_pages(engine: InstrumentedEngine, jobs: list[Generation], step: int) -> None:
    """Everybody that runs, every third step."""
    running = [r for r in engine.scheduler.running if r.missing_len < len(r.tokens)]
    for request in running if step % 3 == 2 else []:
        engine.scheduler._preempt(request)


@engine_recipe("engine-running", "held_back", "forked")
def running(rig: EngineHarness, quick: bool) -> None:
    """No more at once than asked for.

    Forks included; the others wait, and are what they are.
    """
    many: list[str] = []
    engine = rig.engine(max_running_requests=RUNNING)
    engine.watchers.append(watch_running(rig, many))
    several = replace(PLAIN, n=RUNNING)
    orders = [Order(words(5 + i, 40 + i), replace(PLAIN, seed=i), at=1 + i // 3) for i in range(5)]
    first, last = Order(words(12, 45), several), Order(words(8, 46), several, at=3)
    rig.play("running", engine, [first, *orders, last])
    rig.note("limit", many, f"never more than {RUNNING} at once")


def watch_running(
    rig: EngineHarness, many: list[str]
) -> Callable[[InstrumentedEngine, ScheduledStep], None]:
    """Notes steps of too many requests; counts those before which somebody had to wait."""

    def see(engine: InstrumentedEngine, step: ScheduledStep) -> None:
        count = len(engine.scheduler.running)
        if max(count, len(step.pieces)) > RUNNING:
            many.append(f"{count} requests run, {len(step.pieces)} in one step")
        rig.counters["held_back"] += count == RUNNING and bool(engine.scheduler.waiting)

    return see


@engine_recipe("engine-uncached", "turns", "hit_tokens")
def uncached(rig: EngineHarness, quick: bool) -> None:
    """Without a prefix cache, and with one.

    Without one the same prompt is computed again, and nothing is kept when nobody runs.
    """
    for off in (True, False):
        engine = rig.engine(disable_radix_cache=off)
        for turn in range(2):
            (job,) = rig.play("uncached", engine, [Order(words(33, 50), PLAIN)])
            found = job.output("").cached_tokens
            where = f"turn {turn}, cache {'off' if off else 'on'}"
            rig.check(
                "asked", bool(found) == (turn == 1 and not off), f"{where}: {found} tokens found"
            )
            tree = engine.scheduler.tree
            cached = sum(tree.cached(g) for g in tree.groups)
            held = "a cache that is not wanted keeps nothing"
            rig.check("asked", not (off and cached), f"{cached} pages are kept", held)
            rig.counters["turns"] += 1


@engine_recipe("engine-end", "open_ends", "stopped", "stopped_at_once", "eos")
def ends(rig: EngineHarness, quick: bool) -> None:
    """Where a text ends.

    At the end of the context, at the first stop string from min_tokens on, at EOS and not before.
    """
    for room in (19, 1):
        order = Order(words(CONTEXT - room, 60 + room), replace(PLAIN, max_tokens=None))
        for job in rig.play("end", rig.engine(), [order]):
            rig.counters["open_ends"] += len(job.output("").token_ids) == room
    order = Order(words(11, 62), replace(PLAIN, max_tokens=16))
    (plain,) = rig.play("end", rig.engine(), [order])
    ids = plain.output("").token_ids
    stories = []
    for at in range(2, 9 if quick else 13):  # a stop string that token number `at` brings
        stop = Letters.spell(ids[at - 1 : at])
        if stop.isascii() and stop:
            kept = replace(order.params, stop=stop.decode())
            stories += [replace(kept, min_tokens=m) for m in (at - 1, at, at + 1)]
    stories += [
        replace(order.params, stop_token_ids=ids[at : at + 1], min_tokens=at + 3)
        for at in (0, 2, 5)
    ]
    jobs = rig.play("end", rig.engine(), [Order(order.prompt, params) for params in stories])
    for job, params in zip(jobs, stories, strict=True):
        done = job.output("")
        want, stopped = rig.oracle.text(order.prompt, done.token_ids, params)
        held = "cut before the first stop string that counts"
        rig.check("text", done.text == want, f"{done.text!r} is not {want!r}", held)
        rig.counters["stopped"] += stopped
        rig.counters["stopped_at_once"] += stopped and len(done.token_ids) == params.min_tokens
    eager = replace(PLAIN, ignore_eos=False, logit_bias={EOS: 30.0})
    orders = [Order(words(6, 63), replace(eager, min_tokens=m)) for m in (0, 1, 4)]
    jobs = rig.play("end", rig.engine(), orders)
    rig.counters["eos"] += sum(job.output("").token_ids[-1] == EOS for job in jobs)


@engine_recipe("engine-embed", "embedded")
def embed(rig: EngineHarness, quick: bool) -> None:
    """Embeddings between other steps.

    Of several prompts in one step: those of each alone, and the last row's.
    """
    prompts = [words(n, 70 + n) for n in (1, 7, 16, 33)]
    asked: list[Generation] = []

    def add(engine: InstrumentedEngine, jobs: list[Generation], step: int) -> None:
        if step in (0, 3):
            asked.extend(engine.add(p, SamplingParams(seed=0), embed=True) for p in prompts)

    orders = [Order(words(20, 75), PLAIN), Order(words(9, 76), PLAIN, at=2)]
    rig.play("embed", rig.engine(), orders, add)
    for job in asked:
        who, have = f"the embedding of {len(job.prompt_ids)} tokens", job.embedding
        if have is None:
            rig.note("embedding", [f"{who} never came"])
            continue
        rig.values.claim_embedding(job.prompt_ids, "last", have)
        off = float(np.abs(have - rig.oracle.embedding(job.prompt_ids)).max())
        rig.check("embedding", off < CLOSE, f"{who} is off by {off:.3g}", "the last row's")
        engine = rig.engine()
        alone = engine.add(job.prompt_ids, SamplingParams(seed=0), embed=True)
        engine.finish()
        rig.check("embedding", same_bits(have, alone.embedding), f"{who} is another one alone")
        rig.counters["embedded"] += 1


@engine_recipe("engine-text", "items")
def texts(rig: EngineHarness, quick: bool) -> None:
    """Prompts and items as strings.

    By the class that users call: a prompt has its special tokens, an item that follows one has
    none.
    """
    llm = LLM.of(rig.engine())
    letters, text, items = Letters(), "the end", (" of it", "s", "in é")
    begin = tuple(letters.encode(text, True, True))
    for item, scores in zip(items, llm.score(text, items), strict=True):
        want = rig.item_scores(begin, tuple(letters.encode(item, False, True)))
        fault = f"{item!r} is not scored as the tokens of its text"
        rig.check("items", same_bits(scores, want), fault)
        rig.counters["items"] += 1
    (out,) = llm.generate(text, PLAIN)
    fault = f"{text!r} became {out.prompt_token_ids}"
    rig.check("items", out.prompt_token_ids == begin, fault, "a prompt has BOS, an item none")
    same = same_bits(llm.score(text)[1:], rig.oracle.scores(begin)[0])
    rig.check("items", same, f"{text!r} is not scored as its tokens")


@engine_recipe("engine-folder", "folders", applies_to=one_model)
def folder(rig: EngineHarness, quick: bool) -> None:
    """A model from its files.

    The weights' own bits, and the end tokens that generation_config.json names before config.json.
    """
    order = Order(words(13, 80), replace(PLAIN, max_tokens=24))
    (free,) = rig.oracle.completions(order)
    end = free.token_ids[7]
    with TemporaryDirectory() as place:
        save(LLAMA, Path(place), eos_token_id=[end])
        model, info = loader.load(place)
    fault = f"{info.eos_token_ids} end a text, not {(end,)}"
    rig.check("eos", info.eos_token_ids == (end,), fault, "as generation_config.json says")
    engine = rig.engine()
    engine.info = replace(info, folder=Path("tiny"))
    engine.kinds[GENERATE] = replace(engine.kinds[GENERATE], model=model, forward=model)
    job = engine.add(order.prompt, replace(order.params, ignore_eos=False))
    engine.finish()
    have = job.output("")
    want = free.token_ids[: free.token_ids.index(end) + 1]
    fault = f"{have.token_ids}, not {want}"
    held = "the answer of its weights, to its end"
    rig.check("folder", list(have.token_ids) == want, fault, held)
    same = same_bits(have.logprobs, free.logprobs[: len(want)])
    rig.check("folder", same, "log-probabilities differ in bits")
    rig.counters["folders"] += 1


RECIPES = (cache_dtypes, running, uncached, ends, embed, texts, folder)
