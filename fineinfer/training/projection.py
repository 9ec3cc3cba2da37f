"""Linear layers with LoRA in training: one autograd function per fused block, saving only the input and x A^T."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from fineinfer.adapters.config import MODULES
from fineinfer.adapters.weights import LoraBlock, LoraWeights
from fineinfer.training.dropout import Dropout


@dataclass(frozen=True)
class AdaptedPart:
    """One module of a fused block: its columns of the output, its columns of x A^T, B and the gradient of B.

    ``salt`` tells its dropout mask from other modules'.
    """

    columns: slice
    ranks: slice
    scaling: float
    b: torch.Tensor  # [out, rank]
    grad_b: torch.Tensor
    salt: int


@dataclass(frozen=True)
class AdaptedBlock:
    """One fused block with the views that its products read and add to."""

    a: torch.Tensor  # [sum of ranks, in]: the modules' own A, one under the other
    grad_a: torch.Tensor
    parts: tuple[AdaptedPart, ...]

    def covers(self, out_features: int) -> bool:
        """Whether every column of the block's output belongs to an adapted module."""
        return sum(part.columns.stop - part.columns.start for part in self.parts) == out_features


def shrink(block: AdaptedBlock, x: torch.Tensor, dropout: Dropout | None) -> torch.Tensor:
    """``x A^T`` of all modules, [num_tokens, sum of ranks]; with dropout each sees its own part of ``x``, scaled."""
    if dropout is None:
        return x @ block.a.t()
    xa = x.new_empty(x.shape[0], block.a.shape[0])
    for part in block.parts:
        a, dropped = block.a[part.ranks], dropout(x, part.salt)
        xa[:, part.ranks].addmm_(dropped, a.t(), beta=0.0, alpha=dropout.scale)
    return xa


def add_grad_a(block: AdaptedBlock, grad_xa: torch.Tensor, x: torch.Tensor, dropout: Dropout | None) -> None:
    """Add the gradient of all A, given that of ``shrink``'s result."""
    if dropout is None:
        add_product(block.grad_a, grad_xa.t(), x, 1.0)
        return
    for part in block.parts:
        add_product(block.grad_a[part.ranks], grad_xa[:, part.ranks].t(), dropout(x, part.salt), dropout.scale)


def expand_grad(block: AdaptedBlock, grad_xa: torch.Tensor, dropout: Dropout | None) -> torch.Tensor:
    """Gradient of ``shrink``'s ``x``, [num_tokens, in], given that of its result."""
    if dropout is None:
        return grad_xa @ block.a
    total = grad_xa.new_zeros(grad_xa.shape[0], block.a.shape[1])
    for part in block.parts:
        total += dropout(grad_xa[:, part.ranks] @ block.a[part.ranks], part.salt)
    return total.mul_(dropout.scale)


class _LoraLinear(torch.autograd.Function):
    """``x W^T + bias + scaling * (x A^T) B^T`` with W frozen; adapter gradients go straight into flat accumulators."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        block: AdaptedBlock,
        dropout: Dropout | None,
    ) -> torch.Tensor:
        y = F.linear(x, weight, bias)  # [num_tokens, out]
        xa = shrink(block, x, dropout)
        for part in block.parts:
            y[:, part.columns].addmm_(xa[:, part.ranks], part.b.t(), alpha=part.scaling)
        ctx.save_for_backward(x, xa)
        ctx.weight, ctx.block, ctx.dropout = weight, block, dropout  # frozen: nothing to save or to check
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:  # type: ignore[override]
        x, xa = ctx.saved_tensors
        block: AdaptedBlock = ctx.block
        grad_xa = torch.empty_like(xa)
        for part in block.parts:
            grad_part = grad_y[:, part.columns]
            torch.mm(grad_part, part.b, out=grad_xa[:, part.ranks])
            add_product(part.grad_b, grad_part.t(), xa[:, part.ranks], part.scaling)
            grad_xa[:, part.ranks] *= part.scaling
        add_grad_a(block, grad_xa, x, ctx.dropout)
        grad_x = grad_y @ ctx.weight
        if ctx.dropout is None:
            grad_x.addmm_(grad_xa, block.a)
        else:
            grad_x += expand_grad(block, grad_xa, ctx.dropout)
        return grad_x, None, None, None, None


def add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, scaling: float) -> None:
    """``total += scaling * left @ right``, accumulated in the dtype of ``total`` (fp32 for a half-precision model)."""
    if total.dtype == left.dtype:
        total.addmm_(left, right, alpha=scaling)
    elif left.is_cuda:
        total.add_(torch.mm(left, right, out_dtype=total.dtype), alpha=scaling)  # never rounded to a half type
    else:
        total.add_((left @ right).to(total.dtype), alpha=scaling)


class TrainingProjection:
    """The ``project`` callable of the decoder for a training step.

    Args:
        blocks: Of ``adapted_blocks``.
    """

    def __init__(self, blocks: dict[tuple[int, str], AdaptedBlock]) -> None:
        self._blocks = blocks

    def __call__(
        self,
        layer_index: int,
        block: str,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        dropout: Dropout | None = None,
    ) -> torch.Tensor:
        """[num_tokens, in] -> [num_tokens, out] of one fused block."""
        adapted = self._blocks.get((layer_index, block))
        if adapted is None:
            return F.linear(x, weight, bias)
        return _LoraLinear.apply(x, weight, bias, adapted, dropout)


def adapted_blocks(compute: LoraWeights, grads: LoraWeights) -> dict[tuple[int, str], AdaptedBlock]:
    """The views of every adapted block by (layer, name).

    Args:
        compute: The adapter in the model's dtype.
        grads: Gradient accumulators of the same layout, in the dtype of the master weights.
    """
    return {key: _views(block, compute, grads) for key, block in compute.layout.blocks.items()}


def _views(block: LoraBlock, compute: LoraWeights, grads: LoraWeights) -> AdaptedBlock:
    parts, first = [], 0
    for module in block.modules:
        parts.append(
            AdaptedPart(
                columns=slice(module.out_start, module.out_end),
                ranks=slice(first, first + module.rank),
                scaling=module.scaling,
                b=compute.b(module),
                grad_b=grads.b(module),
                salt=module.layer * len(MODULES) + MODULES.index(module.name),
            )
        )
        first += module.rank
    return AdaptedBlock(compute.block_a(block), grads.block_a(block), tuple(parts))
