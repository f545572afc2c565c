"""Text to token ids and back, over the tokenizer.json of a local folder.

Wraps the `tokenizers` library; nothing is downloaded. Which ids end a text is the model's to say
(`models`), not the tokenizer's. Knows no engine: called by `llm` and `serve`.
"""

from __future__ import annotations

import functools
import importlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from lockstep import folder as folder_files
from lockstep.types import RuleError

BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
CONTINUATIONS = (0x80, 0xA0)  # one of the two may follow any beginning of a character in UTF-8


class Codec(Protocol):
    """What a tokenizer library has to offer."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""

    def encode(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        """Text to ids."""

    def decode(self, ids: Sequence[int], skip_special: bool) -> str:
        """Ids to text; ids without a token are left out."""

    def id_of(self, token: str) -> int | None:
        """The id of a token given by its text."""

    def byte_ids(self) -> frozenset[int]:
        """Tokens whose run is decoded as a whole: the bytes of a tokenizer with byte fallback."""

    def continuation_ids(self) -> tuple[int, ...]:
        """Tokens of one byte each, some of which may follow any unfinished character; none if no
        token is a byte."""


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer, and the ids that growing text asks for."""

    codec: Codec

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """From the tokenizer.json of a model's folder."""
        return cls(Fast.from_text(folder_files.read_text(Path(folder), "tokenizer.json")))

    @property
    def vocab_size(self) -> int:
        """One more than the largest id. A model may have more rows than that, as padding."""
        return self.codec.vocab_size

    def encode(self, text: str, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Text to ids.

        add_special    put what the tokenizer puts around a text (usually BOS)
        parse_special  read "<|im_end|>" in the text as the special token; pass False for an end
                       user's text inside a chat template: then it is only characters
        """
        if not isinstance(text, str):
            rule = "a text is a string"
            raise RuleError(rule, type(text).__name__, "Pass a str, or token ids to the engine")
        return self.codec.encode(_characters(text), add_special, parse_special)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Ids to text. Bytes that are no UTF-8 become U+FFFD."""
        return self.codec.decode(ids, skip_special)

    @functools.cached_property
    def byte_ids(self) -> frozenset[int]:
        """Tokens whose run is decoded as a whole (see `Codec`)."""
        return self.codec.byte_ids()

    @functools.cached_property
    def continuation_ids(self) -> tuple[int, ...]:
        """Tokens that continue any unfinished character (see `Codec`)."""
        return self.codec.continuation_ids()


class Fast:
    """The `tokenizers` library."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)

    @classmethod
    def from_text(cls, text: str) -> Fast:
        """From the content of a tokenizer.json."""
        library = importlib.import_module("tokenizers")
        try:
            return cls(library.Tokenizer.from_str(text))
        except Exception as error:  # the library raises plain Exception
            rule = "tokenizer.json is one that `tokenizers` can read"
            raise RuleError(rule, str(error), "Download the model again") from None

    def encode(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        """The library has no such argument as parse_special: it is a state of the tokenizer, so
        there are two."""
        tokenizer = self.tokenizer if parse_special else self.literal
        ids: list[int] = tokenizer.encode(text, add_special_tokens=add_special).ids
        return ids

    @functools.cached_property
    def literal(self) -> Any:
        """A copy to which special tokens in a text are text."""
        copy = type(self.tokenizer).from_str(self.tokenizer.to_str())
        copy.encode_special_tokens = True
        return copy

    def decode(self, ids: Sequence[int], skip_special: bool) -> str:
        """Ids to text."""
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=skip_special)
        return text

    def id_of(self, token: str) -> int | None:
        """The id of a token."""
        found: int | None = self.tokenizer.token_to_id(token)
        return found

    def byte_ids(self) -> frozenset[int]:
        """The <0x..> pieces, if the decoder makes bytes of them."""
        decoder = json.dumps(json.loads(self.tokenizer.to_str()).get("decoder"))
        if '"ByteFallback"' not in decoder:
            return frozenset()
        return frozenset(
            i for piece, i in self.tokenizer.get_vocab().items() if BYTE_PIECE.fullmatch(piece)
        )

    def continuation_ids(self) -> tuple[int, ...]:
        """<0x..> pieces, or bytes as byte-level tokenizers write them."""
        return _byte_tokens(self, CONTINUATIONS)


def _characters(text: str) -> str:
    """The text, if every code point of it is a character: a lone surrogate has no UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        got = f"U+{ord(text[error.start]):04X}, a lone surrogate, at character {error.start}"
        rule = "a text is made of characters"
        raise RuleError(rule, got, "Decode it as what it is, or with errors='replace'") from None
    return text


def _byte_tokens(codec: Codec, values: Sequence[int]) -> tuple[int, ...]:
    """The tokens of single bytes beyond ASCII, those that there are.

    Byte-level tokenizers write a byte that prints nothing as a letter from U+0100 on; 0x7F is
    number 33 of these.
    """
    silent = [byte for byte in range(0x7F, 0x100) if byte < 0xA1 or byte == 0xAD]
    ids = []
    for value in values:
        letter = chr(0x100 + 33 + silent.index(value)) if value in silent else chr(value)
        piece = codec.id_of(f"<0x{value:02X}>")
        ids.append(codec.id_of(letter) if piece is None else piece)
    return tuple(i for i in ids if i is not None)
