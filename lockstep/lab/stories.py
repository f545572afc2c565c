"""The recipes of the engine's cells: what may happen to a request in a serving engine, none of
which may change a bit of its answer.

Each plays some stories on a rig, which compares every request with its recomputation, and looks at
what else must hold: exact hits, equal seeds, text that is the tokens'. `proves` names counters that
must have moved. Lengths sit one below, at and above a page.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from lockstep.attention.base import Backend
from lockstep.lab import asked, limits, sampling
from lockstep.lab.properties import Judgement
from lockstep.lab.recompute import Order
from lockstep.lab.rig import Disturb, Failing, Glass, Rig
from lockstep.lab.tiny import BART, EOS, LLAMA, QWEN3, Letters, Tiny, words
from lockstep.llm.job import Job
from lockstep.sample.params import SamplingParams
from lockstep.sample.sampler import log_probs

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


@dataclass(frozen=True)
class EngineRecipe:
    """`play` runs the stories, fewer of them if the rig is asked to be quick. `proves` names
    counters that must be above 0."""

    name: str
    says: str
    play: Callable[[Rig, bool], None]
    proves: tuple[str, ...]
    suits: Callable[[Tiny], bool] = lambda tiny: tiny is not BART


def batch(rig: Rig, quick: bool) -> None:
    """Everybody alone, then all together, some arriving later, greedy beside sampled beside
    scored."""
    lengths, params = (1, 7, 16, 33, 40, 9), (PLAIN, GREEDY, CUT, PENALISED, SCORED, THREE)
    orders = [Order(words(n, n), p) for n, p in zip(lengths, params, strict=True)]
    for order in orders[3:] if quick else orders:
        rig.play("oracle", rig.engine(disable_radix_cache=True), [order])
    rig.play("batch", rig.engine(), orders)
    late = [replace(order, at=i * i) for i, order in enumerate(reversed(orders))]
    rig.play("batch", rig.engine(chunked_prefill_size=24), late)


def chunk(rig: Rig, quick: bool) -> None:
    """Prompts cut everywhere: single rows, odd sizes, a page less one and one more, and with a
    neighbour that takes part of the step."""
    orders = [
        Order(words(37), SCORED),
        Order(words(21, 1), THREE, at=2),
        Order(words(30, 2), PENALISED, at=3),
    ]
    for size in (3, PAGE - 1) if quick else (3, PAGE - 1, PAGE, PAGE + 1, 16):
        rig.play("chunk", rig.engine(chunked_prefill_size=size, page_size=4), orders)
    rig.play("chunk", rig.engine(chunked_prefill_size=1), [Order(words(11), PLAIN)])


def hit(rig: Rig, quick: bool) -> None:
    """The same prompt cold and warm around a page; longer ones, a second turn, the same tokens in
    another order, another tenant, twins."""
    engine = rig.engine(page_size=PAGE)
    for n in (
        (PAGE - 1, PAGE, PAGE + 1)
        if quick
        else (PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 2 * PAGE + 1, 5 * PAGE + 1)
    ):
        cold, warm = (
            rig.play("hit", engine, [Order(words(n, 100 + n), PLAIN)])[0] for _ in range(2)
        )
        expect(rig, f"{n} tokens", (cold, warm), (0, (n - 1) // PAGE * PAGE))
    prompt = words(29, 7)
    (first,) = rig.play("hit", engine, [Order(prompt, PLAIN)])
    turn = (*prompt, *first.output("").token_ids, *words(3, 8))
    same_tokens = (*prompt[:PAGE], *reversed(prompt[PAGE : 2 * PAGE]), *prompt[2 * PAGE :])
    for what, ids, hits in (
        ("a second turn", turn, 32),
        ("a block reversed", same_tokens, PAGE),
        ("scores", turn, 0),
    ):
        expect(rig, what, rig.play("hit", engine, [Order(ids, CUT if hits else SCORED)]), (hits,))
    (other,) = rig.play("hit", engine, [Order(prompt, GREEDY, tenant="another")])
    expect(rig, "another tenant", (other,), (0,))
    twins = [Order(words(39, 9), replace(PLAIN, seed=s), at=s) for s in range(3)]
    rig.play("hit", rig.engine(page_size=4, chunked_prefill_size=PAGE + 3), twins)


def expect(rig: Rig, what: str, jobs: tuple[Job, ...] | list[Job], hits: tuple[int, ...]) -> None:
    """Exactly so many tokens of each prompt were found in the cache."""
    have = tuple(job.output("").cached_tokens for job in jobs)
    rig.note(
        "hits",
        [f"{what}: {have} tokens found, not {hits}"] if have != hits else [],
        "exactly the whole pages below the last token",
    )


def evict(rig: Rig, quick: bool) -> None:
    """A cache too small for all that could be kept: prefixes come, go in part, and come again,
    windows first."""
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
        engine.tell = watch_tree(rig, engine.tell)
        orders = [replace(rng.choice(menu), at=3 * i) for i in range(24 if quick else 40)]
        rig.play("evict", engine, orders)


def watch_tree(rig: Rig, tell: Callable[..., None] | None) -> Callable[..., None]:
    """Counts pages that left the tree, as far as the next step shows it."""
    before: dict[int, int] = {}

    def see(engine: Glass, step: object) -> None:
        tree = engine.scheduler.tree
        for g in tree.groups:
            rig.counters["evicted_pages"] += max(0, before.get(g, 0) - tree.cached(g))
            before[g] = tree.cached(g)
        if tell is not None:
            tell(engine, step)

    return see


def page(rig: Rig, quick: bool) -> None:
    """Pages of one token, of odd sizes, and larger than everything."""
    orders = [
        Order(words(33, 4), SCORED),
        Order(words(33, 4)[:20], THREE, at=4),
        Order(words(9, 5), PENALISED, at=5),
    ]
    for size in (1, 16) if quick else (1, 3, 16, 64):
        rig.play("page", rig.engine(page_size=size), orders)


def every_second(engine: Glass, jobs: list[Job], step: int) -> None:
    """Everybody, or one, loses its pages."""
    running = [r for r in engine.scheduler.running if r.rows < len(r.tokens)]
    for request in running if step % 4 == 0 else running[:1] if step % 2 == 0 else []:
        engine.scheduler._preempt(request)


def preempt(rig: Rig, quick: bool) -> None:
    """Everybody or somebody loses its pages after every second step, with a prefix tree and
    without; then pages are short by themselves."""
    orders = [
        Order(words(19, 6), PENALISED),
        Order(words(26, 7), SCORED),
        Order(words(12, 8), THREE, at=1),
    ]

    for options in ({"disable_radix_cache": True}, {"page_size": 4}):
        jobs = rig.play("preempt", rig.engine(**options), orders, every_second)
        expect(rig, "prompts that nobody had, after preemption", jobs, (0,) * len(jobs))
    rig.counters["forced"] = rig.counters["preempted"]
    rig.play(
        "preempt", rig.engine(max_total_tokens=72, page_size=4, disable_radix_cache=True), orders
    )
    rig.counters["short_of_pages"] = rig.counters["preempted"] - rig.counters["forced"]


def abort(rig: Rig, quick: bool) -> None:
    """Neighbours leave at every stage: with a shared prefix, in the middle of a prompt, forked; who
    stays or comes later is right."""
    stem = words(32, 12)
    stays = Order((*stem, 3), PENALISED)
    for when in (2, 3, 6) if quick else (1, 2, 3, 4, 6, 9):
        leaves = [
            Order((*stem, 4, 5), PLAIN, abort=when),
            Order((*stem[:21], 6), THREE, abort=when + 2),
        ]
        later = [Order((*stem, 9), replace(CUT, seed=when), at=12), Order(stem[:30], GREEDY, at=13)]
        engine = rig.engine(page_size=4, chunked_prefill_size=PAGE + 3, max_total_tokens=120)
        rig.play("abort", engine, [stays, *leaves, *later])
    engine = rig.engine(page_size=PAGE, chunked_prefill_size=PAGE - 1)
    rig.play(
        "abort",
        engine,
        [Order(words(30, 13), PLAIN, abort=1), Order((*words(30, 13), 2), GREEDY, at=2)],
    )


def several(rig: Rig, quick: bool) -> None:
    """n completions are n requests: forked in the middle of a page and at its end, alone and in
    company."""
    for n in (PAGE - 1, PAGE, PAGE + 2):
        prompt, engine = words(n, 300 + n), rig.engine(page_size=PAGE)
        forked = rig.play("n", engine, [Order(prompt, THREE), Order(words(5, 1), PLAIN)])[0].output(
            ""
        )
        same = len({c.token_ids for c in forked.completions}) == 1
        rig.note(
            "distinct",
            ["all completions are the same"] if same else [],
            "completions of one seed differ",
        )
        for i in (1, 2):
            (alone,) = rig.play("n", engine, [Order(prompt, replace(THREE, n=1, sample_index=i))])
            faults = (
                []
                if alone.output("").token_ids == forked.completions[i].token_ids
                else [f"completion {i} is another one alone"]
            )
            rig.note("n", faults)


def score(rig: Rig, quick: bool) -> None:
    """Scores of a prompt and its generated answer are the log-probabilities of generation: cold,
    warm, in chunks."""
    prompt = words(21, 14)
    engine = rig.engine(page_size=PAGE)
    (job,) = rig.play("score", engine, [Order(prompt, PLAIN)])
    made = job.output("")
    whole = (*prompt, *made.token_ids)
    asked = replace(PLAIN, prompt_logprobs=2, seed=0)
    for place in (engine, rig.engine(page_size=4, chunked_prefill_size=5)):
        (scored,) = rig.play("score", place, [Order(whole, asked, score=True)])
        told, said = scored.output("").prompt_logprobs, made.logprobs
        same = (
            told is not None
            and said is not None
            and told[len(prompt) :].tobytes() == said.tobytes()
        )
        rig.note("score", [] if same else ["a score is not the log-probability of generation"])
        rig.counters["scored_tokens"] += 0 if told is None else len(told)
    rig.play("score", engine, [Order(whole, SCORED), Order(whole[:17], replace(SCORED, n=2), at=1)])
    for place in (
        engine,
        rig.engine(
            page_size=4, chunked_prefill_size=5, max_total_tokens=48, disable_radix_cache=True
        ),
    ):
        items(rig, place, prompt, job)


def stream(rig: Rig, quick: bool) -> None:
    """Text as it comes is the text at the end, which is the text of the tokens: characters in
    pieces, stop strings across tokens."""
    for n in (6,) if quick else (6, 9, 12):
        order = Order(words(n, 400 + n), replace(PLAIN, seed=n, max_tokens=24))
        (job,) = rig.play("stream", rig.engine(), [order])
        text = rig.oracle.text(order.prompt, job.output("").token_ids, order.params)[0]
        rig.counters["characters"] += len(text)
        stop = next(
            (text[i : i + 3] for i in range(9, len(text) - 3) if "\ufffd" not in text[i : i + 3]),
            text[9:12],
        )
        stopped = replace(order, params=replace(order.params, stop=(stop, "never"), n=2))
        told = rig.play("stream", rig.engine(), [stopped])
        rig.counters["stopped"] += sum(
            c.finish_reason == "stop" for j in told for c in j.output("").completions
        )
        held = replace(
            order.params,
            max_tokens=12,
            stop=rig.oracle.text(order.prompt, job.output("").token_ids[:12], order.params)[0][-1:]
            + "~",
        )
        told += rig.play(
            "stream", rig.engine(), [replace(order, params=held), order]
        )  # one ends with text held back, one goes on
        for j in (job, *told):
            compare_text(rig, j)
    edges(rig)


def compare_text(rig: Rig, job: Job) -> None:
    """The text of every completion is that of its tokens."""
    for c in job.output("").completions:
        want = rig.oracle.text(job.prompt_ids, c.token_ids, job.params)[0]
        rig.note(
            "text",
            [f"{c.text!r} is not {want!r}"] if c.text != want else [],
            "the text of all tokens, cut before a stop",
        )


def edges(rig: Rig) -> None:
    """Prompts that end in broken and in unfinished characters, or in nothing; spaces behind tokens
    without text."""
    space, half, rest = (
        Letters.TOKENS.index(token) for token in (b" ", "€".encode()[:1], "é".encode()[1:])
    )
    blank = replace(PLAIN, max_tokens=24, logit_bias={EOS: 6.0, space: 6.0})
    tails = ((rest,), (half,), (half, rest), (EOS,) * 9)
    orders = [
        Order((*words(5, 420 + i), *tail), replace(blank, seed=i)) for i, tail in enumerate(tails)
    ]
    for job in rig.play("stream", rig.engine(), orders):
        compare_text(rig, job)
        ids = job.output("").token_ids
        rig.counters["spaces_after_nothing"] += sum(pair == (EOS, space) for pair in pairwise(ids))


def encoder(rig: Rig, quick: bool) -> None:
    """Sources of many lengths, some equal, in one batch; forked, in pages of one, losing their
    pages after every second step."""
    orders = [
        Order(words(n, n), p, at=i)
        for i, (n, p) in enumerate(
            ((21, PLAIN), (1, GREEDY), (34, THREE), (8, PENALISED), (21, CUT))
        )
    ]
    for order in orders[:2] if quick else orders:
        rig.play("oracle", rig.engine(disable_radix_cache=True), [order])
    for size in (1, PAGE) if quick else (1, 3, PAGE, 64):
        rig.play("batch", rig.engine(page_size=size), orders)
    rig.play("preempt", rig.engine(page_size=1), [*orders, replace(orders[0], at=9)], every_second)
    rig.play(
        "abort", rig.engine(page_size=4), [replace(orders[2], abort=4), *orders[3:], orders[0]]
    )
    (job,) = rig.play("score", rig.engine(), [orders[0]])
    items(rig, rig.engine(), orders[0].prompt, job)


def items(rig: Rig, engine: Glass, prompt: tuple[int, ...], made: Job) -> None:
    """The answer of a generation, given as an item beside others of one prompt, has the
    log-probabilities of the generation."""
    answer = made.output("").completions[0]
    wanted = [answer.token_ids, words(5, 15), answer.token_ids[:1], words(9, 16)]
    forks = engine.scheduler.counters["forked"]
    job = engine.add_items(prompt, wanted)
    while engine.busy:
        engine.poison()
        engine.step()
    told = [c.logprobs for c in job.output("").completions]
    ids = [c.token_ids for c in job.output("").completions]
    rig.note(
        "items",
        [] if ids == [tuple(item) for item in wanted] else [f"the items' tokens became {ids}"],
    )
    said = answer.logprobs
    begin, source = rig.oracle.placed(prompt)
    for item, scores in zip(wanted, told, strict=True):
        want = item_scores(rig, (*begin, *item), source, len(begin))
        rig.note(
            "items",
            [f"an item of {len(item)} is not its recomputation"]
            if scores is None or scores.tobytes() != want
            else [],
        )
    same = told[0] is not None and said is not None and told[0].tobytes() == said.tobytes()
    rig.note(
        "items",
        [] if same else ["an item is not the generation it repeats"],
        "items are scored as they would be generated",
    )
    rig.counters["item_forks"] += engine.scheduler.counters["forked"] - forks


def item_scores(rig: Rig, ids: tuple[int, ...], source: tuple[int, ...], begin: int) -> bytes:
    """The bits of the log-probabilities of ids[begin:], computed whole."""
    rows = rig.oracle.logits(ids, source)[begin - 1 : -1]
    scores = log_probs(rig.parts.model.ops, rows, torch.tensor(ids[begin:])).chosen.numpy()
    rig.values.claim(ids, begin, scores, source=source)
    return scores.tobytes()


BUCKETS = (1, 2, 4, 8, 16, 32, 64)


def padded(rig: Rig, quick: bool) -> None:
    """Every step in a bucket: in company, arriving one by one, in chunks, forked, losing pages; in
    buckets far too large."""
    lengths, params = (1, 7, 16, 33, 40), (PLAIN, GREEDY, CUT, PENALISED, THREE)
    orders = [Order(words(n, n), p) for n, p in zip(lengths, params, strict=True)]
    if rig.oracle.encoder is None:
        orders.append(Order(words(9, 9), SCORED))
    late = [replace(order, at=2 * i) for i, order in enumerate(reversed(orders))]
    rig.play("pad", rig.engine(bucket_sizes=BUCKETS, chunked_prefill_size=64), orders)
    rig.play("pad", rig.engine(bucket_sizes=(50,), chunked_prefill_size=50, page_size=4), late)
    if not quick:
        rig.play(
            "pad", rig.engine(bucket_sizes=(3, 41), chunked_prefill_size=41, page_size=1), late
        )
        rig.play(
            "pad", rig.engine(bucket_sizes=BUCKETS, chunked_prefill_size=64), orders, every_second
        )


def priority(rig: Rig, quick: bool) -> None:
    """Later requests of a higher priority overtake waiting ones and take the place of running ones;
    bits do not know it."""
    orders = [
        Order(words(20, 20), PENALISED),
        Order(words(12, 21), PLAIN, at=1),
        Order(words(9, 22), CUT, at=3, priority=1),
        Order(words(17, 23), THREE, at=4, priority=2),
    ]
    ends: list[int] = []
    rig.play("priority", rig.engine(max_running_requests=1, page_size=4), orders, watch_ends(ends))
    rig.note(
        "order",
        [] if ends == [3, 2, 0] else [f"requests ended in the order {ends}"],
        "the higher priority first",
    )
    rig.counters["displaced"] = rig.counters["preempted"]
    rig.play(
        "priority",
        rig.engine(max_total_tokens=64, page_size=4, chunked_prefill_size=PAGE + 3),
        orders,
    )
    rig.play(
        "priority",
        rig.engine(max_running_requests=3),
        [replace(o, priority=i % 3 - 1) for i, o in enumerate(orders)],
    )


def watch_ends(ends: list[int]) -> Disturb:
    """Writes down which requests have ended, in the order in which they did."""

    def see(engine: Glass, jobs: list[Job], step: int) -> None:
        ends.extend(i for i, job in enumerate(jobs) if job.done and i not in ends)

    return see


def error(rig: Rig, quick: bool) -> None:
    """The model raises in the middle of a step, some layers written: the engine goes on, nothing is
    lost, everybody has its bits."""
    lengths, params = (19, 26, 12, 21), (PENALISED, CUT, THREE, PLAIN)
    orders = [
        Order(words(n, 30 + n), p, at=2 * i)
        for i, (n, p) in enumerate(zip(lengths, params, strict=True))
    ]
    if rig.oracle.encoder is None:
        orders.append(Order(words(23, 31), SCORED, at=3))
    for calls in (
        ((0, 5), (1, 2, 3, 17))
        if quick
        else ((0, 5), (1, 2, 3, 17), (8,), (11, 12, 25), tuple(range(1, 60, 4)))
    ):
        engine = rig.engine(
            page_size=4, chunked_prefill_size=PAGE + 3 if rig.oracle.encoder is None else 64
        )
        engine.runner.backend = Failing(engine.runner.backend, calls)
        jobs = rig.play("error", engine, orders)
        lost = [f"request {i} never ended" for i, job in enumerate(jobs) if not job.done]
        rig.note(
            "error",
            lost
            if len(jobs) == len(orders)
            else [f"{len(jobs)} of {len(orders)} requests were taken in", *lost],
        )


def anything(tiny: Tiny) -> bool:
    """Models of every kind."""
    return True


def encodes(tiny: Tiny) -> bool:
    """Only an encoder-decoder has sources."""
    return tiny is BART


def one_model(tiny: Tiny) -> bool:
    """The sampler sees logits and no model: one stands for all."""
    return tiny is LLAMA


def cached_whole(tiny: Tiny) -> bool:
    """One model that keeps all keys, and one that drops some."""
    return tiny is LLAMA or tiny is QWEN3


ENGINE_RECIPES = (
    EngineRecipe(
        "engine-batch",
        "alone and in batches, arriving together and one by one",
        batch,
        ("batched_steps", "mixed_steps", "forked"),
    ),
    EngineRecipe(
        "engine-chunk", "prompts in chunks of any size", chunk, ("chunks", "batched_steps")
    ),
    EngineRecipe(
        "engine-hit",
        "a cached prefix around a page, second turns, tenants, twins",
        hit,
        ("hit_tokens", "chunks"),
    ),
    EngineRecipe(
        "engine-evict", "a cache that is too small", evict, ("hit_tokens", "evicted_pages")
    ),
    EngineRecipe("engine-page", "pages of other sizes", page, ("hit_tokens", "batched_steps")),
    EngineRecipe(
        "engine-preempt",
        "pages lost after every second step",
        preempt,
        ("forced", "short_of_pages", "recomputed_rows", "hit_tokens"),
    ),
    EngineRecipe(
        "engine-abort", "neighbours that leave", abort, ("aborted", "hit_tokens", "forked")
    ),
    EngineRecipe("engine-n", "n completions of one prompt", several, ("forked", "batched_steps")),
    EngineRecipe(
        "engine-score",
        "log-probabilities of given tokens",
        score,
        ("scored_tokens", "chunks", "item_forks"),
    ),
    EngineRecipe(
        "engine-stream",
        "text as it comes, characters in pieces, stop strings",
        stream,
        ("characters", "stopped", "spaces_after_nothing"),
    ),
    EngineRecipe(
        "engine-encoder",
        "sources read by an encoder",
        encoder,
        ("preempted", "forked", "hit_tokens", "item_forks"),
        encodes,
    ),
    EngineRecipe(
        "engine-dtype",
        "a cache that rounds its keys",
        asked.cache_dtypes,
        ("rounded_requests", "preempted", "forked"),
        lambda _: True,
    ),
    EngineRecipe(
        "engine-running", "no more at once than asked for", asked.running, ("held_back", "forked")
    ),
    EngineRecipe(
        "engine-uncached",
        "without a prefix cache, and with one",
        asked.uncached,
        ("turns", "hit_tokens"),
    ),
    EngineRecipe(
        "engine-end",
        "where a text ends",
        asked.ends,
        ("open_ends", "stopped", "stopped_at_once", "eos"),
    ),
    EngineRecipe("engine-embed", "embeddings between other steps", asked.embed, ("embedded",)),
    EngineRecipe("engine-text", "prompts and items as strings", asked.texts, ("items",)),
    EngineRecipe("engine-folder", "a model from its files", asked.folder, ("folders",), one_model),
    EngineRecipe(
        "engine-pad",
        "steps padded to buckets",
        padded,
        ("pad_rows", "forked", "batched_steps"),
        anything,
    ),
    EngineRecipe(
        "engine-priority", "requests that go first", priority, ("displaced", "forked", "hit_tokens")
    ),
    EngineRecipe(
        "engine-error",
        "a model that raises in the middle of a step",
        error,
        ("failed_steps", "forked"),
        anything,
    ),
    EngineRecipe(
        "capacity",
        "arenas, buckets, contexts and caches that are exactly full",
        limits.capacity,
        ("full_arenas", "full_buckets", "full_contexts", "full_caches"),
        cached_whole,
    ),
    EngineRecipe(
        "experts", "the choice of experts: ties", limits.experts, ("tied_rows",), one_model
    ),
    EngineRecipe(
        "sample",
        "the choice of a token: masks, cuts, ties, noise, its distribution",
        sampling.choices,
        ("rows", "later_blocks"),
        one_model,
    ),
    EngineRecipe(
        "seeds",
        "mixed parameters in a batch, seeds, penalties",
        sampling.seeds,
        ("rows", "seeds_drawn"),
        one_model,
    ),
)


def judge(
    recipe: EngineRecipe, tiny: Tiny, backend: Backend, checks: bool = True, quick: bool = False
) -> Judgement:
    """Plays a recipe and gathers what was found."""
    rig = Rig(tiny, backend, checks)
    recipe.play(rig, quick)
    result = Judgement(counters=dict(rig.counters))
    for name in (n for n in rig.faults if n != "raised"):
        result.add(name, rig.faults[name], rig.held[name])
    value(rig, result)
    result.add(
        "paths",
        [f"{name} is 0" for name in recipe.proves if not rig.counters[name]],
        ", ".join(recipe.proves),
    )
    if rig.faults.get("raised"):
        result.add("raised", rig.faults["raised"], "")
    return result


def value(rig: Rig, result: Judgement) -> None:
    """What the engine's layers say, against the plain float64 model, within `values`' tolerance."""
    verdict = rig.values.verdict()
    if not verdict.judged and not verdict.faults:
        return
    result.out_error, result.tolerance_used = verdict.error, verdict.used
    held = (
        f"{verdict.judged} numbers, max error {verdict.error:.3g}, {verdict.used:.3g} of the "
        "tolerance"
    )
    if verdict.undecided:
        held += f"; {verdict.undecided} behind experts too close to tell apart are left out"
    result.add("value", verdict.faults, held)
