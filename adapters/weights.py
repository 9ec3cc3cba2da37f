"""LoRA weights of one adapter as views of one flat tensor, so optimizer, clipping and checkpoints see one array."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from fineinfer.adapters.config import (
    BLOCK_MODULES,
    AdapterError,
    ModelShape,
    check_pattern,
    check_target_modules,
    lora_scaling,
    module_features,
    module_path,
    pattern_value,
)
from fineinfer.messages import LoraSpec


@dataclass(frozen=True)
class LoraModule:
    """Place of one module's pair: A [rank, in] at ``a_offset``, B [out, rank] at ``b_offset``.

    ``out_start:out_end`` are its columns in the output of the fused block.
    """

    layer: int
    name: str
    rank: int
    scaling: float
    in_features: int
    out_start: int
    out_end: int
    a_offset: int
    b_offset: int


@dataclass(frozen=True)
class LoraBlock:
    """The adapted modules of one fused block. Their A lie one after the other, so one product shrinks for all."""

    modules: tuple[LoraModule, ...]

    @property
    def rank(self) -> int:
        """Sum of the modules' ranks."""
        return sum(module.rank for module in self.modules)


class LoraLayout:
    """Where each matrix of an adapter lies in its flat tensor: by layer, by block, first all A then all B.

    Args:
        shape: Sizes of the base model.
        ranks: (layer, module name) -> (rank, scaling) of every adapted module.
    """

    def __init__(self, shape: ModelShape, ranks: dict[tuple[int, str], tuple[int, float]]) -> None:
        features = module_features(shape)
        self.num_layers = shape.num_layers
        self.blocks: dict[tuple[int, str], LoraBlock] = {}
        offset = 0
        for layer in range(shape.num_layers):
            for block, names in BLOCK_MODULES.items():
                present = [name for name in names if (layer, name) in ranks]
                out_start = {name: sum(features[n][1] for n in names[: names.index(name)]) for name in names}
                a_offset = offset
                b_offset = offset + sum(ranks[layer, name][0] * features[name][0] for name in present)
                modules = []
                for name in present:
                    (rank, scaling), (width_in, width_out) = ranks[layer, name], features[name]
                    start = out_start[name]
                    modules.append(
                        LoraModule(layer, name, rank, scaling, width_in, start, start + width_out, a_offset, b_offset)
                    )
                    a_offset, b_offset = a_offset + rank * width_in, b_offset + rank * width_out
                if modules:
                    self.blocks[layer, block] = LoraBlock(tuple(modules))
                    offset = b_offset
        self.num_parameters = offset
        if not self.blocks:
            raise AdapterError("the adapter touches no module of this model")

    @classmethod
    def uniform(cls, shape: ModelShape, spec: LoraSpec) -> LoraLayout:
        """The layout of a job: every target module of every layer, patterns applied.

        Raises:
            AdapterError: Unknown target module, a rank below 1, or a pattern that matches nothing.
        """
        check_target_modules(spec.target_modules)
        paths = {(i, n): module_path(i, n) for i in range(shape.num_layers) for n in spec.target_modules}
        check_pattern("rank_pattern", spec.rank_pattern, list(paths.values()))
        check_pattern("alpha_pattern", spec.alpha_pattern, list(paths.values()))
        if min([spec.r, *spec.rank_pattern.values()]) < 1:
            raise AdapterError(f"r and ranks of rank_pattern must be at least 1, got {spec.r}, {spec.rank_pattern}")
        ranks = {}
        for key, path in paths.items():
            rank = pattern_value(spec.rank_pattern, path, spec.r)
            alpha = pattern_value(spec.alpha_pattern, path, spec.lora_alpha)
            ranks[key] = (rank, lora_scaling(rank, alpha, spec.use_rslora))
        return cls(shape, ranks)

    def check_same(self, other: LoraLayout) -> None:
        """Raise AdapterError unless ``other`` has the same modules, ranks and scalings; names the first difference."""
        mine, others = ({(m.layer, m.name): m for m in layout.modules()} for layout in (self, other))
        for key in sorted(mine.keys() ^ others.keys()):
            raise AdapterError(f"target_modules: it has {'no' if key in mine else 'a'} {module_path(*key)}")
        for key, module in mine.items():
            path, theirs = module_path(*key), others[key]
            if module.rank != theirs.rank:
                raise AdapterError(f"r: its rank of {path} is {theirs.rank}, the job's {module.rank}")
            if not math.isclose(module.scaling, theirs.scaling, rel_tol=1e-6):
                raise AdapterError(f"lora_alpha: its scaling of {path} is {theirs.scaling}, the job's {module.scaling}")

    @property
    def max_rank(self) -> int:
        """The largest rank of a module."""
        return max(module.rank for module in self.modules())

    def modules(self) -> Iterator[LoraModule]:
        """Every adapted module, in the order of the flat tensor."""
        for block in self.blocks.values():
            yield from block.modules


class LoraWeights:
    """One adapter: a layout and the flat tensor [num_parameters] that holds its matrices.

    Args:
        layout: Where each matrix lies.
        flat: The values; every accessor returns a view of it.
    """

    def __init__(self, layout: LoraLayout, flat: torch.Tensor) -> None:
        if flat.shape != (layout.num_parameters,):
            raise AdapterError(f"expected {layout.num_parameters} adapter parameters, got {tuple(flat.shape)}")
        self.layout, self.flat = layout, flat

    @classmethod
    def zeros(cls, layout: LoraLayout, dtype: torch.dtype, device: torch.device | str = "cpu") -> LoraWeights:
        """An adapter of zeros (also used for gradients and moments)."""
        return cls(layout, torch.zeros(layout.num_parameters, dtype=dtype, device=device))

    @classmethod
    def init(cls, layout: LoraLayout, dtype: torch.dtype, device: torch.device | str, seed: int) -> LoraWeights:
        """A fresh adapter as PEFT starts one: A Kaiming-uniform with a = sqrt(5), B zero.

        Values are drawn on the CPU in fp32, so they depend on the seed alone.
        """
        generator = torch.Generator().manual_seed(seed % 2**63)
        flat = torch.zeros(layout.num_parameters)
        for module in layout.modules():
            bound = 1.0 / math.sqrt(module.in_features)  # sqrt(6 / ((1 + a^2) * fan_in)) with a = sqrt(5)
            size = module.rank * module.in_features
            flat[module.a_offset : module.a_offset + size].uniform_(-bound, bound, generator=generator)
        return cls(layout, flat.to(device=device, dtype=dtype))

    def a(self, module: LoraModule) -> torch.Tensor:
        """A of one module, [rank, in_features]."""
        size = module.rank * module.in_features
        return self.flat[module.a_offset : module.a_offset + size].view(module.rank, module.in_features)

    def b(self, module: LoraModule) -> torch.Tensor:
        """B of one module, [out_features, rank]."""
        width = module.out_end - module.out_start
        return self.flat[module.b_offset : module.b_offset + width * module.rank].view(width, module.rank)

    def block_a(self, block: LoraBlock) -> torch.Tensor:
        """All A of one fused block, [sum of ranks, in_features]."""
        first = block.modules[0]
        size = block.rank * first.in_features
        return self.flat[first.a_offset : first.a_offset + size].view(block.rank, first.in_features)

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(PEFT's key in adapter_model.safetensors, view) of every matrix."""
        for module in self.layout.modules():
            prefix = f"base_model.model.{module_path(module.layer, module.name)}"
            yield f"{prefix}.lora_A.weight", self.a(module)
            yield f"{prefix}.lora_B.weight", self.b(module)

    def is_finite(self) -> bool:
        """Whether every value is a finite number."""
        return bool(torch.isfinite(self.flat).all())
