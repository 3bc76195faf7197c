"""The fitted module against the original: same numbers, same behaviour, and the memory that was predicted."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from support.torch_cases import (
    CASES,
    Model,
    assert_same,
    captured_case,
    fitted,
    fitted_from,
    image,
    keep_all,
    net,
    outcome,
    recompute_some,
    slow_among,
    views,
)
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

import irc
from benchmarks import models
from irc.backends.torch import bind_program, compile_program, emit_source
from irc.compiler.training import measured_peak_bytes
from irc.frontends.torch import capture
from irc.ir import (
    BackwardError,
    Graph,
    IrcError,
    Schedule,
    UnsupportedError,
    UsageError,
    liveness,
    verify_schedule,
)
from irc.passes.costs.allocations import peak_bytes
from irc.passes.costs.profiling import profile_costs

torch.set_num_threads(1)


SCHEDULES: list[Callable[[Graph], Schedule]] = [
    keep_all,
    *(functools.partial(recompute_some, seed=seed) for seed in range(3)),
]


@pytest.mark.parametrize("name", CASES)
def test_two_steps_leave_exactly_what_the_original_leaves(name: str) -> None:
    torch.manual_seed(0)
    case = CASES[name]
    start, args, kwargs = case.module(), case.arguments(), case.keywords()
    for schedule in SCHEDULES:
        original = copy.deepcopy(start)
        ours = fitted_from(captured_case(name), copy.deepcopy(start), schedule)
        for _ in range(2):
            wanted = outcome(original, args, kwargs)
            assert_same(outcome(ours, args, kwargs), wanted)


def test_aliases_among_the_outputs_are_aliases() -> None:
    x = torch.randn(3, 4)
    ours: Any = fitted(Model(views, lin=nn.Linear(4, 4)), x)
    h, viewed, row, transposed, same, tail, flat, weight, weight_t = ours(x)
    address = h.untyped_storage().data_ptr()
    assert all(t.untyped_storage().data_ptr() == address for t in (viewed, row, transposed))
    assert same is x and weight is ours.lin.weight
    assert all(t.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for t in (tail, flat))
    assert weight_t.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
    h.detach().fill_(7.0)
    assert torch.equal(viewed, torch.full((2, 6), 7.0))


def test_an_output_may_be_changed_in_place_as_the_original_s() -> None:
    def results(m: Any, x: Tensor) -> Any:
        h = m.lin(x)
        return h, h.view(2, 6), m.lin(x * 2).view(2, 6)

    module, x = Model(results, lin=nn.Linear(4, 4)), torch.randn(3, 4)
    gradients: list[Tensor] = []
    model: Any
    for model in (module, fitted(module, x)):
        model.zero_grad()
        a, b, c = model(x)
        a.mul_(2.0)
        (a.sum() + (b * b).sum() + c.relu_().sum()).backward()
        gradients.append(model.lin.weight.grad.clone())
    assert torch.equal(gradients[0], gradients[1])


def test_a_hook_of_the_module_itself_runs_once_and_on_real_values() -> None:
    module, x = nn.Linear(4, 4), torch.randn(3, 4)
    calls: list[bool] = []

    def double(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        calls.append(True)
        return output * 2

    module.register_forward_hook(double)
    ours = fitted(module, x)
    assert not calls
    assert torch.equal(ours(x), module(x))
    assert len(calls) == 2


# ---------------------------------------------------------------------- autograd's contract


def _tanh() -> tuple[Any, Tensor, nn.Module]:
    torch.manual_seed(0)
    module, x = Model(lambda m, x: torch.tanh(m.lin(x)) * x, lin=nn.Linear(4, 4)), torch.randn(3, 4)
    return module, x, fitted(module, x)


def test_gradients_double_when_the_graph_is_retained() -> None:
    module, x, ours = _tanh()
    loss = ours(x).sum()
    loss.backward(retain_graph=True)
    once = module.lin.weight.grad.clone()
    loss.backward()
    assert torch.equal(module.lin.weight.grad, 2 * once)


def test_a_second_backward_without_retain_graph_is_refused_as_in_eager() -> None:
    module, x, ours = _tanh()
    for model in (module, ours):
        loss = model(x).sum()
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()


def test_a_second_backward_from_other_outputs_says_what_to_do() -> None:
    torch.manual_seed(0)
    module = Model(
        lambda m, x: (torch.tanh(m.a(x)), torch.tanh(m.b(x))), a=nn.Linear(4, 4), b=nn.Linear(4, 4)
    )
    x = torch.randn(3, 4)
    ours = fitted(module, x)
    for retain_graph in (False, True):
        module.zero_grad()
        first, second = ours(x)
        second.sum().backward(retain_graph=retain_graph)
        if retain_graph:
            first.sum().backward()
            assert all(parameter.grad is not None for parameter in module.parameters())
        else:
            with pytest.raises(RuntimeError, match=r"IRC525.* from output 0 and before from output 1"):
                first.sum().backward()


@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)])
def test_a_hook_on_several_results_is_called_once(used: tuple[int, ...]) -> None:
    def model(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return m.lin(x), m.other(x)

    module, x = Model(model, lin=nn.Linear(4, 4), other=nn.Linear(4, 4)), torch.randn(3, 4)
    found: list[list[Any]] = []
    for each in (module, fitted(copy.deepcopy(module), x)):
        calls: list[Any] = []
        results = each(x)
        torch.autograd.graph.register_multi_grad_hook(results, calls.append)
        torch.stack([results[k].sum() for k in used]).sum().backward()
        found.append([[g is None for g in call] for call in calls])
    assert found[0] == found[1] and len(found[0]) == 1


@pytest.mark.parametrize("way", ["hook", "hook of a view", "retain_grad"])
def test_a_hook_on_a_result_that_another_result_is_computed_from_is_refused(way: str) -> None:
    def model(m: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores = m.lin(x).t() if way == "hook of a view" else m.lin(x)
        return scores, scores.square().mean(), m.other(x)

    torch.manual_seed(0)
    module = Model(model, lin=nn.Linear(4, 4), other=nn.Linear(4, 4))
    x = torch.randn(3, 4)

    def step(m: nn.Module, used: tuple[int, ...]) -> dict[str, Tensor]:
        results, seen = m(x), dict[str, Tensor]()
        for k in (0, 2):
            if way == "retain_grad":
                results[k].retain_grad()
            else:
                results[k].register_hook(lambda gradient, k=k: seen.update({str(k): gradient}))
        torch.stack([results[k].sum() for k in used]).sum().backward()
        return {str(k): results[k].grad for k in (0, 2)} if way == "retain_grad" else seen

    ours = fitted(copy.deepcopy(module), x)
    for used in [(0,), (0, 2), (2, 0)]:
        assert_same(step(ours, used), step(module, used))
    for used in [(1,), (0, 1, 2)]:
        with pytest.raises(BackwardError, match=r"IRC526.* computes from it"):
            step(ours, used)
    first, second, _ = ours(x)
    handle = first.register_hook(print)
    handle.remove()
    second.backward()


def test_a_graph_of_gradients_is_refused() -> None:
    _, x, ours = _tanh()
    parameter = next(ours.parameters())
    with pytest.raises(UnsupportedError, match="IRC504"):
        torch.autograd.grad(ours(x).sum(), parameter, create_graph=True)


class Penalized(nn.Module):
    """Returns a loss with a penalty for gradients, as the refusal of `create_graph=True` says."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_(True)
        score = self.critic(x).sum()
        (gradient,) = torch.autograd.grad(score, x, create_graph=True)
        return score + (gradient.norm(dim=1) - 1).square().mean()


def test_gradients_of_gradients_are_planned_within_a_forward() -> None:
    torch.manual_seed(0)
    model, x = Penalized(), torch.randn(16, 8)
    ours = irc.optimize(copy.deepcopy(model), (x,), "100%", costs="analytic")
    for module in (model, ours):
        module(x).backward()
    for one, other in zip(model.parameters(), ours.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None and torch.equal(one.grad, other.grad)


def test_what_recomputation_reads_is_not_written_before_backward() -> None:
    torch.manual_seed(0)

    def model(m: Any, x: Tensor) -> Tensor:
        return torch.tanh(torch.sigmoid(m.lin(torch.sin(x)))) * x

    module, x = Model(model, lin=nn.Linear(4, 4)), torch.randn(3, 4)
    ours: Any = fitted(module, x, schedule=lambda graph: recompute_some(graph, 0))
    y = ours(x)
    with torch.no_grad():
        ours.lin.bias.mul_(2.0)
    with pytest.raises(BackwardError, match=r"IRC524.*parameter lin.bias was written in place"):
        y.sum().backward()
    y = ours(x)
    with torch.no_grad():
        x.mul_(2.0)
        ours.lin.bias.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation: input") as caught:
        y.sum().backward()
    assert not isinstance(caught.value, BackwardError), "autograd would raise it too"


@pytest.mark.parametrize("what", ["weight", "input", "output", "statistics"])
def test_a_value_that_changes_between_forward_and_backward_is_refused_as_in_eager(what: str) -> None:
    torch.manual_seed(0)

    def model(m: Any, x: Tensor) -> Tensor:
        return torch.tanh(m.lin(m.norm(m.lin(x))))

    module, x = Model(model, lin=nn.Linear(4, 4), norm=nn.BatchNorm1d(4).eval()), torch.randn(3, 4)
    ours: Any
    for ours in (module, fitted(module, x)):
        y = ours(x)
        changed = {"weight": ours.lin.weight, "input": x, "output": y, "statistics": ours.norm.running_var}
        with torch.no_grad():
            changed[what].mul_(2.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_a_parameter_that_backward_does_not_read_may_change_before_it() -> None:
    module, x, ours = _tanh()
    loss = ours(x).sum()
    with torch.no_grad():
        module.lin.bias.add_(1.0)
    loss.backward()
    assert module.lin.bias.grad is not None


def test_only_the_gradients_that_are_asked_for_arrive() -> None:
    module, x, ours = _tanh()
    (gradient,) = torch.autograd.grad(ours(x).sum(), [module.lin.bias])
    (wanted,) = torch.autograd.grad(module(x).sum(), [module.lin.bias])
    assert torch.equal(gradient, wanted) and module.lin.weight.grad is None


def test_an_optimizer_trains_the_fitted_module_as_the_original() -> None:
    torch.manual_seed(0)
    module, args = net(), image()
    original = copy.deepcopy(module)
    losses: list[list[float]] = []
    for model in (fitted(module, *args), original):
        torch.manual_seed(1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses.append([])
        for _ in range(4):
            loss = model(*args).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[0] == losses[1]


# ---------------------------------------------------------------------- a drop-in


def test_the_fitted_module_is_the_module_in_every_other_way() -> None:
    module, args = net(), image()
    ours = fitted(module, *args)
    assert isinstance(ours, type(module))
    assert list(ours.state_dict()) == list(module.state_dict())
    assert all(a is b for a, b in zip(ours.parameters(), module.parameters(), strict=True))
    assert all(a is b for a, b in zip(ours.buffers(), module.buffers(), strict=True))
    assert [n for n, _ in ours.named_modules()] == [n for n, _ in module.named_modules()]
    assert inspect.signature(ours.forward) == inspect.signature(module.forward)
    assert ours.forward.__doc__ == module.forward.__doc__
    ours.load_state_dict(net().state_dict())


def test_a_weight_with_three_uses_gets_the_sum_in_the_order_of_eager() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.linear = nn.Embedding(64, 32), nn.Linear(32, 32)
            self.encoder = nn.ModuleList([self.embedding])
            self.head = nn.Linear(32, 64, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens: Tensor) -> Tensor:
            x = torch.tanh(self.linear(self.encoder[0](tokens)))
            y = torch.tanh(self.linear(self.embedding(tokens + 1) + x))
            return functional.cross_entropy(self.head(y).flatten(0, 1), tokens.flatten())

    torch.manual_seed(0)
    module, tokens = Shared(), torch.randint(60, (4, 12))
    original = copy.deepcopy(module)
    ours = fitted(module, tokens)
    ours(tokens).backward()
    original(tokens).backward()
    for (name, a), b in zip(ours.named_parameters(), original.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad), name


@pytest.mark.parametrize("how", ["eval", "no_grad", "inference_mode"])
def test_without_training_the_original_forward_runs_and_nothing_is_held(how: str) -> None:
    module, (x,) = net(), image()
    ours = fitted(module, x)
    if how == "eval":
        ours.eval()
        assert torch.equal(ours(x[:1]), module.eval()(x[:1]))
        return
    with torch.no_grad() if how == "no_grad" else torch.inference_mode():
        gc.collect()
        held = _tensor_bytes()
        y = ours(x[:2])  # another batch than planned
    assert not y.requires_grad and y.grad_fn is None
    assert _tensor_bytes() - held == y.untyped_storage().nbytes()


def test_a_deep_copy_trains_its_own_parameters() -> None:
    torch.manual_seed(0)
    module, args = net(), image()
    ours = fitted(module, *args)
    twin = copy.deepcopy(ours)
    before = copy.deepcopy(module.state_dict())
    wanted = outcome(copy.deepcopy(module), args, {})
    assert_same(outcome(twin, args, {}), wanted)
    assert all(p.grad is None for p in module.parameters())
    assert all(torch.equal(a, b) for a, b in zip(module.state_dict().values(), before.values(), strict=True))
    assert_same(outcome(ours, args, {}), wanted)


def test_parameters_that_are_replaced_are_found() -> None:
    module, x, ours = _tanh()
    module.lin.weight = nn.Parameter(torch.zeros(4, 4))
    assert torch.equal(ours(x), module(x))
    ours.load_state_dict({k: torch.ones_like(v) for k, v in module.state_dict().items()}, assign=True)
    assert torch.equal(ours(x), module(x))


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    "arguments",
    [
        (torch.randn(2, 4),),
        (torch.randn(3, 4, dtype=torch.float64),),
        (torch.randn(4, 3).t(),),
        (torch.randn(3, 4, device="meta"),),
        (torch.randn(3, 4), 1),
        ([torch.randn(3, 4)],),
        (5,),
    ],
    ids=["shape", "dtype", "strides", "device", "more", "nested", "no tensor"],
)
def test_another_type_of_input_is_refused(arguments: tuple[Any, ...]) -> None:
    _, _, ours = _tanh()
    with pytest.raises(UsageError) as raised:
        ours(*arguments)
    assert raised.value.code == "IRC501" and raised.value.help is not None


def test_another_constant_is_refused() -> None:
    module, x = Model(lambda m, x, power: m.lin(x) ** power, lin=nn.Linear(4, 4)), torch.randn(3, 4)
    ours = fitted(module, x, 2)
    ours(x, 2)
    with pytest.raises(UsageError, match=r"IRC501.*argument 1 is 3; the plan was made for 2"):
        ours(x, 3)


@pytest.mark.parametrize("what", ["parameter", "input"])
def test_a_flip_of_requires_grad_is_refused(what: str) -> None:
    module, x, ours = _tanh()
    if what == "parameter":
        module.lin.bias.requires_grad_(False)
    else:
        x.requires_grad_()
    with pytest.raises(IrcError, match=f"IRC503.*{what}.*requires_grad"):
        ours(x)


@pytest.mark.parametrize("planned_eval", [False, True])
def test_other_modes_than_planned_are_refused(planned_eval: bool) -> None:
    module: Any = net()
    module[1].train(not planned_eval)
    args = image()
    ours: Any = fitted(module, *args)
    ours(*args)
    ours[1].train(planned_eval)
    now = "train" if planned_eval else "eval"
    with pytest.raises(IrcError, match=f"IRC502.*submodule '1' is in {now}"):
        ours(*args)


def test_a_module_planned_in_eval_mode_trains_in_it() -> None:
    torch.manual_seed(0)
    module, args = net().eval(), image()
    original = copy.deepcopy(module)
    ours = fitted(module, *args)
    assert_same(outcome(ours, args, {}), outcome(original, args, {}))
    with pytest.raises(IrcError, match="IRC502"):
        ours.train()(*args)


# ---------------------------------------------------------------------- memory


def _training_models() -> dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]]:
    return {
        "unet": lambda: models.unet(size=32, base=4),
        "gpt2": lambda: models.gpt2(batch=2, sequence=16, depth=2, width=32, heads=2),
        "lstm": lambda: models.lstm(batch=2, sequence=6, vocabulary=50, embedding=8, hidden=8),
        "conv": _conv,
        "losses": _losses,
    }


def _losses() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Losses one after the other; the kernels of some keep all of their terms in the result's memory."""
    torch.manual_seed(0)

    def forward(m: Any, x: Tensor, y: Tensor) -> Tensor:
        h = torch.sigmoid(m.lin(x))
        total = torch.zeros(())
        for loss in (
            functional.mse_loss,
            functional.smooth_l1_loss,
            functional.binary_cross_entropy,
            functional.soft_margin_loss,
            functional.huber_loss,
            functional.l1_loss,
            functional.binary_cross_entropy_with_logits,
        ):
            h = torch.sigmoid(m.lin(h))
            total = total + loss(h, y) * loss(h, y, reduction="sum") + loss(h, y, reduction="none").sum()
        return total

    return Model(forward, lin=nn.Linear(8, 8)), (torch.randn(16, 8), torch.rand(16, 8))


def _conv() -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    return models.Classifier(net()), (*image(), torch.randint(5, (4,)))


def left_behind(module: nn.Module) -> list[Tensor]:
    """The gradients, the buffers and the generator's state."""
    gradients = (p.grad for p in module.parameters() if p.grad is not None)
    return [*gradients, *(b.clone() for b in module.buffers()), torch.get_rng_state()]


def step(module: nn.Module, args: Sequence[Tensor]) -> None:
    torch.manual_seed(4)
    module(*args).backward()


@pytest.mark.parametrize("name", slow_among(_training_models(), "unet", "lstm", "gpt2", "losses"))
def test_recomputing_schedules_give_the_same_bits_in_exactly_the_predicted_memory(name: str) -> None:
    module, args = _training_models()[name]()
    original: nn.Module = copy.deepcopy(module)
    start = copy.deepcopy(module.state_dict())
    step(original, args)
    wanted = (
        {n: p.grad for n, p in original.named_parameters()},
        dict(original.named_buffers()),
        torch.get_rng_state(),
    )
    captured = capture(module, args, loss=lambda result: result)
    graph = captured.graph
    costs = profile_costs(graph, repeats=1)
    peaks: set[int] = set()
    for seed in range(4):
        schedule = recompute_some(graph, seed) if seed else keep_all(graph)
        predicted = verify_schedule(schedule, costs.workspace_bytes).peak_bytes - graph.static_bytes
        ours = bind_program(module, compile_program(schedule, captured.constants), captured.signature)
        ours.load_state_dict(start)
        ours.zero_grad()
        step(ours, args)
        found = (
            {n: p.grad for n, p in ours.named_parameters()},
            dict(ours.named_buffers()),
            torch.get_rng_state(),
        )
        for mine, its in zip(pytree.tree_leaves(found), pytree.tree_leaves(wanted), strict=True):
            assert torch.equal(mine, its)
        ours.zero_grad()
        assert peak_bytes(lambda ours=ours: step(ours, args)) == predicted
        assert liveness(schedule, costs.workspace_bytes).peak_bytes == predicted + graph.static_bytes
        peaks.add(predicted)
    assert len(peaks) > 1


def _tensor_bytes() -> int:
    """Bytes of the storages that Python can reach."""
    tensors = (t for t in gc.get_objects() if type(t) in (Tensor, nn.Parameter) and t.device.type == "cpu")
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def test_nothing_leaks_without_the_garbage_collector() -> None:
    module, args = _conv()
    captured = capture(module, args)
    ours = bind_program(
        module, compile_program(recompute_some(captured.graph, 1), captured.constants), captured.signature
    )
    step(ours, args)
    gc.collect()
    gc.disable()
    try:
        held = _tensor_bytes()
        for _ in range(5):
            step(ours, args)
            ours(*args)  # a forward whose backward never runs
        assert _tensor_bytes() == held
    finally:
        gc.enable()


def test_a_backward_that_fails_holds_nothing_and_the_next_step_is_right() -> None:
    module, args = _conv()
    module.requires_grad_()
    original = copy.deepcopy(module)
    ours: Any = fitted(module, *args)
    step(ours, args)
    ours.zero_grad()
    start = copy.deepcopy(original.state_dict())
    gc.collect()
    held = _tensor_bytes()

    def fail(gradient: Tensor) -> None:
        raise ValueError("from a hook")

    loss = ours(*args)
    handle = loss.register_hook(fail)
    with pytest.raises(ValueError, match="from a hook"):
        loss.backward()
    handle.remove()
    del loss, handle
    parameter = next(ours.parameters())
    handle = parameter.register_hook(fail)
    loss = ours(*args)
    with pytest.raises(ValueError, match="from a hook"):
        loss.backward()
    handle.remove()
    del loss, handle
    ours.zero_grad()
    gc.collect()
    gradients_bytes = sum(p.nbytes for p in ours.parameters())
    assert _tensor_bytes() <= held + gradients_bytes  # the engine's queue, until its next run
    ours.load_state_dict(start)
    step(ours, args)
    step(original, args)
    for mine, its in zip(ours.parameters(), original.parameters(), strict=True):
        assert mine.grad is not None and its.grad is not None
        assert torch.equal(mine.grad, its.grad)
    ours.zero_grad()
    gc.collect()
    assert _tensor_bytes() == held + sum(p.nbytes for p in original.parameters())


# ---------------------------------------------------------------------- the source

SOURCE = """import torch

aten_t = torch.t
aten_addmm = torch.addmm
aten_sigmoid = torch.sigmoid
aten_view = torch.Tensor.view
aten_sigmoid_backward = torch.ops.aten.sigmoid_backward.default
aten_mm = torch.mm
aten_sum_dim_IntList = torch.sum

# inputs:
#   primals_1: parameter 0.weight
#   primals_2: parameter 0.bias
#   primals_3: input 0


def forward(inputs):
    primals_1 = inputs[0]
    primals_2 = inputs[1]
    primals_3 = inputs[2]
    # module 0
    addmm = aten_addmm(primals_2, primals_3, aten_t(primals_1))
    # module 1
    sigmoid = aten_sigmoid(addmm)
    del addmm
    return [aten_view(sigmoid, [6])], [sigmoid.detach()]


def backward(inputs, saved, tangents):
    (sigmoid,) = saved
    saved.clear()
    primals_3 = inputs[2]
    tangents_1 = tangents[0]
    # module 1
    sigmoid_backward = aten_sigmoid_backward(aten_view(tangents_1, [2, 3]), sigmoid)
    # module 0
    mm = aten_mm(aten_t(sigmoid_backward), primals_3)
    sum_1 = aten_sum_dim_IntList(sigmoid_backward, [0], True)
    del sigmoid_backward
    return [aten_t(aten_t(mm)), aten_view(sum_1, [3])]
"""


def test_the_source_reads_as_what_it_does() -> None:
    module = nn.Sequential(nn.Linear(4, 3), nn.Sigmoid(), nn.Flatten(0))
    graph = capture(module, (torch.randn(2, 4),)).graph
    assert emit_source(keep_all(graph)).partition('"""\n\n')[2] == SOURCE


def test_a_hook_on_a_submodule_is_refused_by_name_and_one_on_the_root_runs() -> None:
    x = torch.randn(2, 4)
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    planned = fitted(module, x)
    seen: list[object] = []
    root = planned.register_forward_hook(lambda *_: seen.append(None))
    planned(x).sum().backward()
    assert len(seen) == 1
    root.remove()
    handle = module[0].register_forward_hook(lambda *_: None)
    with pytest.raises(UsageError, match=r"IRC507.*the hooks of submodule '0' have changed"):
        planned(x)
    with pytest.raises(UnsupportedError, match=r"IRC505.*submodule '0' has a hook \(forward hooks"):
        fitted(module, x)
    handle.remove()
    planned(x).sum().backward()


def test_autocast_other_than_at_capture_is_refused() -> None:
    x = torch.randn(2, 4)
    planned = fitted(nn.Linear(4, 4), x)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(IrcError, match=r"IRC502.*bfloat16.*off"):
        planned(x)
    model = nn.Linear(4, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = fitted(model, x)
        mine, expected = cast(x), model(x)
    assert mine.dtype == expected.dtype == torch.bfloat16
    with pytest.raises(IrcError, match="IRC502"):
        cast(x)


def test_a_tensor_returned_twice_has_one_gradient_as_in_eager() -> None:
    def forward(m: Any, x: Tensor) -> dict[str, Tensor]:
        h = m.lin(x).tanh()
        return {"states": h, "again": h, "head": h.exp()}

    def loss(result: dict[str, Tensor]) -> Tensor:
        return result["states"].square().sum() + result["head"].sum() + result["again"].sum()

    module, x = Model(forward, lin=nn.Linear(64, 64)), torch.randn(256, 64)
    original = copy.deepcopy(module)
    captured = capture(module, (x,), loss=loss)
    schedule = keep_all(captured.graph)
    predicted = liveness(schedule, profile_costs(captured.graph).workspace_bytes).peak_bytes
    ours = bind_program(module, compile_program(schedule, captured.constants), captured.signature)
    result = ours(x)
    assert result["states"] is result["again"]
    loss(result).backward()
    loss(original(x)).backward()
    for mine, theirs in zip(module.parameters(), original.parameters(), strict=True):
        assert mine.grad is not None and theirs.grad is not None and torch.equal(mine.grad, theirs.grad)
    assert measured_peak_bytes(ours, (x,), captured.graph.static_bytes, loss=loss) <= predicted
