"""The engine on a GPU, model type by model type: every answer must be the one that its request has
alone, in an engine without graphs and without overlap. A program; `--device cpu` is a rehearsal.

A model is a config of transformers' own classes with small sizes, and random weights made on the
device (`--load-format dummy`). Prompts cross tiles and splits. Answers end one by one, so batches
grow and shrink through bucket sizes and one below them. Prints one JSON object: model → cell → ""
if it passed, or what was found.

usage: python tests/gpu_engine_cells.py [--device cuda] [--models NAME,NAME]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from lockstep.config import EngineConfig
from lockstep.llm.engine import Engine, Parts, load
from lockstep.sample.params import SamplingParams

SIZES = {
    **{"vocab_size": 1000, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64},
    **{"num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2},
    **{"max_position_embeddings": 2048, "bos_token_id": None, "eos_token_id": None},
    "pad_token_id": None,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 128}
LATENT = {
    **{"kv_lora_rank": 512, "q_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64},
    **{"v_head_dim": 64, "n_routed_experts": 8, "n_group": 2, "topk_group": 1},
    "n_shared_experts": 1,
    **{"num_key_value_heads": 8, "first_k_dense_replace": 1, **EXPERTS},
}
LATENT.pop("head_dim", None)
SLIDING = {"sliding_window": 300}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"num_attention_heads": 8, "head_dim": 128},
    "mistral": SLIDING,
    "qwen2": {"use_sliding_window": False},
    "qwen3": {},
    "qwen3_moe": {"num_experts": 8, **EXPERTS},
    "gemma2": {"query_pre_attn_scalar": 64, **SLIDING},
    "gemma3_text": {"head_dim": 256, "query_pre_attn_scalar": 256, **SLIDING},
    "gpt_oss": {
        **{"num_local_experts": 8, "num_experts_per_tok": 2, **SLIDING},
        **{"swiglu_alpha": 1.702, "swiglu_limit": 7.0},  # not every transformers states these
    },
    "deepseek_v2": LATENT | {"topk_method": "greedy"},
    "deepseek_v3": LATENT,
    "bart": {
        **{"d_model": 256, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 512},
        **{"decoder_ffn_dim": 512, "encoder_attention_heads": 4, "decoder_attention_heads": 4},
        **{"decoder_start_token_id": 1},
    },
    "bert": {"num_attention_heads": 4, "type_vocab_size": 2},
}
PROMPTS, ANSWERS = (5, 700, 130, 1, 513, 64, 1100), (33, 21, 40, 9, 27, 14, 40)
SHORT = (5, 70, 13, 1, 51, 64, 110), (6, 4, 8, 2, 5, 3, 7)  # without a GPU


def save(name: str, folder: Path) -> None:
    """Writes a folder that contains a config and nothing else."""
    from transformers import AutoConfig

    sizes = {k: v for k, v in SIZES.items() if name not in ("bart", "bert") or k != "head_dim"}
    config = AutoConfig.for_model(name, **(sizes | MODELS[name]))
    config.save_pretrained(folder)


def answers(engine: Engine, lens: Sequence[tuple[int, int]]) -> list[Any]:
    """Returns (tokens, bits of log-probabilities) of all requests, which are added three at a
    time."""
    vocab, jobs = engine.info.vocab_size, []
    for at, (prompt, new) in enumerate(lens):
        ids = np.random.default_rng(prompt).integers(0, vocab, prompt).tolist()
        how = SamplingParams(
            max_tokens=new,
            temperature=0.8 * (prompt % 3),
            top_k=20 if prompt % 5 == 0 else -1,
            seed=prompt,
            logprobs=2 if prompt % 2 else None,
            ignore_eos=True,
        )
        jobs.append(engine.add(ids, how))
        if at % 3 == 2:
            engine.step()
    while engine.busy:
        engine.step()
    outs = [job.output("") for job in jobs]
    return [
        (tuple(out.token_ids), repr(out.completions[0].top_logprobs), bits(out.logprobs))
        for out in outs
    ]


def bits(values: Any) -> bytes:
    """Returns the bits of log-probabilities, if there are any."""
    return b"" if values is None else np.array(values, np.float32).tobytes()


def vectors(engine: Engine, lens: Sequence[int]) -> list[bytes]:
    """Returns embeddings of prompts of these lengths, computed together."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, engine.info.vocab_size, n).tolist() for n in lens]
    jobs = [engine.add(ids, embed=True) for ids in prompts]
    while engine.busy:
        engine.step()
    return [job.embedding.tobytes() for job in jobs]


def engine_of(parts: Parts, config: EngineConfig, **how: Any) -> Engine:
    from dataclasses import replace

    overlap = how.pop("overlap")
    return Engine(replace(config, **how), parts, overlap)


def check_waits(engine: Engine) -> str:
    """Runs decoding steps in which every synchronising call but the one wait is an error. Returns
    "" or what was found: memory that is held in addition, or graphs captured."""
    how = SamplingParams(max_tokens=400, temperature=0.6, seed=1, ignore_eos=True)
    ids = np.random.default_rng(0).integers(0, engine.info.vocab_size, 70).tolist()
    jobs = [engine.add(ids[: 10 + at], how) for at in range(5)]
    for _ in range(60):
        engine.step()
    held, graphs = torch.cuda.memory_allocated(), len(engine.runner.tapes)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(300):
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    more = torch.cuda.memory_allocated() - held
    captured = len(engine.runner.tapes) - graphs
    for job in jobs:
        engine.abort(job)
    return f"{more} B more, {captured} captured" if more > 0 or captured else ""


def run_cells(name: str, device: str) -> dict[str, str]:
    """Runs all cells of one model type. Returns cell → "" or what was found."""
    found: dict[str, str] = {}
    lens = list(zip(PROMPTS, ANSWERS) if device == "cuda" else zip(*SHORT))
    with TemporaryDirectory() as folder:
        if name != "builtin":
            save(name, Path(folder))
        config = EngineConfig(
            model=None if name == "builtin" else folder,
            device=device,
            load_format="auto" if name == "builtin" else "dummy",
            max_total_tokens=8192,
            max_running_requests=8,
            chunked_prefill_size=1280,
        )
        parts = load(config)
    found["certificate"] = "" if parts.certificate != "none" else "nothing was proven"
    if not parts.model.generates:
        alone = engine_of(parts, config, overlap=False, graphs=False)
        want = [vectors(alone, lens_one)[-1] for lens_one in ([5], [5, 70], [5, 70, 300])]
        got = vectors(alone, [5, 70, 300])
        found["batch"] = "" if got == want else "embeddings differ"
        return found
    plain = engine_of(parts, config, overlap=False, graphs=False)
    want = [answers(plain, [one])[0] for one in lens]
    on_card = device == "cuda"
    ways = {
        "batch": {"overlap": False, "graphs": False},
        "overlap": {"overlap": True, "graphs": False},
        "graphs": {"overlap": False, "graphs": True},
        "graphs and overlap": {"overlap": True, "graphs": True},
        "pages and chunks": {
            **{"overlap": True, "graphs": True, "page_size": 32, "chunked_prefill_size": 144},
            **{"disable_radix_cache": True},
        },
        "preempted": {"overlap": True, "graphs": True, "max_total_tokens": 2048},
    }
    if on_card and not parts.model.encodes:
        found["waits"] = check_waits(engine_of(parts, config, overlap=True, graphs=True))
        print(f"{name}: waits: {found['waits'] or 'held'}", file=sys.stderr, flush=True)
    if parts.model.encodes:  # sources are not cut into chunks
        ways["pages and chunks"].pop("chunked_prefill_size")
    for what, how in ways.items():
        if not on_card:
            how["graphs"] = False
        engine = engine_of(parts, config, **how)
        for again in ("", " again"):
            got = answers(engine, lens)
            wrong = [i for i, (a, b) in enumerate(zip(got, want)) if a != b]
            graphs = list(engine.runner.tapes.values())
            played = sum(graph.replays for graph in graphs)
            if how["graphs"] and played < 20:
                wrong.append(-1)
            found[what + again] = f"{wrong}, {len(graphs)} graphs {played} times" if wrong else ""
            verdict = found[what + again] or f"held ({len(graphs)} graphs, {played} replays)"
            print(f"{name}: {what}{again}: {verdict}", file=sys.stderr, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--models", default="builtin," + ",".join(MODELS))
    args = parser.parse_args()
    report = {}
    for name in args.models.split(","):
        begin = time.time()
        try:
            report[name] = run_cells(name, args.device)
        except Exception as error:
            import traceback

            traceback.print_exc()
            report[name] = {"ran": f"{type(error).__name__}: {str(error)[:500]}"}
        print(f"{name}: {time.time() - begin:.1f} s", file=sys.stderr, flush=True)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
