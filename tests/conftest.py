"""Fixtures of every test room."""

from __future__ import annotations

import gc
import os
import random
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported: its kernels then run on the CPU


if os.environ.get("TRITON_INTERPRET") == "1":
    from .interpreting import check_addresses, patch_once_a_launch

    patch_once_a_launch()
    check_addresses()
TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def pytest_collection_finish() -> None:
    """What the imports made is no garbage: engines collect it when they start, a third of a second each time."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """What is frozen at the end is a leak to some libraries, which say so."""
    gc.unfreeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Each test draws the same numbers whatever ran before it, and others than its neighbours."""
    seed = zlib.crc32(item.nodeid.encode())
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@pytest.fixture(scope="session")
def kernel_device() -> torch.device:
    """Where Triton kernels are tested: a GPU, or the CPU in the interpreter (whose bf16 dot is wrong)."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def embedded_model() -> Path:
    """Folder of the embedded 135M model as safetensors (converted into the cache by the first session)."""
    from fineinfer.model.gguf import converted_gguf, embedded_gguf

    return converted_gguf(embedded_gguf())


@pytest.fixture
def tiny_model(tmp_path: Path) -> Callable[..., tuple[Any, Path]]:
    """Makes a tiny random transformers model and its saved folder: ``tiny_model("Qwen2", seed=0, **config)``."""

    def make(family: str, seed: int = 0, shard_size: str | None = None, **options: Any) -> tuple[Any, Path]:
        import torch
        import transformers

        config = getattr(transformers, f"{family}Config")(**{**TINY, **options})
        torch.manual_seed(seed)
        model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                # norms and biases away from 1 and 0, so that forgetting or swapping one shows
                parameter.add_(torch.randn_like(parameter), alpha=0.3 if "norm" in name or "bias" in name else 0.1)
        folder = tmp_path / f"{family}-{len(list(tmp_path.iterdir()))}"
        model.save_pretrained(folder, **({"max_shard_size": shard_size} if shard_size else {}))
        return model, folder

    return make
