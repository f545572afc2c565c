"""Text to token ids and back, by the `tokenizers` library, over the tokenizer.json of a folder.
Which ids end a text is the model's to say. Called by `llm`."""

import importlib
import json
import re
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Self

from lockstep.folder import read_text
from lockstep.types import RuleError

BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
# bytes 0x80 and 0xA0, one of which may follow any beginning of a character in UTF-8, as tokenizers
# with a byte fallback write them, and byte-level ones: as letters
CONTINUATIONS = (("<0x80>", "\u0122"), ("<0xA0>", "\u0142"))


class Tokenizer:
    """A tokenizer of the library, and the ids that growing text asks for."""

    def __init__(self, library: Any) -> None:
        self.library = library

    @classmethod
    def from_folder(cls, folder: str | Path) -> Self:
        """From the tokenizer.json of a model's folder."""
        text = read_text(Path(folder), "tokenizer.json")
        tokenizers = importlib.import_module("tokenizers")
        try:
            return cls(tokenizers.Tokenizer.from_str(text))
        except Exception as error:  # the library raises plain Exception
            rule = "tokenizer.json is one that `tokenizers` can read"
            raise RuleError(rule, str(error), "Download the model again") from None

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Text to ids. `add_special`: with what the tokenizer puts around a text (usually BOS).
        "<|im_end|>" in the text is the special token."""
        if not isinstance(text, str):
            rule = "a text is a string"
            raise RuleError(rule, type(text).__name__, "Pass a str, or token ids to the engine")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            got = f"U+{ord(text[error.start]):04X}, a lone surrogate, at character {error.start}"
            remedy = "Decode it as what it is, or with errors='replace'"
            raise RuleError("a text is made of characters", got, remedy) from None
        ids: list[int] = self.library.encode(text, add_special_tokens=add_special).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Ids to text, without special tokens and ids that have no token. Bytes that are no UTF-8
        become U+FFFD."""
        if len(ids) == 1:
            return self._decode_one(ids[0])
        text: str = self.library.decode(list(ids))
        return text

    @cached_property
    def _decode_one(self) -> Callable[[int], str]:
        """Growing text asks for the same tokens again and again."""
        return lru_cache(1 << 16)(lambda id_: self.library.decode([id_]))

    @cached_property
    def byte_ids(self) -> frozenset[int]:
        """Tokens whose run is decoded as a whole: <0x..> pieces, where they are bytes."""
        decoder = json.dumps(json.loads(self.library.to_str()).get("decoder"))
        if '"ByteFallback"' not in decoder:
            return frozenset()
        vocab: dict[str, int] = self.library.get_vocab()
        return frozenset(i for piece, i in vocab.items() if BYTE_PIECE.fullmatch(piece))

    @cached_property
    def continuation_ids(self) -> tuple[int, ...]:
        """Tokens of one byte each, one of which may follow any unfinished character, where there
        are such."""
        ids: list[int] = []
        for pieces in CONTINUATIONS:
            known = [self.library.token_to_id(piece) for piece in pieces]
            ids += [i for i in known if i is not None][:1]
        return tuple(ids)
