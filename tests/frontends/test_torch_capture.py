"""Captured graphs: what they say of the model, what they leave alone, and what is refused by name."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import irc
from benchmarks import models
from irc.frontends.torch import Captured, capture
from irc.frontends.torch.alive_bytes import AliveBytes
from irc.ir import (
    Graph,
    InputRole,
    IrcError,
    Node,
    Origin,
    OutputRole,
    Region,
    Slot,
    Trait,
    UnsupportedError,
    UsageError,
    verify_graph,
)

torch.set_num_threads(1)


class Model(nn.Module):
    """A module whose forward is a function of itself and the arguments."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        self.lin = nn.Linear(4, 4)
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def captured(module: nn.Module, *args: Any, **kwargs: Any) -> Captured:
    found = capture(module, args, kwargs)
    verify_graph(found.graph)
    return found


def node(graph: Graph, op: str) -> Node:
    return next(n for n in graph.nodes if n.op.startswith(op))


@pytest.fixture
def x() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(3, 4)


# ---------------------------------------------------------------------- what a graph says


def test_inputs_have_roles_targets_and_gradients(x: Tensor) -> None:
    constant = torch.ones(4)
    module = Model(lambda m, x, y: m.norm(m.lin(x)) * constant + y, norm=nn.BatchNorm1d(4))
    module.lin.bias.requires_grad_(False)
    graph = captured(module, x, x.clone().requires_grad_()).graph
    inputs = [
        (i.role.value, i.target, i.requires_grad) for i in graph.inputs if i.role is not InputRole.CONSTANT
    ]
    assert inputs == [
        ("parameter", "lin.weight", True),
        ("parameter", "lin.bias", False),
        ("parameter", "norm.weight", True),
        ("parameter", "norm.bias", True),
        ("buffer", "norm.running_mean", False),
        ("buffer", "norm.running_var", False),
        ("buffer", "norm.num_batches_tracked", False),
        ("input", "0", False),
        ("input", "1", True),
        ("tangent", "0", False),
    ]
    assert [i.value.type.shape for i in graph.inputs if i.role is InputRole.CONSTANT] == [(4,)]
    assert graph.static_bytes == 4 * (16 + 4 + 8 + 8 + 24 + 4) + 8
    gradients = {o.target: o.value is not None for o in graph.outputs if o.role is OutputRole.GRADIENT}
    wanted = {f"{role}:{target}" for role, target, requires_grad in inputs if requires_grad}
    assert {target for target, exists in gradients.items() if exists} == wanted


def test_a_tied_weight_is_one_storage_that_is_counted_once() -> None:
    embedding, head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
    head.weight = embedding.weight
    graph = captured(nn.Sequential(embedding, head), torch.tensor([1, 2])).graph
    parameters = {i.value.storage for i in graph.inputs if i.role is InputRole.PARAMETER}
    assert len(parameters) == 1
    assert graph.static_bytes == 7 * 4 * 4 + 2 * 8
    gradients = [o.value for o in graph.outputs if o.role is OutputRole.GRADIENT]
    assert len(gradients) == 2 and gradients.count(None) == 1  # one for both names, summed by backward
    assert head.weight is embedding.weight


def test_regions_traits_and_storages(x: Tensor) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return functional.dropout(m.norm(m.lin(x)).view(-1), 0.5)

    graph = captured(Model(forward, norm=nn.BatchNorm1d(4)), x).graph
    dropout, norm, view = (
        node(graph, f"aten.{op}") for op in ("native_dropout", "_native_batch_norm", "view")
    )
    assert dropout.traits == {Trait.RANDOM}
    assert not dropout.is_recomputable
    assert view.is_view and view.values[0].storage is norm.values[0].storage
    assert norm.is_recomputable  # though it reads the statistics that are overwritten after it
    writes = [n for n in graph.nodes if Trait.EFFECT in n.traits]
    assert {n.operands[0].storage for n in writes} == {
        i.value.storage for i in graph.inputs if i.role is InputRole.BUFFER
    }
    assert dropout.values[1].storage.nbytes == 12  # a mask is a byte an element
    regions = [n.region for n in graph.nodes]
    assert regions == sorted(regions, key=[Region.FORWARD, Region.BACKWARD].index)


def test_what_reads_a_buffer_before_it_is_overwritten_is_pinned(x: Tensor) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.lin(x) + m.average
        m.average.add_(1.0)
        return y

    module = Model(forward)
    module.register_buffer("average", torch.zeros(4))
    graph = captured(module, x).graph
    assert Trait.PINNED in node(graph, "aten.add.").traits


def test_attention_without_dropout_may_be_computed_again() -> None:
    module, args = models.gpt2(batch=1, sequence=8, depth=1, width=16, heads=2)
    graph = captured(module, *args).graph
    assert node(graph, "aten._scaled_dot_product").is_recomputable
    assert not node(graph, "aten.native_dropout").is_recomputable


def test_every_operation_knows_its_module_and_the_user_s_line() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = torch.relu(m.lin(x))
        return h.exp()

    graph = captured(Model(forward), torch.randn(3, 4)).graph
    _, first = inspect.getsourcelines(forward)
    for op, line in (("aten.relu", 1), ("aten.exp", 2), ("aten.threshold_backward", 1)):
        at = node(graph, op).at
        assert at is not None and at.source == f"test_torch_capture.py:{first + line} in forward"
    linear = node(graph, "aten.addmm").at
    assert linear is not None and linear.module == "lin" and f":{first + 1} " in str(linear)


def test_a_signature_says_how_arguments_and_results_nest(x: Tensor) -> None:
    def forward(m: Any, pair: Any, *, scale: float) -> Any:
        h = m.lin(pair[0]) * scale
        return {"h": h, "row": h[0], "x": pair[0], "none": None, "n": 4}

    signature = captured(Model(forward), (x, 7), scale=0.5).signature
    assert signature.leaves == (Slot(0), 7, 0.5)
    assert dict(signature.modes) == {"": True, "lin": True}
    origins = {Origin.COMPUTED: 0, Origin.OUTPUT: 0, Origin.INPUT: 0, Origin.CONSTANT: 0}
    for delivery in signature.deliveries:
        origins[delivery.origin] += 1
    assert origins == {Origin.COMPUTED: 1, Origin.OUTPUT: 1, Origin.INPUT: 1, Origin.CONSTANT: 2}


def test_a_loss_outside_of_the_module_is_counted(x: Tensor) -> None:
    module = nn.Linear(4, 4)
    outputs = 3 * 4 * 4
    unknown = capture(module, (x,)).graph
    assert (unknown.loss_bytes, unknown.loss_held_bytes) == (2 * outputs + 32, 32)
    assert unknown.loss_saved_bytes == 2 * outputs + 32
    square = capture(module, (x,), loss=lambda y: y.square().sum()).graph.loss_bytes
    assert square >= x.nbytes  # the square, at least
    deep = capture(module, (x,), loss=lambda y: y.exp().sin().exp().sin().sum()).graph.loss_bytes
    assert deep >= 3 * x.nbytes


def test_what_a_loss_holds_until_its_backward_is_counted(x: Tensor) -> None:
    """The scalar itself, and what its graph saved beyond the outputs."""
    outputs = 3 * 4 * 4
    target = torch.zeros(3, dtype=torch.long)
    for loss, saved in (
        (lambda y: y.square().sum(), 0),
        (lambda y: y.exp().sum(), outputs),
        (lambda y: functional.cross_entropy(y, target), outputs + 4),  # logarithms, and the sum of weights
    ):
        assert capture(nn.Linear(4, 4), (x,), loss=loss).graph.loss_saved_bytes == 8 + saved


def test_losses_that_keep_their_terms_are_counted_with_them(x: Tensor) -> None:
    graph = captured(Model(lambda m, x: functional.mse_loss(m.lin(x), x[:1].expand(3, 4))), x).graph
    assert node(graph, "aten.mse_loss").values[0].storage.nbytes == x.nbytes
    with torch.no_grad():
        assert functional.mse_loss(x, x).untyped_storage().nbytes() == x.nbytes


# ---------------------------------------------------------------------- what it leaves alone


def test_capturing_computes_nothing_and_changes_nothing(x: Tensor) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        x.mul_(2.0)
        return functional.dropout(m.norm(m.lin(x)), 0.5)

    module: Any = Model(forward, norm=nn.BatchNorm1d(4))
    module.add_module("lstm", nn.LSTM(4, 4))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    generator, given = torch.get_rng_state(), x.clone()
    captured(module, x)
    assert torch.equal(torch.get_rng_state(), generator) and torch.equal(x, given)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(p.grad is None for p in module.parameters())
    assert all(type(p) is nn.Parameter for p in module.parameters())
    assert not module._forward_hooks and not module.lin._forward_hooks
    module(x)


def test_a_recurrent_module_still_runs_and_keeps_its_dropout() -> None:
    module, x = nn.LSTM(4, 6, num_layers=2, dropout=0.5), torch.randn(5, 2, 4)
    wanted = module.eval()(x)[0]
    module.train()
    graph = captured(module, x).graph
    assert [n.op for n in graph.nodes if Trait.RANDOM in n.traits] == ["aten.native_dropout.default"]
    assert sum(n.op == "aten.mkldnn_rnn_layer.default" for n in graph.nodes) == 2
    assert torch.equal(module.eval()(x)[0], wanted)


# ---------------------------------------------------------------------- what is refused


def _item(m: Any, x: Tensor) -> Tensor:
    return m.lin(x) * x.sum().item()


def _branch(m: Any, x: Tensor) -> Tensor:
    h = m.lin(x)
    return h * 2 if h.sum() > 0 else h


def _nonzero(m: Any, x: Tensor) -> Tensor:
    return m.lin(x[x[:, 0] > 0])


def _numpy(m: Any, x: Tensor) -> Tensor:
    return m.lin(x) * float(x.numpy().sum())


def _attribute(m: Any, x: Tensor) -> Tensor:
    m.last = m.lin(x) + getattr(m, "last", 0)
    return m.last


def _writes_parameter(m: Any, x: Tensor) -> Tensor:
    m.lin.weight.mul_(0.5)
    return m.lin(x)


def _writes_constant(m: Any, x: Tensor) -> Tensor:
    _STATE.add_(1.0)
    return m.lin(x) * _STATE


def _outside(m: Any, x: Tensor) -> Tensor:
    return m.lin(x) * _WEIGHT


def _generator(m: Any, x: Tensor) -> Tensor:
    return m.lin(x) + torch.rand(4, generator=_PLAIN())


_PLAIN = torch.Generator
_STATE = torch.zeros(4)
_WEIGHT = torch.ones(4, requires_grad=True)


@pytest.mark.parametrize(
    ("function", "code", "names", "at_line"),
    [
        (_item, "IRC332", "aten._local_scalar_dense", True),
        (_branch, "IRC332", "aten._local_scalar_dense", True),
        (_nonzero, "IRC332", "aten.nonzero", True),
        (_numpy, "IRC333", "numpy", True),
        (_attribute, "IRC338", "attribute last", False),
        (_writes_parameter, "IRC336", "parameter lin.weight", True),
        (_writes_constant, "IRC336", "not a parameter, buffer or input", False),
        (_outside, "IRC334", "tensor of shape [4] that requires a gradient", True),
        (_generator, "IRC334", "a generator that no attribute leads to", True),
    ],
)
def test_what_has_no_place_in_a_plan_is_refused_with_the_line(
    function: Callable[..., Any], code: str, names: str, at_line: bool, x: Tensor
) -> None:
    with pytest.raises(UnsupportedError) as raised:
        capture(Model(function), (x,))
    error = raised.value
    assert error.code == code and names in error.message and error.help is not None
    if at_line:
        lines, first = inspect.getsourcelines(function)
        assert error.at is not None and error.at.source is not None
        name, _, rest = error.at.source.partition(":")
        assert name == "test_torch_capture.py" and rest.endswith(f" in {function.__name__}")
        assert first < int(rest.split()[0]) < first + len(lines)


def test_a_write_into_an_input_that_asks_for_a_gradient_is_refused(x: Tensor) -> None:
    with pytest.raises(UnsupportedError, match=r"IRC336.*input 0, which requires a gradient"):
        capture(Model(lambda m, x: m.lin(x.mul_(2.0))), (x.requires_grad_() * 1.0,))


@pytest.mark.parametrize("randomness", ["different", "same"])
def test_dropout_under_vmap_draws_as_eager_does(randomness: str, x: Tensor) -> None:
    """torch.vmap draws the mask of an expanded tensor, which is no place to write into."""
    module = Model(
        lambda m, x: torch.vmap(lambda row: functional.dropout(m.lin(row)), randomness=randomness)(x)
    )
    assert_trains_as_eager(module, x)


def assert_trains_as_eager(module: Model, x: Tensor) -> None:
    original = copy.deepcopy(module)
    fitted = irc.optimize(module, (x,), "100%", loss=torch.sum, costs="analytic")
    for each in (fitted, original):
        torch.manual_seed(0)
        each(x).sum().backward()
    assert torch.equal(fitted.lin.weight.grad, original.lin.weight.grad)  # pyright: ignore


@pytest.mark.parametrize(
    ("module", "cause"),
    [
        (nn.Linear(4, 4).requires_grad_(False), "no parameter and no input"),
        (Model(lambda m, x: m.lin(x).detach()), "no output of the module depends"),
        (Model(lambda m, x: m.lin(x).argmax(1)), "no output of the module depends"),
        (Model(lambda m, x: 3), "no output of the module depends"),
        (Model(lambda m, x: checkpoint(m.lin, x, use_reentrant=True)), "use_reentrant=True.*py:.*no tensor"),
    ],
    ids=["frozen", "detached", "integers", "no tensor", "reentrant checkpoint"],
)
def test_nothing_to_train_is_refused_with_its_cause(module: nn.Module, cause: str, x: Tensor) -> None:
    with pytest.raises(UsageError, match=cause) as raised:
        capture(module, (x,))
    assert raised.value.code == "IRC340" and raised.value.exit_status == 2


def test_an_error_that_speaks_of_gradients_is_not_taken_for_nothing_to_train(x: Tensor) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        raise RuntimeError("the input has requires_grad=True, and this kernel does not require grad")

    with pytest.raises(IrcError, match="this kernel does not") as raised:
        capture(Model(forward), (x,))
    assert raised.value.code != "IRC340"


def test_after_a_refusal_the_model_works_and_is_captured_when_mended(x: Tensor) -> None:
    module: Any = Model(_item)
    with pytest.raises(IrcError):
        capture(module, (x,))
    assert type(module(x)) is Tensor
    module.function = lambda m, x: m.lin(x)
    captured(module, x)


def test_where_no_way_to_trace_succeeds_the_reason_is_that_of_the_model_as_it_runs(x: Tensor) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            raise NotImplementedError("for compilers")
        return m.lin(x) if x.sum() > 0 else x

    with pytest.raises(UnsupportedError, match="IRC332") as caught:
        captured(Model(forward), x)
    assert "specialize_branches" in str(caught.value.help)


class NormOnCudnn(nn.Module):
    """BatchNorm as `functional.batch_norm` runs it on a GPU with cuDNN."""

    def __init__(self, *, on_cudnn: bool) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3)
        self.on_cudnn = on_cudnn

    def forward(self, x: Tensor) -> Tensor:
        x, norm = self.first(x), self.norm
        if not self.on_cudnn:
            return torch.relu(self.last(torch.relu(norm(x)))).mean()
        norm.num_batches_tracked.add_(1)  # type: ignore[operator]
        state = norm.weight, norm.bias, norm.running_mean, norm.running_var
        x = torch.ops.aten.cudnn_batch_norm(x, *state, True, norm.momentum, norm.eps)[0]
        return torch.relu(self.last(torch.relu(x))).mean()


def test_batch_norm_of_cudnn_keeps_the_kernel_of_eager() -> None:
    torch.manual_seed(0)
    plain, x = NormOnCudnn(on_cudnn=False), torch.randn(4, 3, 16, 16)
    ours = NormOnCudnn(on_cudnn=True)
    ours.load_state_dict(plain.state_dict())
    graph = capture(ours, (x,)).graph
    norm = next(n for n in graph.operations if n.op == "aten._batch_norm_with_update_functional.default")
    assert norm.is_recomputable  # though it reads the statistics that are overwritten after it
    assert any(n.op == "aten.batch_norm_backward.default" for n in graph.operations)
    fitted = irc.optimize(ours, x, "90%", costs="analytic", time_limit=2)
    for _ in range(2):
        for module in (plain, fitted):
            module.zero_grad()
            module(x).backward()
    left = [[*(p.grad for p in m.parameters() if p.grad is not None), *m.buffers()] for m in (plain, fitted)]
    assert len(left[0]) == 9 and all(map(torch.equal, *left))


def test_a_loss_on_a_gpu_takes_whole_blocks() -> None:
    alive = AliveBytes()
    with FakeTensorMode(), alive:
        kept = [torch.empty(3, device=device) for device in ("cpu", "cuda")]
        torch.empty(200, device="cuda")
    assert (alive.alive_bytes, alive.peak_bytes) == (12 + 512, 12 + 512 + 1024) and kept


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda m, x: m.lin(x[:, :2]), "RuntimeError: mat1 and mat2 shapes.*test_torch_capture.py"),
        (lambda m, x: m.lin(x).nosuch(), "AttributeError: 'Tensor' object has no attribute 'nosuch'"),
        (lambda m: m.lin, "TypeError"),
    ],
    ids=["shape", "attribute", "arguments"],
)
def test_a_forward_that_raises_by_itself_is_a_fault_of_the_call(function: Any, said: str, x: Tensor) -> None:
    with pytest.raises(UsageError, match="(?s)IRC349.*" + said):
        capture(Model(function), (x,))
