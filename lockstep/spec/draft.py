"""What a draft is: it has to `propose` trees of tokens and to `observe` what was settled.

A draft guesses; the target samples every node of the tree with its own noise and keeps a path for
as long as the guess was its sample (`verify`): a bad draft costs time, and no bit. An algorithm is
a file: `ngram.py` is a `Draft` by itself; `draft_model.py`, `eagle.py` and `eagle3.py` each have
`load(setup) -> DraftModel`, which `model_draft.py` runs. `Speculation` calls it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from lockstep.config import EngineConfig
from lockstep.models.loader import Loaded
from lockstep.nn.decoder import Model
from lockstep.run.kind import GENERATE, StepKind, kinds_of
from lockstep.sample.params import SamplingParams
from lockstep.sched.request import DraftTree, Request

NO_DRAFT = DraftTree((), ())


class DraftRequest(NamedTuple):
    """A request that asks for a tree: it decodes, all its tokens have their values, and its table
    has room for so many nodes in every group, and for as many keys behind the last."""

    request: Request
    params: SamplingParams  # of its completion: a draft may use the same noise
    steps: int  # the deepest node that may be accepted, at least 1
    nodes: int  # of the tree, at most, at least `steps`; its root, the last token, is not counted
    go_on: float = 0.0  # a chain goes on while the draft gives its guesses so far this chance


class SettledRows(NamedTuple):
    """Rows of a request that a settled step has committed. It still runs and holds its table; a
    completion that was forked off at the prompt's end has an entry of its own."""

    request: Request  # whose token behind each of the rows has its value
    begin: int  # position of the first row: keys before it were committed earlier
    rows: tuple[int, ...]  # of the step, in the order of positions; of a tree the accepted path


class SettledStep(NamedTuple):
    """A step of the target that has settled. `hidden` are its rows behind all of the draft's
    `target_layers`, side by side, copied when it was launched; None if the draft wants none."""

    rows: tuple[SettledRows, ...]
    hidden: Tensor | None = None


class Draft(Protocol):
    """Guesses what follows. What it knows of a request's keys it keeps with their table
    (`PageTable.draft_state`): a preempted request begins anew."""

    lag: int = 64  # steps in which the same requests decode plainly, of which it is told at once

    @property
    def knows_chances(self) -> bool:
        """Whether it ends a chain by `DraftRequest.go_on`."""
        return False

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """A tree for each: tokens that may follow the last one, parents before their children,
        siblings with different tokens. `NO_DRAFT` if it has no guess."""
        ...

    def observe(self, settled: SettledStep) -> None:
        """Called for every step that computed rows of a request that may speculate, in order."""
        return

    def launched(self, requests: Sequence[Request], width: int, hidden: Tensor | None) -> None:
        """Called when a step has been launched that verifies a chain of each of these requests, by
        as many rows each: what can be done meanwhile. `hidden` is that of `SettledStep`."""
        return


@dataclass(frozen=True, eq=False)
class DraftModel:
    """A model that drafts, as `model_draft.ModelDraft` runs it, over its groups of the requests'
    own tables, whose pages the scheduler reserves with the target's.

    kind, extend   of its steps (run.kind.DRAFTS): guesses, and rows whose tokens are there. Groups
                   are numbered from `setup.first_group` on
    follow         the same as `extend`, where the keys alone are wanted
    target_layers  layers of the target whose residual streams it reads, or () for a model that sees
                   tokens alone. Where there are some, it looks one token ahead: its row at position
                   p is of the target's states at p and of token p + 1, and predicts token p + 2
    hidden, states [rows, d] and [rows, layers * d], None without target_layers: buffers at fixed
                   addresses, filled before a step is run. `kind` reads the first, `extend` the
                   second; `kind.hidden_layers` is then (0,): what the next row reads as `hidden`
    """

    kind: StepKind
    extend: StepKind
    follow: StepKind
    target_layers: tuple[int, ...] = ()
    hidden: Tensor | None = None
    states: Tensor | None = None

    def logits(self, hidden: Tensor) -> Tensor:
        """[S, target's vocabulary], float32: -inf for tokens that the draft does not know."""
        return self.kind.model.logits(hidden).float()


@dataclass(frozen=True, eq=False)
class DraftSetup:
    """What a draft model is loaded for."""

    config: EngineConfig  # settled: its dtypes are names. `speculative_draft_model` is the path
    target: Loaded
    first_group: int  # number of the draft's first group in the engine's tables
    rows: int  # most rows of a step, pads included

    def kind_of(self, model: Model) -> StepKind:
        """Steps of a model that drafts: those in which it would generate."""
        config = self.config
        sizes = config.page_size, config.kv_cache_dtype, self.first_group
        return kinds_of(model, *sizes)[GENERATE]
