"""Decode and prefill rates of transformers alone on a GGUF file, as one JSON object. Run by peers.py."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--streams", default="1,8")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prefill", type=int, default=512)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(
        options.model.parent, gguf_file=options.model.name, dtype=torch.float32
    ).eval()
    with torch.inference_mode():
        timed(model, 1, 16, 2)
        decode = {
            streams: timed(model, streams, options.prompt, options.tokens)[1]
            for streams in map(int, options.streams.split(","))
        }
        prefill = timed(model, 1, options.prefill, 2)[0]
    print(json.dumps({"decode": decode, "prefill": prefill}))


def timed(model: torch.nn.Module, streams: int, prompt: int, tokens: int) -> tuple[float, float]:
    """(prefill, decode) tokens/s of a batch of prompts of random ids, greedy."""
    ids = torch.randint(100, model.config.get_text_config().vocab_size - 100, (streams, prompt))
    begun = time.perf_counter()
    out = model(ids, use_cache=True, logits_to_keep=1)
    ids = out.logits[:, -1].argmax(-1, keepdim=True)
    filled = time.perf_counter()
    for _ in range(tokens - 1):
        out = model(ids, past_key_values=out.past_key_values, use_cache=True)
        ids = out.logits[:, -1].argmax(-1, keepdim=True)
    ended = time.perf_counter()
    return streams * prompt / (filled - begun), streams * (tokens - 1) / (ended - filled)


if __name__ == "__main__":
    main()
