"""Losses of torch.nn.functional, and others, of one output of `ROWS` rows and `COLUMNS` columns."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

__all__ = ["COLUMNS", "PARTS", "ROWS", "WHOLES", "losses"]

ROWS, COLUMNS = 32, 128

Loss = Callable[[Tensor], Tensor]

PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "abs": Tensor.abs,
    "clamp": lambda y: y.clamp(-1, 1),
    "cumulated": lambda y: y.cumsum(0),
    "exp": Tensor.exp,
    "log of sigmoid": functional.logsigmoid,
    "log softmax": lambda y: y.log_softmax(-1),
    "masked": lambda y: y.masked_fill(torch.eye(*y.shape, dtype=torch.bool), 0),
    "normalized": functional.normalize,
    "scaled": lambda y: 2.0 * y + 1.0,
    "sorted": lambda y: y.sort(-1)[0],
    "square": Tensor.square,
    "transposed": lambda y: y.t().contiguous(),
    "with its negative": lambda y: torch.cat([y, -y]),
}
"""Functions of a matrix to a matrix."""

WHOLES: dict[str, Loss] = {
    "largest element": Tensor.max,
    "largest of rows": lambda y: y.max(-1).values.mean(),
    "logarithm of sum": lambda y: y.logsumexp((0, 1)),
    "mean": Tensor.mean,
    "mean of rows": lambda y: y.mean(0).square().sum(),
    "median": Tensor.median,
    "norm": Tensor.norm,
    "norm to 1": lambda y: y.norm(1),
    "norm to infinity": lambda y: y.norm(float("inf")),
    "product": Tensor.prod,
    "range": lambda y: y.max() - y.min(),
    "some": lambda y: y[:, ::2].mean(),
    "standard deviation": Tensor.std,
    "standard deviations": lambda y: y.std(-1).mean(),
    "sum": Tensor.sum,
    "sum of picked": lambda y: y.gather(1, torch.zeros(len(y), 1, dtype=torch.long)).sum(),
    "variance": Tensor.var,
}
"""Functions of a matrix to a scalar."""


def losses(dtype: torch.dtype) -> dict[str, Loss]:
    """Losses by name, with targets of a type."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator).to(dtype)

    def classes(count: int, *shape: int) -> Tensor:
        return torch.randint(count, shape, generator=generator)

    shape = ROWS, COLUMNS
    target, other, third, weight = drawn(*shape), drawn(*shape), drawn(*shape), drawn(COLUMNS)
    label, bits = classes(COLUMNS, ROWS), classes(2, *shape).to(dtype)
    signs, sides = 2 * bits - 1, 2 * classes(2, ROWS) - 1
    chances, several = drawn(*shape).softmax(-1), classes(COLUMNS, *shape)
    several[:, 5:] = -1
    heard, written = torch.full((4,), ROWS), torch.full((4,), 3)
    spoken = classes(8, 4, 3) + 1

    found: dict[str, Loss] = {}
    for name, function in {
        "l1": functional.l1_loss,
        "mse": functional.mse_loss,
        "smooth l1": functional.smooth_l1_loss,
        "huber": partial(functional.huber_loss, delta=0.5),
        "soft margin": functional.soft_margin_loss,
        "hinge embedding": functional.hinge_embedding_loss,
        "logits": functional.binary_cross_entropy_with_logits,
        "Poisson": functional.poisson_nll_loss,
    }.items():
        against = signs if name in ("soft margin", "hinge embedding") else bits
        for reduction in ("mean", "sum"):
            found[f"{name}, {reduction}"] = partial(function, target=against, reduction=reduction)
        found[name] = lambda y, f=function, t=against: f(y, t, reduction="none").mean()
    found |= {f"whole {name}": whole for name, whole in WHOLES.items()}
    found |= {f"part {name}": lambda y, part=part: part(y).mean() for name, part in PARTS.items()}
    return found | {
        "mse, weighted": lambda y: (functional.mse_loss(y, target, reduction="none") * other).sum(),
        "mse, float32 target": lambda y: functional.mse_loss(y, target.float()),
        "cross entropy": lambda y: functional.cross_entropy(y, label),
        "cross entropy, sum": lambda y: functional.cross_entropy(y, label, reduction="sum"),
        "cross entropy, float32": lambda y: functional.cross_entropy(y.float(), label),
        "cross entropy, smooth": lambda y: functional.cross_entropy(y, label, label_smoothing=0.1),
        "cross entropy, weight": lambda y: functional.cross_entropy(y, label, weight=weight),
        "cross entropy, both": lambda y: functional.cross_entropy(
            y, label, weight=weight, label_smoothing=0.1
        ),
        "cross entropy, ignore": lambda y: functional.cross_entropy(y, label, ignore_index=3),
        "cross entropy, chances": lambda y: functional.cross_entropy(y, chances),
        "cross entropy, smooth chances": lambda y: functional.cross_entropy(y, chances, label_smoothing=0.1),
        "nll": lambda y: functional.nll_loss(y.log_softmax(-1), label),
        "nll, picked": lambda y: -y.log_softmax(-1)[torch.arange(ROWS), label].mean(),
        "binary": lambda y: functional.binary_cross_entropy(y.sigmoid(), target),
        "binary, weight": lambda y: functional.binary_cross_entropy(y.sigmoid(), target, weight=other),
        "logits, positive": lambda y: functional.binary_cross_entropy_with_logits(y, bits, pos_weight=weight),
        "logits, weight": lambda y: functional.binary_cross_entropy_with_logits(y, bits, weight=other),
        "logits, transposed": lambda y: functional.binary_cross_entropy_with_logits(
            y.t(), bits.t().contiguous(), pos_weight=other.t().contiguous()
        ),
        "divergence": lambda y: functional.kl_div(y.log_softmax(-1), chances, reduction="batchmean"),
        "divergence of logarithms": lambda y: functional.kl_div(
            y.log_softmax(-1), chances.log(), reduction="batchmean", log_target=True
        ),
        "Poisson, full": lambda y: functional.poisson_nll_loss(y, target, log_input=False, full=True),
        "Gaussian": lambda y: functional.gaussian_nll_loss(y, target, other + 0.1),
        "Gaussian, full": lambda y: functional.gaussian_nll_loss(target, other, y.square() + 0.1, full=True),
        "ranking": lambda y: functional.margin_ranking_loss(y, other, signs, margin=0.3),
        "ranking of halves": lambda y: functional.margin_ranking_loss(
            y[: ROWS // 2], y[ROWS // 2 :], signs[: ROWS // 2]
        ),
        "multi margin": lambda y: functional.multi_margin_loss(y, label),
        "multi margin, weight": lambda y: functional.multi_margin_loss(y, label, p=2, weight=weight),
        "several labels, margin": lambda y: functional.multilabel_margin_loss(y, several),
        "several labels, soft": lambda y: functional.multilabel_soft_margin_loss(y, bits, weight=weight),
        "triplet": lambda y: functional.triplet_margin_loss(y, other, third),
        "triplet, swap": lambda y: functional.triplet_margin_loss(y, other, third, swap=True, p=1),
        "triplet of parts": lambda y: functional.triplet_margin_loss(y[:8], y[8:16], y[16:24]),
        "triplet, distance": lambda y: functional.triplet_margin_with_distance_loss(
            y, other, third, distance_function=lambda a, b: 1 - functional.cosine_similarity(a, b)
        ),
        "cosine": lambda y: functional.cosine_embedding_loss(y, other, sides, margin=0.2),
        "distances": lambda y: torch.cdist(y, other).mean(),
        "own distances": lambda y: functional.pdist(y).sum(),
        "CTC": lambda y: nn.CTCLoss()(y.view(ROWS, 4, -1).log_softmax(-1), spoken, heard, written),
        "entropy": lambda y: -(y.softmax(-1) * y.log_softmax(-1)).sum(-1).mean(),
        "two terms": lambda y: functional.mse_loss(y, target) + 0.1 * y.abs().mean(),
        "mask": lambda y: y.mul(y > 0.5).sum() / (y > 0.5).sum(),
        "dropped": lambda y: functional.dropout(y).sum(),
        "checkpoint": lambda y: checkpoint(lambda z: z.exp().sin().mean(), y, use_reentrant=False),
        "product of matrices": lambda y: (y @ y.t()).mean(),
    }
