"""`lockstep generate`: text in, text out.

One prompt streams to the terminal; many run as one batch under a progress bar; `--json` gives one document. Takes parsed arguments and
returns an exit code; `cli` calls it.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from lockstep.config import EngineConfig
from lockstep.llm.api import LLM
from lockstep.llm.output import Output
from lockstep.progress import Progress
from lockstep.sample.params import SamplingParams
from lockstep.types import RuleError


def generate(args: Namespace) -> int:
    """`generate`: 1 if a request ended with an error."""
    given = vars(args)
    prompts = read_prompts(args)
    params = SamplingParams.from_dict({name: given[name] for name in PARAMS if given.get(name) is not None})
    options = {f.name: given[f.name] for f in fields(EngineConfig) if given.get(f.name) is not None}
    llm = LLM(**options)
    if not args.quiet:
        print(llm.engine.told, file=sys.stderr)
    if len(prompts) == 1 and params.n == 1 and not args.json:
        return _stream(llm, prompts[0], params)
    outputs = _batch(llm, prompts, params)
    if args.json:
        _write(args.json, {"outputs": [as_json(p, o) for p, o in zip(prompts, outputs, strict=True)]})
    if args.json != "-":
        for prompt, output in zip(prompts, outputs, strict=True):
            for completion in output.completions:
                print(f"--- {prompt!r} [{completion.index}] ({completion.finish_reason})\n{prompt}{completion.text}")
    return int(any(c.finish_reason == "error" for o in outputs for c in o.completions))


PARAMS = (
    *("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "n", "logprobs", "ignore_eos"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens", "logit_bias"),
)


def read_prompts(args: Namespace) -> list[str]:
    """The prompts of the command line, or one per line of a file."""
    prompts = list(args.prompt)
    if args.file:
        path = Path(args.file)
        if args.file != "-" and not path.is_file():
            raise RuleError("--file names a text file with one prompt per line", repr(args.file), "Check the path, or use - for stdin")
        text = sys.stdin.read() if args.file == "-" else path.read_text("utf-8")
        prompts += [line for line in text.splitlines() if line.strip()]
    if not prompts:
        raise RuleError("generate needs a prompt", "none", 'Try: lockstep generate "def fib(n):"')
    return prompts


def as_json(prompt: str, output: Output) -> dict[str, Any]:
    """One answer, as `--json` writes it."""
    return {
        "prompt": prompt,
        "seed": output.seed,
        "cached_tokens": output.cached_tokens,
        "fingerprint": output.fingerprint,
        "completions": [
            {
                "index": c.index,
                "text": c.text,
                "token_ids": list(c.token_ids),
                "finish_reason": c.finish_reason,
                "logprobs": None if c.logprobs is None else [float(x) for x in c.logprobs],
                "top_logprobs": c.top_logprobs,
                "error": c.error or None,
            }
            for c in output.completions
        ],
    }


def _stream(llm: LLM, prompt: str, params: SamplingParams) -> int:
    finish, before = None, prompt  # shown when the request was taken in
    for chunk in llm.stream(prompt, params):
        sys.stdout.write(before + chunk.text)
        sys.stdout.flush()
        finish, before = chunk.finish_reason, ""
    sys.stdout.write("\n")
    return int(finish == "error")


def _batch(llm: LLM, prompts: Sequence[str], params: SamplingParams) -> list[Output]:
    with Progress(len(prompts), "generate") as bar:
        return llm.generate(prompts, params, on_done=lambda: bar.step(""))


def _write(where: str, document: dict[str, Any]) -> None:
    text = json.dumps(document, indent=1, ensure_ascii=False)
    if where == "-":
        print(text)
    else:
        Path(where).write_text(text + "\n", "utf-8")
