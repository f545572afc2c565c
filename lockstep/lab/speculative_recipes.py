"""The recipes of speculation: whatever is guessed, by whom, how deep and how wide, every request
has the bits of its recomputation.

Drafts are the target with noise on its weights, or the text itself; they are right sometimes and
wrong sometimes, which the counters show. Committed lengths sit around a page, a tile and a window.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from lockstep.lab.engine_harness import EngineHarness
from lockstep.lab.engine_recipes import (
    CUT,
    GREEDY,
    PENALISED,
    PLAIN,
    SCORED,
    THREE,
    Options,
    every_second,
    orders_of,
)
from lockstep.lab.recompute import Order
from lockstep.lab.speculative import CHAIN, EAGLE, EAGLE3, EAGLE3_TREE, NGRAM, TREE
from lockstep.lab.tiny import CONTEXT, EOS, words

LONG = replace(PLAIN, max_tokens=20, temperature=0.4)
# every token is penalised away by the one before it, so that guesses are right and depend on it
CYCLING = replace(
    LONG, temperature=0.0, frequency_penalty=2.0, logit_bias={3: 20.0, 4: 20.0, 5: 20.0, 6: 20.0}
)
MIXED = orders_of(
    *((7, LONG), (16, CUT), (30, PENALISED), (61, replace(LONG, seed=3)), (40, SCORED)),
    *((9, THREE), (11, CYCLING)),
)


def shape(steps: int, top_k: int) -> Options:
    """Options of a model's draft."""
    tokens = min(1 + steps * top_k, 24)
    tree = {"speculative_eagle_topk": top_k, "speculative_num_draft_tokens": tokens}
    return {**CHAIN, "speculative_num_steps": steps, **(tree if top_k > 1 else {})}


def ngram(rig: EngineHarness, quick: bool) -> None:
    """Texts that repeat, greedy beside sampled beside penalised, in pages of any size."""
    block = words(9, 1)
    repeating = [
        Order(block * 3 + block[:2], replace(GREEDY, max_tokens=24)),
        Order((4, 5) * 9, replace(PENALISED, max_tokens=24)),
        Order((6, 7, 8) * 7, replace(THREE, temperature=0.9, max_tokens=16), at=2),
        Order(block * 2, replace(LONG, speculative=False), at=3),
    ]
    for size in (2,) if quick else (1, 2, 16):
        rig.story("speculative", repeating, page_size=size, **NGRAM)
    rig.story("speculative", repeating, overlap=True, **NGRAM)


def chain(rig: EngineHarness, quick: bool) -> None:
    """One, three and seven steps deep, in pages of any size, with prompts in chunks."""
    for steps, size in ((3, 2),) if quick else product((1, 3, 7), (1, 2, 16)):
        rig.story("speculative", MIXED, page_size=size, chunked_prefill_size=29, **shape(steps, 1))


def tree(rig: EngineHarness, quick: bool) -> None:
    """The best two and the best eight tokens behind each, one, three and seven steps deep."""
    cases = ((2, 3, 2),) if quick else product((2, 8), (1, 3, 7), (1, 2, 16))
    for top_k, steps, size in cases:
        rig.story("speculative", MIXED, page_size=size, **shape(steps, top_k))


def ends(rig: EngineHarness, quick: bool) -> None:
    """Stop strings, stop tokens, EOS, max_tokens and the end of the context, one request after the
    other while its neighbours go on."""
    near = CONTEXT - 6
    orders = [
        Order(words(8, 2), replace(LONG, stop=tuple("etaoinsh"), min_tokens=5)),
        Order(words(9, 3), replace(LONG, stop_token_ids=tuple(range(1, 61, 3)), min_tokens=4)),
        Order(words(7, 4), replace(LONG, ignore_eos=False, logit_bias={EOS: 30.0}, min_tokens=6)),
        *(Order(words(6, n), replace(LONG, max_tokens=n), at=n % 3) for n in (1, 2, 3, 5, 8)),
        Order(words(near, 6), replace(LONG, max_tokens=None)),
    ]
    for options in (TREE,) if quick else (NGRAM, CHAIN, TREE):
        jobs = rig.story("speculative", orders, page_size=4, **options)
        outs = [job.output("").completions[0] for job in jobs]
        rig.counters["eos"] += sum(c.token_ids[-1:] == (EOS,) for c in outs)
        rig.counters["context_ends"] += len(outs[-1].token_ids) == CONTEXT - near


def losses(rig: EngineHarness, quick: bool) -> None:
    """With nodes on their way: preempted after every second step, aborted, short of pages, settled
    late, and found again in the cache."""
    stem = words(26, 12)
    orders = [
        Order((*stem, 3), replace(PENALISED, max_tokens=16)),
        Order((*stem, 4, 5), LONG, abort=7),
        Order((*stem[:21], 6), replace(THREE, max_tokens=8), abort=9),
        Order((*stem, 9), replace(LONG, speculative=False), at=4),
        Order((*stem[:25], 3), replace(LONG, seed=6), at=12),
    ]
    for options in (TREE,) if quick else (NGRAM, CHAIN, TREE):
        rig.story("speculative", orders, every_second, page_size=4, **options)
        tight: Options = {"max_total_tokens": 96, "chunked_prefill_size": 19, "page_size": 4}
        rig.story("speculative", orders, **tight, **options)
        rig.story("speculative", orders, overlap=True, **tight, **options)


def heads(rig: EngineHarness, quick: bool) -> None:
    """Prompts that differ in the token behind a whole page, that fill their pages and fork: whole
    and cold; in chunks, found in the cache and two at a time; preempted after every second step."""
    stem = words(16, 7)
    orders = [
        Order((*stem, 3), replace(LONG, seed=1)),
        Order((*stem, 4, 9), replace(LONG, seed=2), at=7),
        Order(stem, replace(THREE, max_tokens=9), at=9),
        Order((*stem, 5), replace(LONG, seed=3), at=14),
        Order((*stem, *stem, 8), replace(GREEDY, max_tokens=14), at=16),
    ]
    for options in (EAGLE3, EAGLE3_TREE) if quick else (EAGLE, EAGLE3, EAGLE3_TREE):
        rig.story("speculative", orders, page_size=4, disable_radix_cache=True, **options)
        few: Options = {"chunked_prefill_size": 7, "max_running_requests": 2}
        rig.story("speculative", orders, page_size=4, **few, **options)
        rig.story("speculative", orders, every_second, page_size=2, **options)
