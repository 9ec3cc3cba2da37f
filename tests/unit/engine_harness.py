"""A whole engine in this process and a client on its socket."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import torch
import zmq

from fineinfer.adapters.peft_io import content_hash, save_adapter
from fineinfer.adapters.weights import LoraLayout, LoraWeights
from fineinfer.engine.loop import EngineLoop
from fineinfer.engine.process import build_engine
from fineinfer.engine.settings import EngineSettings
from fineinfer.ipc import Codec
from fineinfer.messages import AddRequest, FromEngine, LoraSpec, Outputs, RequestOutput, SetAdapter
from fineinfer.request import SamplingParams

TOKEN = b"t" * 32
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 97,
    "max_position_embeddings": 512, "initializer_range": 0.5, "tie_word_embeddings": False, "eos_token_id": 2,
}  # fmt: skip
BYTES_PER_SLOT = 2 * 2 * 2 * 8 * 4  # K and V, layers, KV heads, head size, fp32


class Harness:
    """An engine loop and a client on its socket."""

    def __init__(self, folder: Path, **settings: object) -> None:
        (folder / "config.json").write_text(json.dumps(CONFIG))
        # a message is there when it is sent: no thread has to carry it, however busy the machine is
        self.address = address = f"inproc://{uuid.uuid4()}"
        own = {
            "model": str(folder), "base_model": "m", "dtype": "float32", "device": "cpu", "load_format": "dummy",
            "policy": "inference-first",
        }  # fmt: skip
        self.loop: EngineLoop = build_engine(EngineSettings(engine_address=address, **(own | settings)), TOKEN)
        self.parts = self.loop.parts
        self._codec: Codec = Codec(FromEngine)
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.connect(address)
        self.outputs: dict[str, list[RequestOutput]] = {}

    def send(self, message: object) -> None:
        self._socket.send_multipart([TOKEN, self._codec.encode(message)])

    def add(
        self,
        name: str,
        prompt: list[int],
        adapter: str | None = None,
        salt: str | None = None,
        priority: int = 0,
        **params: object,
    ) -> None:
        sampling = SamplingParams(**({"temperature": 0.0, "ignore_eos": True} | params))
        self.outputs[name] = []
        self.send(
            AddRequest(
                request_id=name,
                prompt_token_ids=prompt,
                sampling=sampling,
                adapter=adapter,
                cache_salt=salt,
                priority=priority,
                arrival_s=time.monotonic(),
            )
        )

    def run(self, each_turn: Callable[[int], object] = lambda turn: None) -> None:
        """Step until every request has ended."""
        for turn in range(5000):
            each_turn(turn)
            if not self.loop.step():
                self.parts.inbox.wait(0.01)
            self.read()
            if all(items and items[-1].finish_reason for items in self.outputs.values()):
                break
        for name, items in self.outputs.items():
            assert sum(item.finish_reason is not None for item in items) == 1, f"{name} has not one terminal message"
        kv = self.parts.ladder._kv
        kv.check_integrity()
        assert kv.num_used == kv.num_cached and self.parts.adapters.num_pinned() == 0 and not self.parts.desk.open

    def read(self) -> None:
        """Take in what has come on the socket."""
        while self._socket.poll(0):
            message = self._codec.decode(self._socket.recv_multipart()[-1])
            if isinstance(message, Outputs):
                for output in message.outputs:
                    self.outputs[output.request_id].append(output)

    def tokens(self, name: str) -> list[int]:
        return [token for output in self.outputs[name] for token in output.token_ids]

    def reason(self, name: str) -> str | None:
        return self.outputs[name][-1].finish_reason

    def close(self) -> None:
        self._socket.close(0)
        self.parts.inbox._router.close()


def publish(harness: Harness, name: str, folder: Path, seed: int) -> None:
    """Write a random adapter and register it as ``name@seed``."""
    spec = LoraSpec(r=4, lora_alpha=8)
    shape = harness.parts.training._decoder.spec
    weights = LoraWeights.init(LoraLayout.uniform(shape, spec), torch.float32, "cpu", seed)
    weights.flat.add_(0.1 * torch.randn(weights.flat.shape, generator=torch.Generator().manual_seed(seed)))
    folder.mkdir(exist_ok=True)
    save_adapter(weights, spec, "m", folder)
    version = content_hash(folder)
    harness.send(SetAdapter(name=name, version=version, step=seed, directory=str(folder)))
