"""Which base model a job trains on, told by its content: what it is called and where it lies may change."""

from __future__ import annotations

import hashlib
import json
from dataclasses import fields

import torch

from fineinfer.model.decoder import Decoder

SAMPLES_PER_WEIGHT = 1024  # 0.6 MB of an 8B model; fine-tuned twins differ in far more than one value of 300,000


def base_model_sha256(decoder: Decoder) -> str:
    """SHA-256 (hex) over constants, shapes and a sample of every weight, rounded to bf16.

    The same for one model on every device and in every dtype: a job may go on in another.
    """
    digest = hashlib.sha256(json.dumps(_constants(decoder), sort_keys=True).encode())
    for weight in decoder.parameters():
        digest.update(f"{tuple(weight.shape)}\n".encode())
        step = weight.numel() // SAMPLES_PER_WEIGHT | 1  # odd, so that it is not one column of a matrix
        sample = weight.detach().reshape(-1)[::step].to(torch.bfloat16).cpu().contiguous()
        digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _constants(decoder: Decoder) -> dict[str, object]:
    """What is computed with besides weights.

    Of RoPE only what is not at its default: a field that a later version adds leaves older checkpoints as they are.
    """
    spec, rope = decoder.spec, decoder.spec.rope
    set_here = {field.name: getattr(rope, field.name) for field in fields(rope)}
    changed = {field.name: set_here[field.name] for field in fields(rope) if set_here[field.name] != field.default}
    heads = [spec.num_heads, spec.num_kv_heads, spec.head_dim]
    return {"heads": heads, "eps": spec.rms_norm_eps, "windows": spec.sliding_windows, "rope": changed}
