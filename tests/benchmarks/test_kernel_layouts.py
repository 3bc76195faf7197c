"""The layouts of results without data: those of the kernels, by laws that a program finds."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from benchmarks.kernel_layouts import laws
from benchmarks.kernel_layouts.calls import Call, derivatives, operation_of
from benchmarks.kernel_layouts.laws import Examined, examined_apart, laws_of, observed
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
    "reflection_pad2d_backward": Call(
        _aten.reflection_pad2d_backward.default,
        (torch.randn(2, 3, 6, 6), torch.randn(2, 3, 4, 4), [1, 1, 1, 1]),
        {},
    ),
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
    table, is_own = kernel_layouts.known_laws()
    assert table and is_own == torch.__version__.startswith("2.13.")
    for name in table if is_own else ():
        assert operation_of(name.removeprefix("aten.").removesuffix(".default")) is not None, name


def test_an_operation_without_samples_is_called_by_its_schema() -> None:
    assert {"add.Tensor", "elu", "cudnn_batch_norm"} <= set(derivatives())
    assert examined_apart("aten.elu.default", ()) == Examined(8, [""])
    assert examined_apart("aten.cudnn_batch_norm.default", ()) == Examined(0, [])


@pytest.mark.parametrize("fault", [lambda: os.kill(os.getpid(), signal.SIGKILL), lambda: time.sleep(60)])
def test_an_operation_that_ends_its_process_or_hangs_is_lost_alone(
    fault: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(laws, "_LIMIT_SECONDS", 1)
    monkeypatch.setattr(laws, "observed", lambda *_, **__: fault())
    assert examined_apart("aten.elu.default", [CALLS["elu_backward"]]) == Examined(1, None)


def test_the_table_of_this_version_is_what_the_program_finds() -> None:
    table, is_own = kernel_layouts.known_laws()
    for call in CALLS.values() if is_own else ():
        assert examined_apart(str(call.func), [call]).laws == table[str(call.func)]
