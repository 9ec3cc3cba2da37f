"""The engine with its kernels and captured steps on a GPU, against transformers and against itself."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from ..unit.engine_harness import Harness, publish

pytestmark = pytest.mark.gpu
NUM_NEW = 48
# Of the two candidates' exact logits, as a part of the larger one, of which bf16 resolves 2^-8. They are 11 to 39 here:
# as a difference, 2^-6 would be an eighth of one step of bf16 between 16 and 32.
MAX_BF16_GAP = 2.0**-6


@pytest.fixture
def engine(embedded_model: Path, tmp_path_factory) -> Iterator[Callable[..., Harness]]:
    """Engines on the embedded model; ``max_num_seqs`` and the like by keyword."""
    made: list[Harness] = []

    def build(**settings: object) -> Harness:
        own = {"model": str(embedded_model), "load_format": "auto", "device": "cuda", "memory_budget": 8 << 30}
        own["no_enable_prefix_caching"] = True  # prompts are asked again and again, and have to run each time
        made.append(Harness(tmp_path_factory.mktemp("e"), **(own | {"max_model_len": 1024} | settings)))
        return made[-1]

    yield build
    for harness in made:
        harness.close()


@pytest.fixture(scope="module")
def prompts(embedded_model: Path) -> list[list[int]]:
    from transformers import AutoTokenizer

    root = Path(__file__).resolve().parents[2]
    text = "\n\n".join((root / name).read_text() for name in ("README.md", "LICENSE", "CONTRIBUTING.md"))
    ids, rng = AutoTokenizer.from_pretrained(embedded_model)(text)["input_ids"], random.Random(11)
    lengths = [rng.choice([5, 17, 40, 90, 180, 300]) + rng.randrange(9) for _ in range(64)]
    return [ids[start : start + n] for n in lengths for start in [rng.randrange(len(ids) - n)]]


def answers(harness: Harness, batch: list[list[int]], num_new: int, **params: object) -> list[list[int]]:
    harness.outputs.clear()
    for index, prompt in enumerate(batch):
        harness.add(str(index), prompt, max_tokens=num_new, **params)
    harness.run()
    return [harness.tokens(str(index)) for index in range(len(batch))]


def transformers_logits(embedded_model: Path, dtype: torch.dtype) -> Callable[[list[int]], torch.Tensor]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(embedded_model, dtype=dtype, attn_implementation="eager")
    model = model.eval().cuda()

    @torch.inference_mode()
    def logits(ids: list[int]) -> torch.Tensor:
        return model(torch.tensor([ids], device="cuda")).logits[0].float().cpu()

    return logits


@pytest.mark.parametrize("eager", [False, True], ids=["captured", "eager"])
def test_fp32_tokens_are_those_of_transformers(engine, embedded_model, prompts, eager: bool) -> None:
    """Teacher forcing: every token is the argmax of transformers' logits after what came before it."""
    assert not torch.backends.cuda.matmul.allow_tf32
    harness = engine(dtype="float32", max_num_seqs=48, max_num_batched_tokens=256, enforce_eager=eager)
    logits = transformers_logits(embedded_model, torch.float32)
    for prompt, tokens in zip(prompts, answers(harness, prompts, NUM_NEW), strict=True):
        want = logits(prompt + tokens)[len(prompt) - 1 : -1].argmax(-1).tolist()
        assert tokens == want


def test_bf16_tokens_differ_only_where_transformers_hesitates(engine, embedded_model, prompts, capsys) -> None:
    harness = engine(dtype="bfloat16", max_num_seqs=48, max_num_batched_tokens=256)
    exact, own = (transformers_logits(embedded_model, dtype) for dtype in (torch.float32, torch.bfloat16))
    gaps = []
    for prompt, tokens in zip(prompts, answers(harness, prompts, NUM_NEW), strict=True):
        theirs = own(prompt + tokens)[len(prompt) - 1 : -1].argmax(-1).tolist()
        different = [i for i, (a, b) in enumerate(zip(tokens, theirs, strict=True)) if a != b]
        if different:
            row = exact(prompt + tokens)[len(prompt) - 1 + different[0]]
            top, ours = float(row.max()), float(row[tokens[different[0]]])
            gaps.append(((top - ours) / abs(top), top - ours))
    with capsys.disabled():
        part, widest = (max((gap[i] for gap in gaps), default=0.0) for i in range(2))
        print(
            f"bf16: {len(gaps)} of {len(prompts)} leave transformers', widest gap {widest:.4f}, {part:.5f} of the logit"
        )
    assert all(gap < MAX_BF16_GAP for gap, _ in gaps)


def test_batch_make_up_changes_no_token(engine, prompts) -> None:
    """1 to 257 requests at once: both sides of every captured size, one more than may run together."""
    harness = engine(dtype="float32", max_num_seqs=256, max_num_batched_tokens=2048)
    kinds = [prompt[:12] for prompt in prompts[:8]]
    alone = [answers(harness, [kind], 4)[0] for kind in kinds]
    for count in range(1, 258):
        together = answers(harness, [kinds[i % 8] for i in range(count)], 4)
        assert together == [alone[i % 8] for i in range(count)], f"{count} requests at once"


def test_a_seeded_request_does_not_depend_on_its_neighbours(engine, prompts) -> None:
    harness = engine(dtype="float32", max_num_seqs=64, max_num_batched_tokens=512)
    drawn = {"temperature": 0.9, "top_p": 0.95, "seed": 17}
    (alone,) = answers(harness, prompts[:1], 32, **drawn)
    together = answers(harness, [prompts[0]] * 3 + prompts[1:40], 32, **drawn)
    assert together[:3] == [alone] * 3


def test_adapters_give_the_tokens_of_the_reference_operations(tmp_path: Path) -> None:
    """Base rows and two adapters in one batch on a tiny model; the second one is published while the first serves."""
    prompts = {f"r{n}": [5 + (7 * n + i) % 90 for i in range(10 + 9 * n)] for n in range(12)}

    def run(backend: str) -> dict[str, list[int]]:
        folder = tmp_path / backend
        folder.mkdir()
        harness = Harness(
            folder, device="cuda", attention_backend=backend, memory_budget=4 << 30, max_loras=2, max_lora_rank=8,
            max_num_seqs=12, max_num_batched_tokens=128,
        )  # fmt: skip
        publish(harness, "a", tmp_path / "one", 1)
        for n, (name, prompt) in enumerate(prompts.items()):
            if n == 8:
                publish(harness, "b", tmp_path / "two", 2)
            harness.add(name, prompt, adapter=(None, "a", "b" if n >= 8 else "a")[n % 3], max_tokens=24)
        harness.run()
        tokens = {name: harness.tokens(name) for name in prompts}
        harness.close()
        return tokens

    want, got = run("reference"), run("triton")
    assert got == want
    assert len({tuple(tokens[:8]) for tokens in want.values()}) > 8, "the prompts give too few different answers"
