"""More recipes of the engine's cells: is what a user asks for what the engine does, and does it say
so where it cannot?

An option that is dropped on the way changes no bit and raises nothing: these look at what an option
is for, counted by plain arithmetic, and at what is exactly full, or one beyond.
"""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from numpy.typing import NDArray

from lockstep.lab.engine_harness import EngineHarness, InstrumentedEngine, same_bits
from lockstep.lab.engine_recipes import GREEDY, PLAIN, Options, every_second, orders_of
from lockstep.lab.oracle import KINDS
from lockstep.lab.recompute import Order
from lockstep.lab.tiny import CONTEXT, EOS, LLAMA, Letters, save, words
from lockstep.llm.api import LLM
from lockstep.llm.generation import Generation
from lockstep.models import loader
from lockstep.ops import Routing
from lockstep.plan.bucket import Buckets
from lockstep.plan.build import RequestWork, build
from lockstep.run.arena import Arena
from lockstep.run.kind import GENERATE
from lockstep.run.runner import IMAGE_LEN
from lockstep.sample.params import SamplingParams
from lockstep.sched.request import ScheduledStep
from lockstep.types import AttnSpec, GroupSpec, Layout, RuleError

NARROWER = {name: dtype for name, dtype in KINDS.items() if name != "float32"}
RUNNING = 3
CLOSE = 1e-6  # of an element of an embedding in fp32 against its row divided in float64
SIZES = (2, 5, 9)  # of buckets
EXPERTS = (4, 16, 17, 24, 64)  # up to 16 torch's unstable sorts happen to be stable


def cache_dtypes(rig: EngineHarness, quick: bool) -> None:
    """It gives another answer, the same one whatever happens: chunks, hits, forks, lost pages."""
    orders = orders_of((21, PLAIN), (34, replace(PLAIN, n=2, seed=22)), (9, GREEDY), late=1)
    rows = 11 if rig.oracle.encoder is None else 64
    # elsewhere keys are kept as they come
    narrower = [d for d in NARROWER if d != rig.device.dtype]
    for dtype in narrower[:1] if quick else narrower:
        engine = rig.engine(kv_cache_dtype=dtype, chunked_prefill_size=rows)
        jobs = rig.play("dtype", engine, orders)
        rig.play("dtype", engine, orders, every_second)
        odd: Options = {"kv_cache_dtype": dtype, "page_size": 3, "disable_radix_cache": True}
        rig.story("dtype", orders[:2], **odd)
        for i, job in enumerate(jobs):
            same = same_bits(job.output("").logprobs, rig.oracle.completions(orders[i])[0].logprobs)
            fault = f"{dtype}: request {i} has the bits of a cache that rounds nothing"
            rig.check("rounded", not same, fault)
        held = {s.dtype for pool in engine.runner.pools if pool for ss in pool.storages for s in ss}
        rig.check("rounded", held == {NARROWER[dtype]}, f"{dtype}: the cache has {held}")
        rig.counters["rounded_requests"] += len(jobs)


def running(rig: EngineHarness, quick: bool) -> None:
    """Forks included; the others wait, and are what they are."""
    engine = rig.engine(max_running_requests=RUNNING)

    def watch(engine: InstrumentedEngine, step: ScheduledStep) -> None:
        count = len(engine.scheduler.running)
        fault = f"{count} requests run, {len(step.pieces)} in one step"
        few = max(count, len(step.pieces)) <= RUNNING
        rig.check("limit", few, fault, f"never more than {RUNNING} at once")
        rig.counters["held_back"] += count == RUNNING and bool(engine.scheduler.waiting)

    engine.watchers.append(watch)
    several = replace(PLAIN, n=RUNNING)
    orders = [Order(words(5 + i, 40 + i), replace(PLAIN, seed=i), at=1 + i // 3) for i in range(5)]
    first, last = Order(words(12, 45), several), Order(words(8, 46), several, at=3)
    rig.play("running", engine, [first, *orders, last])


def uncached(rig: EngineHarness, quick: bool) -> None:
    """Without one the same prompt is computed again, and nothing is kept when nobody runs."""
    for off in (True, False):
        engine = rig.engine(disable_radix_cache=off)
        for turn in range(2):
            (job,) = rig.play("uncached", engine, [Order(words(33, 50), PLAIN)])
            found = job.output("").cached_tokens
            fault = f"turn {turn}, cache {'off' if off else 'on'}: {found} tokens found"
            rig.check("asked", bool(found) == (turn == 1 and not off), fault)
            tree = engine.scheduler.tree
            cached = sum(tree.cached(g) for g in tree.groups)
            rig.check("asked", not (off and cached), f"{cached} pages are kept")
            rig.counters["turns"] += 1


def ends(rig: EngineHarness, quick: bool) -> None:
    """At the end of the context, at the first stop string from min_tokens on, at EOS."""
    for room in (19, 1):
        order = Order(words(CONTEXT - room, 60 + room), replace(PLAIN, max_tokens=None))
        for job in rig.story("end", [order]):
            rig.counters["open_ends"] += len(job.output("").token_ids) == room
    stories = []
    for seed in (62, 64):
        order = Order(words(11, seed), replace(PLAIN, max_tokens=16))
        (plain,) = rig.story("end", [order])
        ids = plain.output("").token_ids
        kinds = []
        for at in range(2, 9 if quick else 13):  # a stop string that token number `at` brings
            stop = Letters.spell(ids[at - 1 : at])
            if stop.isascii() and stop:
                kept = replace(order.params, stop=stop.decode())
                kinds += [replace(kept, min_tokens=m) for m in (at - 1, at, at + 1)]
        kinds += [
            replace(order.params, stop_token_ids=ids[at : at + 1], min_tokens=at + 3)
            for at in (0, 2, 5)
        ]
        stories += [replace(order, params=params) for params in kinds]
    for job in rig.story("end", stories):
        done, params = job.output(""), job.params
        by_text = bool(params.stops) and done.completions[0].finish_reason == "stop"
        rig.counters["stopped_at_once"] += by_text and len(done.token_ids) == params.min_tokens
    eager = replace(PLAIN, ignore_eos=False, logit_bias={EOS: 30.0})
    jobs = rig.story("end", [Order(words(6, 63), replace(eager, min_tokens=m)) for m in (0, 1, 4)])
    rig.counters["eos"] += sum(job.output("").token_ids[-1] == EOS for job in jobs)


def embed(rig: EngineHarness, quick: bool) -> None:
    """Of several prompts in one step: those of each alone, and the last row's."""
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
        rig.check("embedding", off < CLOSE, f"{who} is off by {off:.3g}")
        engine = rig.engine()
        alone = engine.add(job.prompt_ids, SamplingParams(seed=0), embed=True)
        engine.finish()
        rig.check("embedding", same_bits(have, alone.embedding), f"{who} is another one alone")
        rig.counters["embedded"] += 1


def texts(rig: EngineHarness, quick: bool) -> None:
    """As users call it: a prompt has its special tokens, an item that follows one has none."""
    llm = LLM.of(rig.engine())
    letters, text, items = Letters(), "the end", (" of it", "s", "in é")
    begin = tuple(letters.encode(text, True, True))
    for item, scores in zip(items, llm.score(text, items), strict=True):
        want = rig.item_scores(begin, tuple(letters.encode(item, False, True)))
        fault = f"{item!r} is not scored as the tokens of its text"
        rig.check("items", same_bits(scores, want), fault)
        rig.counters["items"] += 1
    (out,) = llm.generate(text, PLAIN)
    became = out.prompt_token_ids
    rig.check("items", became == begin, f"{text!r} became {became}")
    same = same_bits(llm.score(text)[1:], rig.oracle.scores(begin)[0])
    rig.check("items", same, f"{text!r} is not scored as its tokens")


def folder(rig: EngineHarness, quick: bool) -> None:
    """The weights' own bits, and end tokens by generation_config.json before config.json."""
    order = Order(words(13, 80), replace(PLAIN, max_tokens=24))
    (free,) = rig.oracle.completions(order)
    end = free.token_ids[7]
    with TemporaryDirectory() as place:
        save(LLAMA, Path(place), rig.device, eos_token_id=[end])
        model, info = loader.load(place, rig.device.name, rig.device.dtype)
    fault = f"{info.eos_token_ids} end a text, not {(end,)}"
    rig.check("eos", info.eos_token_ids == (end,), fault)
    engine = rig.engine()
    engine.info = replace(info, folder=Path("tiny"))
    engine.kinds[GENERATE] = replace(engine.kinds[GENERATE], model=model, forward=model)
    job = engine.add(order.prompt, replace(order.params, ignore_eos=False))
    engine.finish()
    have, n = job.output(""), free.token_ids.index(end) + 1
    want = free.token_ids[:n]
    same = list(have.token_ids) == want and same_bits(have.logprobs, free.logprobs[:n])
    fault = f"{have.token_ids}, not {want}, or with other log-probabilities"
    rig.check("folder", same, fault)
    rig.counters["folders"] += 1


def capacity(rig: EngineHarness, quick: bool) -> None:
    """And others that just do not suffice. A request's last token needs no place in a cache."""
    new, size = 4, 4
    exact = Order(words(21), replace(GREEDY, max_tokens=new))
    keys = len(exact.prompt) + new - 1
    roomy = rig.engine(graphs=False)  # a graph keeps the arena that it was captured with
    roomy.runner.arena = measured = MeasuredArena(IMAGE_LEN, rig.device.place)
    rig.play("capacity", roomy, [exact])
    most = measured.most
    for lacking in (0, 1):
        engine = rig.engine(graphs=False)
        engine.runner.arena = Arena(most - lacking, rig.device.place)
        rule = f"a step's image has at most {most - 1} numbers; got {most}."
        suffices(rig, "full_arenas", engine, exact, rule if lacking else "")
        long = replace(exact, prompt=words(CONTEXT - new + lacking))
        rule = f"prompt and new tokens fit into the context of {CONTEXT}; got {CONTEXT - new + 1} +"
        suffices(rig, "full_contexts", rig.engine(), long, rule if lacking else "")
        tokens = (-(-keys // size) - lacking) * size
        engine = rig.engine(max_total_tokens=tokens, page_size=size, max_running_requests=1)
        rule = "a request fits into the cache alone"
        suffices(rig, "full_caches", engine, exact, rule if lacking else "")
    for n in range(3, SIZES[-1] + 2):
        for what, lengths in (("requests", (1,) * n), ("tokens", (n - 1, 1))):
            full = f"a step has at most {SIZES[-1]} {what}; got {n}. Schedule less, or allow a "
            want = next((str(size) for size in SIZES if size >= n), f"{full}larger bucket.")
            have, held = padded(what, lengths), f"buckets of {SIZES}, at and beyond"
            rig.check("capacity", have == want, f"{n} {what}: {have}, not {want}", held)
            rig.counters["full_buckets"] += n in SIZES


class MeasuredArena(Arena):
    """Notes the largest image that it held."""

    most = 0

    def host(self, length: int) -> NDArray[np.int32]:
        self.most = max(self.most, length)
        return super().host(length)


def suffices(
    rig: EngineHarness, counter: str, engine: InstrumentedEngine, order: Order, rule: str
) -> None:
    """Something is just large enough for an order, or says by its rule that it is not."""
    rig.counters[counter] += 1
    if not rule:
        ended = [job for job in rig.play("capacity", engine, [order]) if job.done]
        rig.check("capacity", len(ended) == 1, f"{counter}: just large enough, and did not end")
        return
    try:
        order.given_to(engine)
        engine.finish()
        rig.note("capacity", [f"nobody said that {rule}"])
    except Exception as error:  # one of another kind than the rule's is what is looked for
        said = f"{type(error).__name__}: {error}"
        rig.check("capacity", said.startswith(f"RuleError: {rule}"), said)


def padded(what: str, lengths: tuple[int, ...]) -> str:
    """How many requests or tokens a step of these lengths is padded to, or why it is not."""
    spec = GroupSpec(Layout.FRESH, 1, 1, 8, 8, (AttnSpec(scale=1.0),))
    plan = build([spec], [RequestWork(cached_len=0, new_len=n, pages=(None,)) for n in lengths])
    try:
        return str(getattr(Buckets(SIZES).fit(plan), what))
    except RuleError as error:
        return str(error)


def experts(rig: EngineHarness, quick: bool) -> None:
    """Routers of every kind, with scores that are often equal, against a sort by score and id."""
    gen = torch.Generator().manual_seed(5)
    for count in EXPERTS:
        logits = torch.randint(0, 4, (40, count), generator=gen).float()
        ranked = [sorted(range(count), key=lambda e: (-row[e], e))[:3] for row in logits.tolist()]
        for score in ("softmax", "sigmoid", "chosen"):
            routing = Routing(k=3, experts=count, score=score)
            ids = rig.device.ops.route(logits.to(rig.device.place), routing, None).ids
            wrong = sum(a != b for a, b in zip(ids.tolist(), ranked, strict=True))
            rig.check("ties", not wrong, f"{count} experts by {score}: {wrong} rows")
            rig.counters["tied_rows"] += sum(len(set(row)) < count for row in logits.tolist())
