"""Text to token ids and back, over the tokenizer.json of a local folder.

Wraps the `tokenizers` library; `from_folder` hands a folder without tokenizer.json to transformers,
imported then and only then (the engine asks for one only where there is a tokenizer.json). Reads
which ids end a text from the model's configuration files. Nothing is downloaded. Knows no engine:
called by `llm` and `serve`.
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
CONTINUATIONS = (
    0x80,
    0xA0,
)  # behind every beginning of a character in UTF-8 one of the two may stand


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
    """A tokenizer and the ids that have a meaning to the engine."""

    codec: Codec
    bos_id: int | None
    eos_ids: tuple[int, ...]

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Read a model folder: tokenizer.json, and the special ids of generation_config, config and
        tokenizer_config."""
        path = Path(folder)
        codec: Codec
        if folder_files.has(path, "tokenizer.json"):
            codec = Fast.from_text(folder_files.read_text(path, "tokenizer.json"))
        else:
            codec = Slow(path)
        configs = [
            _config(path, f"{name}.json")
            for name in ("generation_config", "config", "tokenizer_config")
        ]
        configs[1:1] = [
            config["text_config"]
            for config in configs
            if isinstance(config.get("text_config"), dict)
        ]
        bos = [i for config in configs for i in _ids(config, "bos", codec)]
        eos = dict.fromkeys(i for config in configs for i in _ids(config, "eos", codec))
        return cls(codec, bos[0] if bos else None, tuple(eos))

    @property
    def vocab_size(self) -> int:
        """One more than the largest id. A model may have more rows than that, as padding."""
        return self.codec.vocab_size

    def encode(self, text: str, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Text to ids.

        add_special    put what the tokenizer puts around a text (usually BOS)
        parse_special  read "<|im_end|>" in the text as the special token. Pass False for text of an
        end user inside a chat template:
                       then it is only characters
        """
        if not isinstance(text, str):
            raise RuleError(
                "a text is a string", type(text).__name__, "Pass a str, or token ids to the engine"
            )
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
            raise RuleError(
                "tokenizer.json is one that `tokenizers` can read",
                str(error),
                "Download the model again",
            ) from None

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


class Slow:
    """transformers' AutoTokenizer, for folders without a tokenizer.json."""

    def __init__(self, folder: Path) -> None:
        rule = "a model folder has a tokenizer.json"
        try:
            library = importlib.import_module("transformers")
        except ImportError as error:
            raise RuleError(
                rule,
                f"{folder} without one, and {error}",
                "Add the file, or install transformers to convert it",
            ) from None
        try:
            self.tokenizer: Any = library.AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True
            )
        except (OSError, ValueError) as error:
            raise RuleError(
                rule, f"{folder} without one, and transformers says: {error}", "Add the file"
            ) from None
        self.vocab_size = len(self.tokenizer)

    def encode(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        """Text to ids."""
        ids: list[int] = self.tokenizer.encode(
            text, add_special_tokens=add_special, split_special_tokens=not parse_special
        )
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool) -> str:
        """Ids to text, without the library's clean-up of spaces, which would change earlier
        text."""
        known = [i for i in ids if 0 <= i < self.vocab_size]
        text: str = self.tokenizer.decode(
            known, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False
        )
        return text

    def id_of(self, token: str) -> int | None:
        """The id of a token."""
        return dict(self.tokenizer.get_vocab()).get(token)

    def byte_ids(self) -> frozenset[int]:
        """The <0x..> pieces."""
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
        raise RuleError(
            "a text is made of characters", got, "Decode it as what it is, or with errors='replace'"
        ) from None
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


def _config(folder: Path, name: str) -> dict[str, Any]:
    """A JSON object; empty if there is no such file."""
    return folder_files.read_json(folder, name) if folder_files.has(folder, name) else {}


def _ids(config: dict[str, Any], name: str, codec: Codec) -> list[int]:
    """The ids a configuration gives for "bos" or "eos": `eos_token_id` is one or several,
    `eos_token` a text or an object."""
    given = config.get(f"{name}_token_id")
    ids = given if isinstance(given, list) else [] if given is None else [given]
    for i in ids:
        if isinstance(i, bool) or not isinstance(i, int) or i < 0:
            raise RuleError(
                f"{name}_token_id is a token id, or several",
                repr(given),
                "Mend the model's configuration",
            )
    token = config.get(f"{name}_token")
    text = token.get("content") if isinstance(token, dict) else token
    found = codec.id_of(text) if isinstance(text, str) else None
    return [*ids, *([] if found is None else [found])]
