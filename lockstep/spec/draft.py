"""What a draft is: it has to `propose` trees of tokens and to `observe` settled steps.

A draft guesses; the target samples every node of the tree with its own noise and keeps a path for
as long as the draft token was its sample (`verify`): a bad draft costs time, and no bit. An
algorithm is a file: `ngram.py` is a `Draft` by itself; `draft_model.py`, `eagle.py` and `eagle3.py`
each have `load(setup) -> DraftModel`, which `model_draft.py` runs. `Speculation` calls it.
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
    """A request that asks for a tree: it decodes, all its tokens have values, and its table has
    room for `nodes` nodes in every group, and for as many keys after the last."""

    request: Request
    params: SamplingParams  # of its completion: a draft may use the same noise
    steps: int  # the deepest node that may be accepted, at least 1
    nodes: int  # most nodes of the tree, at least `steps`, without the root (the last token)
    min_chance: float = 0.0  # a chain continues while the draft gives it at least this chance


class SettledRows(NamedTuple):
    """Rows of a request that a settled step has committed. It still runs and owns its table; a
    completion that was forked at the prompt's end has an entry of its own."""

    request: Request  # the token after each of the rows has its value
    begin: int  # position of the first row; keys before it were committed earlier
    rows: tuple[int, ...]  # in the step, in order of position; for a tree, the accepted path


class SettledStep(NamedTuple):
    """A settled step of the target. `hidden` has its rows after all of the draft's `target_layers`,
    side by side, copied when it was launched; None if the draft wants none."""

    rows: tuple[SettledRows, ...]
    hidden: Tensor | None = None


class Draft(Protocol):
    """Guesses which tokens follow. What it knows of a request's keys is kept with their table
    (`PageTable.draft_state`): a preempted request starts without it."""

    lag: int = 64  # plain decode steps of the same requests that it observes in one call

    @property
    def knows_chances(self) -> bool:
        """Whether it ends a chain by `DraftRequest.min_chance`."""
        return False

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """Returns a tree for each request: tokens that may follow the last one, parents before
        their children, siblings with different tokens. `NO_DRAFT` if it has no guess."""
        ...

    def observe(self, settled: SettledStep) -> None:
        """Called for every step that computed rows of a request that may speculate, in order."""
        return

    def launched(self, requests: Sequence[Request], width: int, hidden: Tensor | None) -> None:
        """Called when a step is launched that verifies a chain of each request, `width` rows each,
        for work that can be done meanwhile. `hidden` is that of `SettledStep`."""
        return


@dataclass(frozen=True, eq=False)
class DraftModel:
    """A model that drafts, as `model_draft.ModelDraft` runs it, over its groups of the requests'
    own tables, whose pages the scheduler reserves with the target's.

    kind, extend   its kinds of step (run.kind.DRAFTS): draft tokens, and rows of known tokens. The
                   groups are numbered from `setup.first_group` on
    follow         as `extend`, where only the keys are wanted
    target_layers  layers of the target whose residual streams it reads, or () for a model that sees
                   tokens alone. With layers it is one token ahead: its row at position p reads the
                   target's states at p and token p + 1, and predicts token p + 2
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
        """Returns float32 [S, target's vocabulary]: -inf for tokens unknown to the draft."""
        return self.kind.model.logits(hidden).float()


@dataclass(frozen=True, eq=False)
class DraftSetup:
    """What a draft model is loaded for."""

    config: EngineConfig  # settled: its dtypes are names. `speculative_draft_model` is the path
    target: Loaded
    first_group: int  # number of the draft's first group in the engine's tables
    rows: int  # most rows of a step, including pads

    def kind_of(self, model: Model) -> StepKind:
        """Returns the generating kind of step of a model that drafts."""
        config = self.config
        sizes = config.page_size, config.kv_cache_dtype, self.first_group
        return kinds_of(model, *sizes)[GENERATE]
