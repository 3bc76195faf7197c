"""Losses, for graphs that carry their own."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from .table import Call, Result, lowering

# What torch ignores when nothing is to be ignored: no class has this number.
_NOTHING = -(2**31)


def _loss(c: Call, log_probabilities: Tensor) -> Tensor:
    weight, classes = c.optional(2), c[1].long()
    ignored, reduction = c.int_("ignore_index", _NOTHING), c.str_("reduction", "mean")
    if weight is None or c.static(2) is not None:
        return F.nll_loss(log_probabilities, classes, weight, ignore_index=ignored, reduction=reduction)
    # torch's own has no gradient to the weights of the classes.
    counts = classes != ignored
    picked = classes.masked_fill(~counts, 0)
    shares = weight[picked].masked_fill(~counts, 0.0)
    losses = -log_probabilities.gather(1, picked.unsqueeze(1)).squeeze(1) * shares
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / shares.sum()


@lowering("NegativeLogLikelihoodLoss", since=12)
def negative_log_likelihood(c: Call) -> Result:
    """Computes the loss of log-probabilities, with classes on axis one."""
    return _loss(c, c[0])


@lowering("SoftmaxCrossEntropyLoss", since=12)
def softmax_cross_entropy(c: Call) -> Result:
    """Computes the loss of scores, with classes on axis one; the log-probabilities are an output too."""
    log_probabilities = F.log_softmax(c[0], 1)
    return _loss(c, log_probabilities), log_probabilities
