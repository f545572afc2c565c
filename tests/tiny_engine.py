"""An engine for tests: the tiny model with a window in one layer and none in the other, certified
on this machine once per process."""

from __future__ import annotations

from functools import lru_cache

from lockstep.config import EngineConfig
from lockstep.lab.tiny import CONTEXT, QWEN3, loaded
from lockstep.llm.engine import Engine, Parts, prepare


@lru_cache(maxsize=1)
def parts() -> Parts:
    return prepare(loaded(QWEN3), None)


def engine(**options: object) -> Engine:
    return Engine(EngineConfig.from_names({"context_length": CONTEXT, **options}), parts())
