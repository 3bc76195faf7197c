"""Tensors that have a type and no data: those on the device `meta`, and torch's fake ones."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from ..ir import UsageError

__all__ = ["lacks_data", "refuse_without_data"]


def lacks_data(tensor: Tensor) -> bool:
    """Whether a tensor, such as a parameter of a model that is only planned, has no data."""
    return tensor.is_meta or isinstance(tensor, FakeTensor) or isinstance(tensor.data, FakeTensor)


def refuse_without_data(root: nn.Module, tensors: Iterable[Tensor]) -> None:
    """Refuses a step of a model that was planned without weights, as long as they are not there.

    Args:
        root: The module.
        tensors: The inputs of the step.

    Raises:
        UsageError: IRC527.
    """
    named = (*root.named_parameters(), *root.named_buffers())
    lacking = [name for name, tensor in named if lacks_data(tensor)]
    if not lacking and not any(map(lacks_data, tensors)):
        return
    what = f"{len(lacking)} of {len(named)} tensors have no data, first {lacking[0]}" if lacking else ""
    raise UsageError(
        "IRC527",
        f"the model was planned without weights: {what or 'an input has no data'}",
        help="load them: model.to_empty(device=...), then model.load_state_dict(...) or assign=True; or save "
        "the plan (model.plan.to_json()) and plan the model again where its weights are",
    )
