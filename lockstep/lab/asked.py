"""More recipes of the engine's cells: is what a user asks for what the engine does?

An option that is dropped on the way changes no bit and raises nothing. So these look at what an
option is for: the dtype of the cache, the requests that run at once, a cache that is not wanted,
where a text ends, what is embedded, what a folder and a text say. The rig compares every request
with its recomputation besides. `stories` puts them into the table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from lockstep.lab.recompute import Order
from lockstep.lab.rig import Glass, Rig
from lockstep.lab.tiny import CONTEXT, EOS, LLAMA, Letters, save, words
from lockstep.llm.api import LLM
from lockstep.llm.job import Job
from lockstep.models import loader
from lockstep.run.kind import GENERATE
from lockstep.sample.params import SamplingParams
from lockstep.sample.sampler import log_probs
from lockstep.sched.request import Step

PLAIN = SamplingParams(max_tokens=10, temperature=0.8, seed=21, logprobs=2, ignore_eos=True)
DTYPES = ("bfloat16", "float8_e4m3")
RUNNING = 3
CLOSE = 1e-6  # of an element of an embedding in fp32 against its row divided in float64


def cache_dtypes(rig: Rig, quick: bool) -> None:
    """A cache that rounds its keys gives another answer, the same one whatever happens: chunks,
    hits, forks, lost pages."""
    orders = [
        Order(words(21, 30), PLAIN),
        Order(words(34, 31), replace(PLAIN, n=2, seed=22), at=1),
        Order(words(9, 32), replace(PLAIN, temperature=0.0), at=2),
    ]
    for dtype in DTYPES[:1] if quick else DTYPES:
        engine = rig.engine(
            kv_cache_dtype=dtype, chunked_prefill_size=11 if rig.oracle.encoder is None else 64
        )
        jobs = rig.play("dtype", engine, orders)
        rig.play("dtype", engine, orders, lose_pages)
        rig.play(
            "dtype",
            rig.engine(kv_cache_dtype=dtype, page_size=3, disable_radix_cache=True),
            orders[:2],
        )
        same = [
            i
            for i, job in enumerate(jobs)
            if _logprobs(job) == rig.oracle.completions(orders[i])[0].logprobs
        ]
        rig.note(
            "rounded",
            [f"{dtype}: request {i} has the bits of a float32 cache" for i in same],
            "keys are rounded to what was asked for",
        )
        held = {
            storage.element_size()
            for pool in engine.runner.pools
            if pool
            for layer in pool.storages
            for storage in layer
        }
        wide = [
            f"{dtype}: numbers of {n} bytes"
            for n in held
            if n != torch.empty(0, dtype=TORCH[dtype]).element_size()
        ]
        rig.note("rounded", wide)
        rig.counters["rounded_requests"] += len(jobs)


TORCH = {"bfloat16": torch.bfloat16, "float8_e4m3": torch.float8_e4m3fn}


def _logprobs(job: Job) -> list[float]:
    found = job.output("").logprobs
    return [] if found is None else [float(x) for x in found]


def lose_pages(engine: Glass, jobs: list[Job], step: int) -> None:
    """Everybody that runs, every third step."""
    for request in (
        [r for r in engine.scheduler.running if r.rows < len(r.tokens)] if step % 3 == 2 else []
    ):
        engine.scheduler._preempt(request)


def running(rig: Rig, quick: bool) -> None:
    """No more requests run at once than were asked for, forks included; the others wait, and are
    what they are."""
    many: list[str] = []
    engine = rig.engine(max_running_requests=RUNNING)
    engine.tell = watch_running(rig, many, engine.tell)
    several = replace(PLAIN, n=RUNNING)
    orders = [Order(words(5 + i, 40 + i), replace(PLAIN, seed=i), at=1 + i // 3) for i in range(5)]
    rig.play(
        "running",
        engine,
        [Order(words(12, 45), several), *orders, Order(words(8, 46), several, at=3)],
    )
    rig.note("limit", many, f"never more than {RUNNING} at once")


def watch_running(
    rig: Rig, many: list[str], tell: Callable[[Glass, Step], None] | None
) -> Callable[[Glass, Step], None]:
    """Notes steps of too many requests; counts those before which somebody had to wait."""

    def see(engine: Glass, step: Step) -> None:
        count = len(engine.scheduler.running)
        if max(count, len(step.pieces)) > RUNNING:
            many.append(f"{count} requests run, {len(step.pieces)} in one step")
        rig.counters["held_back"] += count == RUNNING and bool(engine.scheduler.waiting)
        if tell is not None:
            tell(engine, step)

    return see


def uncached(rig: Rig, quick: bool) -> None:
    """Without a prefix cache the same prompt is computed again, and nothing is kept when nobody
    runs; with one it is found."""
    for off in (True, False):
        engine = rig.engine(disable_radix_cache=off)
        for turn in range(2):
            (job,) = rig.play("uncached", engine, [Order(words(33, 50), PLAIN)])
            found, cached = (
                job.output("").cached_tokens,
                sum(engine.scheduler.tree.cached(g) for g in engine.scheduler.tree.groups),
            )
            want = turn == 1 and not off
            rig.note(
                "asked",
                [f"turn {turn}, cache {'off' if off else 'on'}: {found} tokens found"]
                if bool(found) != want
                else [],
            )
            rig.note(
                "asked",
                [f"{cached} pages are kept"] if off and cached else [],
                "a cache that is not wanted keeps nothing",
            )
            rig.counters["turns"] += 1


def ends(rig: Rig, quick: bool) -> None:
    """A text ends where it should: at the end of the context, at the first stop string from
    min_tokens on, at EOS and not before."""
    for room in (19, 1):
        for job in rig.play(
            "end",
            rig.engine(),
            [Order(words(CONTEXT - room, 60 + room), replace(PLAIN, max_tokens=None))],
        ):
            rig.counters["open_ends"] += len(job.output("").token_ids) == room
    order = Order(words(11, 62), replace(PLAIN, max_tokens=16))
    (plain,) = rig.play("end", rig.engine(), [order])
    ids = plain.output("").token_ids
    stories = []
    for at in range(2, 9 if quick else 13):  # a stop string that token number `at` brings
        stop = Letters.spell(ids[at - 1 : at])
        if stop.isascii() and stop:
            stories += [
                replace(order.params, stop=stop.decode(), min_tokens=m)
                for m in (at - 1, at, at + 1)
            ]
    stories += [
        replace(order.params, stop_token_ids=ids[at : at + 1], min_tokens=at + 3)
        for at in (0, 2, 5)
    ]
    jobs = rig.play("end", rig.engine(), [Order(order.prompt, params) for params in stories])
    for job, params in zip(jobs, stories, strict=True):
        done = job.output("")
        want, stopped = rig.oracle.text(order.prompt, done.token_ids, params)
        rig.note(
            "text",
            [f"{done.text!r} is not {want!r}"] if done.text != want else [],
            "cut before the first stop string that counts",
        )
        rig.counters["stopped"] += stopped
        rig.counters["stopped_at_once"] += stopped and len(done.token_ids) == params.min_tokens
    eager = replace(PLAIN, ignore_eos=False, logit_bias={EOS: 30.0})
    jobs = rig.play(
        "end", rig.engine(), [Order(words(6, 63), replace(eager, min_tokens=m)) for m in (0, 1, 4)]
    )
    rig.counters["eos"] += sum(job.output("").token_ids[-1] == EOS for job in jobs)


def embed(rig: Rig, quick: bool) -> None:
    """Embeddings of several prompts in one step, between steps of others, are those of each alone,
    and the last row's."""
    prompts = [words(n, 70 + n) for n in (1, 7, 16, 33)]
    asked: list[Job] = []

    def add(engine: Glass, jobs: list[Job], step: int) -> None:
        if step in (0, 3):
            for prompt in prompts:
                asked.append(engine.add(prompt, SamplingParams(seed=0), embed=True))

    rig.play(
        "embed", rig.engine(), [Order(words(20, 75), PLAIN), Order(words(9, 76), PLAIN, at=2)], add
    )
    for job in asked:
        alone = _embedded(rig.engine(), job.prompt_ids)
        have = job.embedding
        if have is not None:
            rig.values.claim_embedding(job.prompt_ids, "last", have)
        off = (
            np.inf
            if have is None
            else float(np.abs(have - rig.oracle.embedding(job.prompt_ids)).max())
        )
        who = f"the embedding of {len(job.prompt_ids)} tokens"
        rig.note(
            "embedding",
            [f"{who} is off by {off:.3g}"] if not off < CLOSE else [],
            "the last row, of length 1",
        )
        same = have is not None and alone is not None and have.tobytes() == alone.tobytes()
        rig.note("embedding", [] if same else [f"{who} is another one alone"])
        rig.counters["embedded"] += have is not None


def _embedded(
    engine: Glass, prompt: Sequence[int]
) -> np.ndarray[tuple[int], np.dtype[np.float32]] | None:
    job = engine.add(prompt, SamplingParams(seed=0), embed=True)
    while engine.busy:
        engine.step()
    return job.embedding


def texts(rig: Rig, quick: bool) -> None:
    """Strings by the class that users call: a prompt has its special tokens, an item that follows
    one has none."""
    llm = LLM.__new__(LLM)
    llm.engine = rig.engine()
    letters, text, items = Letters(), "the end", (" of it", "s", "in é")
    begin = tuple(letters.encode(text, True, True))
    told = llm.score(text, items)
    for item, scores in zip(items, told, strict=True):
        ids = tuple(letters.encode(item, False, True))
        rows = rig.oracle.logits((*begin, *ids))[len(begin) - 1 : -1]
        want = log_probs(rig.parts.model.ops, rows, torch.tensor(ids)).chosen.numpy()
        rig.values.claim((*begin, *ids), len(begin), want)
        rig.note(
            "items",
            []
            if scores.tobytes() == want.tobytes()
            else [f"{item!r} is not scored as the tokens of its text"],
        )
        rig.counters["items"] += 1
    (out,) = llm.generate(text, PLAIN)
    rig.note(
        "items",
        [] if out.prompt_token_ids == begin else [f"{text!r} became {out.prompt_token_ids}"],
        "a prompt has BOS, an item none",
    )
    scores = llm.score(text)
    want, _ = rig.oracle.prompt_scores(begin, 0)
    rig.note(
        "items",
        []
        if scores[1:].tobytes() == want[1:].tobytes()
        else [f"{text!r} is not scored as its tokens"],
    )


def folder(rig: Rig, quick: bool) -> None:
    """A model from its files: the weights' own bits, and the end tokens that generation_config.json
    names before config.json."""
    order = Order(words(13, 80), replace(PLAIN, max_tokens=24))
    (free,) = rig.oracle.completions(order)
    end = free.token_ids[7]
    with TemporaryDirectory() as place:
        save(LLAMA, Path(place), eos_token_id=[end])
        model, info = loader.load(place)
    named = info.eos_token_ids == (end,)
    rig.note(
        "eos",
        [] if named else [f"{info.eos_token_ids} end a text, not {(end,)}"],
        "as generation_config.json says",
    )
    engine = rig.engine()
    engine.info = replace(info, folder=Path("tiny"))
    engine.kinds[GENERATE] = replace(engine.kinds[GENERATE], model=model, forward=model)
    job = engine.add(order.prompt, replace(order.params, ignore_eos=False))
    while engine.busy:
        engine.step()
    have = job.output("")
    want = free.token_ids[: free.token_ids.index(end) + 1]
    rig.note(
        "folder",
        [] if list(have.token_ids) == want else [f"{have.token_ids}, not {want}"],
        "the answer of its weights, to its end",
    )
    same = have.logprobs is not None and have.logprobs.tolist() == free.logprobs[: len(want)]
    rig.note("folder", [] if same else ["log-probabilities differ in bits"])
    rig.counters["folders"] += 1
