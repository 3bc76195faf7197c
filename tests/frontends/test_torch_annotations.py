"""Annotations on their way from modules and torch's checkpoints to the operations of a graph."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx import TensorProto, helper
from support.torch_cases import fitted
from torch import Tensor, nn
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import irc
from irc.frontends.onnx import example_inputs
from irc.frontends.torch import capture
from irc.frontends.torch.annotation_scopes import Scopes
from irc.frontends.torch.annotations import mark
from irc.ir import Graph, Policy, UnsupportedError, UsageError, verify_graph

KEEP, RECOMPUTE = Policy.KEEP, Policy.RECOMPUTE


class Calls(nn.Module):
    """A module whose forward is a function of itself and the arguments."""

    def __init__(self, function: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


def graph_of(module: nn.Module, *args: Tensor) -> Graph:
    graph = capture(module, args or (torch.randn(3, 4),)).graph
    verify_graph(graph)
    return graph


def annotations_of(graph: Graph) -> dict[str, str]:
    """Who annotations something for each operation of forward."""
    return {node.name: node.annotation.by for node in graph.nodes if node.annotation is not None}


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Sigmoid())


# ---------------------------------------------------------------------- marks


def test_a_kept_module_marks_all_that_it_computes() -> None:
    model = nn.Sequential(mlp(), mlp())
    assert irc.keep(model[1]) is model[1]
    graph = graph_of(model)
    assert annotations_of(graph) == dict.fromkeys(
        ("addmm_2", "tanh_1", "addmm_3", "sigmoid_1"), "irc.keep(1)"
    )
    assert [(annotation.policy, annotation.by) for annotation in graph.annotations] == [(KEEP, "irc.keep(1)")]


def test_what_leaves_a_recomputed_module_is_free() -> None:
    model = nn.Sequential(mlp(), mlp())
    irc.recompute(model[0])
    assert annotations_of(graph_of(model)) == dict.fromkeys(("addmm", "tanh", "addmm_1"), "irc.recompute(0)")


def test_views_of_a_result_leave_with_it() -> None:
    part = Calls(lambda m, x: m.a(x).tanh().view(2, 6).t(), a=nn.Linear(4, 4))
    model = Calls(lambda m, x: m.part(x).exp(), part=part)
    irc.recompute(part)
    assert annotations_of(graph_of(model)) == {"addmm": "irc.recompute(part)"}


def test_the_innermost_mark_counts() -> None:
    model: Any = irc.recompute(nn.Sequential(mlp(), nn.Linear(4, 4), nn.ReLU()))
    irc.keep(model[0][1])
    found = annotations_of(graph_of(model))
    assert found == {
        "addmm": "irc.recompute(the model)",
        "tanh": "irc.keep(0.1)",
        "addmm_1": "irc.recompute(the model)",
        "sigmoid": "irc.recompute(the model)",
        "addmm_2": "irc.recompute(the model)",
    }


def test_what_leaves_an_inner_module_is_up_to_the_outer_one() -> None:
    outer = irc.keep(nn.Sequential(irc.recompute(mlp()), nn.ReLU()))
    found = annotations_of(graph_of(outer))
    assert found["tanh"] == "irc.recompute(0)" and found["sigmoid"] == "irc.keep(the model)"


def test_the_last_mark_of_a_module_counts_and_can_be_taken_back() -> None:
    model = nn.Sequential(mlp())
    irc.recompute(irc.keep(model[0]))
    assert set(annotations_of(graph_of(model)).values()) == {"irc.recompute(0)"}
    assert irc.unmark(model[0]) is model[0]
    assert not graph_of(model).annotations


def test_each_call_of_a_module_is_one_of_its_own() -> None:
    """What goes from one call of a block to the next leaves the block."""
    model: Any = Calls(lambda m, x: m.block(m.block(m.block(x))).exp(), block=mlp())
    irc.recompute(model.block)
    found = annotations_of(graph_of(model))
    assert "sigmoid" not in found and "sigmoid_1" not in found and "sigmoid_2" not in found
    assert len(found) == 9


def test_new_values_of_buffers_do_not_leave() -> None:
    block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU())
    model = nn.Sequential(block, nn.Linear(4, 4))
    irc.recompute(block)
    found = annotations_of(graph_of(model))
    assert {"addmm", "_native_batch_norm_legit_functional"} <= set(found) and "relu" not in found


def test_a_module_that_does_not_run_is_said_not_to() -> None:
    model: Any = Calls(lambda m, x: m.a(x), a=nn.Linear(4, 4), spare=nn.Linear(4, 4))
    irc.keep(model.spare)
    graph = graph_of(model)
    assert not annotations_of(graph) and [annotation.by for annotation in graph.annotations] == [
        "irc.keep(spare)"
    ]
    plan = irc.optimize(model, torch.randn(3, 4), "100%", costs="analytic").plan
    assert plan.explain().splitlines()[-1] == (
        "irc.keep(spare): no effect: nothing of it runs in forward, or other annotations decide"
    )


def test_a_block_of_a_forward_can_be_marked() -> None:
    @irc.keep()
    def kept(x: Tensor) -> Tensor:
        return x.sin()

    def forward(m: Any, x: Tensor) -> Tensor:
        with irc.recompute():
            x = m.a(x).tanh().exp()
        return kept(x).cos()

    model: Any = Calls(forward, a=nn.Linear(4, 4))
    found = annotations_of(graph_of(model))
    assert set(found) == {"addmm", "tanh", "sin"}
    assert found["addmm"].startswith("irc.recompute() at test_torch_annotations.py:")
    assert found["addmm"].endswith(" in forward") and found["sin"].startswith("irc.keep() at ")
    x = torch.randn(3, 4)
    assert torch.equal(model(x), model.a(x).tanh().exp().sin().cos())  # outside of a capture it is nothing


def test_marks_are_in_copies_and_pickles_and_in_no_state_dict() -> None:
    model = nn.Sequential(mlp(), mlp())
    plain = list(model.state_dict())
    irc.keep(model[1])
    attributes = [dict(vars(module)) for module in model.modules()]
    graph_of(model)
    assert [dict(vars(module)) for module in model.modules()] == attributes
    assert list(model.state_dict()) == plain
    written = io.BytesIO()
    torch.save(model, written)
    written.seek(0)
    loaded = torch.load(written, weights_only=False)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), loaded):
        assert annotations_of(graph_of(copied)) == annotations_of(graph_of(model))


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda: irc.keep(torch.relu), "an annotation is for a torch.nn.Module, not for a builtin"),  # type: ignore[arg-type]
        (lambda: irc.recompute(irc.optimize(mlp(), torch.randn(3, 4), "100%", costs="analytic")), "too late"),
        (lambda: mark(mlp(), KEEP, "7"), "the model has no submodule '7'"),
    ],
)
def test_a_mark_out_of_place_is_refused(mistake: Callable[[], object], message: str) -> None:
    with pytest.raises(UsageError, match="IRC553") as caught:
        mistake()
    assert message in caught.value.message and caught.value.help


def test_a_mark_after_planning_is_planned_at_the_next_step_or_refused() -> None:
    model, x = nn.Sequential(mlp(), mlp()), torch.randn(3, 4)
    fitted: Any = irc.optimize(model, x, "200%", costs="analytic")
    strict = irc.optimize(model, x, "200%", costs="analytic", plans=1)
    irc.keep(model[1])
    fitted(x)
    assert [annotation.by for annotation in fitted.irc_plans[0].plan.annotations] == ["irc.keep(1)"]
    with pytest.raises(UsageError, match="IRC507"):
        strict(x)


def test_nodes_of_an_onnx_model_are_marked_by_the_beginning_of_their_names(tmp_path: Path) -> None:
    def node(op: str, read: list[str], made: str, name: str) -> onnx.NodeProto:
        return helper.make_node(op, read, [made], name=name)

    nodes = [
        node("Tanh", ["x"], "a", "/layer1/act/Tanh"),
        node("Sigmoid", ["a"], "b", "/layer1/Sigmoid"),
        node("Exp", ["b"], "c", "/layer10/Exp"),
        node("Mul", ["c", "w"], "y", "/layer2/Mul"),
    ]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, (2, 3)) for name in "xwy"]
    weight = helper.make_tensor("w", TensorProto.FLOAT, (2, 3), [1.0] * 6)
    made = helper.make_graph(nodes, "g", values[:1], values[2:], [weight])
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(made, opset_imports=opsets, ir_version=8), str(tmp_path / "m.onnx"))
    module = irc.from_onnx(tmp_path / "m.onnx")
    args = tuple(x.requires_grad_() for x in example_inputs(module))
    mark(mark(module, RECOMPUTE, "/layer1"), KEEP, "/layer1/act/Tanh")
    found = annotations_of(graph_of(module, *args))
    assert found == {"tanh": "irc.keep(/layer1/act/Tanh)"}  # the result of the other node leaves
    mark(module, KEEP, "/layer10/")
    mark(module, KEEP, "/layer1")
    assert set(annotations_of(graph_of(copy.deepcopy(module), *args))) == {"tanh", "sigmoid", "exp"}
    with pytest.raises(UsageError, match="IRC553") as caught:
        mark(module, KEEP, "/layer")
    assert "no node of the ONNX model" in caught.value.message


# ---------------------------------------------------------------------- torch's checkpoints


def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return {
        torch.ops.aten.addmm.default: CheckpointPolicy.MUST_SAVE,
        torch.ops.aten.tanh.default: CheckpointPolicy.MUST_RECOMPUTE,
        torch.ops.aten.sigmoid.default: CheckpointPolicy.PREFER_SAVE,
    }.get(op, CheckpointPolicy.PREFER_RECOMPUTE)


def selectively(rule: Any) -> Any:
    return functools.partial(create_selective_checkpoint_contexts, rule)


def checkpointed(**options: Any) -> nn.Module:
    return Calls(lambda m, x: checkpoint(m.part, x, **options).exp(), part=mlp())


OPTIONS: dict[str, dict[str, Any]] = {
    "reentrant": {"use_reentrant": True},
    "not reentrant": {"use_reentrant": False},
    "by a policy": {"use_reentrant": False, "context_fn": selectively(policy)},
    "by a list": {
        "use_reentrant": False,
        "context_fn": selectively([torch.ops.aten.addmm.default]),
    },
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_checkpoint_adds_no_operation(name: str) -> None:
    x = torch.randn(3, 4, requires_grad=True)
    plain = graph_of(Calls(lambda m, x: m.part(x).exp(), part=mlp()), x)
    graph = graph_of(checkpointed(**OPTIONS[name]), x)
    assert [node.op for node in graph.operations] == [node.op for node in plain.operations]


@pytest.mark.parametrize("name", ["reentrant", "not reentrant"])
def test_a_plain_checkpoint_is_a_hint(name: str) -> None:
    graph = graph_of(checkpointed(**OPTIONS[name]), torch.randn(3, 4, requires_grad=True))
    (hint,) = graph.annotations
    assert hint.policy is Policy.PREFER_RECOMPUTE and hint.is_hint
    assert hint.by.startswith("torch.utils.checkpoint at test_torch_annotations.py:")
    assert set(annotations_of(graph)) == {"addmm", "tanh", "addmm_1", "sigmoid"}
    assert all(node.is_recomputable and not node.is_transient for node in graph.operations)


def test_a_policy_of_torch_is_a_annotation_for_each_operation() -> None:
    graph = graph_of(checkpointed(**OPTIONS["by a policy"]))
    policies = {node.name: node.annotation.policy for node in graph.nodes if node.annotation is not None}
    assert policies == {
        "addmm": KEEP,
        "tanh": RECOMPUTE,
        "addmm_1": KEEP,
        "sigmoid": Policy.PREFER_KEEP,
    }
    assert annotations_of(graph)["tanh"].startswith(
        "CheckpointPolicy.MUST_RECOMPUTE at test_torch_annotations.py:"
    )


def test_marks_and_policies_nest() -> None:
    model: Any = checkpointed(**OPTIONS["by a policy"])
    irc.recompute(model.part[0])  # its only result leaves it: the policy decides
    irc.keep(model.part[1])
    found = annotations_of(graph_of(model))
    assert found["addmm"].startswith("CheckpointPolicy.MUST_SAVE") and found["tanh"] == "irc.keep(part.1)"
    irc.keep(model)
    assert (
        annotations_of(graph_of(model))["sigmoid"] == "irc.keep(the model)"
    )  # what must be goes before a hint


def test_a_policy_that_moves_results_to_the_host_is_refused() -> None:
    def moving(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_CPU_OFFLOAD

    with pytest.raises(UnsupportedError, match="IRC554") as caught:
        graph_of(checkpointed(use_reentrant=False, context_fn=selectively(moving)))
    assert "MUST_CPU_OFFLOAD" in caught.value.message and "test_torch_annotations.py" in str(caught.value.at)


def test_a_checkpoint_that_torch_compile_has_wrapped_keeps_its_policy() -> None:
    found: list[Graph] = []

    def backend(module: nn.Module, args: list[Any]) -> Callable[..., Any]:
        made = [torch.empty(tuple(a.shape), requires_grad=a.requires_grad) for a in args]
        found.append(graph_of(module, *made))
        return module.forward

    model = checkpointed(**OPTIONS["by a policy"])
    torch.compile(model, backend=backend)(torch.randn(3, 4))
    torch.compiler.reset()
    policies = {node.name: node.annotation.policy for node in found[0].nodes if node.annotation is not None}
    assert policies["addmm"] is KEEP and policies["tanh"] is RECOMPUTE and "exp" not in policies


def test_without_an_argument_that_asks_a_reentrant_checkpoint_gives_no_gradients() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.b(checkpoint(m.a, x, use_reentrant=True))

    model, x = Calls(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4)), torch.randn(3, 4)
    fitted = irc.optimize(copy.deepcopy(model), x, "100%", costs="analytic")
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad"):
        model(x).sum().backward()
    fitted(x).sum().backward()
    gradients: Any = [{n: p.grad for n, p in each.named_parameters()} for each in (model, fitted)]
    assert gradients[0]["a.weight"] is None and gradients[1]["a.weight"] is None
    for name in ("b.weight", "b.bias"):
        assert torch.equal(gradients[0][name], gradients[1][name])


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints_of_other_threads_and_after_a_capture_are_torch_s(use_reentrant: bool) -> None:
    runs: list[int] = []

    def step() -> None:
        def function(x: Tensor) -> Tensor:
            runs.append(threading.get_ident())
            return x.sin()

        x = torch.randn(3, requires_grad=True)
        checkpoint(function, x, use_reentrant=use_reentrant).sum().backward()

    model = nn.Linear(3, 3)
    before = torch_checkpoint.CheckpointFunction
    with Scopes(model).recording():
        assert torch_checkpoint.CheckpointFunction is not before
        with Scopes(model).recording():
            step()
        assert len(runs) == 1
        other = threading.Thread(target=step)
        other.start()
        other.join()
        assert len(runs) == 3
    step()
    assert len(runs) == 5 and torch_checkpoint.CheckpointFunction is before


def test_a_failing_capture_leaves_torch_s_checkpoints_alone() -> None:
    def fails(m: Any, x: Tensor) -> Tensor:
        raise ValueError("no")

    before = vars(torch_checkpoint).copy()
    with pytest.raises(UsageError, match="IRC349"):
        graph_of(Calls(fails, a=nn.Linear(4, 4)))
    assert vars(torch_checkpoint) == before


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_that_draws_anew_is_refused_and_trains_with_the_same_draws(*, reentrant: bool) -> None:
    def model(**options: Any) -> nn.Module:
        torch.manual_seed(0)
        part = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
        block = functools.partial(checkpoint, use_reentrant=reentrant, **options)
        return Calls(lambda m, x: block(m.part, m.lin(x)), lin=nn.Linear(4, 4), part=part)

    x = torch.randn(3, 4)
    with pytest.raises(UnsupportedError, match=r"IRC339.*torch_annotations.py.*preserve_rng_state=False"):
        graph_of(model(preserve_rng_state=False), x)
    original, ours = model(), fitted(model(), x)
    for module in (original, ours):
        torch.manual_seed(1)
        module(x).sum().backward()
    for mine, its in zip(ours.parameters(), original.parameters(), strict=True):
        assert mine.grad is not None and its.grad is not None and torch.equal(mine.grad, its.grad)


def test_a_checkpoint_that_keeps_no_state_of_the_generator_and_draws_nothing_is_traced() -> None:
    graph_of(checkpointed(use_reentrant=False, preserve_rng_state=False))

    def without_gradient(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            noise = checkpoint(nn.functional.dropout, x, use_reentrant=False, preserve_rng_state=False)
        return m.part(x) + noise

    graph_of(Calls(without_gradient, part=mlp()))


@pytest.mark.parametrize("layout", ["permuted", "expanded"])
def test_the_gradient_of_what_a_reentrant_checkpoint_is_given_is_laid_out_as_it_is(layout: str) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = x * m.a.weight
        y = y.transpose(0, 1) if layout == "permuted" else y[0].expand(4, 6, 8)
        return checkpoint(m.b, y, use_reentrant=True)

    torch.manual_seed(0)
    x = torch.randn(4, 6, 8)
    original = Calls(forward, a=nn.PReLU(8), b=nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
    ours = fitted(copy.deepcopy(original), x)
    for module in (original, ours):
        (module(x).square() * torch.linspace(0, 1, 8)).sum().backward()
    gradients: Any = [[parameter.grad for parameter in module.parameters()] for module in (original, ours)]
    assert all(map(torch.equal, *gradients))


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT, -1) @ v + q * k


def clamped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.no_grad():
        q.clamp_(-1, 1)
    return q.tanh()


@pytest.mark.parametrize("function", [attention, clamped])
def test_what_a_reentrant_checkpoint_is_given_gets_the_gradient_of_eager(
    function: Callable[..., Tensor],
) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = x * m.a.weight
        return checkpoint(function, y, y, y, use_reentrant=True) + (x * m.a.weight).sin()

    torch.manual_seed(0)
    x = torch.randn(4, 6, 8)
    slopes = nn.PReLU(8)
    nn.init.uniform_(slopes.weight)
    original = Calls(forward, a=slopes)
    ours = fitted(copy.deepcopy(original), x)
    for module in (original, ours):
        (module(x).square() * torch.linspace(0, 1, 8)).sum().backward()
    gradients: Any = [[parameter.grad for parameter in module.parameters()] for module in (original, ours)]
    assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize("cast", [False, True])
def test_a_parameter_of_two_reentrant_checkpoints_is_named_and_cast_in_each(*, cast: bool) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(m.part, x, use_reentrant=True)
        return x

    torch.manual_seed(0)
    original, x = Calls(forward, part=nn.Linear(16, 16)), torch.randn(8, 16).requires_grad_()
    twin = copy.deepcopy(original)
    with torch.autocast("cpu", torch.bfloat16, enabled=cast):
        (rounding, _) = capture(twin, (x,)).roundings
        ours = fitted(twin, x)
    text = str(rounding)
    assert text.startswith("the gradient of parameter part.bias") and "test_torch_annotations.py:" in text
    assert rounding.tensors == ("part.bias",)
    for module in (original, ours):
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            result = module(x)
        result.float().square().sum().backward()
    for mine, its in zip(ours.parameters(), original.parameters(), strict=True):
        assert mine.grad is not None and its.grad is not None and torch.equal(mine.grad, its.grad)


@pytest.mark.parametrize("reentrant", [False, True])
def test_buffers_that_a_checkpoint_writes_are_named(*, reentrant: bool) -> None:
    """Eager's checkpoint runs its function again in backward, and updates the statistics twice a step."""
    norm = nn.BatchNorm1d(16)

    def forward(m: Any, x: Tensor) -> Tensor:
        return checkpoint(m.part, x, use_reentrant=reentrant).exp()

    original = Calls(forward, part=norm)
    twin, x = copy.deepcopy(original), torch.randn(8, 16).requires_grad_()
    (rounding,) = capture(twin, (x,)).roundings
    text = str(rounding)
    assert rounding.is_more and rounding.tensors is not None and "part.running_var" in rounding.tensors
    assert (
        text.startswith("buffers part.num_batches_tracked, part.running_mean, part.running_var, which")
        and "test_torch_annotations.py:" in text
    )
    ours = fitted(twin, x)
    for module in (original, ours):
        module(x).square().sum().backward()
    assert (original.get_buffer("part.num_batches_tracked"), ours.get_buffer("part.num_batches_tracked")) == (
        2,
        1,
    )
    for mine, its in zip(ours.parameters(), original.parameters(), strict=True):
        assert mine.grad is not None and its.grad is not None and torch.equal(mine.grad, its.grad)


def test_a_checkpoint_that_computes_from_a_buffer_that_it_writes_is_refused_and_the_cure_trains() -> None:
    """Spectral norm iterates once more in eager's backward: its gradients are those of another function."""
    part, x = nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16)), torch.randn(8, 16)
    with pytest.raises(UnsupportedError, match=r"IRC339.*part\.parametrizations\.weight\.0\._u") as refused:
        capture(Calls(lambda m, x: checkpoint(m.part, x, use_reentrant=False), part=part), (x,))
    assert "attribute_reads.py" not in str(refused.value)
    original = Calls(lambda m, x: m.part(x), part=part)
    ours = fitted(copy.deepcopy(original), x)
    for module in (original, ours):
        module(x).square().sum().backward()
    for mine, its in zip(ours.parameters(), original.parameters(), strict=True):
        assert mine.grad is not None and its.grad is not None and torch.equal(mine.grad, its.grad)
