"""Recipes are the columns of both tables. This module turns those of recipes.toml into the scripts
that the attention harness plays: what happens to which request, in logical tokens.

A token is a number, its `uid`, at the end of exactly one path. Its attention output is a function
of that path alone, whatever batch, chunk or tree it was computed in. A script is a list of steps, a
step a list of acts. Scripts know no pages and no tensors.
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
    """Computes the rows `uids` of a request after `cached_len` committed keys."""

    request: int
    uids: tuple[int, ...]
    cached_len: int
    keep: int  # how many of the rows stay; the rest are rejected
    parents: tuple[int, ...] | None = None  # the rows are the last nodes of this tree
    emit: tuple[int, ...] | None = None
    encoder: bool = False  # the request's whole source: writes its cross keys


@dataclass(frozen=True)
class Fork:
    """Makes `child` continue the first `cached_len` keys of `request`."""

    request: int
    child: int
    cached_len: int


@dataclass(frozen=True)
class Accept:
    """Commits the tree path `nodes` after `cached_len` keys."""

    request: int
    nodes: tuple[int, ...]
    cached_len: int


@dataclass(frozen=True)
class Drop:
    """The request frees its pages: it ended or was preempted."""

    request: int


Act = Compute | Fork | Accept | Drop


@dataclass
class Script:
    """A recipe's script while it is written: methods return acts, `step` appends a step of acts."""

    split: int = 512  # the position at which the second split begins
    parents: list[int] = field(default_factory=list)  # each uid's parent uid; -1 for a first token
    owner: list[int] = field(default_factory=list)  # the request that computed a uid first
    encoder_uids: dict[int, tuple[int, ...]] = field(default_factory=dict)
    steps: list[tuple[Act, ...]] = field(default_factory=list)
    committed: dict[int, list[int]] = field(default_factory=dict)
    trees: dict[int, list[int]] = field(default_factory=dict)  # node uids of open trees, by request
    lineage: dict[int, tuple[int, ...]] = field(default_factory=dict)  # itself, its parent, ...
    infinite: list[int] = field(default_factory=list)  # uids of tokens with infinite values

    def open(self) -> int:
        r = len(self.committed)
        self.committed[r], self.lineage[r] = [], (r,)
        return r

    def step(self, *acts: Act) -> None:
        self.steps.append(acts)

    def extend(
        self, r: int, n: int, keep: int | None = None, emit: tuple[int, ...] | None = None
    ) -> Compute:
        """Adds n tokens to a request; those after the first `keep` are rejected and overwritten."""
        done = self.committed[r]
        uids = self._chain(r, [-1, *done][-1], n)
        act = Compute(r, uids, len(done), n if keep is None else keep, emit=emit)
        done += uids[: act.keep]
        return act

    def again(self, r: int, n: int) -> Compute:
        """Computes the first n tokens of a preempted request once more."""
        return Compute(r, tuple(self.committed[r][:n]), 0, n)

    def tree(self, r: int, parents: tuple[int, ...], new: int | None = None) -> Compute:
        """Computes the last `new` nodes of the tree `parents`; earlier steps did the others."""
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
        """Opens a request that continues r."""
        child = self.open()
        self.committed[child] = list(self.committed[r])
        self.lineage[child] = (child, *self.lineage[r])
        if r in self.encoder_uids:
            self.encoder_uids[child] = self.encoder_uids[r]
        return Fork(r, child, len(self.committed[r]))

    def encode(self, r: int, n: int) -> Compute:
        """Encodes a request's n source tokens, the same uids every time."""
        if r not in self.encoder_uids:
            self.encoder_uids[r] = self._chain(r, -1, n)
        return Compute(r, self.encoder_uids[r], 0, 0, encoder=True)

    def path(self, uid: int) -> list[int]:
        """Returns the tokens that a row sees if it sees everything, itself last."""
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
    """Returns the script reduced to `request` and the requests it was forked from."""
    mine = script.lineage[request]
    steps = [
        tuple(a for a in step if a.request in mine and (not isinstance(a, Fork) or a.child in mine))
        for step in script.steps
    ]
    return replace(script, steps=[s for s in steps if s])


def chunked(script: Script, size: int) -> Script:
    """Returns the script with every plain computation cut into chunks of `size` rows. Each step
    becomes as many steps as its longest act has chunks; other acts stay in the first."""
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
    """Returns the plain script, which all others must equal: every path alone, whole, cold."""
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
    """Returns the tokens that no other token continues."""
    inner = set(script.parents)
    return [uid for uid in range(len(script.parents)) if uid not in inner]


@dataclass(frozen=True)
class Recipe:
    """A column of a table of cells."""

    name: str
    description: str
    play: Callable[..., None]  # writes a Script, or plays stories on a harness
    # counters that must end above 0: an equality proves nothing if its path was not taken
    required_counters: tuple[str, ...]
    applies_to: Callable[[Any], bool]  # whether it is played on a feature or model


# keys of a step's table; a step without any of them lists new rows only
VERBS = {"all", "drop", "encode", "fork", "again", "accept", "tree"}
APPLIES: dict[str, Callable[[Feature], bool]] = {
    "cached": lambda feature: not feature.fresh,
    "uncached": lambda feature: feature.fresh,
    "window": lambda feature: not feature.fresh and any(g.window for g in feature.made_of),
    "encoder": lambda feature: bool(feature.encode),
    # values stored apart from keys: an infinity in a latent row would be one in its key, too
    "apart": lambda feature: (
        not feature.fresh and all(g.layout is not Layout.LATENT for g in feature.made_of)
    ),
}


def play(s: Script, steps: Sequence[Any]) -> None:
    """Writes the steps of a recipes.toml entry into the script `s`."""
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
    """Adds new rows to requests, and opens the requests that do not exist yet."""
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
    """Returns the recipe's script for a feature. With an encoder, each request is encoded first, at
    varied lengths where the recipe gives none; a fork shares its parent's source."""
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
