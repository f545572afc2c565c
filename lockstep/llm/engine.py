"""The engine: schedule, advance, run, sample, settle, publish, until no request is left.

Joins parts that do not know each other: a scheduler without tensors, a model without requests and a
sampler without either. With `overlap` a step is settled after the next one has been launched. Calls
take turns. An exception may strike anywhere, so generations change only by one frozen result per
step, which can be written again. Everything else is suspect while `_changing` is set; the next call
then rebuilds it from the generations.
"""

import gc
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from itertools import count
from pathlib import Path
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from lockstep import __version__, order
from lockstep.attention.base import Backend
from lockstep.attention.select import BACKENDS, select
from lockstep.config import EngineConfig
from lockstep.folder import has
from lockstep.kernels.cpu.threads import engine_turn
from lockstep.kernels.select import DEVICES
from lockstep.kv.pool import cache_size
from lockstep.kv.tables import PagePool
from lockstep.llm import prompts
from lockstep.llm.accept import accept
from lockstep.llm.calls import GONE, Caller, Turn, executing, pause_gc
from lockstep.llm.generation import Ending, Generation, StepResult
from lockstep.llm.output import Chunk
from lockstep.llm.rows import Launched, SampledRows, compute_scores
from lockstep.models import loader
from lockstep.models.loader import Info, Loaded
from lockstep.nn.decoder import Model
from lockstep.ops import TRANSPARENT
from lockstep.plan.bucket import Buckets
from lockstep.plan.build import build
from lockstep.plan.step import StepPlan
from lockstep.run.certify import certify
from lockstep.run.kind import DRAFT, EMBED, ENCODE, GENERATE, group_specs, kinds_of
from lockstep.run.runner import GUESSES, Runner, StepOutput
from lockstep.sample import sampler
from lockstep.sample.params import SamplingParams, resolve_seed
from lockstep.sched.request import AcceptedTokens, Batch, Request, RequestSpec, ScheduledStep
from lockstep.sched.scheduler import Scheduler
from lockstep.spec import select as drafts
from lockstep.spec.draft import DraftModel, DraftSetup
from lockstep.text import Tokenizer
from lockstep.types import INT32_MAX, Choice, RuleError, checked_int, format_value

ITEM = SamplingParams(max_tokens=None, logprobs=True, seed=0)
Known = tuple[tuple[int, ...], ...]  # tokens that every completion already has; () if none has
BUILTIN = Path(__file__).parent.parent / "builtin"


@dataclass(frozen=True, eq=False)
class Parts:
    """The loaded, certified parts of an engine; several engines may share them."""

    model: Model
    info: Info
    tokenizer: Tokenizer | None
    backend: Backend
    attention: Choice  # the backend and the reason
    certificate: str  # the digest of the proven bits, or "none"
    # loads its draft model; None: the module of spec/ for the algorithm does
    draft: Callable[[DraftSetup], DraftModel] | None = None

    def fingerprint(self, kv_dtype: str) -> str:
        """Returns what determines an answer's bits as `name=value;...`. If order = canonical, equal
        fingerprints promise equal bits: everything that may change a bit is in it."""
        ops, info = self.model.ops, self.info
        packages = ["torch", "numba", "llvmlite"]
        if ops.device.type == "cuda":
            packages.append("triton")
        fields = [
            f"order={self.backend.caps.order}",
            f"backend={BACKENDS.owned(self.attention.name)}",
            f"gemm={ops.gemm_order.name}",  # the order of its sums
            f"device={DEVICES.owned(info.device.name)}",
            f"machine={ops.machine}",  # its class
            f"sums={order.ORDER_NAMES[order.device_class(ops.machine)]}",  # that class's order
            f"dtype={str(ops.dtype).removeprefix('torch.')}",  # of activations
            f"lockstep={__version__}",
            ",".join(f"{package}={version(package)}" for package in packages),
            f"kv={kv_dtype}",
            f"weights={info.weights}",  # the digest of the tensors
            f"certificate={self.certificate}",  # of the layers' kinds and their bits
        ]
        if info.rope_context is not None:  # the context that a dynamic rope was stretched to
            fields.append(f"rope_context={info.rope_context}")
        return ";".join(fields)


def load(config: EngineConfig) -> Parts:
    """Loads the model (folder, hub id or built-in) for its device, and selects a backend."""
    loaded = loader.load(config.model or BUILTIN, config)
    folder = loaded.info.folder
    tokenizer = Tokenizer.from_folder(folder) if has(folder, "tokenizer.json") else None
    return prepare(loaded, tokenizer, config)


def prepare(
    loaded: Loaded, tokenizer: Tokenizer | None, config: EngineConfig | None = None
) -> Parts:
    """Selects a backend and proves that rows do not depend on their neighbours."""
    (model, info), ops = loaded, loaded.model.ops
    dtype = str(ops.dtype).removeprefix("torch.")
    config = (config or EngineConfig()).settled(dtype)
    groups = model.groups(config.page_size, config.kv_cache_dtype)
    backend, attention = select(config.attention_backend, groups, ops.device.type, dtype)
    return Parts(
        model=model,
        info=info,
        tokenizer=tokenizer,
        backend=backend,
        attention=attention,
        certificate=certify(model, backend, info, config),
    )


class Engine:
    """A model, its cache and its queue. `add` prompts, call `step` while `busy`. `startup_report`
    lists what was chosen, and why."""

    def __init__(self, config: EngineConfig, parts: Parts, overlap: bool | None = None) -> None:
        ops = parts.model.ops
        config = config.settled(str(ops.dtype).removeprefix("torch."))
        self.config, self.parts = config, parts
        self.info, self.tokenizer = parts.info, parts.tokenizer
        self.on_gpu = ops.device.type == "cuda"  # where `overlap` is the default
        overlap = self.overlap = self.on_gpu if overlap is None else overlap
        self.context_length = config.context_length or self.info.max_position
        if self.context_length > self.info.max_position:
            rule = f"context_length is at most the model's {self.info.max_position} positions"
            raise RuleError(rule, str(config.context_length), "Leave it out, or lower it")
        target = Loaded(parts.model, parts.info)
        draft = self.draft_model = drafts.load(config, target, parts.backend, parts.draft)
        layers = () if draft is None else draft.target_layers
        sizes = config.page_size, config.kv_cache_dtype
        self.kinds = kinds_of(parts.model, *sizes, hidden_layers=layers)
        if draft is not None:
            self.kinds[DRAFT] = draft.kind
        specs = self.specs = group_specs(self.kinds.values())
        graphs = config.graphs
        if graphs is None:  # on a CPU, where recording is faster
            graphs = self.on_gpu or (parts.backend.caps.graphs and hasattr(ops.linear, TRANSPARENT))
        launches = list[drafts.Launch]()  # that a GPU captures now
        if graphs and self.on_gpu and GENERATE in self.kinds:
            launches = drafts.launches(config, self.kinds[GENERATE], draft)
        logit_bytes = parts.model.logits_dtype.itemsize
        outputs = drafts.logits_of(launches, config) * self.info.vocab_size * logit_bytes
        pages, memory_text = cache_size(specs, config, self.context_length, ops.device, outputs)
        buckets, every = self._buckets(graphs and self.on_gpu, 2 * max(pages)), bool(config.graphs)
        self.runner = Runner(
            specs, pages, parts.backend, ops, buckets, graphs=graphs, overlap=overlap, every=every
        )
        say = partial(print, file=sys.stderr, flush=True)
        self.speculation = drafts.speculation(config, draft, self.runner, self.info, say)
        self._num_pages = pages
        self.scheduler = self._new_scheduler()
        self.fingerprint = parts.fingerprint(config.kv_cache_dtype)
        self.generations: dict[str, Generation] = {}  # by the id of the request
        self._numbers = count()
        chosen = {"attention": parts.attention, "device": self.info.device, "gemm": ops.gemm_order}
        reasons = [f"{what} {choice.name}: {choice.reason}" for what, choice in chosen.items()]
        self.startup_report = "; ".join([*reasons, memory_text])
        self._turns: list[Turn] = []
        self._changing = False  # set while state other than the generations may be half changed
        self._launched: list[Launched] = []  # not settled yet, in order
        self._rows: WeakKeyDictionary[Batch, SampledRows] = WeakKeyDictionary()
        self._callers: set[Caller | None] = set()  # of generations, some of which have left
        self._all_held = False  # every request of the last launched step waits for it to settle
        # the result of a step that has happened, until it is written to its generations
        self._settled: StepResult | None = None
        for kind, width, every, chain in launches:
            self.runner.capture(kind, say, width, every, chain)
        if launches:
            gc.freeze()  # a full collection of all this would stall a step for 0.2 s

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished; abandoned ones do not count."""
        with Turn(self._turns):
            self._clean_up(thorough=True)
            return bool(self.generations)

    def add(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams | None = None,
        embed: bool = False,
        scores_only: bool = False,
        *,
        request_id: str = "",
        priority: int = 0,
        tenant: str = "",
        generated: Sequence[Sequence[int]] = (),
        caller: Caller | None = None,
    ) -> Generation:
        """Queues a prompt (an encoder-decoder's source), or raises with the reason. `embed` and
        `scores_only` ask for no new tokens. A higher `priority` runs first; cached keys are shared
        only within a `tenant`. Generation continues after the tokens that every completion already
        has (`generated`). A generation is identified by `request_id` and dropped when its `caller`
        is gone; without a caller it stays until it ends or is aborted."""
        ids, source = self._split_prompt(self._check_prompt(prompt_ids))
        for what, flag in (("embed", embed), ("scores_only", scores_only)):
            if not isinstance(flag, bool):
                raise RuleError(f"{what} is True or False", format_value(flag), "Pass a bool")
        (params,) = prompts.params_for(params, 1)
        params.check_vocab(self.info.vocab_size)
        scored = params.top_prompt_logprobs is not None
        if source and scored:
            rule = "a prompt is scored by a decoder"
            raise RuleError(rule, "an encoder-decoder", "Score items that follow the prompt")
        if source and embed:
            rule = "embeddings come from decoders and encoders"
            raise RuleError(rule, "an encoder-decoder", "Use it for generation")
        for what, name in (("a tenant", tenant), ("a request_id", request_id)):
            if not isinstance(name, str):
                rule = f"{what} is a string"
                raise RuleError(rule, format_value(name), "Leave it out for the default")
        room = self.context_length - len(ids)
        new = 0 if embed or scores_only else params.max_new_len(room)
        if new > room:
            rule = f"prompt and new tokens fit into the context of {self.context_length}"
            remedy = f"Use max_tokens of at most {max(room, 0)}, or a shorter prompt"
            raise RuleError(rule, f"{len(ids)} + {new}", remedy)
        first = "0 is the default, a higher one runs first"
        known = self._check_generated(generated, params, new)
        speculative = self.speculation is not None and params.speculative and new > 1
        spec = RequestSpec(
            prompt=ids,
            max_new_tokens=new,
            n=params.n,
            priority=checked_int("priority", priority, -INT32_MAX, INT32_MAX, first),
            wants_prompt_logprobs=scored,
            encoder_ids=source,
            tenant=tenant,
            embed=embed,
            speculative=speculative,
            draft=speculative and self.draft_model is not None,
            needs_values=params.penalised,
            request_id=request_id or self._free_id(),
        )
        return self._take(spec, resolve_seed(params), caller, known)

    def add_items(
        self,
        prompt_ids: Sequence[int],
        items: Sequence[Sequence[int]],
        caller: Caller | None = None,
    ) -> Generation:
        """Queues one prompt and the continuations whose log-probabilities are wanted."""
        ids, source = self._split_prompt(self._check_prompt(prompt_ids))
        given = tuple(self._check_prompt(item) for item in prompts.items(items))
        longest = max(map(len, given), default=0)
        if not given or len(ids) + longest > self.context_length:
            fit = f"prompt and item fit into the context of {self.context_length}"
            got = f"{len(given)} items, {len(ids)} + {longest} tokens"
            raise RuleError(f"there is an item, and {fit}", got, "Pass one, or shorten it")
        spec = RequestSpec(ids, 0, encoder_ids=source, items=given, request_id=self._free_id())
        return self._take(spec, ITEM, caller)

    def _check_generated(
        self, generated: Sequence[Sequence[int]], params: SamplingParams, new: int
    ) -> Known:
        """Returns the tokens that were `generated` before, checked; () if there are none."""
        form = ("tokens already generated are a list of ids per completion", "Pass [[id, ...]]")
        each = [prompts.elements(ids, *form) for ids in prompts.elements(generated, *form)]
        known = tuple(prompts.token_ids(ids, self.info.vocab_size) for ids in each)
        if known and (not new or len(known) != params.n or any(known) != all(known)):
            rule = "tokens already generated are given for every completion or for none"
            raise RuleError(rule, f"{list(map(len, known))} for n={params.n}", "Give them all")
        if known and params.seed is None and not params.greedy:
            rule = "a sampled request that continues generated tokens names its seed"
            raise RuleError(rule, "None", "Pass the seed of its first part")
        return known if any(known) else ()

    def _free_id(self) -> str:
        """Returns an unused id for a request that was added without one."""
        names = (f"#{number}" for number in self._numbers)
        return next(name for name in names if name not in self.generations)

    def _take(
        self, spec: RequestSpec, params: SamplingParams, caller: Caller | None, known: Known = ()
    ) -> Generation:
        with Turn(self._turns):
            self._clean_up()
            self.scheduler.refuse(spec)
            if spec.request_id in self.generations:
                rule = "unfinished requests have different ids"
                raise RuleError(rule, f"a second {spec.request_id!r}", "Choose another id")
            request = Request(spec, self.scheduler.arrivals)
            text = (self.tokenizer, self.info.eos_token_ids)
            generation = Generation(params, request, text, caller)
            if known:
                generation.continue_from(known)
            if not generation.done:
                self._changing = True
                self.scheduler.resume(generation.requests_to_resume())
                self.generations[spec.request_id] = generation
                self._callers.add(caller)
                self._changing = False
            return generation

    def _split_prompt(self, ids: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns (the decoder's first tokens, the encoder's source or ())."""
        if ENCODE not in self.kinds:
            return ids, ()
        start = self.info.decoder_start_token_id
        if start is None:
            rule = "an encoder-decoder's config names decoder_start_token_id"
            raise RuleError(rule, "none", "Add it to config.json")
        return (start,), ids

    def abort(self, generation: Generation) -> None:
        """Ends a generation now; its output so far stays readable."""
        generation.caller = GONE
        with Turn(self._turns):
            self._callers.add(GONE)
            self._clean_up()

    def step(self) -> list[Generation]:
        """Runs one step. Returns the generations that it touched; finished ones have left."""
        with Turn(self._turns), nullcontext() if self.on_gpu else engine_turn():
            self._clean_up()
            self._changing = True
            with pause_gc():  # the device is idle until the next launch
                touched = self._settle(0) if self._all_held else []
                step = self._schedule()
                if step is not None:
                    self.scheduler.advance(step)
                    self._launched.append(self._launch(step))
                    self._look_ahead(self._launched[-1])
            touched += self._settle(int(self.overlap and step is not None))
            self._write()
            self._changing = False
        return self._publish(touched)

    def new_chunks(self, generation: Generation) -> tuple[list[Chunk], bool]:
        """Returns a generation's new output since the last call, and whether it is complete."""
        generation.publish()  # without a lock on the engine
        with Turn(self._turns):
            self._clean_up()
            return generation.new_chunks(), generation.done

    def check(self) -> None:
        """Raises unless every page is free, cached, or held by a live request."""
        with Turn(self._turns):
            self._clean_up(thorough=True)
            self.scheduler.check()

    # -- one step

    def _schedule(self) -> ScheduledStep | None:
        """Returns the next step, with draft tokens proposed for its requests."""
        if self.speculation is not None:
            self.speculation.propose(self.scheduler, self._params_of)
        return self.scheduler.schedule()

    def _launch(self, step: ScheduledStep) -> Launched:
        """Launches a step and its sampling. The launch itself samples if every emitted row is
        sampled and no logits are edited first."""
        rows = self._rows.get(step.batch)
        if rows is None:  # kept as long as the scheduler keeps the batch
            rows = self._rows[step.batch] = SampledRows.of(step.batch, self._generation)
        batch = self._row_batch(step, rows)
        fused = step.kind.name == GENERATE and bool(rows.completions)
        fused = fused and not rows.scored and not sampler.edited_rows(batch)
        settings = sampler.settings(batch, self.info.vocab_size) if fused else None
        out = self.runner.run(self._plan(step), step.ids, step.kind, settings)
        launched = self._sample(step, rows, batch, out)
        if (least := int(step.ids.min(initial=0))) < -GUESSES:
            launched = replace(launched, guesses=self.runner.sampled[GUESSES:-least].clone())
        if self.overlap and launched.chosen is not None:
            self.runner.keep(launched.first_ids(launched.chosen))
        return launched.fetch() if self.on_gpu else launched

    def _plan(self, step: ScheduledStep) -> StepPlan:
        return build(step.kind.specs, step.work)

    def _look_ahead(self, launched: Launched) -> None:
        """Holds the requests that are drafted next; the draft may start on the launched step."""
        if self.speculation is not None:
            self._all_held = self.overlap and self.speculation.hold(launched.step)
            self.speculation.launched(self.scheduler, launched.step, launched.hidden)

    def _sample(
        self, step: ScheduledStep, rows: SampledRows, batch: sampler.RowBatch, out: StepOutput
    ) -> Launched:
        """Computes what each request gets: a step is of one kind. Waits for no device work."""
        ops = self.parts.model.ops
        if step.kind.name == EMBED:
            vectors = step.kind.model.embed(out.rows, list(step.batch.begins))
            return Launched(step, rows, embeddings=vectors)
        if step.kind.name == ENCODE:
            return Launched(step, rows)
        logits = step.kind.model.logits(out.emitted) if out.logits is None else out.logits
        hidden = out.states if step.batch.drafts else None
        if hidden is not None:  # a replay overwrites this memory
            hidden = hidden[: len(step.ids)]
            hidden = hidden.copy() if isinstance(hidden, np.ndarray) else hidden.clone()
        scores = compute_scores(ops, step, rows, logits)
        launched = Launched(step, rows, scored=scores, hidden=hidden)
        if not rows.completions:
            return launched
        if out.sampled is None:
            emits = rows.draws.emits
            wanted = logits if len(emits) == len(logits) else logits[list(emits)]
            chosen = sampler.sample(ops, wanted, batch, self.info.eos_token_ids)
        else:
            (tokens, states), count = out.sampled, len(rows.draws.emits)
            if len(tokens) > count:
                tokens, states = tokens[:count], states[:count]
            if self.overlap and not self.on_gpu:  # the next launch precedes settling
                tokens, states = tokens.clone(), states.clone()
            chosen = sampler.with_logprobs(ops, logits, rows.draws.how, tokens, states)
        begins = batch.positions - batch.how.prompt_lens
        if rows.drafts:
            begins = begins[list(rows.firsts)]
        return replace(launched, begins=tuple(begins.tolist()), chosen=chosen)

    def _row_batch(self, step: ScheduledStep, rows: SampledRows) -> sampler.RowBatch:
        draws = rows.draws
        positions = draws.positions(step.cached_lens)
        history = {}
        for row, path in draws.penalised:
            owner = draws.owners[row]
            begin = step.batch.begins[owner]
            before = step.batch.requests[owner].tokens[: positions[row] - len(path)]
            nodes = [step.ids.item(begin + node) for node in path]
            history[row] = np.array([*before, *nodes], np.int32)
        return sampler.RowBatch(draws.how, positions, history)

    def _settle(self, later: int) -> list[Generation]:
        """Settles all launched steps but the last `later`. A step has happened from the moment that
        `_settled` is set, and not before. The last result is still to be written."""
        touched: list[Generation] = []
        while len(self._launched) > later:
            self._write()
            launched = self._launched.pop(0)
            if launched.ready is not None:
                launched.ready.synchronize()
            generations, requests = launched.rows.generations, launched.step.batch.requests
            if self.scheduler.ends > launched.step.ends:
                pairs = zip(generations, requests, strict=True)
                generations = tuple(each for each, request in pairs if request.finish is None)
            touched += generations
            result, accepted = self._result(launched)
            ended = self.scheduler.settle(launched.step, accepted)
            if self.speculation is not None and launched.step.kind.name == GENERATE:
                self.speculation.settled(launched.step, accepted, launched.hidden)
            owners = [(self._generation(request), request) for request in ended]
            endings = [Ending(g.completions[r.index], r.finish or "stop") for g, r in owners]
            endings = [*result.endings, *endings]
            leaving = frozenset(generation for generation, _ in owners)
            self._settled = replace(result, endings=tuple(endings), leaving=leaving)
        return touched

    def _write(self) -> None:
        """Writes the last settled result, if any. May be interrupted anywhere and repeated."""
        if self._settled is None:
            return
        self._settled.write()
        for generation in self._settled.leaving:
            if generation.done:
                self.generations.pop(generation.request.spec.request_id, None)
        self._settled = None

    def _result(self, launched: Launched) -> tuple[StepResult, AcceptedTokens]:
        """Returns what generations and the scheduler get; requests that ended get nothing."""
        tokens, endings, accepted = None, list[Ending](), AcceptedTokens()
        if launched.chosen is not None:
            some_ended = self.scheduler.ends > launched.step.ends
            tokens, accepted, endings = accept(launched, launched.chosen, some_ended)
        scores = tuple(score for score in launched.scored if score.request.finish is None)
        embedded: list[tuple[Generation, NDArray[np.float32]]] = []
        if launched.embeddings is not None:
            vectors = zip(launched.rows.generations, launched.embeddings.numpy(), strict=True)
            embedded = [pair for pair in vectors if pair[0].request.finish is None]
        return StepResult(tokens, scores, tuple(embedded), tuple(endings)), accepted

    def _publish(self, touched: list[Generation]) -> list[Generation]:
        """Detokenises, unlocked, while a device computes; otherwise the text's reader does."""
        for generation in touched if self.overlap and self.tokenizer is not None else ():
            generation.publish()
        return touched

    def _generation(self, request: Request) -> Generation:
        return self.generations[request.spec.request_id]

    def _params_of(self, request: Request) -> SamplingParams:
        return self._generation(request).completions[request.index].params

    # -- between calls

    def _clean_up(self, thorough: bool = False) -> None:
        """Recovers half-changed state and drops abandoned generations. A sole caller is the one
        that calls now: it is checked only if `thorough`."""
        if self._changing:
            self._recover()
        if thorough or len(self._callers) > 1 or GONE in self._callers:
            for generation in self._abandoned():
                self._changing = True
                self.scheduler.abort(generation.request)
                generation.end("abort")
                self.generations.pop(generation.request.spec.request_id, None)
                self._changing = False
            self._callers = {generation.caller for generation in self.generations.values()}

    def _abandoned(self) -> list[Generation]:
        owned = [(each, each.caller) for each in self.generations.values() if each.caller]
        frames = executing() if owned else set()
        return [each for each, caller in owned if caller.gone(frames)]

    def _recover(self) -> None:
        """Rebuilds pages, tree and queue from the generations, as if all had been preempted. Drops
        the prefix cache and every launched step that is not settled. Changes nothing that it reads
        before `_changing` is unset, so it may be interrupted anywhere and repeated."""
        self._write()
        for generation in self._abandoned():
            generation.end("abort")
        generations = {name: each for name, each in self.generations.items() if not each.done}
        scheduler = self._new_scheduler(self.scheduler.arrivals)
        for generation in generations.values():
            scheduler.resume(generation.requests_to_resume())
        scheduler.counters.update(self.scheduler.counters, recovered=1)
        if self.speculation is not None:
            self.speculation.forget()
        self.generations, self.scheduler, self._launched = generations, scheduler, []
        self._changing = False

    def _buckets(self, captured: bool, most_pages: int) -> Buckets | None:
        """Returns the buckets that steps are padded to: the config's, or those of the graphs."""
        config = self.config
        if config.bucket_sizes is not None:
            others = config.request_bucket_sizes, config.emit_bucket_sizes
            pads = max(np.diff(config.bucket_sizes, prepend=0)) - 1
            if self.parts.model.position_table and pads > self.info.max_position:
                rule = f"a pad request has at most the model's {self.info.max_position} positions"
                raise RuleError(rule, f"up to {pads} pads", "Add sizes between the bucket_sizes")
            return Buckets(config.bucket_sizes, *others)
        if not captured:
            return None
        shape = drafts.shape_of(config) if config.speculative_algorithm else None
        keys = self.context_length + (2 * shape.steps if shape else 0)  # pads of a chain included
        most, each = config.max_running_requests, -(-keys // config.page_size)
        return Buckets.for_decoding(most, each, most_pages, shape.widths if shape else (1,))

    def _new_scheduler(self, arrivals: int = 0) -> Scheduler:
        pools = [PagePool(n) if n else None for n in self._num_pages]
        return Scheduler(self.kinds, pools, self.config, arrivals)

    def _check_prompt(self, prompt_ids: prompts.Prompt) -> tuple[int, ...]:
        ids = prompts.token_ids(prompt_ids, self.info.vocab_size)
        if not ids:
            rule = "a prompt has at least one token"
            raise RuleError(rule, "an empty prompt", "Start with some text")
        if len(ids) > self.context_length:
            rule = f"a prompt has at most {self.context_length} tokens"
            raise RuleError(rule, str(len(ids)), "Shorten it")
        return ids
