"""Worker processes: the death of one is an answer, one that hangs is ended, and the rest are not
disturbed."""

from __future__ import annotations

import os
import signal
import time

import pytest

from lockstep.lab import isolate
from lockstep.types import RuleError


def work(job: str) -> str:
    """The job that the worker processes of this test run."""
    if job == "die":
        os.kill(os.getpid(), signal.SIGSEGV)
    if job == "hang":
        time.sleep(600)
    if job == "rule":
        raise RuleError("a rule", "a break", "Do not")
    return f"{job} done, threads {os.environ['OMP_WAIT_POLICY'].lower()}"


def test_a_job_whose_process_died_or_timed_out_has_an_answer():
    answers = dict(
        isolate.run(
            work, ["die", "one", "hang", "two"], 2, lambda job: 1.0 if job == "hang" else 100.0
        )
    )
    assert answers["die"] == isolate.Died("the process was killed by SIGSEGV")
    assert answers["hang"] == isolate.Died("no answer within 1 s")
    assert (
        answers["one"] == "one done, threads passive"
        and answers["two"] == "two done, threads passive"
    )


def test_an_error_of_the_lab_itself_is_raised():
    with pytest.raises(RuleError, match="a rule; got a break"):
        list(isolate.run(work, ["rule"], 1, lambda job: 100.0))
