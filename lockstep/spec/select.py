"""Selects an engine's draft: from its options to a `Speculation`, or to an error with the reason.

An algorithm is a file beside this one. Knows names, defaults and the requirements on a target; the
engine calls it when it is made.
"""

from collections.abc import Callable, Sequence
from importlib import import_module

from lockstep.attention.base import Backend
from lockstep.attention.select import refusal
from lockstep.config import EngineConfig
from lockstep.models.loader import Info, Loaded
from lockstep.plan.bucket import RECORDED_ROWS, Buckets
from lockstep.run.kind import StepKind, group_specs, kinds_of
from lockstep.run.runner import Chain, Runner
from lockstep.spec.draft import Draft, DraftModel, DraftSetup
from lockstep.spec.model_draft import ModelDraft
from lockstep.spec.ngram import NgramDraft
from lockstep.spec.speculation import Report, Speculation, TreeShape
from lockstep.types import RuleError

MOST = 1024  # most tokens of a draft, and of all its levels
STEPS = {"ngram": 8, "draft": 4, "eagle": 6, "eagle3": 6}  # default depths
VARIANTS = 4  # most graphs of one shape (`Backend.wider`)
FILES = {"draft": "draft_model", "eagle": "eagle", "eagle3": "eagle3"}

Loader = Callable[[DraftSetup], DraftModel]


def shape_of(config: EngineConfig) -> TreeShape:
    """Returns the largest size of drafts that the options allow."""
    steps = config.speculative_num_steps or STEPS[config.speculative_algorithm or ""]
    rows, k = config.speculative_num_draft_tokens, config.speculative_eagle_topk or 1
    if rows is not None and rows < 2:
        rule = "speculative_num_draft_tokens counts the last token and at least one draft token"
        raise RuleError(rule, str(rows), "Use 2 or more")
    if rows is not None and k == 1 and config.speculative_num_steps is None:
        steps = rows - 1
    most = k + (steps - 1) * k * k
    nodes = min(most, steps * k) if rows is None else rows - 1
    if not steps <= nodes <= most:
        rule = f"{steps} steps of top-k {k} give from {steps} to {most} draft tokens"
        raise RuleError(rule, str(nodes), "Change their number, the steps or top-k")
    if max(steps * k, nodes) > MOST:
        rule = f"a draft has at most {MOST:,} tokens, and so have all its levels of top-k together"
        raise RuleError(rule, f"{nodes:,} tokens, {steps:,} levels of {k:,}", "Ask for fewer")
    return TreeShape(steps, k, nodes)


def most_rows(config: EngineConfig) -> int:
    """Returns the most rows of a draft's step: padding at most doubles the number of requests."""
    padded = 2 * config.max_running_requests * max(shape_of(config).widths)
    return max(config.bucket_sizes or (config.chunked_prefill_size, padded))


def load(
    config: EngineConfig, target: Loaded, backend: Backend, loader: Loader | None
) -> DraftModel | None:
    """Loads the model that drafts; None if there is no speculation, or the algorithm has no model.
    Raises if speculation is asked for and impossible."""
    algorithm = config.speculative_algorithm
    if algorithm is None:
        return None
    model = target.model
    if model.encodes or not model.generates:
        rule = "speculation continues a decoder's text"
        got = "an encoder-decoder" if model.encodes else "a model for embeddings"
        raise RuleError(rule, got, "Leave speculative_algorithm out")
    if shape_of(config).top_k > 1 and not backend.caps.tails:
        rule = "a tree of drafts needs a backend that states `tails`"
        got = f"{type(backend).__module__}, which does not"
        raise RuleError(rule, got, "Use speculative_eagle_topk 1, or another backend")
    if algorithm not in FILES:
        return None
    kinds = kinds_of(model, config.page_size, config.kv_cache_dtype)
    setup = DraftSetup(config, target, len(group_specs(kinds.values())), most_rows(config))
    if loader is None:
        loader = import_module(f"lockstep.spec.{FILES[algorithm]}").load
    draft = loader(setup)
    for spec in draft.kind.specs:
        dtype = str(model.ops.dtype).removeprefix("torch.")
        reason = refusal(backend.caps, spec, model.ops.device.type, dtype=dtype)
        if reason is not None:
            rule = "the target's attention backend computes the draft's layers too"
            raise RuleError(rule, reason, "Use another draft, or another backend")
    return draft


Launch = tuple[StepKind, int, bool, Chain | None]  # a kind, `width`, `every` and `chain`


def launches(config: EngineConfig, target: StepKind, model: DraftModel | None) -> list[Launch]:
    """Returns the steps to record when an engine starts, as `Runner.capture` takes them: the
    target's, chains' and verifying ones, with few rows. Those of trees are when they occur."""
    found: list[Launch] = [(target, 1, False, None)]
    if config.speculative_algorithm is not None and (shape := shape_of(config)).top_k == 1:
        found += [(target, n + 1, True, None) for n in shape.depths]
        if model is not None:
            found += [
                (model.extend, shape.steps + n, False, Chain(model.kind, n)) for n in shape.depths
            ]
    return [launch for launch in found if launch[1] <= RECORDED_ROWS]


def logits_of(launches: Sequence[Launch], config: EngineConfig) -> int:
    """Returns the most rows of logits that the graphs of these launches keep together."""
    rows = sum(width if every else 1 for _, width, every, chain in launches if chain is None)
    sizes = Buckets.for_decoding(config.max_running_requests, 0, 0).tokens
    return VARIANTS * rows * sum(sizes)


def speculation(
    config: EngineConfig, model: DraftModel | None, runner: Runner, info: Info, report: Report
) -> Speculation | None:
    """Returns what the engine calls between steps; None without speculation."""
    if config.speculative_algorithm is None:
        return None
    shape = shape_of(config)
    draft: Draft = NgramDraft()
    if model is not None:
        draft = ModelDraft(model, runner, shape.top_k, shape.steps, most_rows(config), info)
    return Speculation(draft, shape, runner, config.context_length or info.max_position, report)
