"""What a draft is: two verbs, `propose` trees of tokens and `observe` what was settled.

A draft guesses; the target samples every node of the tree with its own noise and keeps a path for
as long as the guess was its sample (`verify`). So no bit of an answer depends on a draft, and
nothing here can make an answer wrong: a bad draft costs time.

An algorithm is a file: `ngram.py` is a `Draft` by itself; `draft_model.py`, `eagle.py` and
`eagle3.py` each have `load(setup) -> DraftModel`, and `model_draft.py` runs all of these: ordinary
plans over the draft's own groups of the requests' tables, through the engine's runner. The engine
calls both verbs, between steps: `propose` before a step is scheduled, `observe` when one has
settled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from lockstep.config import EngineConfig
from lockstep.models.loader import Loaded
from lockstep.run.kind import DRAFT as DRAFT
from lockstep.run.kind import StepKind
from lockstep.sample.params import SamplingParams
from lockstep.sched.request import DraftTree, Request

NO_DRAFT = DraftTree((), ())


class DraftRequest(NamedTuple):
    """A request that asks for a tree.

    request  it decodes: `request.tokens` have their values, all but the last have their keys in
             the target's groups. Its table has room for `nodes` nodes in every group, and for as
             many keys behind the last
    params   of its completion: a draft may use the same noise (seed, index, position, token id)
    steps    the deepest node that may be accepted, at least 1
    nodes    of the tree, at most, at least 1; the last token, its root, is not counted
    go_on    a chain goes on while the draft gives its guesses so far this chance, together; of a
             draft that knows none it is ignored
    """

    request: Request
    params: SamplingParams
    steps: int
    nodes: int
    go_on: float = 0.0


class SettledRows(NamedTuple):
    """Rows of a request that are committed by a settled step.

    request   the tokens up to and with the one behind these rows have their values: row i stands
              at position `begin` + i, and `request.tokens[begin + i + 1]` is known, for the last
              row of a chunk of the prompt too. It still runs and holds its table; a completion
              that was forked off at the prompt's end has an entry of its own
    begin     position of the first row: the target's keys before it were committed earlier
    rows      which rows of the step: int, in the order of positions. Of a tree the accepted path
    """

    request: Request
    begin: int
    rows: tuple[int, ...]


class SettledStep(NamedTuple):
    """A step of the target that has settled. `hidden` are its rows behind all of the draft's
    `target_layers`, side by side, copied when it was launched; None if the draft wants none."""

    rows: tuple[SettledRows, ...]
    hidden: Tensor | None = None


class Draft(Protocol):
    """Guesses what follows. What it knows of a request it keeps under the request, and only as
    long as `request.table` is the same table: a preempted request begins anew. `knows_chances`:
    it ends a chain by `DraftRequest.go_on`."""

    @property
    def knows_chances(self) -> bool: ...

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """A tree for each: tokens that may follow the last one, parents before their children
        (node 0 is the last token itself, `parents[i]` the node above node i + 1). `NO_DRAFT` if
        it has no guess. Siblings have different tokens."""
        ...

    def observe(self, settled: SettledStep) -> None:
        """A step has settled: called for every step that computed rows of a request that may
        speculate, prompts included, in order."""
        ...


class DraftModel(Protocol):
    """A model that drafts, as `model_draft.ModelDraft` runs it. `load(setup)` of a file makes one.

    kind           of its steps: `StepKind(name=run.kind.DRAFT, groups=...)`, numbered from
                   `setup.first_group` on, page size and KV dtype those of the config. Plans are
                   built over its groups of the requests' own tables; pages are reserved by the
                   scheduler, for the target and the draft at once
    extend         the same, of rows whose tokens are there (run.kind.EXTEND)
    target_layers  layers of the target whose residual streams it reads; () for a model of its own,
                   which sees tokens alone. Where there are some, it looks one token ahead: its row
                   at position p is of the target's states at p and of token p + 1, and predicts
                   token p + 2. Without, row p is of token p and predicts p + 1
    hidden, states [rows, d] and [rows, layers * d], None without target_layers: buffers at fixed
                   addresses with one row for every row of a step (`setup.rows`), filled before a
                   step is run. `kind.forward` reads `hidden[: len(ids)]`, `extend.forward` the
                   target's states. With them `kind.hidden_layers` is (0,): forward(ids, positions,
                   step, layers) returns (what `logits` takes [T, d'], what the next draft step
                   reads as `hidden` [T, d])
    """

    @property
    def kind(self) -> StepKind: ...

    @property
    def extend(self) -> StepKind: ...

    @property
    def target_layers(self) -> tuple[int, ...]: ...

    @property
    def hidden(self) -> Tensor | None: ...

    @property
    def states(self) -> Tensor | None: ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[S, target's vocabulary], float32: -inf for tokens that the draft does not know."""
        ...


@dataclass(frozen=True, eq=False)
class DraftSetup:
    """What a draft model is loaded for."""

    config: EngineConfig  # settled: its dtypes are names. `speculative_draft_model` is the path
    target: Loaded
    first_group: int  # number of the draft's first group in the engine's tables
    rows: int  # most rows of a step, pads included
