"""The peer of training: transformers + PEFT, LoRA r=16 on all linear layers, AdamW, random weights of the 8B shape.

    python benchmarks/peft_training.py [--batch 4 --length 1024]

Prints tokens per second and peak memory with activations kept and with gradient checkpointing. Run it in the same call
as benchmarks/coserving.py on the same card.
"""

from __future__ import annotations

import argparse
import time

import torch
from harness import LLAMA_8B, card
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM


def build(shape: dict[str, object], device: str) -> torch.nn.Module:
    """The model in bf16, made on the device."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = LlamaForCausalLM(LlamaConfig(**shape, attn_implementation="sdpa"))
    finally:
        torch.set_default_dtype(default)
    config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, config).train()


def measure(model: torch.nn.Module, ids: torch.Tensor, updates: int) -> float:
    """Seconds of one update, the first one left out."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    begin = 0.0
    for index in range(updates + 1):
        if index == 1:
            begin = synchronized_time(ids.device)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return (synchronized_time(ids.device) - begin) / updates


def synchronized_time(device: torch.device) -> float:
    """The clock, once the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--updates", type=int, default=4)
    parser.add_argument("--layers", type=int, default=32, help="fewer, for a try on a small machine")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    skip = ("architectures", "model_type", "torch_dtype")
    shape = {key: value for key, value in LLAMA_8B.items() if key not in skip} | {"num_hidden_layers": args.layers}
    model = build(shape, device)
    ids = torch.randint(0, 128000, (args.batch, args.length), device=device)
    for checkpointed in (False, True):
        if checkpointed:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            model.enable_input_require_grads()
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        speed = args.batch * args.length / measure(model, ids, args.updates)
        peak = f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB" if device == "cuda" else "not measured"
        mode = "checkpointed" if checkpointed else "kept"
        print(f"{card()}: HF + PEFT {args.batch}x{args.length} {mode}: {speed:.0f} tok/s, peak {peak}", flush=True)


if __name__ == "__main__":
    main()
