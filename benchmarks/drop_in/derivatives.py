"""Rows 13 and 14: derivatives of other kinds than loss.backward(), and backward more than once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from irc.ir import IrcError

from .cases import check_script, check_step
from .comparison import Difference
from .models import Arguments, Calls
from .registry import OWN, check, every, having, the
from .steps import train, trains
from .trial import Pair, Script, Side, Trial

_SMOOTH = the("transformer", "experts", "structures")


# ---------------------------------------------------------------------- row 13, what must work


@check_script(13, every())
def grad_of_parameters(side: Side) -> Any:
    """autograd.grad of some parameters gives eager's gradients, and leaves .grad alone."""
    parameters = list(side.module.parameters())
    some = parameters[::2]
    gradients = torch.autograd.grad(side.loss(), some, allow_unused=True)
    return gradients, [p.grad for p in parameters], train("SGD", 1)(side)


@check(13, having("tensor"))
def grad_of_the_input(trial: Trial) -> None:
    """autograd.grad of the input, of the result, and of both with parameters."""
    arguments = trial.subject.arguments()
    arguments.args[0].requires_grad_(True)

    def script(side: Side) -> Any:
        x = side.arguments.args[0]
        (first,) = torch.autograd.grad(side.loss(), x)
        result = side()
        second = torch.autograd.grad(side.lossy(result), [result, x, next(side.module.parameters())])
        return first, second

    trial.same(trial.fit(trial.subject.make(), arguments), script)


@check_script(13, every())
def backward_into_some_inputs(side: Side) -> Any:
    """backward(inputs=[...]) fills these gradients alone."""
    parameters = list(side.module.parameters())
    side.loss().backward(inputs=parameters[:2])
    return [p.grad is None for p in parameters], train("SGD", 1)(side)


@check_script(13, having("tensor"))
def backward_with_a_gradient(side: Side) -> Any:
    """result.backward(gradient) and autograd.grad(grad_outputs=...) without a loss."""
    result = side()
    result.backward(torch.linspace(-1, 1, result.numel()).view_as(result))
    other = side()
    given = torch.ones_like(other).t() if other.ndim == 2 else torch.ones_like(other)
    given = given.t() if other.ndim == 2 else given
    return torch.autograd.grad(other, list(side.module.parameters()), given, allow_unused=True)


@check(13, having("tensor"))
def a_module_within_a_larger_graph(trial: Trial) -> None:
    """Layers of the script before and after the fitted module train with it."""
    shape = trial.subject.arguments().args[0].shape

    def script(side: Side) -> Any:
        scale = nn.Parameter(torch.tensor(1.25))
        out = nn.Parameter(torch.tensor(0.5))
        x = torch.linspace(-1, 1, shape.numel()).view(shape)
        for _ in range(2):
            (side.lossy(side.module(x * scale) * out) + out).backward()
        return scale.grad, out.grad

    arguments = Arguments((torch.randn(shape, requires_grad=True),))
    trial.same(trial.fit(trial.subject.make(), arguments), script)


@check(13, having("several results"), refusable=True)
def grad_of_one_result_by_another(trial: Trial) -> None:
    """A gradient of one result with respect to another that it was computed from: equal, or an error.

    All results come from one autograd node, so that torch finds no way from one to another, and says so.
    """

    def script(side: Side) -> Any:
        result = side()
        if hasattr(result, "scores"):
            return torch.autograd.grad(result.loss, result.scores)
        return torch.autograd.grad(result[1].square().mean(), result[0])

    try:
        trial.same(trial.pair(), script)
    except RuntimeError as error:
        if "not have been used in the graph" not in str(error):
            raise


# ---------------------------------------------------------------------- row 13, equal or refused


def _equal_or_not_implemented(
    name: str,
    promise: str,
    script: Script,
    models: tuple[str, ...] = _SMOOTH,
    *,
    prepare: Callable[[Trial], Pair] | None = None,
) -> None:
    """Enters a check whose refusal must be a NotImplementedError too."""

    def run(trial: Trial) -> None:
        pair = trial.pair() if prepare is None else prepare(trial)
        try:
            trial.same(pair, script, tolerance=1e-5)
        except IrcError as refusal:
            if not isinstance(refusal, NotImplementedError):
                raise Difference(
                    f"the refusal is no NotImplementedError: {refusal.code}: {refusal.message}"
                ) from refusal
            raise

    check(13, models, name=name, in_backward=True, promise=promise)(run)


_EQUAL = (
    "Equal (to 1e-5 of the largest: other formulas than eager's), or NotImplementedError with what to do."
)


def _penalty(side: Side) -> Any:
    loss = side.loss()
    parameters = list(side.module.parameters())
    side.mark()
    gradients: Any = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
    norm = torch.stack([g.square().sum() for g in gradients if g is not None]).sum()
    (loss + norm).backward()


def _create_graph(side: Side) -> Any:
    loss = side.loss()
    side.mark()
    loss.backward(create_graph=True)
    gradients: list[Any] = [parameter.grad for parameter in side.module.parameters()]
    return [gradient is None or gradient.requires_grad for gradient in gradients]


def _functional_call(side: Side) -> Any:
    state = {name: (p.detach() * 1.5).requires_grad_() for name, p in side.module.named_parameters()}
    arguments = side.arguments
    result = torch.func.functional_call(side.module, state, arguments.args, arguments.kwargs)
    side.lossy(result).backward()
    return [tensor.grad for tensor in state.values()]


def _lossy_of(side: Side) -> Callable[..., Tensor]:
    arguments = side.arguments

    def loss(state: dict[str, Tensor]) -> Tensor:
        result = torch.func.functional_call(side.module, state, arguments.args, arguments.kwargs)
        return side.lossy(result)

    return loss


def _func_grad(side: Side) -> Any:
    state = {name: p.detach() for name, p in side.module.named_parameters()}
    return torch.func.grad(_lossy_of(side))(state)


def _func_vjp(side: Side) -> Any:
    state = {name: p.detach() for name, p in side.module.named_parameters()}
    made: Any = torch.func.vjp(_lossy_of(side), state)
    loss, pull = made
    return loss.detach(), pull(torch.ones_like(loss))


def _func_jvp(side: Side) -> Any:
    state = {name: p.detach() for name, p in side.module.named_parameters()}
    tangents = {name: torch.ones_like(p) for name, p in state.items()}
    return torch.func.jvp(_lossy_of(side), (state,), (tangents,))


def _per_example(side: Side) -> Any:
    state = {name: p.detach() for name, p in side.module.named_parameters()}

    def loss(state: dict[str, Tensor], example: Tensor) -> Tensor:
        return side.lossy(torch.func.functional_call(side.module, state, (example[None],)))

    gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))
    return gradients(state, side.arguments.args[0])


def _vmap(side: Side) -> Any:
    x = side.arguments.args[0]
    return torch.func.vmap(side.module)(torch.stack([x, x + 1]))


def _forward_mode(side: Side) -> Any:
    x = side.arguments.args[0]
    with forward_ad.dual_level():
        result = side.module(forward_ad.make_dual(x, torch.ones_like(x)))
        return tuple(forward_ad.unpack_dual(result))


def _jacobian(side: Side) -> Any:
    x = side.arguments.args[0]
    return torch.autograd.functional.jacobian(lambda x: side.module(x).sum((0, 1)), x)


def _hvp(side: Side) -> Any:
    x = side.arguments.args[0]
    side.mark()
    hvp: Any = torch.autograd.functional.hvp
    return hvp(lambda x: side.lossy(side.module(x)), x, torch.ones_like(x))


def _batched_grad(side: Side) -> Any:
    result = side()
    parameters = list(side.module.parameters())
    side.mark()
    given = torch.stack([torch.ones_like(result), torch.zeros_like(result)])
    return torch.autograd.grad(result, parameters, given, is_grads_batched=True, allow_unused=True)


def _small(trial: Trial) -> Pair:
    layers = (nn.Linear(4, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 4))
    return trial.fit(nn.Sequential(*layers), Arguments((torch.randn(8, 4),)))


def _trained_input(trial: Trial) -> Pair:
    """Planned for an input that asks for a gradient, as these derivatives call it."""
    arguments = trial.subject.arguments()
    arguments.args[0].requires_grad_()
    return trial.fit(trial.subject.make(), arguments)


_EXPERTS = the("experts")
_equal_or_not_implemented("a penalty on gradients", _EQUAL, _penalty, the("experts", "structures"))
_equal_or_not_implemented("backward with create_graph", _EQUAL, _create_graph)
_equal_or_not_implemented("functional_call with other parameters", _EQUAL, _functional_call)
_equal_or_not_implemented("func.grad", _EQUAL, _func_grad)
_equal_or_not_implemented("func.vjp", _EQUAL, _func_vjp)
_equal_or_not_implemented("func.jvp", _EQUAL, _func_jvp, _EXPERTS)
_equal_or_not_implemented("gradients of each example", _EQUAL, _per_example, (OWN,), prepare=_small)
_equal_or_not_implemented("vmap", _EQUAL, _vmap, _EXPERTS)
_equal_or_not_implemented("forward mode", _EQUAL, _forward_mode, _EXPERTS)
_equal_or_not_implemented("a jacobian of the input", _EQUAL, _jacobian, _EXPERTS, prepare=_trained_input)
_equal_or_not_implemented("a hessian times a vector", _EQUAL, _hvp, _EXPERTS, prepare=_trained_input)
_equal_or_not_implemented("batched gradients", _EQUAL, _batched_grad, _EXPERTS)


# ---------------------------------------------------------------------- row 14


@check_step(14, every())
def backward_twice_with_a_retained_graph(side: Side, optimizer: torch.optim.Optimizer) -> Any:
    """retain_graph=True and a second backward: gradients double, the generator's state does not move."""
    optimizer.zero_grad()
    loss = side.loss()
    loss.backward(retain_graph=True)
    once = [None if p.grad is None else p.grad.clone() for p in side.module.parameters()]
    loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()
    return loss.detach(), once


@check_script(14, every())
def a_second_backward_without_a_retained_graph(side: Side) -> Any:
    """It raises RuntimeError, as in eager, and changes no gradient."""
    loss = side.loss()
    loss.backward()
    once = [None if p.grad is None else p.grad.clone() for p in side.module.parameters()]
    try:
        loss.backward()
    except RuntimeError as error:
        return once, [p.grad for p in side.module.parameters()], "retain_graph" in str(error)
    return "no error"


@check_step(14, having("several results"))
def losses_on_several_results(side: Side, optimizer: torch.optim.Optimizer) -> Any:
    """A loss for each result, backward in either order with a retained graph."""
    seen: list[Any] = []
    for order in (1, -1):
        optimizer.zero_grad()
        losses = _two_losses(side())[::order]
        losses[0].backward(retain_graph=True)
        seen.append([None if p.grad is None else p.grad.clone() for p in side.module.parameters()])
        losses[1].backward()
    optimizer.step()
    return seen


def _two_losses(result: Any) -> list[Tensor]:
    if hasattr(result, "scores"):
        return [result.loss, result.scores.sin().mean()]
    return [result[0].square().mean(), result[1].sin().mean()]


@check(14, in_backward=True)
def losses_on_disjoint_parts(trial: Trial) -> None:
    """Two heads that share nothing: each loss goes backward by itself, without a retained graph."""

    def forward(m: Any, x: Tensor, y: Tensor) -> Any:
        return torch.tanh(m.a(x)), torch.tanh(m.b(y))

    def step(side: Side, optimizer: torch.optim.Optimizer) -> Any:
        optimizer.zero_grad()
        one, other = side()
        other.square().mean().backward()
        side.mark()
        one.square().mean().backward()
        optimizer.step()

    module = Calls(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    arguments = Arguments((torch.randn(8, 4), torch.randn(8, 4)))
    trains(trial, trial.fit(module, arguments, lambda result: result[0].mean()), step=step)


@check(14)
def losses_of_an_adversarial_pair(trial: Trial) -> None:
    """A generator and a discriminator, both fitted, trained in turns as in a GAN script."""
    generator = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 6))
    critic = nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    noise, real = torch.randn(8, 4), torch.randn(8, 6)
    made = trial.fit(generator, Arguments((noise,)))
    judged = trial.fit(critic, Arguments((real.clone().requires_grad_(),)))

    def script(side: Side) -> Any:
        other = judged.original.module if side is made.original else judged.ours.module
        makes, judges = (torch.optim.SGD(m.parameters(), lr=0.05) for m in (side.module, other))
        seen: list[Tensor] = []
        for _ in range(3):
            judges.zero_grad()
            fake = side.module(noise)
            loss = (other(fake.detach().requires_grad_()) - other(real.clone().requires_grad_())).mean()
            loss.backward()
            judges.step()
            makes.zero_grad()
            fooled = -other(side.module(noise)).mean()
            fooled.backward()
            makes.step()
            seen += [loss.detach(), fooled.detach(), *(p.detach().clone() for p in other.parameters())]
        return seen

    trial.same(made, script)
