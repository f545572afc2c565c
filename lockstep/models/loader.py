"""Loads a model from a folder or a hub id: config.json and safetensors, which must agree. A folder
is not trusted: no code of it runs, and every size that a config states is compared with what the
files hold before anything is allocated."""

import hashlib
import importlib
import math
import os
import pkgutil
import re
import zlib
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from lockstep import models
from lockstep.config import EngineConfig
from lockstep.folder import has, inside, read_json
from lockstep.kernels.cpu.digest import digest
from lockstep.kernels.select import select
from lockstep.nn import rope
from lockstep.nn.decoder import Model
from lockstep.nn.layers import WeightSource
from lockstep.ops import Ops
from lockstep.types import INT32_MAX, Choice, RuleError, check_one_of, checked_int, format_value

T = TypeVar("T")
ON_CPU = EngineConfig(device="cpu")
Entries = Mapping[str, "Entry"]
Build = Callable[[WeightSource], T]  # makes a model from weights
# a config.json with this key is read as it is, without importing transformers for its defaults
STATED = "lockstep_states_every_field"
CHECK_PATH, CHECK_FILE = "Check the path", "Check the file"
TOGETHER = "Check that config and weights belong together"
SHOWN = 4  # names in an error
SEED, SPREAD = 0, 0.02  # of random weights
FAULTS = 1000  # with more missing tensors than these the check ends early
BROKEN = (TypeError, ValueError, KeyError, AttributeError, ArithmeticError, RuntimeError)
FLOATS = {"F32", "F16", "BF16", "F64"}
PICKLES = {".bin", ".pt", ".pth", ".ckpt", ".pkl"}
DOWNLOAD = ["*.safetensors", "*.json", "*.txt", "*.jinja", "tokenizer.model"]
LAYERS = ("num_hidden_layers", "encoder_layers", "decoder_layers")
EPSILONS = ("rms_norm_eps", "layer_norm_eps")
MAY_BE_0 = ("num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts")
SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "head_dim", "d_model", "type_vocab_size"),
    *("num_attention_heads", "num_key_value_heads", "encoder_ffn_dim", "decoder_ffn_dim"),
    *("encoder_attention_heads", "decoder_attention_heads", "moe_intermediate_size", *MAY_BE_0),
    *("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
)


@dataclass(frozen=True)
class Info:
    """What the engine needs to know of a model besides its layers."""

    model_type: str
    folder: Path
    vocab_size: int
    hidden_size: int
    max_position: int
    eos_token_ids: tuple[int, ...]
    decoder_start_token_id: int | None
    device: Choice  # the table of operations, and the reason
    rope_context: int | None = None  # the length a dynamic rope was stretched to; None: it was not
    weights: str = "none"  # the digest of the tensors that were read, not of the files


class Loaded(NamedTuple):
    """A model and what its config says about it."""

    model: Model
    info: Info


class Entry(NamedTuple):
    """One tensor of the files."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def load(path_or_id: str | Path, options: EngineConfig = ON_CPU) -> Loaded:
    """Loads the model of a folder or a hub id, in the requested dtype or the device's default. With
    `load_format` "dummy" weights are random, with a fixed seed. Only a dynamic rope depends on
    `context_length`: it is stretched to one beyond the config's own."""
    ops, choice = select(options.device, options.dtype)
    folder = local_folder(path_or_id)
    raw = read_json(folder, "config.json")
    module = model_module(raw)
    check_numbers(raw)
    entries = None if options.load_format == "dummy" else scan(folder)
    if entries is not None:
        check_sizes(raw, entries)
    config = parse_config(folder, raw)
    params = getattr(config, "rope_parameters", None)
    if isinstance(params, Mapping):
        length = config.max_position_embeddings
        config.rope_parameters = rope.for_context(params, length, options.context_length)
    what = f"a {config.model_type} model"
    model, weights = built(lambda: module.describe(config).build, what, entries, ops)
    return Loaded(model, describe(folder, config, model, choice, weights))


def built(
    described: Callable[[], Build[T]], what: str, entries: Entries | None, ops: Ops
) -> tuple[T, str]:
    """Returns what `described()` builds, and the weights' digest. Builds twice: without numbers, to
    check that the files hold what is asked for and no more, then of them, or of random weights."""
    asked, unused, known = dict[str, tuple[int, ...]](), list[str](), entries or {}

    def note(name: str, shape: tuple[int, ...]) -> Tensor:
        asked[name] = shape
        if entries is not None and len(asked) > len(entries) + FAULTS:
            judge(entries, asked, unused)
        return torch.empty(shape, device="meta")

    try:
        build = described()
        build(WeightSource(note, unused.append, known, ops))
    except RuleError:
        raise
    except BROKEN as error:
        rule, got = f"config.json describes {what}", f"{type(error).__name__}: {error}"
        raise RuleError(rule, got, CHECK_FILE) from error
    if entries is not None:
        judge(entries, asked, unused)
    check_room(ops, sum(map(math.prod, asked.values())))
    with ExitStack() as stack, torch.no_grad():
        take, digests = partial(random_weights, ops.device), dict[str, bytes]()
        if entries is not None:
            take = reader(entries, stack, ops.device, digests)
        made = build(WeightSource(take, lambda pattern: None, known, ops))
    return made, f"dummy-{SEED}" if entries is None else combined_digest(entries, digests)


def judge(entries: Entries, asked: Mapping[str, tuple[int, ...]], unused: Sequence[str]) -> None:
    """Raises unless the files hold exactly the tensors asked for, `unused` ones aside."""
    there = {name: entry.shape for name, entry in entries.items()}
    both = [(name, there[name], shape) for name, shape in asked.items() if name in there]
    others = [name for name in there if name not in asked]
    kinds = {
        "missing": [name for name in asked if name not in there],
        "misshapen": [f"{name} is {list(a)}, not {list(b)}" for name, a, b in both if a != b],
        "unknown to the model": [n for n in others if not any(re.fullmatch(p, n) for p in unused)],
    }
    faults = [f"{len(names)} {kind}: {listed(names)}" for kind, names in kinds.items() if names]
    if faults:
        rule = "the weights are exactly those that config.json describes"
        raise RuleError(rule, "; ".join(faults), TOGETHER)


def check_room(ops: Ops, elements: int) -> None:
    """Raises unless a GPU has room for `elements` weights, before the first is copied there."""
    if ops.device.type != "cuda":
        return
    free, needed = torch.cuda.mem_get_info(ops.device)[0], elements * ops.dtype.itemsize
    if needed > free:
        rule = f"weights fit into the {free:,} B that are free on the GPU"
        got = f"{elements:,} of {ops.dtype.itemsize} B = {needed:,} B"
        raise RuleError(rule, got, "Use a smaller model, or device cpu")


def random_weights(device: torch.device, name: str, shape: tuple[int, ...]) -> Tensor:
    """Returns random weights, a function of the name; those of norms are around 1."""
    generator = torch.Generator(device).manual_seed(SEED + zlib.crc32(name.encode()))
    weights = torch.randn(shape, generator=generator, device=device) * SPREAD
    return weights + 1.0 if len(shape) == 1 and name.endswith("norm.weight") else weights


def model_types() -> list[str]:
    return sorted({m.name for m in pkgutil.iter_modules(models.__path__)} - {"loader"})


def model_module(raw: Mapping[str, Any]) -> ModuleType:
    """Returns the module of a config's model_type."""
    name = raw.get("model_type")
    check_one_of(model_types(), "model_type", name, "Use a checkpoint of one of these")
    quantised = raw.get("quantization_config")
    if quantised is not None:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else "unknown"
        got, rule = f"quantised ones ({method})", "weights are float32, bfloat16 or float16"
        raise RuleError(rule, got, "Use an unquantised checkpoint")
    return importlib.import_module(f"lockstep.models.{name}")


def local_folder(path_or_id: str | Path) -> Path:
    """Returns the folder, or the download of a hub id: weights, configs and tokenizer files."""
    folder = Path(path_or_id)
    if os.path.isdir(folder):  # False, and no error, for a name that no file can have
        return folder
    if not re.fullmatch(r"[\w.-]{1,96}/[\w.-]{1,96}", str(path_or_id)) or os.path.exists(folder):
        rule = "a model is a folder or a hub id of the form owner/name"
        raise RuleError(rule, format_value(str(path_or_id)), CHECK_PATH)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(path_or_id), allow_patterns=DOWNLOAD))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        got = f"{path_or_id!r}: {type(error).__name__}: {error}"
        rule = "the hub has the model, or its cache does"
        raise RuleError(rule, got, "Check the name, the network and the access") from error


def parse_config(folder: Path, raw: Mapping[str, Any]) -> Any:
    """Returns the config as transformers reads it. No code of the folder runs."""
    if raw.get(STATED):
        return SimpleNamespace(**raw)
    from transformers import AutoConfig

    try:
        options = {"trust_remote_code": False, "local_files_only": True}
        return AutoConfig.from_pretrained(str(folder), **options)
    except Exception as error:  # whatever its validators raise: the file is at fault
        rule = "config.json is one that transformers accepts"
        raise RuleError(rule, f"{type(error).__name__}: {error}", "Check the file") from error


def scan(folder: Path, maps: Container[str] = ()) -> dict[str, Entry]:
    """Returns all tensors of the folder's safetensors, by header; `maps` need not be floats."""
    entries: dict[str, Entry] = {}
    for path, listed_names in weight_files(folder).items():
        found = _header(path)
        lost = sorted(set(listed_names) - set(found))
        if lost:
            rule = "a file holds the tensors that the index names"
            raise RuleError(rule, f"{path.name} without {listed(lost)}", "Download it again")
        twice = sorted(set(found) & set(entries))
        if twice:
            rule = "a tensor is in one file only"
            raise RuleError(rule, f"{listed(twice)} in {path.name} too", "Check the index")
        entries |= found
    weights = [name for name in entries if name not in maps and "position_ids" not in name]
    odd = [f"{n} is {entries[n].dtype}" for n in weights if entries[n].dtype not in FLOATS]
    if odd:
        rule = "weights are floating point"
        raise RuleError(rule, f"{len(odd)} others: {listed(odd)}", "Use an unquantised checkpoint")
    return entries


def weight_files(folder: Path) -> dict[Path, list[str]]:
    """Returns file → the tensors that the index assigns to it (none if there is no index)."""
    if has(folder, "model.safetensors.index.json"):
        index = read_json(folder, "model.safetensors.index.json").get("weight_map")
        if not isinstance(index, dict) or not all(isinstance(v, str) for v in index.values()):
            rule = "weight_map of an index maps tensors to files"
            raise RuleError(rule, "none that does", "Download it again")
        files: dict[Path, list[str]] = {}
        for name, file in index.items():
            files.setdefault(inside(folder, file), []).append(name)
        wrong = sorted(p.name for p in files if p.suffix != ".safetensors" or not p.is_file())
        if wrong:
            rule = "an index names safetensors files that exist"
            raise RuleError(rule, listed(wrong), "Download them again")
        return files
    single = inside(folder, "model.safetensors")
    if single.is_file():
        return {single: []}
    pickles = sorted(p.name for p in folder.iterdir() if p.suffix in PICKLES)
    if pickles:
        rule = "weights are safetensors; pickled ones can run code"
        raise RuleError(rule, listed(pickles), "Convert them, or take another revision")
    raise RuleError("a model folder holds model.safetensors or its index", str(folder), CHECK_PATH)


def _header(path: Path) -> dict[str, Entry]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            names = file.keys()  # the file is not a dict and cannot be iterated itself
            views = [(name, file.get_slice(name)) for name in names]
            return {n: Entry(path, tuple(v.get_shape()), str(v.get_dtype())) for n, v in views}
    except (SafetensorError, OSError) as error:
        rule = f"{path.name} is a complete safetensors file"
        raise RuleError(rule, str(error), "Download it again") from error


def reader(
    entries: Entries, stack: ExitStack, device: torch.device, digests: dict[str, bytes]
) -> Any:
    """Returns `take`, which copies a tensor from the mapped files and notes its digest."""
    from safetensors import safe_open

    paths = {entry.file for entry in entries.values()}
    files = {path: stack.enter_context(safe_open(path, "pt")) for path in paths}

    def take(name: str, shape: tuple[int, ...]) -> Tensor:
        tensor: Tensor = files[entries[name].file].get_tensor(name)
        if name not in digests:
            digests[name] = digest(tensor)
        return tensor.to(device).to(torch.float32)  # copied as stored, widened on the device

    return take


def combined_digest(entries: Entries, digests: Mapping[str, bytes]) -> str:
    """Returns a digest of all tensors (names, dtypes, shapes, bytes), however files split them."""
    whole = hashlib.blake2b(digest_size=8)
    for name, each in sorted(digests.items()):
        whole.update(repr((name, entries[name].dtype, entries[name].shape, each.hex())).encode())
    return whole.hexdigest()


def check_sizes(raw: Mapping[str, Any], entries: Entries) -> None:
    """Raises if a size in the config exceeds what the files hold, before memory is allocated."""
    largest = max((max(e.shape, default=1) for e in entries.values()), default=0)
    limits = {**dict.fromkeys(SIZES, largest), **dict.fromkeys(LAYERS, len(entries))}
    for key, limit in limits.items():
        value, least = raw.get(key), 0 if key in MAY_BE_0 else 1
        if value is not None and (type(value) is not int or not least <= value <= limit):
            files = f"the files hold {len(entries)} tensors with dimensions up to {largest}"
            rule = f"{key} in config.json is from {least} to {limit}: {files}"
            raise RuleError(rule, format_value(value), TOGETHER)


def check_numbers(raw: Mapping[str, Any]) -> None:
    """Raises unless max_position_embeddings is at least 1 and epsilons are not negative."""
    for key in EPSILONS:
        value = raw.get(key, 0.0)
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            rule = f"{key} in config.json is a number, 0 or above"
            raise RuleError(rule, format_value(value), CHECK_FILE)
    longest = "max_position_embeddings"
    checked_int(f"{longest} in config.json", raw.get(longest, 1), 1, INT32_MAX, CHECK_FILE)


def describe(folder: Path, config: Any, model: Model, device: Choice, weights: str) -> Info:
    """Returns a model's `Info`; special tokens of generation_config.json take precedence."""
    file = "generation_config.json"
    extra = read_json(folder, file) if has(folder, file) else {}
    start = special_ids("decoder_start_token_id", extra, config) if model.encodes else ()
    stretched = model.max_position > config.max_position_embeddings
    return Info(
        model_type=config.model_type,
        folder=folder,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        max_position=model.max_position,
        eos_token_ids=special_ids("eos_token_id", extra, config),
        decoder_start_token_id=start[0] if start else None,
        device=device,
        rope_context=model.max_position if stretched else None,
        weights=weights,
    )


def special_ids(name: str, extra: Mapping[str, Any], config: Any) -> tuple[int, ...]:
    """Returns the tokens that generation_config.json, or else config.json, has under this name."""
    file = "generation_config.json" if name in extra else "config.json"
    given = extra.get(name, getattr(config, name, None))
    if given is None:
        return ()
    ids = given if isinstance(given, list) else [given]
    wrong = [i for i in ids if type(i) is not int or not 0 <= i < config.vocab_size]
    if wrong:
        rule = f"{name} in {file} names tokens from 0 to {config.vocab_size - 1}"
        raise RuleError(rule, format_value(wrong[0]), "Correct the file")
    return tuple(ids)


def listed(names: Sequence[str]) -> str:
    """Returns the first few names, and how many more there are."""
    rest = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + rest
