"""Trains the built-in model's EAGLE-3 head on what the model writes after the standard library.

Three parts, one after the other. `prompts` cuts the library's files into prompts (on the CPU, once;
without the 32 files of `lockstep bench speculative` and all others held out from the model's
training). The target continues them, greedily and sampled, and the head learns to predict that from
the target's states. In training as in use, a draft step reads the state that the head itself made
in the step before ("training-time test"). Plain float32 torch, on a GPU if there is one:

    python tools/train_head.py prompts
    python tools/train_head.py train

Contains the target's formulas a second time, since a batch of equal lengths needs no engine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "lockstep/builtin"
HELD_OUT = ROOT / "lockstep/bench/held_out.json"
BEGIN_ID, END_ID = 0, 1
LONGEST = 512  # tokens of the longest prompt
TEMPERATURE = 0.8  # of sampled continuations


# -- prompts


def write_prompts(args: argparse.Namespace) -> None:
    """Writes training prompts [count, LONGEST] and the held-out ones [32, prompt_len] to one file.
    A quarter begin where a file does; the others anywhere in any file, uniformly."""
    sys.path.insert(0, str(ROOT / "tools/builtin"))
    from prepare import is_held_out, sources
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    held = json.loads(HELD_OUT.read_text())
    library = Path(sysconfig.get_path("stdlib"))
    known = [file.text for file in sources(library) if not is_held_out(file.path)]
    known = known[:: max(1, len(known) // args.files)] if args.files else known
    rows = [np.array([BEGIN_ID, *row.ids]) for row in tokenizer.encode_batch(known)]
    rows = [row for row in rows if len(row) >= LONGEST]
    rng, text = np.random.default_rng(args.seed), np.concatenate(rows)
    starts = np.cumsum([0, *map(len, rows[:-1])])
    first = rng.choice(starts, args.count // 4)
    begins = np.concatenate(
        (first, rng.integers(len(text) - LONGEST, size=args.count - len(first)))
    )
    rng.shuffle(begins)
    texts = [(library / name).read_text("utf-8") for name in held["files"]]
    held_rows = [
        [BEGIN_ID, *row.ids][: held["prompt_len"]] for row in tokenizer.encode_batch(texts)
    ]
    args.data.parent.mkdir(parents=True, exist_ok=True)
    prompts = text[begins[:, None] + np.arange(LONGEST)].astype(np.uint16)
    np.savez_compressed(args.data, prompts=prompts, held_out=np.array(held_rows, np.uint16))
    print(f"{len(prompts)} prompts of {len(rows)} files, {len(held_rows)} held out: {args.data}")


# -- the target


CosSin = tuple[Tensor, Tensor]


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, 1e-6)


def cos_sin(begin: int, end: int, device: torch.device) -> CosSin:
    """Returns cos and sin of positions [begin, end), for heads of 64: [T, 32] each."""
    freqs = 10_000.0 ** (-torch.arange(32, device=device) / 32)
    angles = torch.arange(begin, end, device=device)[:, None] * freqs
    return angles.cos(), angles.sin()


def rotate(x: Tensor, turn: CosSin) -> Tensor:
    """x [..., T, 64]."""
    (a, b), (cos, sin) = x.chunk(2, -1), turn
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Target:
    """The built-in model, for batches of sequences of one length; keys are kept between calls."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        tensors = load_file(folder / "model.safetensors")
        self.weights = {n: t.to(device, torch.float32) for n, t in tensors.items()}
        self.layers: int = self.config["num_hidden_layers"]
        self.embedding = self.weights["model.embed_tokens.weight"]

    def begin(self, rows: int, length: int) -> None:
        """Allocates the keys of a new batch."""
        heads, d = self.config["num_key_value_heads"], self.config["head_dim"]
        shape = (2, self.layers, rows, heads, length, d)
        self.cache, self.length = torch.empty(shape, device=self.embedding.device), 0

    def __call__(self, ids: Tensor, layers: tuple[int, ...] = ()) -> tuple[Tensor, list[Tensor]]:
        """ids [B, T], following those of earlier calls → normed rows [B, T, d], and the states
        after `layers`."""
        x, states = F.embedding(ids, self.embedding), dict[int, Tensor]()
        begin, end = self.length, self.length + ids.shape[1]
        turn, sees = cos_sin(begin, end, x.device), dict[int, Tensor]()
        for window in {self.window(i, end) for i in range(self.layers)}:
            keys = torch.arange(max(0, begin - window + 1), end, device=x.device)
            distance = torch.arange(begin, end, device=x.device)[:, None] - keys
            sees[window] = (distance >= 0) & (distance < window)
        for i in range(self.layers):
            x = self._layer(x, i, turn, sees[self.window(i, end)])
            if i in layers:
                states[i] = x
        self.length = end
        return rms_norm(x, self.weights["model.norm.weight"]), [states[i] for i in layers]

    def window(self, i: int, length: int) -> int:
        """Returns how many of `length` keys a row of layer i sees at most."""
        sliding = self.config["layer_types"][i] == "sliding_attention"
        return min(length, self.config["sliding_window"]) if sliding else length

    def _layer(self, x: Tensor, i: int, turn: CosSin, sees: Tensor) -> Tensor:
        """Query heads that share keys are rows of one head."""

        def weight(name: str) -> Tensor:
            return self.weights[f"model.layers.{i}.{name}.weight"]

        def heads(name: str) -> Tensor:
            out = F.linear(normed, weight(f"self_attn.{name}_proj"))
            return out.unflatten(-1, (-1, self.config["head_dim"])).transpose(1, 2)

        normed, begin = rms_norm(x, weight("input_layernorm")), self.length
        end = begin + x.shape[1]
        q = rotate(rms_norm(heads("q"), weight("self_attn.q_norm")), turn)
        k = rotate(rms_norm(heads("k"), weight("self_attn.k_norm")), turn)
        self.cache[0, i, :, :, begin:end], self.cache[1, i, :, :, begin:end] = k, heads("v")
        k, v = self.cache[:, i, :, :, end - sees.shape[1] : end]
        group = q.shape[1] // k.shape[1]
        rows = q.unflatten(1, (-1, group)).flatten(2, 3)
        mixed = F.scaled_dot_product_attention(rows, k, v, sees.repeat(group, 1))
        mixed = mixed.unflatten(2, (group, -1)).flatten(1, 2)
        x = x + F.linear(mixed.transpose(1, 2).flatten(2), weight("self_attn.o_proj"))
        normed = rms_norm(x, weight("post_attention_layernorm"))
        gate = F.silu(F.linear(normed, weight("mlp.gate_proj")))
        fed = gate * F.linear(normed, weight("mlp.up_proj"))
        return x + F.linear(fed, weight("mlp.down_proj"))

    def logits(self, rows: Tensor) -> Tensor:
        return F.linear(rows, self.embedding)


@dataclass
class Batch:
    """Sequences of one length, their first `prompt_len` tokens a prompt.

    ids      [B, T]
    states   [B, T, 3d], the head's input, and `rows` [B, T, d], the input of the target's logits
    greedy   [B]: continued at temperature 0
    counts   [B, T]: a token of the continuation, up to its end of text
    noise    [B, T, vocab] of sampled tokens, if kept: token i was chosen with noise[i]
    """

    prompt_len: int
    ids: Tensor
    states: Tensor
    rows: Tensor
    greedy: Tensor
    counts: Tensor
    noise: Tensor | None = None


@torch.no_grad()
def continued(
    target: Target, prompts: Tensor, new: int, layers: tuple[int, ...], keep_noise: bool = False
) -> Batch:
    """Continues every prompt [B, P] by `new` tokens, the first half of the prompts greedily."""
    (count, prompt_len), device = prompts.shape, prompts.device
    greedy = torch.arange(count, device=device) < count // 2
    hot = torch.where(greedy, 0.0, TEMPERATURE)[:, None]
    target.begin(count, prompt_len + new)
    ids, last, kept = [prompts], prompts, []
    for _ in range(new):
        rows, _ = target(last)
        logits = target.logits(rows[:, -1])
        noise = -torch.log(torch.empty_like(logits).exponential_())
        last = (logits + hot * noise).argmax(-1)[:, None]
        ids.append(last)
        if keep_noise:
            kept.append(noise)
    whole = torch.cat(ids, 1)
    chunks: list[tuple[Tensor, Tensor]] = []
    for part in whole.split(256):
        target.begin(len(part), whole.shape[1])
        rows, states = target(part, layers)
        chunks.append((torch.cat(states, -1).bfloat16(), rows.bfloat16()))
    states, rows = (torch.cat(each) for each in zip(*chunks))
    place = torch.arange(whole.shape[1], device=device)
    ended = ((whole == END_ID) & (place >= prompt_len)).cumsum(1)
    counts = (place >= prompt_len) & (ended - (whole == END_ID).long() <= 0)
    before = torch.zeros(count, prompt_len, logits.shape[-1], device=device)
    all_noise = torch.cat((before, torch.stack(kept, 1)), 1) if kept else None
    return Batch(prompt_len, whole, states, rows, greedy, counts, all_noise)


# -- the head


@dataclass(frozen=True)
class Shape:
    """The shape of a head."""

    hidden: int = 256
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    inner: int = 1024
    vocab: int = 2048
    layers: tuple[int, ...] = (2, 5, 7)


class Head(nn.Module):
    """An EAGLE-3 head; names are those of its file. `tokens` [vocab]: the target's ids of the
    head's vocabulary."""

    def __init__(self, shape: Shape, tokens: Tensor, embedding: Tensor) -> None:
        super().__init__()
        s, d = shape, shape.hidden
        self.shape, self.tokens, self.embedding = s, tokens, embedding
        sizes = {
            "fc": (d, 3 * d),
            "midlayer.self_attn.q_proj": (s.heads * s.head_dim, 2 * d),
            "midlayer.self_attn.k_proj": (s.kv_heads * s.head_dim, 2 * d),
            "midlayer.self_attn.v_proj": (s.kv_heads * s.head_dim, 2 * d),
            "midlayer.self_attn.o_proj": (d, s.heads * s.head_dim),
            "midlayer.mlp.gate_proj": (s.inner, d),
            "midlayer.mlp.up_proj": (s.inner, d),
            "midlayer.mlp.down_proj": (d, s.inner),
        }
        norms = [f"midlayer.{n}" for n in ("input_layernorm", "hidden_norm")]
        norms += ["midlayer.post_attention_layernorm", "norm"]
        values = {name: torch.randn(size) * size[1] ** -0.5 for name, size in sizes.items()}
        values |= {name: torch.ones(d) for name in norms}
        values["lm_head"] = embedding[tokens].clone()
        self.named = nn.ParameterDict(
            {
                name.replace(".", "/"): nn.Parameter(v.to(embedding.device))
                for name, v in values.items()
            }
        )

    def weight(self, name: str) -> Tensor:
        return self.named[name.replace(".", "/")]

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.weight(name))

    def norm(self, name: str, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight(name))

    def project(self, ids: Tensor, state: Tensor, begin: int, names: str) -> list[Tensor]:
        """Returns queries, keys or values [B, heads, T, d] of rows at positions from `begin` on."""
        embedded = self.norm("midlayer.input_layernorm", F.embedding(ids, self.embedding))
        x = torch.cat((embedded, self.norm("midlayer.hidden_norm", state)), -1)
        turn, out = cos_sin(begin, begin + ids.shape[1], ids.device), []
        for name in names:
            heads = self.linear(f"midlayer.self_attn.{name}_proj", x)
            heads = heads.unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2)
            out.append(heads if name == "v" else rotate(heads, turn))
        return out

    def finish(self, mixed: Tensor, state: Tensor) -> Tensor:
        """Attention's output [B, T, heads · d] → the state that the next row receives."""
        x = state + self.linear("midlayer.self_attn.o_proj", mixed)
        normed = self.norm("midlayer.post_attention_layernorm", x)
        gate = F.silu(self.linear("midlayer.mlp.gate_proj", normed))
        return x + self.linear(
            "midlayer.mlp.down_proj", gate * self.linear("midlayer.mlp.up_proj", normed)
        )

    def logits(self, state: Tensor) -> Tensor:
        return self.linear("lm_head", self.norm("norm", state))


def unrolled(head: Head, batch: Batch, steps: int) -> list[Tensor]:
    """Returns, per draft step s, logits [B, N, draft vocabulary] of chains that begin at every row
    j from the prompt's last on: step s reads token j + 1 + s, and predicts token j + 2 + s.

    Row j sees the keys of rows up to j, from the target's states, and those that its own chain
    made.
    """
    first, last = batch.prompt_len - 1, batch.ids.shape[1] - 2 - steps  # rows [first, last]
    states = head.linear("fc", batch.states.float())
    k0, v0 = head.project(batch.ids[:, 1 : last + 2], states[:, : last + 1], 0, "kv")
    group = head.shape.heads // head.shape.kv_heads
    k0, v0 = k0.repeat_interleave(group, 1), v0.repeat_interleave(group, 1)
    row = torch.arange(first, last + 1, device=k0.device)
    hidden = torch.arange(last + 1, device=k0.device) > row[:, None]
    state, own, out = states[:, first : last + 1], list[tuple[Tensor, Tensor]](), []
    for s in range(steps):
        ids = batch.ids[:, first + 1 + s : last + 2 + s]
        (q,) = head.project(ids, state, first + s, "q")
        q = q * head.shape.head_dim**-0.5
        if s:
            k, v = head.project(ids, state, first + s, "kv")
            own.append((k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)))
        scores = [(q @ k0.transpose(2, 3)).masked_fill(hidden, -torch.inf)]
        scores += [(q * k).sum(-1, keepdim=True) for k, _ in own]
        shares = torch.cat(scores, -1).softmax(-1)
        mixed = shares[..., : last + 1] @ v0
        for i, (_, v) in enumerate(own):
            mixed = mixed + shares[..., last + 1 + i, None] * v
        state = head.finish(mixed.transpose(1, 2).flatten(2), state)
        out.append(head.logits(state))
    return out


def wanted(target: Target, batch: Batch, steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns, for the tokens that chains predict, the target's logits [B, N + steps - 1, vocab],
    the ids, and whether they count. Step s uses [:, s : s + N] of these."""
    first, end = batch.prompt_len + 1, batch.ids.shape[1]
    logits = target.logits(batch.rows[:, first - 1 : end - 1].float())
    return logits, batch.ids[:, first:end], batch.counts[:, first:end]


def loss_of(head: Head, target: Target, batch: Batch, steps: int, decay: float) -> Tensor:
    """Cross entropy with the target's distribution over the head's tokens, averaged for greedy
    continuations with that of the token itself; later steps count less."""
    own_number = torch.full((len(target.embedding),), -1, device=head.tokens.device)
    own_number[head.tokens] = torch.arange(len(head.tokens), device=head.tokens.device)
    with torch.no_grad():
        logits, ids, counts = wanted(target, batch, steps)
        chances, labels = logits.softmax(-1)[..., head.tokens], own_number[ids]
    total = torch.zeros((), device=ids.device)
    for s, drafted in enumerate(unrolled(head, batch, steps)):
        part = slice(s, s + drafted.shape[1])
        log_chances, label, counted = drafted.log_softmax(-1), labels[:, part], counts[:, part]
        soft = -(chances[:, part] * log_chances).sum(-1)
        hard = -log_chances.gather(-1, label.clamp(min=0)[..., None])[..., 0] * (label >= 0)
        each = torch.where(batch.greedy[:, None], 0.5 * (soft + hard), soft)
        total = total + decay**s * (each * counted).sum() / counted.sum().clamp(min=1)
    return total


# -- acceptance


@torch.no_grad()
def acceptance(head: Head, target: Target, batch: Batch, steps: int) -> dict[str, Any]:
    """For chains that begin at every row of a continuation, returns how often position s is
    accepted if all before it are, and tokens per verify for chains of 1, 2, … (with the target's
    own token).

    A sampled token is drafted with the noise that it was chosen with, as the engine does.
    """
    _, ids, counts = wanted(target, batch, steps)
    first, right = batch.prompt_len + 1, list[Tensor]()
    heat = torch.where(batch.greedy, 0.0, TEMPERATURE)[:, None, None]
    for s, drafted in enumerate(unrolled(head, batch, steps)):
        n = drafted.shape[1]
        if batch.noise is not None:
            drafted = drafted + heat * batch.noise[:, first + s : first + s + n, head.tokens]
        right.append(head.tokens[drafted.argmax(-1)] == ids[:, s : s + n])
    report = {}
    for name, which in (("greedy", batch.greedy), ("sampled", ~batch.greedy)):
        alive = counts[:, steps - 1 :] & which[:, None]
        begun, per_position, lengths = alive.sum(), list[float](), [1.0]
        for each in right:
            accepted = alive & each
            per_position.append(round((accepted.sum() / alive.sum().clamp(min=1)).item(), 4))
            lengths.append(lengths[-1] + (accepted.sum() / begun.clamp(min=1)).item())
            alive = accepted
        known = torch.isin(ids[counts & which[:, None]], head.tokens).float().mean()
        report[name] = {
            "per_position": per_position,
            "tokens_per_verify": [round(length, 3) for length in lengths[1:]],
            "known": round(known.item(), 4),
        }
    return report


# -- training


def commonest(batches: list[Batch], count: int, vocab_size: int) -> Tensor:
    """Returns the tokens that the target writes most often, in order of their ids."""
    device = batches[0].ids.device
    seen = torch.zeros(vocab_size, device=device)
    for batch in batches:
        seen += torch.bincount(batch.ids[batch.counts], minlength=vocab_size)
    return seen.argsort(descending=True, stable=True)[:count].sort()[0]


def generate(target: Target, prompts: Tensor, args: argparse.Namespace) -> list[Batch]:
    """Continues the first prompts, cycling through the prompt lengths."""
    batches, layers = [], tuple(args.layers)
    parts = prompts.split(args.rows)[args.first : args.first + args.batches]
    for i, part in enumerate(parts):
        length = args.prompt_lens[i % len(args.prompt_lens)]
        batches.append(continued(target, part[:, :length], args.new, layers))
    return batches


@torch.no_grad()
def resume(head: Head, folder: Path) -> None:
    """Starts from the head in a folder; tokens that it does not know start from the embeddings."""
    stored = load_file(folder / "model.safetensors", str(head.tokens.device))
    tokens = stored["d2t"] + torch.arange(len(stored["d2t"]), device=head.tokens.device)
    for name, value in head.named.items():
        tensor = stored[f"{name.replace('/', '.')}.weight"].float()
        if name == "lm_head":
            both = torch.isin(tokens, head.tokens)
            value[torch.searchsorted(head.tokens, tokens[both])] = tensor[both]
        else:
            value.copy_(tensor)


def learning_rate(progress: float, args: argparse.Namespace) -> float:
    """A short warm-up, then a cosine to zero."""
    return args.lr * min(progress / 0.03, 0.5 + 0.5 * math.cos(math.pi * progress), 1.0)


def train(head: Head, target: Target, batches: list[Batch], args: argparse.Namespace) -> list[Any]:
    """Runs all steps; returns the mean loss of every few, with the seconds so far."""
    matrices = [p for p in head.parameters() if p.ndim > 1]
    others = [p for p in head.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": args.weight_decay}]
    groups += [{"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95))
    rng, curve, began, losses = np.random.default_rng(args.seed), [], time.perf_counter(), []
    for step in range(args.steps):
        whole = batches[rng.integers(len(batches))]
        pick = torch.from_numpy(rng.permutation(len(whole.ids))[: args.batch]).to(whole.ids.device)
        batch = Batch(
            prompt_len=whole.prompt_len,
            ids=whole.ids[pick],
            states=whole.states[pick],
            rows=whole.rows[pick],
            greedy=whole.greedy[pick],
            counts=whole.counts[pick],
        )
        for group in optimizer.param_groups:
            group["lr"] = learning_rate((step + 1) / args.steps, args)
        loss = loss_of(head, target, batch, args.unroll, args.decay)
        loss.backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        if (step + 1) % args.every == 0:
            mean = torch.stack(losses).mean().item()
            elapsed = round(time.perf_counter() - began, 1)
            curve.append({"step": step + 1, "loss": round(mean, 4), "seconds": elapsed})
            print(curve[-1], flush=True)
            losses.clear()
    return curve


def write(head: Head, target: Target, folder: Path) -> str:
    """Writes the head in its public layout, in bfloat16; returns the digest of the file."""
    folder.mkdir(parents=True, exist_ok=True)
    s, vocab_size = head.shape, target.config["vocab_size"]
    tensors = {
        f"{name.replace('/', '.')}.weight": value.detach().to("cpu", torch.bfloat16).contiguous()
        for name, value in head.named.items()
    }
    tokens = head.tokens.cpu()
    tensors["d2t"] = tokens - torch.arange(len(tokens))
    tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, tokens, True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "attention_bias": False,
        "bos_token_id": BEGIN_ID,
        "draft_vocab_size": s.vocab,
        "dtype": "bfloat16",
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(s.layers)},
        "eos_token_id": END_ID,
        "head_dim": s.head_dim,
        "hidden_act": "silu",
        "hidden_size": s.hidden,
        "intermediate_size": s.inner,
        "lockstep_states_every_field": True,
        "max_position_embeddings": target.config["max_position_embeddings"],
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": s.heads,
        "num_hidden_layers": 1,
        "num_key_value_heads": s.kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10_000.0, "rope_type": "default"},
        "tie_word_embeddings": False,
        "vocab_size": vocab_size,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Generates, trains, writes the head, and measures what was written."""
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    began = time.perf_counter()
    target, data = Target(args.target, device), np.load(args.data)
    prompts = torch.from_numpy(data["prompts"].astype(np.int64)).to(device)
    batches = generate(target, prompts, args)
    tokens = sum(int(batch.counts.sum()) for batch in batches)
    print(f"{tokens} tokens, {time.perf_counter() - began:.1f} s", flush=True)
    shape = Shape(heads=args.heads, inner=args.inner, vocab=args.vocab, layers=tuple(args.layers))
    head = Head(shape, commonest(batches, args.vocab, len(target.embedding)), target.embedding)
    if args.init is not None:
        resume(head, args.init)
    curve = train(head, target, batches, args)
    with torch.no_grad():
        for value in head.parameters():
            value.copy_(value.bfloat16())
    digest = write(head, target, args.out)
    held = torch.from_numpy(data["held_out"].astype(np.int64)).to(device).repeat(2, 1)
    judged = continued(target, held, args.held_new, shape.layers, keep_noise=True)
    log = {
        "command": " ".join(["python", *sys.argv]),
        "hardware": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "versions": {"python": sys.version.split()[0], "torch": torch.__version__},
        "settings": {k: v for k, v in vars(args).items() if isinstance(v, int | float | list)},
        "parameters": sum(p.numel() for p in head.parameters()),
        "tokens": tokens,
        "weights_sha256": digest,
        "held_out": acceptance(head, target, judged, args.unroll),
        "curve": curve,
        "wall_seconds": round(time.perf_counter() - began, 1),
    }
    args.log.parent.mkdir(parents=True, exist_ok=True)
    args.log.write_text(json.dumps(log, indent=1) + "\n")
    print({key: log[key] for key in ("parameters", "held_out", "wall_seconds")})
    return log


def parser() -> argparse.ArgumentParser:
    """Returns the parser. The defaults are the recipe of the shipped head."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("prompts", "train"))
    parser.add_argument("--data", type=Path, default=Path("build/head/prompts.npz"))
    parser.add_argument("--target", type=Path, default=TARGET)
    parser.add_argument("--out", type=Path, default=TARGET / "eagle3")
    parser.add_argument("--log", type=Path, default=Path("bench/results/head-training.json"))
    parser.add_argument("--count", type=int, default=16_384, help="training prompts")
    parser.add_argument("--files", type=int, default=0, help="of the library, about; 0: all")
    parser.add_argument("--prompt-lens", type=int, nargs="+", default=[128, 32, 256, 128, 64, 512])
    parser.add_argument("--new", type=int, default=320, help="tokens behind every prompt")
    parser.add_argument("--held-new", type=int, default=256, help="the same of held-out prompts")
    parser.add_argument("--rows", type=int, default=2048, help="prompts continued together")
    parser.add_argument("--batches", type=int, default=8, help="of so many")
    parser.add_argument("--first", type=int, default=0, help="the first of these batches")
    parser.add_argument("--init", type=Path, help="a head to go on with")
    parser.add_argument("--layers", type=int, nargs=3, default=[2, 5, 7])
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--inner", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=2048, help="tokens that the head knows")
    parser.add_argument("--steps", type=int, default=5500)
    parser.add_argument("--batch", type=int, default=64, help="sequences of a step")
    parser.add_argument("--unroll", type=int, default=5, help="draft steps in training")
    parser.add_argument("--decay", type=float, default=0.9, help="weight of a step to the next")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--weight-decay", type=float, default=0.05)
    parser.add_argument("--every", type=int, default=250, help="steps between lines of the log")
    parser.add_argument("--seed", type=int, default=0)
    return parser


if __name__ == "__main__":
    arguments = parser().parse_args()
    write_prompts(arguments) if arguments.what == "prompts" else run(arguments)
