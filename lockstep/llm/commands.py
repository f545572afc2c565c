"""`lockstep generate`: one prompt streams to the terminal; several run as one batch with a progress
bar; `--json` writes one document. `cli` calls it."""

import json
import sys
from argparse import Namespace
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np

from lockstep import outfile
from lockstep.config import EngineConfig
from lockstep.llm.api import LLM
from lockstep.llm.output import Output
from lockstep.progress import Progress
from lockstep.sample.params import SamplingParams
from lockstep.types import RuleError


def generate(args: Namespace) -> int:
    """Runs `generate`; returns 1 if a request ended with an error, else 0."""
    prompts = list(args.prompt)
    if args.file:
        lines = read_file(args.file).replace("\r\n", "\n").split("\n")
        prompts += [line for line in lines if line.strip()]
    if not prompts:
        raise RuleError("generate needs a prompt", "none", 'Try: lockstep generate "def fib(n):"')
    params = SamplingParams(**given(args, SamplingParams))
    llm = LLM(**given(args, EngineConfig))
    if not args.quiet:
        print(llm.engine.startup_report, file=sys.stderr)
    if len(prompts) == 1 and params.n == 1 and not args.json:
        return _stream(llm, prompts[0], params)
    with Progress(len(prompts), "generate") as bar:
        outputs = llm.generate(prompts, params, on_done=bar.step)
    if args.json:
        document = {"outputs": [as_json(p, o) for p, o in zip(prompts, outputs, strict=True)]}
        text = json.dumps(document, default=np.ndarray.tolist)
        document = json.loads(text, parse_constant=lambda _: None)  # JSON has no NaN
        text = json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False)
        outfile.write(args.json, f"{text}\n")
    if args.json != "-":
        for prompt, output in zip(prompts, outputs, strict=True):
            for completion in output.completions:
                print(f"--- {prompt!r} [{completion.index}] ({completion.finish_reason})")
                print(f"{prompt}{completion.text}")
    return int(any(c.finish_reason == "error" for o in outputs for c in o.completions))


def given(args: Namespace, kind: type[SamplingParams | EngineConfig]) -> dict[str, Any]:
    """Returns the fields of `kind` that the command line sets."""
    known = {field.name for field in fields(kind)}
    return {name: x for name, x in vars(args).items() if name in known and x is not None}


def read_file(where: str) -> str:
    """Returns the text of a file of prompts, or of stdin."""
    try:
        content = sys.stdin.buffer.read() if where == "-" else Path(where).read_bytes()
        return content.decode("utf-8-sig")
    except OSError as error:
        rule, got = "--file names a text file with one prompt per line", error.strerror
        remedy = "Check the path, or use - for stdin"
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        rule = "a file of prompts is text in UTF-8"
        got = f"byte 0x{error.object[error.start]:02X} in line {line}"
        remedy = "Convert it, as with iconv"
    raise RuleError(rule, f"{where!r}: {got}", remedy)


def as_json(prompt: str, output: Output) -> dict[str, Any]:
    """Returns all of an output, by its names in Python."""
    completions = []
    for c in output.completions:
        others = {"error": c.error or None, "speculated": c.speculated._asdict()}
        completions.append(asdict(c) | others)
    return {"prompt": prompt} | asdict(output) | {"completions": completions}


def _stream(llm: LLM, prompt: str, params: SamplingParams) -> int:
    finish, before = None, prompt  # the prompt is shown before the first chunk's text
    for chunk in llm.stream(prompt, params):
        sys.stdout.write(before + chunk.text)
        sys.stdout.flush()
        finish, before = chunk.finish_reason, ""
    sys.stdout.write("\n")
    return int(finish == "error")
