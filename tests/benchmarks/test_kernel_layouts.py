"""The layouts of results without data: those of the kernels, by laws that a program finds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from benchmarks.kernel_layouts.calls import Call, derivatives, operation_of, schema_calls
from benchmarks.kernel_layouts.laws import laws_of, observed
from irc.frontends.torch.fixups import kernel_layouts
from irc.frontends.torch.fixups.fake_kernels import fake_kernels_of_eager

_aten = torch.ops.aten
_SHAPE = (2, 3, 4)


def _call(operation: Any, *others: Any) -> Call:
    gradient, data = torch.randn(2, *_SHAPE)
    return Call(operation, (gradient, *others, data), {})


CALLS = {
    "elu_backward": _call(_aten.elu_backward.default, 1.0, 1.0, 1.0, False),
    "softplus_backward": Call(_aten.softplus_backward.default, (*torch.randn(2, *_SHAPE), 1.0, 20.0), {}),
    "hardsigmoid_backward": _call(_aten.hardsigmoid_backward.default),
    "mse_loss_backward": Call(_aten.mse_loss_backward.default, (*torch.randn(3, *_SHAPE), 0), {}),
}


@pytest.mark.parametrize("name", CALLS)
def test_torchs_rule_misses_a_layout_that_a_law_tells(name: str) -> None:
    (law,) = laws_of(observed([CALLS[name]]))
    assert law, "torch's rule has become right: make the table of this version again"
    assert all(seen.is_right for results in observed([CALLS[name]], laws=None) for seen in results)


def test_a_law_of_another_version_that_is_wrong_gives_way_to_the_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wrong = {"aten.elu_backward.default": ["elementwise 1"]}
    monkeypatch.setattr(kernel_layouts, "known_laws", lambda: (wrong, False))
    gradient, data = torch.randn(2, 4, 3).mT, torch.randn(_SHAPE)
    kernels = _aten.elu_backward(gradient, 1.0, 1.0, 1.0, False, data)
    with fake_kernels_of_eager(), FakeTensorMode() as mode:
        stood_in = [mode.from_tensor(each) for each in (gradient, data)]
        result = _aten.elu_backward(stood_in[0], 1.0, 1.0, 1.0, False, stood_in[1])
    assert result.stride() == kernels.stride() != data.stride()


def test_laws_are_of_operations_that_there_are() -> None:
    laws, is_own = kernel_layouts.known_laws()
    assert laws and is_own == torch.__version__.startswith("2.13.")
    for name in laws if is_own else ():
        assert operation_of(name.removeprefix("aten.").removesuffix(".default")) is not None, name


def test_calls_are_made_of_a_schema_and_of_nothing_that_ends_the_process() -> None:
    assert {"add.Tensor", "elu", "cudnn_batch_norm"} <= set(derivatives())
    assert len(schema_calls("elu")) > 1 and not schema_calls("cudnn_batch_norm")
