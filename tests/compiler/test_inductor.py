"""Plans of kernels that Inductor compiles: numbers, bytes, folders, graphs of Dynamo, and what fails."""

from __future__ import annotations

import copy
import json
import math
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import irc
from irc.compiler.case import Case
from irc.compiler.request import Request
from irc.compiler.training import measured_peak_bytes
from irc.ir import FUSED, DType, Kernel, Step, Symbol, TensorType
from irc.passes import Cost, FuseOperations, PassManager, Program
from irc.passes.rewrites import fuse_operations
from irc.tools.cli import main
from irc.torch_support import kernels

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # of torch's compiler
]

WIDTH, CLASSES = 32, 300


class Block(nn.Module):
    """A gated perceptron with dropout beside its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH) for _ in range(2))
        self.down, self.dropout = nn.Linear(2 * WIDTH, WIDTH), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.dropout(self.down(functional.silu(self.gate(y)) * self.up(y)))


class Network(nn.Module):
    """Equal blocks under a projection to classes."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(depth)))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(self.blocks(x)), labels)


def network() -> tuple[Network, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return Network(4), (torch.randn(64, WIDTH), torch.randint(0, CLASSES, (64,)))


@pytest.fixture(autouse=True)
def every_kernel(monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    """Tensors here are so small that operations are faster by themselves."""
    monkeypatch.setattr(fuse_operations, "_NOISE", math.inf)


def _step(module: nn.Module, args: tuple[Any, ...]) -> tuple[list[Tensor], Tensor]:
    module.zero_grad(set_to_none=True)
    torch.manual_seed(3)
    loss = module(*args)
    loss.backward()
    found = [p.grad for p in module.parameters() if p.grad is not None]
    return [loss.detach(), *found], torch.get_rng_state()


@pytest.mark.parametrize("budget", ["100%", "75%"])
def test_numbers_are_eagers_but_for_rounding_and_peaks_are_as_predicted(budget: str) -> None:
    module, args = network()
    fitted = irc.optimize(copy.deepcopy(module), args, budget, compiler="inductor")
    plan = fitted.plan
    assert 0 < plan.kernels < plan.fused_operations  # equal blocks share theirs
    assert f"{plan.kernels} of inductor" in plan.summary()
    assert {each.name for each in plan.reordered} >= {"output 0", "head.weight"}
    for _ in range(2):
        (expected, state), (found, state_after) = _step(module, args), _step(fitted, args)
        assert torch.equal(state, state_after)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    fitted.zero_grad(set_to_none=True)
    assert 0 <= plan.peak_bytes - measured_peak_bytes(fitted, args, plan.static_bytes) <= 64  # the loss


def test_a_backward_that_retains_its_graph_may_run_again() -> None:
    module, args = network()
    fitted = irc.optimize(copy.deepcopy(module), args, "100%", compiler="inductor")
    found: list[list[Tensor]] = []
    loss = fitted(*args)
    for last in (False, True):
        fitted.zero_grad(set_to_none=True)
        loss.backward(retain_graph=not last)
        found.append([p.grad.clone() for p in fitted.parameters() if p.grad is not None])
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


def test_tiles_of_a_head_make_their_gradients_in_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("irc.compiler.tiles._LEAST_BYTES", 1 << 12)
    module, args = Network(1), (torch.randn(256, WIDTH), torch.randint(0, CLASSES, (256,)))
    with pytest.raises(irc.BudgetError) as refused:
        irc.optimize(copy.deepcopy(module), args, "10%", compiler="inductor")
    budget = refused.value.minimum_bytes * 9 // 10
    fitted = irc.optimize(copy.deepcopy(module), args, budget, compiler="inductor", exact="sums")
    assert fitted.plan.fused_operations and "head.weight" in {each.name for each in fitted.plan.reordered}
    fitted = pickle.loads(pickle.dumps(fitted))
    for _ in range(2):
        (expected, state), (found, state_after) = _step(module, args), _step(fitted, args)
        assert torch.equal(state, state_after)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    fitted.zero_grad(set_to_none=True)
    assert 0 <= fitted.plan.peak_bytes - measured_peak_bytes(fitted, args, fitted.plan.static_bytes) <= 64


def test_a_fitted_module_trains_when_it_comes_from_a_pickle() -> None:
    module, args = network()
    fitted = irc.optimize(module, args, "100%", compiler="inductor")
    expected, _ = _step(fitted, args)
    again = pickle.loads(pickle.dumps(fitted))
    kernels.forget()
    found, _ = _step(again, args)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_written_folder_trains_by_its_kernels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = f"{Path(__file__)}:network", str(tmp_path / "out")
    assert main(["optimize", path, "--budget", "80%", "--compiler", "inductor", "-o", out]) == 0
    assert "fused operations" in capsys.readouterr().out
    assert main(["run", out, "--check", "--trust", "--steps", "2"]) == 0
    assert "equal up to rounding" in capsys.readouterr().out
    program = Path(out) / "program.irc"
    text = program.read_text()
    assert '"aten.silu.default"' in text
    for other in ("aten.from_file.default", "os.system.default", "aten.add_.Tensor"):
        program.write_text(text.replace('"aten.silu.default"', f'"{other}"'))
        assert main(["run", out, "--steps", "1"]) == 1
        assert f"{other} is not an operation that can be fused" in capsys.readouterr().err


def test_graphs_of_dynamo_have_kernels() -> None:
    module, args = network()
    options: dict[str, Any] = {"budget": "64MiB", "compiler": "inductor"}
    compiled: Any = torch.compile(copy.deepcopy(module), backend="irc", options=options)
    (expected, state), (found, state_after) = _step(module, args), _step(compiled, args)
    assert torch.equal(state, state_after)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_without_room_for_kernels_operations_are_planned_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    module, args = network()
    compiled = irc.optimize(copy.deepcopy(module), args, "100%", compiler="inductor").plan
    whole = irc.optimize(copy.deepcopy(module), args, "100%").plan

    def costs_of(step: Cost, program: Program) -> Program:
        found = run(step, program)
        assert found.costs is not None
        large = {n: b + (n.op == FUSED) * 2**30 for n, b in found.costs.workspace_bytes.items()}
        return replace(found, costs=replace(found.costs, workspace_bytes=large))

    run = Cost.run
    monkeypatch.setattr(Cost, "run", costs_of)
    plan = irc.optimize(copy.deepcopy(module), args, whole.peak_bytes, compiler="inductor").plan
    assert (plan.compiler, plan.kernels) == ("inductor", 0)
    assert "none of inductor" in plan.summary()
    with pytest.raises(irc.BudgetError) as caught:
        irc.optimize(module, args, 1, compiler="inductor")
    assert caught.value.minimum_bytes == whole.minimum_budget_bytes
    assert compiled.kernels


def test_a_compiler_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("g++: not found\nmore")

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx_inner", fails)
    kernels.forget()
    module, args = network()
    with pytest.raises(irc.UnsupportedError) as caught:
        irc.optimize(module, args, "100%", compiler="inductor")
    assert caught.value.code == "IRC470"
    assert "g++: not found" in caught.value.message


def test_a_kernel_that_does_not_compile_leaves_its_operations_as_they_are(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compile_ = kernels.compiled
    failed: list[str] = []

    def fails_once(computation: Kernel) -> kernels.Compiled:
        if not failed:
            failed.append(computation.text)
            raise irc.UnsupportedError("IRC470", "no such luck")
        return compile_(computation)

    kernels.forget()
    monkeypatch.setattr(kernels, "compiled", fails_once)
    module, args = network()
    with caplog.at_level("WARNING", "irc"):
        fitted = irc.optimize(copy.deepcopy(module), args, "100%", compiler="inductor")
    assert "operations run by themselves: no such luck" in caplog.text
    assert fitted.plan.kernels
    (expected, _), (found, _) = _step(module, args), _step(fitted, args)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_no_kernel_is_begun_after_the_time_limit() -> None:
    module, args = network()
    request = Request.of("100%", compiler="inductor")
    program = Case.of(module, args, {}, request).prepared
    kernels.forget()
    assert PassManager([FuseOperations(time_limit=-1.0)]).run(program) is program


def test_a_class_out_of_range_is_an_error_and_not_the_end_of_the_process() -> None:
    module, (x, labels) = network()
    fitted = irc.optimize(copy.deepcopy(module), (x, labels), "100%", compiler="inductor")
    wrong = labels.clone()
    wrong[3] = CLASSES
    for each in (module, fitted):
        with pytest.raises(IndexError, match=f"Target {CLASSES} is out of bounds"):
            each(x, wrong)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_losses_of_classes_are_eagers(reduction: str, *, is_weighted: bool) -> None:
    class Loss(nn.Module):
        weight: Tensor | None

        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Conv2d(3, 5, 1)
            self.register_buffer("weight", torch.rand(5) if is_weighted else None)

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            scores = self.head(x)
            return functional.cross_entropy(
                scores, labels, self.weight, ignore_index=2, reduction=reduction
            ).sum()

    torch.manual_seed(0)
    module, labels = Loss(), torch.randint(0, 5, (2, 4, 4))
    args = torch.randn(2, 3, 4, 4), labels
    fitted = irc.optimize(copy.deepcopy(module), args, "300%", compiler="inductor")
    assert fitted.plan.kernels
    (expected, _), (found, _) = _step(module, args), _step(fitted, args)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


SMALL, WHOLE = (TensorType.contiguous(shape, DType.FLOAT32) for shape in ((4, 8), (16, 8)))
RELU = Step("aten.relu.default", (Symbol("operand", "0"),))
ROWS = Step("aten.slice.Tensor", (Symbol("result", "0"), 0, 0, 4))
FIRST, SECOND = Symbol("result", "0"), Symbol("result", "1")


def test_each_result_has_memory_of_its_own_and_the_strides_that_were_traced() -> None:
    x = torch.randn(16, 8)
    part = kernels.kernel(Kernel((WHOLE,), (RELU, ROWS), (SECOND,), (SMALL,)).text)
    (made,) = part([x])
    assert made.untyped_storage().nbytes() == SMALL.nbytes
    both = kernels.kernel(Kernel((WHOLE,), (RELU, ROWS), (FIRST, SECOND), (WHOLE, SMALL)).text)
    first, second = both([x])
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()
    turned = TensorType((16, 8), DType.FLOAT32, (1, 16), "cpu")
    loose = TensorType((1, 8), DType.FLOAT32, (3, 1), "cpu")
    (column_first,) = kernels.kernel(Kernel((WHOLE,), (RELU,), (FIRST,), (turned,)).text)([x])
    (row,) = kernels.kernel(Kernel((loose,), (RELU,), (FIRST,), (loose,)).text)([torch.randn(1, 8)])
    assert (column_first.stride(), row.stride()) == ((1, 16), (3, 1))
    assert torch.equal(column_first, x.relu())


def test_a_tensor_that_is_not_laid_out_as_traced_is_an_error() -> None:
    relu = kernels.kernel(Kernel((WHOLE,), (RELU,), (FIRST,), (WHOLE,)).text)
    with pytest.raises(irc.IrcError) as caught:
        relu([torch.randn(8, 16).t()])
    assert caught.value.code == "IRC471"


class Resized(nn.Module):
    """A view of one image, whose traced strides are not those that it has when it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.norm = nn.Parameter(torch.randn(1, 25, 8)), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        image = self.rows[:, 1:17].transpose(1, 2).view(1, 8, 4, 4)
        image = functional.interpolate(image, size=(4, 4), mode="bicubic")
        return functional.gelu(self.norm(image.flatten(2).transpose(1, 2) + x)).square().mean()


def test_what_a_kernel_would_read_by_wrong_strides_is_left_to_operations() -> None:
    torch.manual_seed(0)
    module, args = Resized(), (torch.randn(1, 16, 8),)
    fitted = irc.optimize(copy.deepcopy(module), args, "300%", compiler="inductor")
    (expected, _), (found, _) = _step(module, args), _step(fitted, args)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_a_folder_that_claims_other_kernels_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    options = ["--budget", "90%", "--compiler", "inductor", "-o", str(out)]
    assert main(["optimize", f"{__file__}:network", *options]) == 0
    plan = json.loads((out / "plan.json").read_text())
    (out / "plan.json").write_text(json.dumps({**plan, "kernels": plan["kernels"] + 1}))
    assert main(["run", str(out), "--steps", "1"])
    assert "error[IRC129]: the program has" in capsys.readouterr().err
    (out / "plan.json").write_text(json.dumps(plan))
    program = out / "program.irc"
    program.write_text(program.read_text().replace('result("0")', r'result("\u001b[31m")', 1))
    assert main(["run", str(out), "--steps", "1"])
    assert "\x1b" not in capsys.readouterr().err


class Mixed(nn.Module):
    """Norms that autocast leaves with parameters of 32 bits, between products in 16."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.layers, self.groups, self.batch = nn.LayerNorm(64), nn.GroupNorm(4, 64), nn.BatchNorm1d(64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.batch(self.groups(self.layers(functional.gelu(self.first(x)))))
        return (torch.sigmoid(self.second(y)) + x).square().mean()


def test_statistics_of_norms_have_the_precision_of_their_parameters_under_autocast() -> None:
    torch.manual_seed(0)
    module, args = Mixed(), (torch.randn(16, WIDTH),)
    with torch.autocast("cpu", torch.bfloat16):
        fitted = irc.optimize(copy.deepcopy(module), args, "300%", compiler="inductor")
    names = [d.operation for d in fitted.plan.decisions]
    assert not [name for name in names if " (aten." in name and "_norm" in name.partition(" (")[2]]
    exact, _ = _step(copy.deepcopy(module).double(), (args[0].double(),))
    off: list[float] = []
    for each in (module, fitted):
        each.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16):
            loss = each(*args)
        loss.backward()
        pairs = zip((p.grad for p in each.parameters()), exact[1:], strict=True)
        off.append(max(float((a.double() - b).norm() / b.norm()) for a, b in pairs if a is not None))
    assert off[1] < 3 * off[0] + 1e-3


def test_a_tensor_of_other_elements_than_traced_is_an_error() -> None:
    relu = kernels.kernel(Kernel((SMALL,), (RELU,), (FIRST,), (SMALL,)).text)
    kernels.forget()
    with pytest.raises(irc.IrcError) as caught:
        kernels.kernel(Kernel((SMALL,), (RELU,), (FIRST,), (SMALL,)).text)([torch.randn(4, 8).bfloat16()])
    assert caught.value.code == "IRC471"
    assert torch.equal(relu([torch.ones(4, 8)])[0], torch.ones(4, 8))
    half = TensorType.contiguous((4, 8), DType.FLOAT16)
    with pytest.raises(irc.UnsupportedError) as refused:
        kernels.kernel(Kernel((SMALL,), (RELU,), (FIRST,), (half,)).text)
    assert refused.value.code == "IRC470"


def test_a_model_without_data_has_no_kernels() -> None:
    with torch.device("meta"):
        module, x = nn.Linear(4, 4), torch.empty(2, 4)
    with pytest.raises(irc.UsageError, match="device meta has no kernels"):
        irc.optimize(module, (x,), "100%", compiler="inductor")
