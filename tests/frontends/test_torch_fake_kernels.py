"""Operations that torch's tracer takes apart or describes wrongly: as eager runs them, with their memory."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.torch_cases import Model, assert_same, fitted, outcome
from torch import Tensor, nn
from torch._C import DispatchKey
from torch._subclasses import FakeTensorMode
from torch.nn import functional
from torch.utils import _pytree as pytree

import irc
from irc.frontends.torch import capture
from irc.frontends.torch.fixups.fake_kernels import fake_kernels_of_eager
from irc.frontends.torch.fixups.meta_kernels import composites_on_meta
from irc.ir import Graph, Trait, UnsupportedError
from irc.passes.costs.profiling import profile_costs, runner
from irc.torch_support.pytree import tensors_of

torch.set_num_threads(1)


def weighted(function: Callable[..., Any], *shape: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return Model(function, weight=nn.Parameter(torch.randn(*shape, dtype=dtype)))


def graph_of(module: nn.Module, *args: Tensor) -> Graph:
    return capture(module, args).graph


def assert_trains_the_same(module: nn.Module, *args: Tensor) -> None:
    original = copy.deepcopy(module)
    assert_same(outcome(fitted(module, *args), args, {}), outcome(original, args, {}))


# ---------------------------------------------------------------------- whole operations

WHOLE: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "upsample_bilinear2d": lambda m, x: functional.interpolate(
        x * m.weight, scale_factor=2.0, mode="bilinear"
    ),
    "upsample_bicubic2d": lambda m, x: functional.interpolate(x * m.weight, size=(5, 9), mode="bicubic"),
    "upsample_nearest2d": lambda m, x: functional.interpolate(x * m.weight, scale_factor=2.0),
    "upsample_trilinear3d": lambda m, x: functional.interpolate(
        (x * m.weight)[:, None], size=(4, 9, 9), mode="trilinear"
    ),
    "_upsample_bilinear2d_aa": lambda m, x: functional.interpolate(
        x * m.weight, size=(4, 4), mode="bilinear", antialias=True
    ),
    "hardshrink": lambda m, x: functional.hardshrink(x * m.weight),
}


@pytest.mark.parametrize("name", WHOLE)
def test_interpolation_is_one_operation_as_in_eager(name: str) -> None:
    module, x = weighted(WHOLE[name], 2, 3, 6, 6), torch.randn(2, 3, 6, 6)
    ops = [node.op.split(".")[1] for node in graph_of(module, x).operations]
    assert ops.count(name) == 1 and ops.count(f"{name}_backward") == 1 and len(ops) <= 5
    assert_trains_the_same(module, x)


def test_other_tracers_take_them_apart_as_before() -> None:
    graph_of(weighted(WHOLE["upsample_bilinear2d"], 2, 3, 6, 6), torch.randn(2, 3, 6, 6))
    kernels = torch.ops.aten.upsample_bilinear2d.default.py_kernels
    assert torch._C.DispatchKey.Autograd in kernels  # pyright: ignore[reportPrivateUsage]


# ---------------------------------------------------------------------- rules

LENGTHS = torch.tensor([2, 1, 2])


def _ctc(m: Any, targets: Tensor, lengths: Any) -> Tensor:
    times: Any = torch.tensor([6, 6, 5]) if isinstance(lengths, Tensor) else (6, 6, 5)
    return functional.ctc_loss(m.weight.log_softmax(-1), targets, times, lengths, zero_infinity=True)


@pytest.mark.parametrize("targets", [torch.tensor([[1, 2], [3, 1], [2, 2]]), torch.tensor([1, 2, 3, 2, 2])])
def test_the_ctc_loss_is_planned_for_the_longest_labels_there_can_be(targets: Tensor) -> None:
    module = weighted(lambda m, t, n: _ctc(m, t, n), 6, 3, 4)
    graph = graph_of(module, targets, LENGTHS)
    loss = next(node for node in graph.nodes if node.op.startswith("aten._ctc_loss"))
    assert loss.values[1].type.shape == (3, 6, 2 * targets.shape[-1] + 1)
    assert_trains_the_same(module, targets, LENGTHS)


def test_the_ctc_loss_takes_lists_of_lengths() -> None:
    module = weighted(lambda m, t: _ctc(m, t, (2, 1, 2)), 6, 3, 4)
    assert_trains_the_same(module, torch.tensor([[1, 2], [3, 1], [2, 2]]))


def test_the_gradient_of_a_dropout_has_the_layout_of_what_comes_in() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        strided = torch.empty_strided((4, 3, 5), (5, 20, 1)).copy_(x)
        return strided + functional.dropout(functional.linear(x, m.weight), 0.5)

    module, x = weighted(forward, 5, 5), torch.randn(4, 3, 5)
    node = next(n for n in graph_of(module, x).nodes if "native_dropout_backward" in n.op)
    assert node.values[0].type.strides == node.operands[0].type.strides
    if torch.__version__ >= "2.12":  # before, the tracer has the gradient of a result in rows
        assert node.values[0].type.strides == (5, 20, 1)
    assert_trains_the_same(module, x)


def test_the_rules_stand_only_while_a_module_is_traced() -> None:
    graph_of(weighted(lambda m, x: functional.dropout(x @ m.weight), 4, 4), torch.randn(3, 4))
    with FakeTensorMode():
        gradient, mask = torch.empty_strided((4, 3, 5), (5, 20, 1)), torch.empty(4, 3, 5, dtype=torch.bool)
        assert torch.ops.aten.native_dropout_backward(gradient, mask, 2.0).stride() == (15, 5, 1)
        with pytest.raises(Exception, match="_ctc_loss"):
            torch.ops.aten._ctc_loss(torch.empty(6, 3, 4), torch.empty(3, 2), LENGTHS, LENGTHS)


# ---------------------------------------------------------------------- storages


def test_a_write_into_a_slice_takes_the_whole_storage() -> None:
    """The kernels clone the storage that the slice lies in; torch's rule counts up to its last element."""

    def forward(m: Any, x: Tensor) -> Tensor:
        room = torch.zeros(6, 8)
        room[:, :5][:, 1:3] = m.weight * x
        return room

    module, x = weighted(forward, 6, 2), torch.randn(6, 2)
    scattered = [
        n for n in graph_of(module, x).nodes if n.op in ("aten.slice_scatter.default", "aten.copy.default")
    ]
    assert scattered and all(n.values[0].storage.nbytes >= 6 * 8 * 4 for n in scattered)
    assert_trains_the_same(module, x)


def test_conjugates_are_made_with_memory_of_their_own() -> None:
    module = weighted(lambda m, x: (x.conj().mT @ m.weight.conj()).abs(), 4, 4, dtype=torch.complex64)
    x = torch.randn(4, 4, dtype=torch.complex64)
    graph = graph_of(module, x)
    ops = [n.op for n in graph.nodes]
    assert "aten._conj.default" not in ops and "aten._conj_physical.default" in ops
    assert_trains_the_same(module, x)


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (lambda m, x: (lambda h: (h, h.imag))(x @ m.weight), "complex64 seen as torch.float32"),
        (lambda m, x: (x @ m.weight, torch.view_as_real(x)), "complex64 seen as torch.float32"),
    ],
)
def test_a_result_that_is_another_view_than_strides_can_tell_is_refused(function: Any, named: str) -> None:
    module = weighted(function, 4, 4, dtype=torch.complex64)
    with pytest.raises(UnsupportedError, match="IRC348") as raised:
        capture(module, (torch.randn(4, 4, dtype=torch.complex64),))
    assert named in raised.value.message and "clone()" in str(raised.value.help)


# ---------------------------------------------------------------------- checks


def test_an_operation_that_only_checks_runs_once_and_raises_as_in_eager() -> None:
    module = weighted(lambda m, x: torch.linalg.inv(x * m.weight), 3, 3)
    x = torch.eye(3) + 0.1 * torch.randn(3, 3)
    checks = [n for n in graph_of(module, x).nodes if n.op == "aten._linalg_check_errors.default"]
    assert len(checks) == 1 and checks[0].traits == {Trait.PINNED} and checks[0].results == ()
    assert_trains_the_same(module, x)
    with pytest.raises(torch.linalg.LinAlgError, match="singular"):
        fitted(module, x)(torch.zeros(3, 3))


# ---------------------------------------------------------------------- layouts

_TARGET = torch.zeros(2, 3, 4)
LAYOUTS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "_log_softmax_backward_data": lambda m, x: x.log_softmax(-1).mT.contiguous(),
    "native_layer_norm_backward": lambda m, x: functional.layer_norm(x, (4,)).mT.contiguous(),
    "mse_loss_backward": lambda m, x: functional.mse_loss(x, _TARGET),
    "smooth_l1_loss_backward": lambda m, x: functional.smooth_l1_loss(x, _TARGET),
    "huber_loss_backward": lambda m, x: functional.huber_loss(x, _TARGET),
    "log_sigmoid_forward": lambda m, x: functional.logsigmoid(x).view(-1),
    "_native_batch_norm_legit_functional": lambda m, x: m.norm(x).view(-1),
    "native_batch_norm_backward": lambda m, x: m.norm(x).exp(),
    "hardtanh_backward": lambda m, x: functional.hardtanh(x).contiguous(),
    "hardswish_backward": lambda m, x: functional.hardswish(x).contiguous(),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("order", [(0, 2, 1), (1, 2, 0), (1, 0, 2)])
def test_results_have_the_layout_that_the_kernel_gives_them(name: str, order: tuple[int, int, int]) -> None:
    """On operands that are transposed: what is a view of a result is one in eager too."""
    places = [order.index(dim) for dim in range(3)]
    shape = [(2, 3, 4)[dim] for dim in order]

    def forward(m: Any, x: Tensor) -> Tensor:
        return LAYOUTS[name](m, (x * m.weight).permute(places))

    module = Model(forward, weight=nn.Parameter(torch.randn(shape)), norm=nn.BatchNorm1d(3))
    nodes = graph_of(module, torch.randn(shape)).operations
    assert name in [node.op.split(".")[1] for node in nodes]
    for node in nodes:
        made = runner(node)()
        for value, tensor in zip(node.results, made if isinstance(made, tuple) else (made,), strict=False):
            if value is not None:
                steps = [
                    [step for size, step in zip(value.type.shape, strides, strict=True) if size > 1]
                    for strides in (value.type.strides, tensor.stride())
                ]
                assert steps[0] == steps[1], node.op


@pytest.mark.parametrize("axes", [(0,), (1,), (0, 1), (0, 2)])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_what_is_indexed_has_the_layout_that_the_kernel_gives_it(
    axes: tuple[int, ...], order: tuple[int, int]
) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.weight[tuple(x if axis in axes else slice(None) for axis in range(3))].reshape(-1, 2).sin()

    places = torch.randint(0, 4, (3, 2)).permute(order)
    module = Model(forward, weight=nn.Parameter(torch.randn(4, 4, 4)))
    assert_trains_the_same(module, places)


GROUPED: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...] | None]] = {
    "rows": ((14, 8), (3, 16, 8), (2, 9, 14)),
    "columns": ((3, 4, 8), (16, 8), (2, 9, 16)),
    "pairs": ((3, 4, 8), (3, 16, 8), None),
    "sums": ((4, 16), (8, 16), (8, 16)),
}


def grouped(name: str, dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
    shape, weight, ends = GROUPED[name]
    offsets = None if ends is None else torch.tensor(ends, dtype=torch.int32)

    def forward(m: Any, x: Tensor) -> Tensor:
        return functional.grouped_mm(x.exp(), m.weight.mT, offs=offsets).exp()

    return weighted(forward, *weight, dtype=dtype), torch.randn(shape, dtype=dtype)


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_groups_run_without_data_too(name: str, dtype: torch.dtype) -> None:
    module, x = grouped(name, dtype)
    captured = capture(module, (x,), with_eager=True)
    assert captured.eager is not None
    assert "aten._grouped_mm.default" in {op for op, _ in captured.eager.alive_bytes}
    assert_trains_the_same(module, x)


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("width", [3, 12, 16])
def test_products_of_groups_have_the_strides_of_the_kernel(name: str, dtype: torch.dtype, width: int) -> None:
    shape, (*groups, _, depth), ends = GROUPED[name]
    ends = (1, 2, width) if name == "columns" else ends
    offsets = None if ends is None else torch.tensor(ends, dtype=torch.int32)
    operands = torch.randn(shape, dtype=dtype), torch.randn(*groups, width, depth, dtype=dtype).mT
    made = functional.grouped_mm(*operands, offs=offsets)
    with fake_kernels_of_eager(), FakeTensorMode(allow_non_fake_inputs=True):
        fake = functional.grouped_mm(*operands, offs=offsets)
    assert (fake.shape, fake.stride(), fake.dtype) == (made.shape, made.stride(), made.dtype)
    assert fake.untyped_storage().nbytes() == made.untyped_storage().nbytes()


def test_the_memory_of_folded_columns_is_the_kernels() -> None:
    module = Model(
        lambda m, x: functional.unfold(x * m.weight, 3, padding=1), weight=nn.Parameter(torch.ones(1))
    )
    x = torch.randn(2, 3, 6, 6)
    graph = graph_of(module, x)
    profile_costs(graph)  # refuses an operation that returns more bytes than were traced
    (node,) = [node for node in graph.operations if node.op.startswith("aten.col2im")]
    assert node.values[0].storage.nbytes == 9 * x.nbytes
    assert_trains_the_same(module, x)


WITH_ROOM: dict[str, tuple[Any, ...]] = {
    "col2im": (torch.zeros(2, 27, 36), [6, 6], [3, 3], [1, 1], [1, 1], [1, 1]),
    "_embedding_bag": (
        *(torch.zeros(5, 4), torch.zeros(6, dtype=torch.long), torch.tensor([0, 2, 6])),
        *(False, 1, False, None, True),
    ),
}


@pytest.mark.parametrize("name", WITH_ROOM)
def test_the_memory_of_equal_calls_is_equal(name: str) -> None:
    operation, arguments = getattr(torch.ops.aten, name).default, WITH_ROOM[name]
    made = [result.untyped_storage().nbytes() for result in tensors_of(operation(*arguments))]
    with fake_kernels_of_eager(), FakeTensorMode() as mode:
        fakes = pytree.tree_map_only(Tensor, mode.from_tensor, arguments)
        for _ in range(3):
            traced = [result.untyped_storage().nbytes() for result in tensors_of(operation(*fakes))]
            assert traced == made


def test_the_step_of_folds_of_equal_sizes_takes_what_is_predicted() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        columns = functional.unfold(x * m.weight, 3, padding=1)
        return functional.fold(columns, (6, 6), 3, padding=1).sin()

    module, x = Model(forward, weight=nn.Parameter(torch.ones(1))), torch.randn(2, 3, 6, 6)
    planned = irc.optimize(module, (x,), "100%", loss=torch.sum, costs="measured", time_limit=1)
    torch.sum(planned(x)).backward()
    assert irc.measured_peak_bytes(planned, (x,), loss=torch.sum) == planned.plan.peak_bytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_gradient_of_dropout_is_rounded_as_eager_does(dtype: torch.dtype) -> None:
    module = weighted(lambda m, x: functional.dropout(x * m.weight, 0.3), 64, dtype=dtype)
    assert_trains_the_same(module, torch.randn(8, 64, dtype=dtype))


def test_kernels_for_meta_are_back_when_the_last_that_took_them_is_left() -> None:
    kernels = torch.ops.aten.nll_loss.default.py_kernels
    before, on_meta = dict(kernels), torch.empty(1, device="meta")
    assert DispatchKey.Meta in before
    with pytest.raises(KeyError), composites_on_meta([on_meta]):
        with composites_on_meta([on_meta]):
            assert DispatchKey.Meta not in kernels
        assert DispatchKey.Meta not in kernels
        raise KeyError
    assert kernels == before
    with composites_on_meta([torch.empty(1)]):
        assert kernels == before


@pytest.mark.slow
def test_a_transform_inside_a_model_finds_torchs_rules() -> None:
    """In a process of its own: torch reads its table of rules once, when the first transform needs it."""
    script = (
        "import torch, irc\n"
        "class Slope(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.lin = torch.nn.Linear(2, 1)\n"
        "    def forward(self, x):\n"
        "        return torch.func.vmap(torch.func.grad(lambda v: self.lin(v).tanh().sum()))(x)\n"
        "fitted = irc.optimize(Slope(), torch.randn(4, 2), '100%', costs='analytic')\n"
        "fitted(torch.randn(4, 2)).square().mean().backward()\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


# ---------------------------------------------------------------------- sizes

NORMS: dict[str, Callable[[], nn.Module]] = {
    "weights": lambda: nn.InstanceNorm1d(8, affine=True),
    "statistics": lambda: nn.BatchNorm1d(8, affine=False),
    "neither": lambda: nn.InstanceNorm1d(8),
    "groups": lambda: nn.GroupNorm(2, 8),
    "no bias": lambda: nn.LayerNorm(6, bias=False),
}


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_of_half_precision_save_what_their_operands_are(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv1d(8, 8, 1, groups=8), NORMS[name]())
    x = torch.randn(4, 8, 6)
    original = copy.deepcopy(module)
    with torch.autocast("cpu", dtype):
        plan = irc.optimize(module, (x,), "100%", loss=_mean_square)  # each operation runs to be measured
        _mean_square(plan(x)).backward()
        _mean_square(original(x)).backward()
        peak_bytes = irc.measured_peak_bytes(plan, (x,), loss=_mean_square)
    assert all(map(torch.equal, _gradients(module), _gradients(original)))
    assert 0 <= plan.plan.peak_bytes - peak_bytes <= 64


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("is_closed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bags_of_embeddings_take_the_memory_of_the_kernel(
    dtype: torch.dtype, mode: Any, is_closed: bool
) -> None:
    torch.manual_seed(0)
    module = nn.EmbeddingBag(10, 16, mode=mode, include_last_offset=is_closed, dtype=dtype)
    args = torch.arange(24) % 10, torch.arange(0, 24 + is_closed, 3)
    original = copy.deepcopy(module)
    plan = irc.optimize(module, args, "100%", loss=_mean_square)
    _mean_square(plan(*args)).backward()
    _mean_square(original(*args)).backward()
    assert all(map(torch.equal, _gradients(module), _gradients(original)))
    assert 0 <= plan.plan.peak_bytes - irc.measured_peak_bytes(plan, args, loss=_mean_square) <= 64


def _mean_square(y: Tensor) -> Tensor:
    return y.float().square().mean()


def _gradients(module: nn.Module) -> list[Tensor]:
    return [p.grad for p in module.parameters() if p.grad is not None]
