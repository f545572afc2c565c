"""Text to token ids and back, and streamed text. `Tokenizer` is the `tokenizers` library over a
folder's tokenizer.json; the model determines which ids end a text. Streamed text never ends in half
a character or part of a stop string: `Detok` turns tokens into text that will not change, `Stops`
finds stop strings across pieces, `Stream` is both. Called by `llm`."""

import importlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Self

from lockstep.folder import read_text
from lockstep.types import RuleError

BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
# bytes 0x80 and 0xA0, one of which may continue any unfinished character of UTF-8: as tokenizers
# with a byte fallback write them, and as letters, as byte-level ones do
CONTINUATIONS = (("<0x80>", "\u0122"), ("<0xA0>", "\u0142"))
REPLACEMENT = "�"  # a decoder's result for bytes that are not, or not yet, a character
PROMPT_TAIL = 8  # tokens of the prompt that the first piece is decoded with
CHARACTER_BYTES = 4  # of the longest character in UTF-8
Ids = Sequence[int]


class Tokenizer:
    """A tokenizer of the library, and the ids that streaming needs."""

    def __init__(self, library: Any) -> None:
        self.library = library
        # streaming decodes the same tokens again and again
        self._decode_one: Callable[[int], str] = lru_cache(1 << 16)(lambda i: library.decode([i]))

    @classmethod
    def from_folder(cls, folder: str | Path) -> Self:
        """Loads the tokenizer.json of a model's folder."""
        text = read_text(Path(folder), "tokenizer.json")
        tokenizers = importlib.import_module("tokenizers")
        try:
            return cls(tokenizers.Tokenizer.from_str(text))
        except Exception as error:  # the library raises plain Exception
            rule = "tokenizer.json is one that `tokenizers` can read"
            raise RuleError(rule, str(error), "Download the model again") from None

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Returns a text's ids; `add_special`: with what the tokenizer puts around it (usually
        BOS). "<|im_end|>" in the text becomes the special token."""
        if not isinstance(text, str):
            rule = "a text is a string"
            raise RuleError(rule, type(text).__name__, "Pass a str, or token ids to the engine")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            got = f"U+{ord(text[error.start]):04X}, a lone surrogate, at character {error.start}"
            remedy = "Decode it with its own encoding, or with errors='replace'"
            raise RuleError("a text is valid Unicode", got, remedy) from None
        ids: list[int] = self.library.encode(text, add_special_tokens=add_special).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text, without special tokens and unknown ids; invalid UTF-8 is U+FFFD."""
        if len(ids) == 1:
            return self._decode_one(ids[0])
        text: str = self.library.decode(list(ids))
        return text

    @cached_property
    def byte_ids(self) -> frozenset[int]:
        """Tokens of which a run is decoded as a whole: <0x..> pieces, if they stand for bytes."""
        decoder = json.dumps(json.loads(self.library.to_str()).get("decoder"))
        if '"ByteFallback"' not in decoder:
            return frozenset()
        vocab: dict[str, int] = self.library.get_vocab()
        return frozenset(i for piece, i in vocab.items() if BYTE_PIECE.fullmatch(piece))

    @cached_property
    def continuation_ids(self) -> tuple[int, ...]:
        """One-byte tokens, if there are any: one of them may continue any unfinished character."""
        ids: list[int] = []
        for pieces in CONTINUATIONS:
            known = [self.library.token_to_id(piece) for piece in pieces]
            ids += [i for i in known if i is not None][:1]
        return tuple(ids)


class TextPiece(NamedTuple):
    """New text, and the stop string that followed and ended it, if one did."""

    text: str
    stop: str | None = None


class Detok:
    """Tokens are decoded together with some before them, because a decoder treats the first token
    of a sequence differently (the space of "▁the") and because a character can take several tokens.
    `ids[begin:]` is that window. Of its text, `sent` characters were returned, among them those of
    `ids[begin:settled]`. With `prompt_ids` the text continues the prompt's."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Ids = ()) -> None:
        self.tokenizer = tokenizer
        self.ids = self._tail(prompt_ids)
        self.begin, self.settled = 0, len(self.ids)
        self.sent = self._settled_len()
        # in a run of byte tokens, valid or not as a whole; only a token with text ends it
        self.in_run = False

    def push(self, token_id: int) -> str:
        """Returns text that `token_id` adds and that no later token can change; possibly none."""
        self.ids.append(token_id)
        if token_id in self.tokenizer.byte_ids:
            self.in_run = True
        elif self.in_run:
            self.in_run = not self.tokenizer.decode([token_id])
        if self.in_run:
            return ""
        text = self._window()
        complete = text.rstrip(REPLACEMENT)  # the last bytes may be the beginning of a character
        new = self._send(complete)
        if complete == text:
            self._advance(new)
        return new

    def finish(self) -> str:
        """Returns the text that was held back: no token follows."""
        return self._send(self._window())

    def _tail(self, prompt_ids: Ids) -> list[int]:
        """Returns the prompt's last tokens, with some text and no run of byte tokens cut in two."""
        tail_len = PROMPT_TAIL
        while tail_len < len(prompt_ids) and not self.tokenizer.decode(prompt_ids[-tail_len:]):
            tail_len *= 2
        first = max(0, len(prompt_ids) - tail_len)
        while first and prompt_ids[first] in self.tokenizer.byte_ids:
            first -= 1
        return list(prompt_ids[first:])

    def _settled_len(self) -> int:
        """Returns how many characters of the prompt's text no token can change. A U+FFFD at its end
        was written by the user, or is bytes that are not a character, or that begin one:
        continuation bytes are tried, and a character they complete belongs to the answer."""
        text = self._window()
        if not text.endswith(REPLACEMENT):
            return len(text)
        lengths = [len(text)]
        for token_id in self.tokenizer.continuation_ids:
            for count in range(1, CHARACTER_BYTES):
                longer = self.tokenizer.decode([*self.ids, *[token_id] * count])
                if longer.count(REPLACEMENT) < text.count(REPLACEMENT):
                    kept = [n for n in range(len(text) + 1) if longer.startswith(text[:n])]
                    lengths.append(kept[-1])
        return min(lengths)

    def _advance(self, new: str) -> None:
        """Moves the window on if there is new text: a token without text must not begin one."""
        if new:
            self.begin, self.settled = self.settled, len(self.ids)
            self.sent = len(self._window())

    def _window(self) -> str:
        return self.tokenizer.decode(self.ids[self.begin :])

    def _send(self, text: str) -> str:
        new = text[self.sent :]
        self.sent += len(new)
        return new


class Stops:
    """Finds stop strings in text that arrives in pieces. The one that ends first wins, of several
    that end together the longest. So the result depends on the text, not on the pieces."""

    def __init__(self, stops: Iterable[str]) -> None:
        self.stops = tuple(stops)
        self.held = ""  # the longest end of the text that may be the beginning of a stop string

    def feed(self, text: str) -> TextPiece:
        """Returns the text that is final now, or the rest of it before a stop string."""
        text = self.skip(text)
        if not self.stops:
            return TextPiece(text)
        found = [(at + len(stop), at, stop) for stop in self.stops if (at := text.find(stop)) >= 0]
        if found:
            _, at, stop = min(found)
            return TextPiece(text[:at], stop)
        longest = max(map(len, self.stops)) - 1
        for begin in range(max(len(text) - longest, 0), len(text)):
            if any(stop.startswith(text[begin:]) for stop in self.stops):
                self.held = text[begin:]
                return TextPiece(text[:begin])
        return TextPiece(text)

    def skip(self, text: str = "") -> str:
        """Returns held-back text and `text` without searching them, as before min_tokens."""
        text, self.held = self.held + text, ""
        return text


class Stream:
    """A completion's text: tokens in; final text, and the stop string that ended it, out."""

    def __init__(
        self, tokenizer: Tokenizer, stops: Iterable[str] = (), prompt_ids: Ids = ()
    ) -> None:
        self.detok, self.stops, self.ended = Detok(tokenizer, prompt_ids), Stops(stops), False

    def push(self, token_id: int, may_stop: bool = True) -> TextPiece:
        """Adds a token. Without `may_stop` (before min_tokens) its text is not searched."""
        if self.ended:
            return TextPiece("")
        text = self.detok.push(token_id)
        piece = self.stops.feed(text) if may_stop else TextPiece(self.stops.skip(text))
        self.ended = piece.stop is not None
        return piece

    def finish(self) -> TextPiece:
        """Ends the text: returns what was held back, in which a stop string may be complete now."""
        if self.ended:
            return TextPiece("")
        self.ended = True
        text, stop = self.stops.feed(self.detok.finish())
        return TextPiece(text + self.stops.skip(), stop)
