"""The recipes of the sampler's cells: what must be true of the choice of a token, whatever model
made the logits. They are made up: ties, masks, peaks and plains. Every choice is compared with
`choice`, and with the CPU's kernel, whose bits every device must have."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.kernels.cpu.ops import Ops
from lockstep.lab import choice, table
from lockstep.lab.engine_harness import EngineHarness, same_bits
from lockstep.lab.recompute import StoryRequest
from lockstep.lab.tiny import EOS
from lockstep.sample import sampler
from lockstep.sample.formulas import counter, gumbel
from lockstep.sample.params import SamplingParams
from lockstep.sample.sampler import Row, RowBatch, noise_of

WORDS = (0, 1, 2, 2**31 - 1, 2**31, 2**32 - 257, 2**32 - 129, 2**32 - 2, 2**32 - 1)
VOCAB = 37  # not a multiple of 4, the noise's group size
BLOCK = 256  # tokens whose noise is computed together
WIDE = 2 * BLOCK + 70  # a vocabulary of two blocks and a part of one
FEW = 5  # best tokens that are requested
CLOSE = 2e-6  # two float32 roundings of the noise's largest value
CHI = 45.0  # chi-square of 11 dof is above this once in 200,000 times
KINDS = table("sampler_kinds.json")["kinds"]
SIZES = {True: (160, 32, 1000), False: (400, 80, 4000)}  # rows, wide rows and draws; True: quick


def rows_of(count: int, vocab: int = VOCAB) -> tuple[Tensor, list[Row]]:
    """Returns logits with ties and masked tokens, and rows with every kind of parameters."""
    rng = np.random.default_rng(17)
    logits = rng.standard_normal((count, vocab)) * rng.choice((0.2, 2.0, 8.0), (count, 1))
    logits = logits.astype(np.float32)
    logits[::3] = np.round(logits[::3])
    logits[1::4, rng.permutation(vocab)[: vocab // 2 + 2]] = -np.inf
    rows = []
    for r in range(count):
        past = rng.integers(0, vocab, 4 + r % 13).astype(np.int32)
        params = SamplingParams.from_dict({"logprobs": 2, **KINDS[r % len(KINDS)]})
        rows.append(Row(params, len(past), 4, past))
    return torch.from_numpy(logits), rows


def sample(
    rig: EngineHarness, logits: Tensor, rows: list[Row], eos_ids: tuple[int, ...] = (EOS,)
) -> sampler.Sampled:
    """Samples by the device's operations and copies the result to the host."""
    there, batch = logits.to(rig.device.place), RowBatch.of(rows)
    found = sampler.sample(rig.parts.model.ops, there, batch, eos_ids)
    tokens, states = found.token_ids.cpu(), found.states.cpu()
    scores = found.logprobs and on_host(found.logprobs)
    return replace(found, token_ids=tokens, states=states, logprobs=scores)


def on_host(scores: sampler.Logprobs) -> sampler.Logprobs:
    return sampler.Logprobs(*(tensor.cpu() for tensor in scores))


def choices(rig: EngineHarness, quick: bool) -> None:
    noise_at_the_ends(rig)
    rows, wide, draws = SIZES[quick]
    one_by_one(rig, *rows_of(rows))
    one_by_one(rig, *rows_of(wide, WIDE))
    one_by_one(rig, *noisy_ties())
    ties(rig)
    bad_rows(rig)
    for what in ("position", "sample_index", "seed"):
        distribution(rig, what, draws)


def one_by_one(rig: EngineHarness, logits: Tensor, rows: list[Row]) -> None:
    """Compares every row with the second text of the choice and with the CPU's kernel."""
    rig.counters["rows"] += len(rows)
    chosen = sample(rig, logits, rows).token_ids
    for r, row in enumerate(rows):
        past = row.token_ids.tolist()
        want = choice.choose(logits[r].numpy(), row.params, past, row.prompt_len, (EOS,))
        have = int(chosen[r])
        fault = f"row {r}: {have}, not {want} ({row.params})"
        rig.check("choice", have == want, fault, f"{len(rows)} rows")
        rig.check("masked", bool(logits[r, have] != -torch.inf), f"row {r}: masked token {have}")
    rig.counters["later_blocks"] += int((chosen >= BLOCK).sum())
    log_probabilities(rig, logits, chosen)
    on_cpu = sampler.sample(Ops(), logits, RowBatch.of(rows), (EOS,)).token_ids
    rig.check("devices", torch.equal(on_cpu, chosen), "the CPU chooses other tokens")


def log_probabilities(rig: EngineHarness, logits: Tensor, tokens: Tensor) -> None:
    """Compares those of the chosen and the best tokens with float64; ties go to the lower id."""
    told = on_host(sampler.log_probs(rig.parts.model.ops, logits.to(rig.device.place), tokens, FEW))
    exact = logits.double().log_softmax(1)
    best = exact.sort(dim=1, descending=True, stable=True).indices[:, :FEW]
    rig.check("logprobs", torch.equal(told.top_ids.long(), best), "the best tokens differ")
    have = torch.cat((told.chosen[:, None], told.top), 1).double()
    want = exact.gather(1, torch.cat((tokens[:, None].long(), best), 1)).float().double()
    near = (have == want) | ((have - want).abs() <= 2.0**-23 * want.abs().clamp(min=1))
    wrong = (~near).any(1).nonzero().flatten().tolist()
    rig.note("logprobs", [f"row {r}: {have[r].tolist()}, not {want[r].tolist()}" for r in wrong])
    on_cpu = sampler.log_probs(Ops(), logits, tokens, FEW)
    same = all(map(torch.equal, on_cpu, told))
    rig.check("devices", same, "the CPU's log-probabilities differ")


def noisy_ties() -> tuple[Tensor, list[Row]]:
    """Returns equal logits so large that float32 hardly has room for the noise."""
    past = np.array([7, 8, 9], np.int32)
    kinds = [SamplingParams(seed=seed, logprobs=0) for seed in range(24)]
    rows = [Row(params, len(past), len(past), past) for params in kinds]
    logits = torch.full((len(rows), WIDE), 2.0**24)
    logits[::2, : BLOCK - 6] = 0.0
    return logits, rows


def noise_at_the_ends(rig: EngineHarness) -> None:
    """Checks that u is in (0, 1) for every word, and that the noise is the definition's."""
    for name, words in (("numpy", np.array(WORDS, np.int64)), ("torch", torch.tensor(WORDS))):
        for word, x in zip(WORDS, map(float, gumbel(words)), strict=True):
            near = abs(x - choice.gumbel(word)) < CLOSE
            rig.check("noise", near, f"{name}, word {word}: {x}")
    places = [(5, 0, 1), (5, 1, 1), (-3, 2, 70), (2**45, 0, 2**20)]
    ids = torch.arange(VOCAB).expand(len(places), -1)
    drawn = noise_of(torch.tensor([counter(*place) for place in places]), ids)
    for at, place in enumerate(places):
        off = float((drawn[at] - torch.from_numpy(choice.noise(*place, VOCAB))).abs().max())
        rig.check("noise", off < CLOSE, f"seed, index and position {place}: off by {off:.3g}")


def ties(rig: EngineHarness) -> None:
    """Checks that ties go to the lower id: the best token, the last of top-k, the last of top-p."""
    equal = torch.zeros(1, VOCAB)
    limits = {"temperature": (0.0, 1), "top_k": (3, 3), "top_p": (3 / VOCAB, 3)}
    for name, (limit, allowed) in [*limits.items(), ("top_k", (1, 1))]:
        params = SamplingParams.from_dict({"seed": 0, name: limit})
        rows = [[Row(params, position)] for position in range(40)]
        seen = {int(sample(rig, equal, row, ()).token_ids) for row in rows}
        fault = f"{name} {limit}: {sorted(seen)} were chosen"
        rig.check("ties", seen == set(range(allowed)), fault)


def bad_rows(rig: EngineHarness) -> None:
    """Checks that rows that cannot be sampled report why, get no token, and affect no other row."""
    logits, rows = rows_of(24)
    bad = {3: (torch.nan, "NaN"), 8: (torch.inf, "+inf"), 13: (-torch.inf, "no token is left")}
    spoilt = logits.clone()
    for r, (value, _) in bad.items():
        spoilt[r, :: 1 if value == -torch.inf else 5] = value
    have, want = sample(rig, spoilt, rows), sample(rig, logits, rows).token_ids.tolist()
    told, scores = have.errors(), have.logprobs
    assert scores is not None, "every row asks for them"
    for r, token in enumerate(have.token_ids.tolist()):
        said, scored = told.get(r, ""), bool(scores.chosen[r].isfinite())
        refused = r in bad and bad[r][1] in said and token == -1 and not scored
        fine = refused or (r not in bad and not said and token == want[r])
        fault = f"row {r}: {said or 'no error'}, token {token}, scored {scored}"
        rig.check("bad rows", fine, fault)


def distribution(rig: EngineHarness, what: str, count: int) -> None:
    """Tests counts over positions, completions or seeds against the probabilities (chi-square)."""
    logits = torch.linspace(0, 2.5, 12)
    rows = []
    for i in range(count):
        own: dict[str, Any] = {"seed": 1, "sample_index": 0, "position": 3, what: i + 3}
        position = own.pop("position")
        rows.append(Row(SamplingParams(**own), position))
    chosen = sample(rig, logits.expand(count, -1), rows, ()).token_ids
    seen = torch.bincount(chosen, minlength=12).double()
    expected = logits.double().softmax(0) * count
    chi = float(((seen - expected) ** 2 / expected).sum())
    rig.counters["rows"] += count
    fault, held = f"over {what}: chi-square {chi:.0f}, 11 dof", f"chi-square below {CHI:.0f}"
    rig.check("distribution", chi < CHI, fault, held)


def seeds(rig: EngineHarness, quick: bool) -> None:
    """Checks that rows of a batch have the bits that they have alone, and that a seed that was not
    given is drawn once, returned, and repeats the answer."""
    logits, rows = rows_of(48)
    rig.counters["rows"] += len(rows)
    alone = [sample(rig, logits[r : r + 1], rows[r : r + 1]) for r in range(len(rows))]
    for order in (list(range(len(rows))), list(reversed(range(len(rows))))):
        many = sample(rig, logits[order], [rows[r] for r in order])
        for r, have in zip(order, tokens_and_scores(many), strict=True):
            (want,) = tokens_and_scores(alone[r])
            same = have[0] == want[0] and same_bits(have[1], want[1])
            fault = f"row {r}: {have} in a batch, {want} alone"
            rig.check("batch", same, fault, "rows in a batch = alone")
    some = SamplingParams(max_tokens=10, logprobs=0, ignore_eos=True)
    kinds = (some, some, replace(some, n=2), replace(some, seed=7))
    jobs = rig.play("seed", rig.engine(), [StoryRequest((1, 2, 3), params) for params in kinds])
    drawn = [job.output("").seed for job in jobs]
    rig.counters["seeds_drawn"] += sum(seed is not None for seed in drawn[:3])
    rig.check("seed", len(set(drawn)) == 4, f"4 different seeds expected; drawn: {drawn}")
    seeded = zip(kinds, drawn, strict=True)
    orders = [StoryRequest((1, 2, 3), replace(params, seed=seed)) for params, seed in seeded]
    for i, job in enumerate(rig.play("seed", rig.engine(), orders)):
        same = job.output("").token_ids == jobs[i].output("").token_ids
        rig.check("seed", same, f"request {i} differs when its drawn seed is given")


def tokens_and_scores(sampled: sampler.Sampled) -> list[tuple[int, float]]:
    assert sampled.logprobs is not None, "every row asks for them"
    return list(zip(sampled.token_ids.tolist(), sampled.logprobs.chosen.tolist(), strict=True))
