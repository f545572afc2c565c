"""The recipes of the engine's cells: what may happen to a request in a serving engine, none of
which may change a bit of its answer.

Each plays some stories on a harness, which compares every request with its recomputation, and looks
at what else must hold: exact hits, equal seeds, text that is the tokens'. Lengths sit one below, at
and above a page. A quick run plays fewer of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

from lockstep.lab import capacity_recipes, option_recipes, replay_recipes, sampler_recipes
from lockstep.lab.engine_harness import (
    Disturb,
    EngineHarness,
    Failing,
    InstrumentedEngine,
    engine_recipe,
    every_model,
    same_bits,
)
from lockstep.lab.recompute import Order
from lockstep.lab.tiny import BART, EOS, Letters, Tiny, words
from lockstep.llm.job import Generation
from lockstep.sample.params import SamplingParams

PAGE = 8
PLAIN = SamplingParams(max_tokens=10, temperature=0.8, seed=5, logprobs=2, ignore_eos=True)
GREEDY = replace(PLAIN, temperature=0.0)
CUT = replace(PLAIN, temperature=1.3, top_k=12, top_p=0.9, seed=-7, ignore_eos=False)
PENALISED = replace(
    PLAIN,
    seed=2**40 + 3,
    frequency_penalty=1.6,
    presence_penalty=0.4,
    repetition_penalty=1.1,
    logit_bias={3: 5.0, 4: 4.5},
)
SCORED = replace(PLAIN, prompt_logprobs=1, seed=9)
THREE = replace(PLAIN, n=3, seed=11)
BUCKETS = (1, 2, 4, 8, 16, 32, 64)


def encodes(tiny: Tiny) -> bool:
    """Only an encoder-decoder has sources."""
    return tiny is BART


def orders_of(*pairs: tuple[int, SamplingParams], late: int = 0) -> list[Order]:
    """Prompts of these lengths, each its own; `late` steps between one and the next."""
    return [Order(words(n, n), params, at=late * i) for i, (n, params) in enumerate(pairs)]


@engine_recipe("engine-batch", "batched_steps", "mixed_steps", "forked")
def batch(rig: EngineHarness, quick: bool) -> None:
    """Alone and in batches, arriving together and one by one.

    Greedy beside sampled beside scored.
    """
    orders = orders_of(
        (1, PLAIN), (7, GREEDY), (16, CUT), (33, PENALISED), (40, SCORED), (9, THREE)
    )
    for order in orders[3:] if quick else orders:
        rig.play("oracle", rig.engine(disable_radix_cache=True), [order])
    rig.play("batch", rig.engine(), orders)
    late = [replace(order, at=i * i) for i, order in enumerate(reversed(orders))]
    rig.play("batch", rig.engine(chunked_prefill_size=24), late)


@engine_recipe("engine-chunk", "chunks", "batched_steps")
def chunk(rig: EngineHarness, quick: bool) -> None:
    """Prompts in chunks of any size.

    Single rows, odd sizes, a page less one and one more, a neighbour that takes part of the step.
    """
    orders = [
        Order(words(37), SCORED),
        Order(words(21, 1), THREE, at=2),
        Order(words(30, 2), PENALISED, at=3),
    ]
    for size in (3, PAGE - 1) if quick else (3, PAGE - 1, PAGE, PAGE + 1, 16):
        rig.play("chunk", rig.engine(chunked_prefill_size=size, page_size=4), orders)
    rig.play("chunk", rig.engine(chunked_prefill_size=1), [Order(words(11), PLAIN)])


@engine_recipe("engine-hit", "hit_tokens", "chunks")
def hit(rig: EngineHarness, quick: bool) -> None:
    """A cached prefix around a page, second turns, tenants, twins.

    The same prompt cold and warm; then the same tokens in another order.
    """
    engine = rig.engine(page_size=PAGE)
    lengths = (PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 2 * PAGE + 1, 5 * PAGE + 1)
    for n in lengths[:3] if quick else lengths:
        order = Order(words(n, 100 + n), PLAIN)
        cold, warm = (rig.play("hit", engine, [order])[0] for _ in range(2))
        expect_hits(rig, f"{n} tokens", (cold, warm), (0, (n - 1) // PAGE * PAGE))
    prompt = words(29, 7)
    (first,) = rig.play("hit", engine, [Order(prompt, PLAIN)])
    turn = (*prompt, *first.output("").token_ids, *words(3, 8))
    same_tokens = (*prompt[:PAGE], *reversed(prompt[PAGE : 2 * PAGE]), *prompt[2 * PAGE :])
    for what, order, hits in (
        ("a second turn", Order(turn, CUT), 32),
        ("a block reversed", Order(same_tokens, CUT), PAGE),
        ("scores", Order(turn, SCORED), 0),
        ("another tenant", Order(prompt, GREEDY, tenant="another"), 0),
    ):
        expect_hits(rig, what, rig.play("hit", engine, [order]), (hits,))
    twins = [Order(words(39, 9), replace(PLAIN, seed=s), at=s) for s in range(3)]
    rig.play("hit", rig.engine(page_size=4, chunked_prefill_size=PAGE + 3), twins)


def expect_hits(
    rig: EngineHarness,
    what: str,
    jobs: tuple[Generation, ...] | list[Generation],
    hits: tuple[int, ...],
) -> None:
    """Exactly so many tokens of each prompt were found in the cache."""
    have = tuple(job.output("").cached_tokens for job in jobs)
    held = "exactly the whole pages below the last token"
    rig.check("hits", have == hits, f"{what}: {have} tokens found, not {hits}", held)


@engine_recipe("engine-evict", "hit_tokens", "evicted_pages")
def evict(rig: EngineHarness, quick: bool) -> None:
    """A cache that is too small.

    Prefixes come, go in part, and come again, windows first.
    """
    stems, rng = [words(n, 200 + n) for n in (41, 30)], random.Random(3)
    menu = [
        Order(stem[:n], replace(PLAIN, max_tokens=m))
        for stem in stems
        for n, m in ((13, 1), (22, 9), (len(stem), 5))
    ]
    for page, total in ((4, 60), (2, 56)):
        engine = rig.engine(
            page_size=page, max_total_tokens=total, max_running_requests=2, chunked_prefill_size=10
        )
        engine.watchers.append(watch_tree(rig))
        orders = [replace(rng.choice(menu), at=3 * i) for i in range(24 if quick else 40)]
        rig.play("evict", engine, orders)


def watch_tree(rig: EngineHarness) -> Callable[..., None]:
    """Counts pages that left the tree, as far as the next step shows it."""
    before: dict[int, int] = {}

    def see(engine: InstrumentedEngine, step: object) -> None:
        tree = engine.scheduler.tree
        for g in tree.groups:
            rig.counters["evicted_pages"] += max(0, before.get(g, 0) - tree.cached(g))
            before[g] = tree.cached(g)

    return see


@engine_recipe("engine-page", "hit_tokens", "batched_steps")
def page(rig: EngineHarness, quick: bool) -> None:
    """Pages of other sizes."""
    orders = [
        Order(words(33, 4), SCORED),
        Order(words(33, 4)[:20], THREE, at=4),
        Order(words(9, 5), PENALISED, at=5),
    ]
    for size in (1, 16) if quick else (1, 3, 16, 64):
        rig.play("page", rig.engine(page_size=size), orders)


def every_second(engine: InstrumentedEngine, jobs: list[Generation], step: int) -> None:
    """Everybody, or one, loses its pages."""
    running = [r for r in engine.scheduler.running if r.missing_len < len(r.tokens)]
    for request in running if step % 4 == 0 else running[:1] if step % 2 == 0 else []:
        engine.scheduler._preempt(request)


@engine_recipe("engine-preempt", "forced", "short_of_pages", "recomputed_rows", "hit_tokens")
def preempt(rig: EngineHarness, quick: bool) -> None:
    """Pages lost after every second step.

    With a prefix tree and without; then pages are short by themselves.
    """
    orders = [
        Order(words(19, 6), PENALISED),
        Order(words(26, 7), SCORED),
        Order(words(12, 8), THREE, at=1),
    ]
    for options in ({"disable_radix_cache": True}, {"page_size": 4}):
        jobs = rig.play("preempt", rig.engine(**options), orders, every_second)
        expect_hits(rig, "prompts that nobody had, after preemption", jobs, (0,) * len(jobs))
    rig.counters["forced"] = rig.counters["preempted"]
    short = rig.engine(max_total_tokens=72, page_size=4, disable_radix_cache=True)
    rig.play("preempt", short, orders)
    rig.counters["short_of_pages"] = rig.counters["preempted"] - rig.counters["forced"]


@engine_recipe("engine-abort", "aborted", "hit_tokens", "forked")
def abort(rig: EngineHarness, quick: bool) -> None:
    """Neighbours that leave.

    At every stage: with a shared prefix, in the middle of a prompt, forked; who stays or comes
    later is right.
    """
    stem = words(32, 12)
    for when in (2, 3, 6) if quick else (1, 2, 3, 4, 6, 9):
        orders = [
            Order((*stem, 3), PENALISED),
            Order((*stem, 4, 5), PLAIN, abort=when),
            Order((*stem[:21], 6), THREE, abort=when + 2),
            Order((*stem, 9), replace(CUT, seed=when), at=12),
            Order(stem[:30], GREEDY, at=13),
        ]
        engine = rig.engine(page_size=4, chunked_prefill_size=PAGE + 3, max_total_tokens=120)
        rig.play("abort", engine, orders)
    prompt = words(30, 13)
    orders = [Order(prompt, PLAIN, abort=1), Order((*prompt, 2), GREEDY, at=2)]
    rig.play("abort", rig.engine(page_size=PAGE, chunked_prefill_size=PAGE - 1), orders)


@engine_recipe("engine-n", "forked", "batched_steps")
def several(rig: EngineHarness, quick: bool) -> None:
    """N completions of one prompt.

    They are n requests: forked in the middle of a page and at its end, alone and in company.
    """
    for n in (PAGE - 1, PAGE, PAGE + 2):
        prompt, engine = words(n, 300 + n), rig.engine(page_size=PAGE)
        jobs = rig.play("n", engine, [Order(prompt, THREE), Order(words(5, 1), PLAIN)])
        ids = [c.token_ids for c in jobs[0].output("").completions]
        held = "completions of one seed differ"
        rig.check("distinct", len(set(ids)) > 1, "all completions are the same", held)
        for i in (1, 2):
            (alone,) = rig.play("n", engine, [Order(prompt, replace(THREE, n=1, sample_index=i))])
            same = alone.output("").token_ids == ids[i]
            rig.check("n", same, f"completion {i} is another one alone")


@engine_recipe("engine-score", "scored_tokens", "chunks", "item_forks")
def score(rig: EngineHarness, quick: bool) -> None:
    """Log-probabilities of given tokens.

    Scores of a prompt and its generated answer are the log-probabilities of generation: cold, warm,
    in chunks.
    """
    prompt = words(21, 14)
    engine = rig.engine(page_size=PAGE)
    (job,) = rig.play("score", engine, [Order(prompt, PLAIN)])
    made = job.output("")
    whole = (*prompt, *made.token_ids)
    order = Order(whole, replace(PLAIN, prompt_logprobs=2, seed=0), score=True)
    for place in (engine, rig.engine(page_size=4, chunked_prefill_size=5)):
        (scored,) = rig.play("score", place, [order])
        scores = scored.output("").prompt_logprobs
        same = scores is not None and same_bits(scores[len(prompt) :], made.logprobs)
        rig.check("score", same, "a score is not the log-probability of generation")
        rig.counters["scored_tokens"] += 0 if scores is None else len(scores)
    rig.play("score", engine, [Order(whole, SCORED), Order(whole[:17], replace(SCORED, n=2), at=1)])
    tight: dict[str, Any] = {"page_size": 4, "chunked_prefill_size": 5, "max_total_tokens": 48}
    for place in (engine, rig.engine(**tight, disable_radix_cache=True)):
        items(rig, place, prompt, job)


@engine_recipe("engine-stream", "characters", "stopped", "spaces_after_nothing")
def stream(rig: EngineHarness, quick: bool) -> None:
    """Text as it comes, characters in pieces, stop strings."""
    for n in (6,) if quick else (6, 9, 12):
        order = Order(words(n, 400 + n), replace(PLAIN, seed=n, max_tokens=24))
        (job,) = rig.play("stream", rig.engine(), [order])
        ids = job.output("").token_ids
        text = rig.oracle.text(order.prompt, ids, order.params)[0]
        rig.counters["characters"] += len(text)
        places = (text[i : i + 3] for i in range(9, len(text) - 3))
        stop = next((three for three in places if "\ufffd" not in three), text[9:12])
        stopped = replace(order, params=replace(order.params, stop=(stop, "never"), n=2))
        told = rig.play("stream", rig.engine(), [stopped])
        ends = [c.finish_reason for j in told for c in j.output("").completions]
        rig.counters["stopped"] += ends.count("stop")
        last = rig.oracle.text(order.prompt, ids[:12], order.params)[0][-1:]
        held = replace(order, params=replace(order.params, max_tokens=12, stop=last + "~"))
        # one ends with text held back, one goes on
        told += rig.play("stream", rig.engine(), [held, order])
        for j in (job, *told):
            compare_text(rig, j)
    edges(rig)


def compare_text(rig: EngineHarness, job: Generation) -> None:
    """The text of every completion is that of its tokens."""
    for c in job.output("").completions:
        want = rig.oracle.text(job.prompt_ids, c.token_ids, job.params)[0]
        held = "the text of all tokens, cut before a stop"
        rig.check("text", c.text == want, f"{c.text!r} is not {want!r}", held)


def edges(rig: EngineHarness) -> None:
    """Prompts that end in broken and in unfinished characters, or in nothing; spaces behind tokens
    without text."""
    space, half, rest = map(Letters.TOKENS.index, (b" ", "€".encode()[:1], "é".encode()[1:]))
    blank = replace(PLAIN, max_tokens=24, logit_bias={EOS: 6.0, space: 6.0})
    tails = ((rest,), (half,), (half, rest), (EOS,) * 9)
    orders = [
        Order((*words(5, 420 + i), *tail), replace(blank, seed=i)) for i, tail in enumerate(tails)
    ]
    for job in rig.play("stream", rig.engine(), orders):
        compare_text(rig, job)
        ids = job.output("").token_ids
        rig.counters["spaces_after_nothing"] += sum(pair == (EOS, space) for pair in pairwise(ids))


@engine_recipe(
    "engine-encoder", "preempted", "forked", "hit_tokens", "item_forks", applies_to=encodes
)
def encoder(rig: EngineHarness, quick: bool) -> None:
    """Sources read by an encoder.

    Of many lengths, some equal, in one batch; forked, in pages of one, losing their pages after
    every second step.
    """
    pairs = ((21, PLAIN), (1, GREEDY), (34, THREE), (8, PENALISED), (21, CUT))
    orders = orders_of(*pairs, late=1)
    for order in orders[:2] if quick else orders:
        rig.play("oracle", rig.engine(disable_radix_cache=True), [order])
    for size in (1, PAGE) if quick else (1, 3, PAGE, 64):
        rig.play("batch", rig.engine(page_size=size), orders)
    rig.play("preempt", rig.engine(page_size=1), [*orders, replace(orders[0], at=9)], every_second)
    leaves = [replace(orders[2], abort=4), *orders[3:], orders[0]]
    rig.play("abort", rig.engine(page_size=4), leaves)
    (job,) = rig.play("score", rig.engine(), [orders[0]])
    items(rig, rig.engine(), orders[0].prompt, job)


def items(
    rig: EngineHarness, engine: InstrumentedEngine, prompt: tuple[int, ...], made: Generation
) -> None:
    """The answer of a generation, given as an item beside others of one prompt, has the
    log-probabilities of the generation."""
    answer = made.output("").completions[0]
    wanted = [answer.token_ids, words(5, 15), answer.token_ids[:1], words(9, 16)]
    forks = engine.scheduler.counters["forked"]
    job = engine.add_items(prompt, wanted)
    engine.finish()
    done = job.output("").completions
    ids = [c.token_ids for c in done]
    rig.check("items", ids == list(map(tuple, wanted)), f"the items' tokens became {ids}")
    for item, completion in zip(wanted, done, strict=True):
        want = rig.item_scores(prompt, item)
        fault = f"an item of {len(item)} is not its recomputation"
        rig.check("items", same_bits(completion.logprobs, want), fault)
    same = same_bits(done[0].logprobs, answer.logprobs)
    held = "items are scored as they would be generated"
    rig.check("items", same, "an item is not the generation it repeats", held)
    rig.counters["item_forks"] += engine.scheduler.counters["forked"] - forks


@engine_recipe("engine-pad", "pad_rows", "forked", "batched_steps", applies_to=every_model)
def padded(rig: EngineHarness, quick: bool) -> None:
    """Steps padded to buckets.

    In company, arriving one by one, in chunks, forked, losing pages; in buckets far too large.
    """
    pairs = [(1, PLAIN), (7, GREEDY), (16, CUT), (33, PENALISED), (40, THREE)]
    if rig.oracle.encoder is None:
        pairs.append((9, SCORED))
    orders = orders_of(*pairs)
    late = [replace(order, at=2 * i) for i, order in enumerate(reversed(orders))]
    rig.play("pad", rig.engine(bucket_sizes=BUCKETS, chunked_prefill_size=64), orders)
    rig.play("pad", rig.engine(bucket_sizes=(50,), chunked_prefill_size=50, page_size=4), late)
    if not quick:
        odd = rig.engine(bucket_sizes=(3, 41), chunked_prefill_size=41, page_size=1)
        rig.play("pad", odd, late)
        many = rig.engine(bucket_sizes=BUCKETS, chunked_prefill_size=64)
        rig.play("pad", many, orders, every_second)


@engine_recipe(
    "engine-late", "late_ids", "unseen_rows", "forked", "aborted", applies_to=every_model
)
def late(rig: EngineHarness, quick: bool) -> None:
    """Steps that are settled one step late.

    Row ids name samples of the step before; a stop is found when the next row is computed, which
    nobody sees. In company, in buckets, in a cache that is too small, with a neighbour that leaves.
    """
    eager = replace(PLAIN, ignore_eos=False, logit_bias={EOS: 30.0}, min_tokens=3)
    pairs = [(7, GREEDY), (16, CUT), (33, PENALISED), (40, THREE), (9, eager)]
    if rig.oracle.encoder is None:
        pairs.append((12, SCORED))
    orders = orders_of(*pairs)
    rig.play("late", rig.engine(overlap=True, chunked_prefill_size=64), orders)
    leaving = [replace(order, at=2 * i) for i, order in enumerate(reversed(orders))]
    leaving[-1] = replace(leaving[-1], abort=leaving[-1].at + 3)
    small = {"chunked_prefill_size": 50, "page_size": 4}
    rig.play("late", rig.engine(overlap=True, bucket_sizes=(50,), **small), leaving)
    if not quick:
        tight = rig.engine(overlap=True, **small, max_total_tokens=160)
        rig.play("late", tight, leaving)
        rig.play("late", rig.engine(overlap=True, **small, disable_radix_cache=True), orders)


@engine_recipe("engine-priority", "displaced", "forked", "hit_tokens")
def priority(rig: EngineHarness, quick: bool) -> None:
    """Requests that go first.

    Later ones of a higher priority overtake waiting ones and take the place of running ones; bits
    do not know it.
    """
    orders = [
        Order(words(20, 20), PENALISED),
        Order(words(12, 21), PLAIN, at=1),
        Order(words(9, 22), CUT, at=3, priority=1),
        Order(words(17, 23), THREE, at=4, priority=2),
    ]
    ends: list[int] = []
    rig.play("priority", rig.engine(max_running_requests=1, page_size=4), orders, watch_ends(ends))
    fault = f"requests ended in the order {ends}"
    rig.check("order", ends == [3, 2, 0], fault, "the higher priority first")
    rig.counters["displaced"] = rig.counters["preempted"]
    tight = rig.engine(max_total_tokens=64, page_size=4, chunked_prefill_size=PAGE + 3)
    rig.play("priority", tight, orders)
    levels = [replace(order, priority=i % 3 - 1) for i, order in enumerate(orders)]
    rig.play("priority", rig.engine(max_running_requests=3), levels)


def watch_ends(ends: list[int]) -> Disturb:
    """Writes down which requests have ended, in the order in which they did."""

    def see(engine: InstrumentedEngine, jobs: list[Generation], step: int) -> None:
        ends.extend(i for i, job in enumerate(jobs) if job.done and i not in ends)

    return see


@engine_recipe("engine-error", "failed_steps", "forked", applies_to=every_model)
def error(rig: EngineHarness, quick: bool) -> None:
    """A model that raises in the middle of a step.

    Some layers are written: the engine goes on, nothing is lost, everybody has its bits.
    """
    decoder = rig.oracle.encoder is None
    pairs = ((19, PENALISED), (26, CUT), (12, THREE), (21, PLAIN))
    orders = [Order(words(n, 30 + n), p, at=2 * i) for i, (n, p) in enumerate(pairs)]
    orders += [Order(words(23, 31), SCORED, at=3)] if decoder else []
    moments = [(0, 5), (1, 2, 3, 17), (8,), (11, 12, 25), tuple(range(1, 60, 4))]
    for calls in moments[:2] if quick else moments:
        engine = rig.engine(page_size=4, chunked_prefill_size=PAGE + 3 if decoder else 64)
        engine.runner.backend = Failing(engine.runner.backend, calls)
        jobs = rig.play("error", engine, orders)
        fault = f"{len(jobs)} of {len(orders)} requests were taken in"
        rig.check("error", len(jobs) == len(orders), fault)
        rig.note(
            "error", [f"request {i} never ended" for i, job in enumerate(jobs) if not job.done]
        )


ENGINE_RECIPES = (
    *(batch, chunk, hit, evict, page, preempt, abort, several, score, stream, encoder),
    *option_recipes.RECIPES,
    *(padded, replay_recipes.replayed, late, priority, error),
    *capacity_recipes.RECIPES,
    *sampler_recipes.RECIPES,
)
