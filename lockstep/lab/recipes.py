"""Recipes: the columns of both tables, and the scripts of the attention's, which recipes.toml has:
what happens to which request, in logical tokens.

A token is a number, its `uid`, at the end of exactly one path; its attention output is a function
of that path alone, whatever the batch, the chunk or the tree it was computed in. A script is a list
of steps; a step is a list of acts. Scripts know no pages and no tensors.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle
from typing import Any

from lockstep.lab import table
from lockstep.lab.features import WINDOW, Feature
from lockstep.order import attention_order, device_class
from lockstep.types import Layout


@dataclass(frozen=True)
class Compute:
    """Rows `uids` of a request after `cached_len` committed keys."""

    request: int
    uids: tuple[int, ...]
    cached_len: int
    keep: int  # so many stay, the rest was rejected
    parents: tuple[int, ...] | None = None  # the rows are the last nodes of this tree
    emit: tuple[int, ...] | None = None
    encoder: bool = False  # the request's encoder, whole: writes its cross keys


@dataclass(frozen=True)
class Fork:
    """`child` continues the first `cached_len` keys of `parent`."""

    request: int
    child: int
    cached_len: int


@dataclass(frozen=True)
class Accept:
    """The tree path `nodes` becomes committed after `cached_len` keys."""

    request: int
    nodes: tuple[int, ...]
    cached_len: int


@dataclass(frozen=True)
class Drop:
    """The request gives its pages back: it ended, or was preempted."""

    request: int


Act = Compute | Fork | Accept | Drop


@dataclass
class Script:
    """A recipe's story while it is written: verbs return acts, `step` puts acts together."""

    split: int = 512  # where the second split begins
    parents: list[int] = field(default_factory=list)  # of every uid; -1 for a first token
    owner: list[int] = field(default_factory=list)  # the request that computed a uid first
    encoder_uids: dict[int, tuple[int, ...]] = field(default_factory=dict)
    steps: list[tuple[Act, ...]] = field(default_factory=list)
    committed: dict[int, list[int]] = field(default_factory=dict)
    trees: dict[int, list[int]] = field(default_factory=dict)  # uids of nodes, while it is open
    lineage: dict[int, tuple[int, ...]] = field(default_factory=dict)  # itself, its parent, ...
    infinite: list[int] = field(default_factory=list)  # uids of tokens whose values hold infinities

    def open(self) -> int:
        r = len(self.committed)
        self.committed[r], self.lineage[r] = [], (r,)
        return r

    def step(self, *acts: Act) -> None:
        self.steps.append(acts)

    def extend(
        self, r: int, n: int, keep: int | None = None, emit: tuple[int, ...] | None = None
    ) -> Compute:
        """n more tokens; if keep < n, the last ones are rejected and will be written over."""
        done = self.committed[r]
        uids = self._chain(r, [-1, *done][-1], n)
        act = Compute(r, uids, len(done), n if keep is None else keep, emit=emit)
        done += uids[: act.keep]
        return act

    def again(self, r: int, n: int) -> Compute:
        """The first n tokens of a preempted request, computed once more."""
        return Compute(r, tuple(self.committed[r][:n]), 0, n)

    def tree(self, r: int, parents: tuple[int, ...], new: int | None = None) -> Compute:
        """Nodes with these parents; only the last `new` are computed, the others were before."""
        done, nodes = self.committed[r], self.trees.setdefault(r, [])
        for parent in parents[len(nodes) :]:
            above = nodes[parent] if parent >= 0 else [-1, *done][-1]
            nodes.append(self._chain(r, above, 1)[0])
        new = len(parents) if new is None else new
        return Compute(r, tuple(nodes[len(parents) - new : len(parents)]), len(done), 0, parents)

    def accept(self, r: int, nodes: tuple[int, ...]) -> Accept:
        done, tree = self.committed[r], self.trees.pop(r)
        act = Accept(r, nodes, len(done))
        done += [tree[n] for n in nodes]
        return act

    def fork(self, r: int) -> Fork:
        """A new request that continues r."""
        child = self.open()
        self.committed[child] = list(self.committed[r])
        self.lineage[child] = (child, *self.lineage[r])
        if r in self.encoder_uids:
            self.encoder_uids[child] = self.encoder_uids[r]
        return Fork(r, child, len(self.committed[r]))

    def encode(self, r: int, n: int) -> Compute:
        """The encoder of a request: n tokens, the same ones every time."""
        if r not in self.encoder_uids:
            self.encoder_uids[r] = self._chain(r, -1, n)
        return Compute(r, self.encoder_uids[r], 0, 0, encoder=True)

    def path(self, uid: int) -> list[int]:
        """The tokens a row sees when it sees everything, itself last."""
        out = []
        while uid >= 0:
            out.append(uid)
            uid = self.parents[uid]
        return out[::-1]

    def _chain(self, r: int, above: int, n: int) -> tuple[int, ...]:
        uids = tuple(range(len(self.parents), len(self.parents) + n))
        self.parents += [above, *uids[:-1]] if n else []
        self.owner += [r] * n
        return uids


def alone(script: Script, request: int) -> Script:
    """The same story with nobody but `request` and those it was forked from."""
    mine = script.lineage[request]
    steps = [
        tuple(a for a in step if a.request in mine and (not isinstance(a, Fork) or a.child in mine))
        for step in script.steps
    ]
    return replace(script, steps=[s for s in steps if s])


def chunked(script: Script, size: int) -> Script:
    """The same story with every plain computation cut into chunks of `size` rows: each step becomes
    as many as its longest act has chunks; other acts stay in the first."""
    steps: list[tuple[Act, ...]] = []
    for step in script.steps:
        lists = [_chunks(act, size) for act in step]
        for i in range(max(map(len, lists), default=1)):
            steps.append(tuple(acts[i] for acts in lists if i < len(acts)))
    return replace(script, steps=steps)


def _chunks(act: Act, size: int) -> Sequence[Act]:
    if not isinstance(act, Compute) or act.parents is not None or act.encoder:
        return [act]
    if act.keep < len(act.uids) or len(act.uids) <= size:
        return [act]
    pieces = []
    for i in range(0, len(act.uids), size):
        uids = act.uids[i : i + size]
        cached_len = act.cached_len + i
        pieces.append(replace(act, uids=uids, cached_len=cached_len, keep=len(uids), emit=None))
    return pieces


def plain(script: Script) -> Script:
    """Every token once, each leaf a request of its own, alone, whole, cold: what all must equal."""
    out = replace(script, steps=[], lineage={}, encoder_uids={})
    for r, uid in enumerate(leaf_uids(script)):
        path = tuple(script.path(uid))
        source = script.owner[uid]
        if source in script.encoder_uids:
            out.encoder_uids[r] = script.encoder_uids[source]
            if path == script.encoder_uids[source]:
                continue
            out.step(Compute(r, script.encoder_uids[source], 0, 0, encoder=True))
        out.step(Compute(r, path, 0, len(path)))
        out.step(Drop(r))
    return out


def leaf_uids(script: Script) -> list[int]:
    """Tokens that no other token continues."""
    inner = set(script.parents)
    return [uid for uid in range(len(script.parents)) if uid not in inner]


@dataclass(frozen=True)
class Recipe:
    """A column of a table."""

    name: str
    description: str
    play: Callable[..., None]  # writes a script, or plays stories on a harness
    # above 0 afterwards: an equality is worth nothing if its path was not taken
    required_counters: tuple[str, ...]
    applies_to: Callable[[Any], bool]  # to a feature, or a model


# of a step; one without any is new rows alone
VERBS = {"all", "drop", "encode", "fork", "again", "accept", "tree"}
APPLIES: dict[str, Callable[[Feature], bool]] = {
    "cached": lambda feature: not feature.fresh,
    "uncached": lambda feature: feature.fresh,
    "window": lambda feature: not feature.fresh and any(g.window for g in feature.made_of),
    "encoder": lambda feature: bool(feature.encode),
    # values of their own: an infinity in a latent row would be one in its key
    "apart": lambda feature: (
        not feature.fresh and all(g.layout is not Layout.LATENT for g in feature.made_of)
    ),
}


def play(s: Script, steps: Sequence[Any]) -> None:
    """Steps as recipes.toml has them."""
    for step in steps:
        told = step if isinstance(step, dict) and VERBS & set(step) else {"all": step}
        acts: list[Act] = [Drop(r) for r in told.get("drop", ())]
        acts += [s.encode(s.open(), n) for n in told.get("encode", ())]
        acts += [s.fork(r) for r in told.get("fork", ())]
        acts += [s.again(int(r), n) for r, n in told.get("again", {}).items()]
        for r in list(s.trees) if "accept" in told else ():
            acts.append(s.accept(r, tuple(told["accept"])))
        trees = told.get("tree", ())
        if trees and isinstance(trees[0], int):
            trees = [trees] * len(s.committed)
        acts += [s.tree(r, tuple(parents), told.get("new")) for r, parents in enumerate(trees)]
        s.step(*acts, *new_rows(s, told.get("all", ()), told))


def new_rows(s: Script, counts: Any, told: Mapping[str, Any]) -> list[Compute]:
    """New rows of requests; those that are not there yet are opened."""
    if isinstance(counts, int | str):
        counts = dict.fromkeys(s.committed, counts)
    elif not isinstance(counts, dict):
        counts = dict(enumerate(counts))
    acts, named = list[Compute](), {"split": s.split, "window": WINDOW}
    for at, (request, count) in enumerate(counts.items()):
        while len(s.committed) <= int(request):
            s.open()
        keep = told["keep"][at] if "keep" in told else None
        emit = tuple(told["emit"][at]) if "emit" in told else None
        n = sum(named.get(term) or int(term) for term in str(count).split())
        acts.append(s.extend(int(request), n, keep, emit))
        s.infinite += [acts[-1].uids[i] for i in told.get("infinite", ())]
    return acts


def recipe(
    name: str, about: str, counters: list[str], steps: Sequence[Any], of: str = "cached"
) -> Recipe:
    return Recipe(name, about, partial(play, steps=steps), tuple(counters), APPLIES[of])


RECIPES = tuple(recipe(name, **entry) for name, entry in table("recipes.toml").items())


def write(recipe: Recipe, feature: Feature) -> Script:
    """The recipe's script for a feature; with an encoder, each request is encoded first, at odd
    lengths where the recipe gives none; a fork shares its parent's."""
    specs, device = feature.groups(16), device_class(feature.device.ops.machine)
    splits = [attention_order(device, spec.d_qk, spec.d_v).splits for spec in specs]
    script = Script(split=max(each.begin(1) for each in splits))
    recipe.play(script)
    if not feature.encode or script.encoder_uids:
        return script
    told, lengths = script.steps, cycle((33, 1, 64, 20, 65, 7, 16, 5))
    script.steps = []
    for step in told:
        fresh = [a for a in step if isinstance(a, Compute) and a.cached_len == 0]
        if fresh:
            script.step(*(script.encode(a.request, next(lengths)) for a in fresh))
        script.step(*step)
    for request, lineage in script.lineage.items():
        script.encoder_uids[request] = script.encoder_uids[lineage[-1]]
    return script
