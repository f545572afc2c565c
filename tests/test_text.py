"""Tokenizer and growing text: pieces that add up to the whole, never half a character, stop strings
across any boundary."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Library

from lockstep.text import REPLACEMENT, Detok, Stops, Stream, Tokenizer
from lockstep.types import RuleError

CORPUS = [
    "the quick brown fox jumps over the lazy dog. The end. the the then there",
    "naïve café, e\u0301 combining, 你好世界 你们好, こんにちは, 안녕하세요, 😀😃👩‍👩‍👧‍👦🇩🇪, "
    "\u200f\u0645\u0631\u062d\u0628\u0627",
    "def fib(n):\n    return n if n < 2 else fib(n - 1) + fib(n - 2)\n\n\n\tx  =   1",
]


@functools.cache
def byte_level() -> Tokenizer:
    """A byte-level BPE like GPT-2's, trained on three lines: most characters outside ASCII take
    several tokens."""
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=["<|end|>", "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(CORPUS, trainer)
    return Tokenizer(library)


@functools.cache
def byte_fallback() -> Tokenizer:
    """A tokenizer like Llama 2's: "▁" for a space, one added before the text and one removed, and
    <0x..> pieces for unknown characters."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{i:02X}>" for i in range(256)),
        *"▁abcdefghijklmnopqrstuvwxyzé你",
        "▁t",
        "he",
        "▁the",
    ]
    library = Library(
        models.BPE(
            {p: i for i, p in enumerate(pieces)},
            [("▁", "t"), ("h", "e"), ("▁t", "he")],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    library.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    library.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    library.add_special_tokens([AddedToken(token, special=True) for token in pieces[:3]])
    return Tokenizer(library)


TOKENIZERS = [byte_level, byte_fallback]
TEXTS = st.text(
    st.one_of(
        st.characters(exclude_categories=["Cs"]), st.sampled_from("the 你好😀👩‍🇩é\u0301▁�<|end>\n")
    ),
    max_size=30,
)


def literal(tokenizer: Tokenizer, text: str) -> list[int]:
    """Returns the ids of a text whose special tokens are read as plain characters."""
    return characters(tokenizer).encode(text).ids


@functools.cache
def characters(tokenizer: Tokenizer) -> Library:
    library = Library.from_str(tokenizer.library.to_str())
    library.encode_special_tokens = True
    return library


def grown(detok: Detok, ids: list[int]) -> list[str]:
    return [*(detok.push(i) for i in ids), detok.finish()]


# ---- tokenizer ----


@settings(deadline=None, max_examples=150)
@given(TEXTS)
def test_a_text_survives_the_round_trip(text: str):
    assert byte_level().decode(literal(byte_level(), text)) == text


def test_special_tokens_in_a_text_are_parsed_and_have_no_text():
    tokenizer = byte_level()
    ids = tokenizer.encode("a<|end|>b")
    assert ids[1:2] == [0] and 0 not in literal(tokenizer, "a<|end|>b")
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.decode([*ids, 10_000]) == "ab", "an id of the model's padding has no text"
    with pytest.raises(RuleError, match="a text is a string; got bytes"):
        tokenizer.encode(b"a")  # type: ignore[arg-type]


def saved(folder: Path) -> Tokenizer:
    byte_level().library.save(str(folder / "tokenizer.json"))
    return Tokenizer.from_folder(folder)


def test_a_saved_tokenizer_is_the_same(tmp_path: Path):
    tokenizer = saved(tmp_path)
    assert tokenizer.library.get_vocab() == byte_level().library.get_vocab()
    assert tokenizer.encode("the end") == byte_level().encode("the end")


def test_a_broken_tokenizer_is_refused(tmp_path: Path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(RuleError, match=r"tokenizer\.json is one that `tokenizers` can read"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (
            b"\xff\xfe{}",
            "tokenizer.json is text in UTF-8; got byte 0xFF at 0. Download the model again.",
        ),
        (
            b"",
            "tokenizer.json is one that `tokenizers` can read; got EOF while parsing a value at "
            "line 1 column 0. Download the model again.",
        ),
        (
            b"rubbish",
            "tokenizer.json is one that `tokenizers` can read; got expected value at line 1 column "
            "1. Download the model again.",
        ),
    ],
)
def test_an_invalid_tokenizer_is_reported_in_one_line(tmp_path: Path, content: bytes, line: str):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(RuleError) as error:
        Tokenizer.from_folder(tmp_path)
    assert str(error.value) == line


@pytest.mark.parametrize("there", [True, False])
def test_a_tokenizer_that_is_a_link_out_of_the_folder_is_refused(tmp_path: Path, there: bool):
    folder, outside = tmp_path / "model", tmp_path / "outside"
    folder.mkdir()
    saved(folder)
    (folder / "tokenizer.json").rename(outside)
    (folder / "tokenizer.json").symlink_to(outside)
    if not there:
        outside.unlink()
    with pytest.raises(RuleError) as error:
        Tokenizer.from_folder(folder)
    got = f"a model's files are inside its folder; got tokenizer.json → {outside}."
    assert str(error.value) == f"{got} Replace the link by the file."


def test_a_folder_without_tokenizer_json_is_refused(tmp_path: Path):
    with pytest.raises(RuleError, match=r"a model folder holds tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


# ---- growing text ----


@pytest.mark.parametrize("make", TOKENIZERS)
@settings(deadline=None, max_examples=250)
@given(text=TEXTS)
@example(text="👩‍👩‍👧‍👦 e\u0301 你好")
@example(text="��")
def test_pieces_of_a_text_add_up_and_no_character_is_split(make: Any, text: str):
    tokenizer = make()
    ids = literal(tokenizer, text)
    pieces = grown(Detok(tokenizer), ids)
    whole = tokenizer.decode(ids)
    assert "".join(pieces) == whole
    if REPLACEMENT not in whole:
        assert not any(REPLACEMENT in piece for piece in pieces), "half a character was shown"


@pytest.mark.parametrize("make", TOKENIZERS)
@settings(deadline=None, max_examples=250)
@given(data=st.data())
def test_pieces_of_any_tokens_add_up_to_the_decode(make: Any, data: st.DataObject):
    """A model may generate anything: broken UTF-8, special tokens inside a character, ids without a
    token."""
    tokenizer = make()
    some = st.one_of(
        st.integers(0, max(tokenizer.library.get_vocab().values()) + 3),
        st.sampled_from(literal(tokenizer, "😀你é the")),
    )
    ids = data.draw(st.lists(some, max_size=25))
    assert "".join(grown(Detok(tokenizer), ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("make", TOKENIZERS)
@settings(deadline=None, max_examples=150)
@given(prompt=st.text("the 你a�", min_size=1, max_size=12), text=TEXTS)
@example(prompt="a�", text="the")
@example(prompt="��", text="�")
@example(prompt="�😀�", text="😀")
def test_text_continues_the_prompt(make: Any, prompt: str, text: str):
    """The space of "▁the" belongs to the answer when there is a prompt before it."""
    tokenizer = make()
    before, after = tokenizer.encode(prompt), literal(tokenizer, text)
    whole, start = tokenizer.decode([*before, *after]), tokenizer.decode(before)
    if whole.startswith(start):
        assert start + "".join(grown(Detok(tokenizer, before), after)) == whole


@pytest.mark.parametrize("make", TOKENIZERS)
def test_a_replacement_character_at_the_end_of_a_prompt_is_not_repeated(make: Any):
    """The user's own U+FFFD used to be taken for the start of a character, and began every
    answer."""
    tokenizer = make()
    prompt, answer = tokenizer.encode("a\ufffd", False), tokenizer.encode("b", False)[-1:]
    assert tokenizer.decode(prompt) == "a\ufffd"
    assert "".join(grown(Detok(tokenizer, prompt), answer)) == "b"


def test_only_the_bytes_that_can_still_become_a_character_belong_to_the_answer():
    tokenizer = byte_level()
    first, *rest = literal(tokenizer, "\u2603")
    prompt = [*literal(tokenizer, "a\ufffd"), first]
    assert tokenizer.decode(prompt) == "a\ufffd\ufffd"
    assert "".join(grown(Detok(tokenizer, prompt), rest)) == "\u2603", (
        "the snowman, without the user's U+FFFD"
    )
    lone = [*literal(tokenizer, "a"), *rest[-1:]]  # a byte that continues nothing
    assert "".join(grown(Detok(tokenizer, lone), tokenizer.encode("b"))) == "b"


@pytest.mark.parametrize("make", TOKENIZERS)
def test_a_prompt_that_ends_in_many_tokens_without_text_keeps_the_answers_space(make: Any):
    tokenizer = make()
    space = tokenizer.encode("the the")[len(tokenizer.encode("the")) :]
    prompt = [*tokenizer.encode("a"), *[1] * 20]
    assert "".join(grown(Detok(tokenizer, prompt), space)) == " the"


@pytest.mark.parametrize("make", TOKENIZERS)
def test_a_prompt_that_ends_inside_a_character_is_recognised(make: Any):
    tokenizer = make()
    lead = {"E0": "\u0800", "ED": "\ud000", "F0": "\U00010000", "F4": "\U00100000", "C3": "é"}
    assert len(tokenizer.continuation_ids) == 2
    for text in lead.values():
        for missing in range(1, len(text.encode())):
            ids = [i for b in text.encode()[:-missing] for i in byte_tokens(tokenizer, b)]
            detok = Detok(tokenizer, ids)
            assert detok.sent == 0, f"{text!r} without {missing} bytes can become a character"


def byte_tokens(tokenizer: Tokenizer, byte: int) -> list[int]:
    """Returns the token of one byte."""
    if tokenizer is byte_fallback():
        return [3 + byte]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letter = (
        chr(byte)
        if byte in printed
        else chr(256 + [b for b in range(256) if b not in printed].index(byte))
    )
    assert letter in alphabet
    return [tokenizer.library.token_to_id(letter)]


def test_text_is_not_held_back_without_need():
    tokenizer = byte_level()
    ids = literal(tokenizer, "the end")
    detok = Detok(tokenizer)
    assert [detok.push(i) for i in ids] == [tokenizer.decode([i]) for i in ids]
    first, *rest = literal(tokenizer, "☃")  # three bytes that were never merged in training
    assert rest and detok.push(first) == ""
    assert "".join(detok.push(i) for i in rest) == "☃"


def test_a_run_of_bytes_waits_for_its_end():
    """With byte fallback a later byte can turn a whole run into replacement characters."""
    tokenizer = byte_fallback()
    ids = [i + 3 for i in "好".encode()]
    detok = Detok(tokenizer)
    assert [detok.push(i) for i in ids] == ["", "", ""] and detok.finish() == "好"
    for inside in ([], [1], [100_000]):  # tokens without text do not end a run
        longer = [*ids, *inside, 3 + 0xFF]
        assert (
            "".join(grown(Detok(tokenizer), longer)) == REPLACEMENT * 4 == tokenizer.decode(longer)
        )
    prompt = [i + 3 for i in "好好好好".encode()]  # longer than the part of a prompt that is kept
    assert "".join(grown(Detok(tokenizer, prompt), ids)) == "好"


def test_long_texts_do_not_decode_everything_again():
    tokenizer = byte_level()
    detok = Detok(tokenizer)
    widest = 0
    for i in tokenizer.encode(CORPUS[0] * 50):
        detok.push(i)
        widest = max(widest, len(detok.ids) - detok.begin)
    assert widest < 8


# ---- stop strings ----


def first_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Searches character by character. Returns the text before the first stop string to be
    completed (the longest, if there are several), and that string."""
    for end in range(1, len(text) + 1):
        hits = sorted((s for s in stops if text[:end].endswith(s)), key=len)
        if hits:
            return text[: end - len(hits[-1])], hits[-1]
    return text, None


@settings(deadline=None, max_examples=400)
@given(
    st.lists(st.text("abc", max_size=4), max_size=12),
    st.lists(st.text("abc", min_size=1, max_size=5), max_size=4),
)
@example(["ab", "cd"], ["abcd", "bc"])
@example(["aab"], ["ab", "aab", "b"])
@example(["aaa", "ab"], ["aaab"])
def test_stop_strings_do_not_depend_on_the_pieces(pieces: list[str], stops: list[str]):
    found, out, stop = Stops(stops), "", None
    want, want_stop = first_stop("".join(pieces), stops)
    for piece in pieces:
        got = found.feed(piece)
        out += got.text
        assert want.startswith(out), "part of a stop string was shown"
        if got.stop:
            stop = got.stop
            break
    out += "" if stop else found.skip()
    assert (out, stop) == (want, want_stop)


@pytest.mark.parametrize("make", TOKENIZERS)
@settings(deadline=None, max_examples=200)
@given(data=st.data(), text=TEXTS)
def test_a_stream_stops_where_the_whole_text_does(make: Any, data: st.DataObject, text: str):
    tokenizer = make()
    ids = literal(tokenizer, text)
    whole = tokenizer.decode(ids)
    cuts = st.tuples(st.integers(0, len(whole)), st.integers(1, 4)).map(
        lambda c: whole[c[0] : c[0] + c[1]]
    )
    stops = [s for s in data.draw(st.lists(cuts, max_size=2)) if s]
    stream = Stream(tokenizer, stops)
    pieces = [*(stream.push(i) for i in ids), stream.finish()]
    ended = [piece.stop for piece in pieces if piece.stop]
    assert ("".join(piece.text for piece in pieces), ended[0] if ended else None) == first_stop(
        whole, stops
    )
    assert len(ended) <= 1 and stream.finish().text == "" and stream.push(5).text == ""


def test_a_stop_string_may_be_skipped_before_min_tokens():
    tokenizer = byte_level()
    ids = literal(tokenizer, "end end")
    stream, text = Stream(tokenizer, ["nd"]), ""
    for n, i in enumerate(ids):
        piece = stream.push(i, may_stop=n >= len(ids) - 1)
        text += piece.text
    assert stream.ended and text == "end e"
