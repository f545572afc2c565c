"""Writes the built-in model's text and tokenizer: the interpreter's standard library as tokens.

Reads the standard library, holds out whole files, trains the byte-level BPE on the rest and writes
what `train.py` needs to one folder. Knows nothing of the model. The same interpreter version gives
the same bytes in every output file: files are visited in sorted order and the held-out ones are
chosen by a hash of their path.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import platform
import re
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB = 4096
BEGIN, END = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
)  # ids 0 and 1; a file is BEGIN text END, a fragment is text END
HELD_OUT_PERCENT = 3

# Only ASCII classes, so that Python's `re` and every other engine split alike. A run of spaces
# (indentation) and a newline are pieces of their own: a prompt that ends after ":", after the
# newline or after the indentation is cut where the training text was cut. Digits stand alone.
PATTERN = r" ?[A-Za-z_]+| ?[0-9]| {2,}|\n+|[^\x00-\x7F]+| ?[!-/:-@\[-\^`{-~]+|[\x00-\x20\x7F]"

SKIPPED_FOLDERS = (
    "site-packages",
    "dist-packages",
    "encodings",
    "pydoc_data",
    "idlelib/idle_test",
    "lib2to3/tests",
    "test/tokenizedata",
)
SKIPPED_PREFIXES = ("config-", "_sysconfigdata")  # describe one installation, paths included
TEST_FOLDERS = {"test", "tests"}
LEAST_LETTERS = (
    0.65  # share of letters, spaces and newlines; below it a file is a table of numbers or escapes
)
FRAGMENT_LINES = range(3, 101)


class Source(NamedTuple):
    path: str  # relative to the library's folder, with forward slashes
    text: str


def skipped(path: str) -> bool:
    """Returns whether a file is third-party, a data table, a fixture of broken code or specific to
    this machine."""
    return path.startswith(SKIPPED_PREFIXES) or any(
        f"/{folder}/" in f"/{path}" for folder in SKIPPED_FOLDERS
    )


def is_test(path: str) -> bool:
    """Returns whether a file is a test. Tests are half of the library and read differently: they
    are a stream of their own, mixed in at a lower weight."""
    return not TEST_FOLDERS.isdisjoint(path.split("/")[:-1])


def is_held_out(path: str) -> bool:
    """Hashes the path instead of drawing, so adding or removing files does not move the split."""
    return int(hashlib.sha256(path.encode()).hexdigest()[:8], 16) % 100 < HELD_OUT_PERCENT


def sources(root: Path) -> Iterator[Source]:
    """Yields every file of the library that is UTF-8, parses and is code rather than a table, in
    sorted order."""
    for path in sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py")):
        if skipped(path):
            continue
        try:
            text = (root / path).read_bytes().decode("utf-8").replace("\r\n", "\n")
            ast.parse(text)
        except (UnicodeDecodeError, SyntaxError, ValueError):
            continue
        if text and len(re.findall(r"[A-Za-z_ \n]", text)) >= LEAST_LETTERS * len(text):
            yield Source(path, text)


def fragments(source: Source) -> Iterator[str]:
    """Yields functions, methods and classes of a file, unindented: like prompts that start with
    `def` or `class`."""
    lines = source.text.splitlines(keepends=True)

    def visit(body: list[ast.stmt]) -> Iterator[str]:
        for node in body:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            assert node.end_lineno is not None
            if node.end_lineno - first + 1 in FRAGMENT_LINES:
                yield textwrap.dedent("".join(lines[first - 1 : node.end_lineno])).rstrip() + "\n"
            if isinstance(node, ast.ClassDef):
                yield from visit(node.body)

    return visit(ast.parse(source.text).body)


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Trains a byte-level BPE. The 256 bytes are in the vocabulary, so every text has an encoding
    and no token stands for the unknown."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PATTERN), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[BEGIN, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=24,  # longer ones are rulers of dashes
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    assert tokenizer.get_vocab_size() == VOCAB, tokenizer.get_vocab_size()
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str], begin: bool) -> tuple[np.ndarray, np.ndarray]:
    """Returns all texts as one array of ids, each ended by END, and the index of each start."""
    head, tail = ([tokenizer.token_to_id(BEGIN)] if begin else []), [tokenizer.token_to_id(END)]
    rows = [head + row.ids + tail for row in tokenizer.encode_batch(texts)]
    ids = np.fromiter((token for row in rows for token in row), np.uint16)
    starts = np.cumsum([0, *(len(row) for row in rows[:-1])], dtype=np.int64)
    return ids, starts


def tokenizer_config(context: int) -> dict[str, object]:
    """Returns the config of a plain fast tokenizer: its class reads tokenizer.json as it is,
    instead of rebuilding it after another model's pattern."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": END,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/builtin"))
    parser.add_argument(
        "--context", type=int, default=2048, help="longest sequence the model is trained on"
    )
    args = parser.parse_args()
    warnings.simplefilter("ignore", SyntaxWarning)  # the library's tests have doubtful literals
    warnings.simplefilter("ignore", DeprecationWarning)
    args.out.mkdir(parents=True, exist_ok=True)

    files = list(sources(Path(sysconfig.get_path("stdlib"))))
    known = [file for file in files if not is_held_out(file.path)]
    library = [file for file in known if not is_test(file.path)]
    streams = {
        "library": [file.text for file in library],
        "tests": [file.text for file in known if is_test(file.path)],
        "fragments": list(dict.fromkeys(text for file in library for text in fragments(file))),
        "held_library": [
            file.text for file in files if is_held_out(file.path) and not is_test(file.path)
        ],
        "held_tests": [
            file.text for file in files if is_held_out(file.path) and is_test(file.path)
        ],
    }
    tokenizer = train_tokenizer(streams["library"] + streams["tests"])
    tokenizer.save(str(args.out / "tokenizer.json"), pretty=False)
    (args.out / "tokenizer_config.json").write_text(
        json.dumps(tokenizer_config(args.context), indent=2) + "\n"
    )

    digest = hashlib.sha256()
    sizes = {}
    for name, texts in streams.items():
        ids, starts = encode(tokenizer, texts, begin=name != "fragments")
        np.save(args.out / f"{name}.ids.npy", ids)
        np.save(args.out / f"{name}.starts.npy", starts)
        digest.update(ids.tobytes())
        sizes[name] = {
            "texts": len(texts),
            "bytes": sum(len(text.encode()) for text in texts),
            "tokens": len(ids),
        }
        print(name, sizes[name], f"{sizes[name]['bytes'] / len(ids):.2f} bytes/token")
    corpus = {
        "python": platform.python_version(),
        "vocab": VOCAB,
        "context": args.context,
        "held_out_library_files": [
            file.path for file in files if is_held_out(file.path) and not is_test(file.path)
        ],
        "sha256_of_ids": digest.hexdigest(),
        "streams": sizes,
    }
    (args.out / "corpus.json").write_text(json.dumps(corpus, indent=2) + "\n")
    print("sha256 of ids", digest.hexdigest())


if __name__ == "__main__":
    main()
