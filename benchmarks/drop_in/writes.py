"""Row 5: writes in place, by the model and by the script."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from irc.ir import IrcError

from .cases import check_script, check_step, trains_own
from .comparison import check_same
from .models import Arguments, Calls
from .registry import check, every, having
from .steps import one_step, trains
from .trial import Pair, Side, Trial


@check(5, having("in-place"))
def relu_in_place(trial: Trial) -> None:
    """A model with ReLU(inplace=True) trains as in eager, and its arguments keep their values."""
    trains(trial, trial.pair())


def _linear(function: Callable[[Any, Tensor], Tensor]) -> tuple[nn.Module, Arguments]:
    parts = {"lin": nn.Linear(4, 16), "out": nn.Linear(16, 4)}

    def forward(m: Any, x: Tensor) -> Tensor:
        h = torch.tanh(m.lin(x))
        return torch.sigmoid(m.out(function(m, h * torch.sin(h))))

    return Calls(forward, **parts), Arguments((torch.randn(12, 4),))


def _adds(m: Any, h: Tensor) -> Tensor:
    h += 1.0
    h *= torch.sigmoid(h)
    h -= h.mean(0)
    return h


def _slices(m: Any, h: Tensor) -> Tensor:
    h = h * 2
    h[1, :2] = 0.5
    h[:, 3].mul_(2.0)
    h[3:6] += h[6:9]
    h[h > 1.5] = 1.5
    return h


def _through_views(m: Any, h: Tensor) -> Tensor:
    h = h * 3
    view = h.view(4, 3, 16).transpose(0, 1)
    view[0].clamp_(-1.0, 1.0)
    h.t()[2].zero_()
    return h + view.reshape(12, 16)


def _fills(m: Any, h: Tensor) -> Tensor:
    filled = torch.zeros(12, 16)
    filled[:6] = h[6:]
    filled[6:].copy_(h[:6].detach())
    filled.masked_fill_(filled > 1, 0.25).index_fill_(1, torch.tensor([0, 3]), 0.5)
    return filled.scatter_(0, torch.zeros(1, 16, dtype=torch.int64), 1.0) + h


def _activations(m: Any, h: Tensor) -> Tensor:
    h = functional.leaky_relu_(h * 2, 0.1)
    h = functional.elu_(h + 0.5)
    h = functional.hardtanh_(h * 1.5)
    return functional.silu(h, inplace=True).clamp_(min=-1).exp_()


_WRITES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "augmented assignment": _adds,
    "writes into slices": _slices,
    "writes through views": _through_views,
    "fills": _fills,
    "activations in place": _activations,
}
for _name, _function in _WRITES.items():
    trains_own(5, _name, lambda function=_function: _linear(function))


def _writing(function: Callable[[Any, Tensor], Any]) -> Calls:
    model = Calls(function, lin=nn.Linear(4, 4))
    model.register_buffer("steps", torch.zeros((), dtype=torch.int64))
    model.register_buffer("average", torch.zeros(4))
    return model


def _averages(m: Any, x: Tensor) -> Tensor:
    m.steps += 1
    m.average.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
    return torch.tanh(m.lin(x) * m.average.clone())


def _queues(m: Any, x: Tensor) -> Tensor:
    h = torch.tanh(m.lin(x))
    with torch.no_grad():
        m.average.copy_(h.mean(0))
    return h


def _rewrites_input(m: Any, x: Tensor) -> Tensor:
    x.mul_(1.5)
    return torch.tanh(m.lin(x))


def _buffers_and_inputs() -> None:
    made: dict[str, Callable[[Any, Tensor], Any]] = {
        "a buffer that averages": _averages,
        "a buffer that is written under no_grad": _queues,
        "the model writes into its input": _rewrites_input,
    }
    for name, function in made.items():
        trains_own(
            5,
            name,
            lambda function=function: (_writing(function), Arguments((torch.randn(6, 4),))),
            "What is written is there afterwards, as in eager, also after a forward alone.",
            step=lambda side, optimizer: (one_step(side, optimizer), side().detach()),
        )


_buffers_and_inputs()


# ---------------------------------------------------------------------- the script's writes


Change = Callable[[Side, Any], object]


def _written_between(change: Change | None) -> Callable[[Side], Any]:
    """A script that writes between forward and backward, as far as there is something to write."""

    def script(side: Side) -> Any:
        result = side()
        loss = side.lossy(result)
        if change is not None:
            with torch.no_grad():
                change(side, result)
        side.mark()
        loss.backward()

    return script


def _same_or_raises(trial: Trial, pair: Pair, change: Change) -> None:
    """Where eager raises, the fitted module raises too, or its gradients are those without the write.

    Eager compares the versions of more tensors than its backward reads: going through is no mistake as
    long as the numbers are right.
    """
    unwritten = trial.twin(pair).original
    if _raised(_written_between(change), trial.twin(pair).original) is None:
        trial.same(pair, _written_between(change))
        return
    found = _raised(_written_between(change), pair.ours)
    if found is None:
        torch.manual_seed(5)
        _written_between(None)(unwritten)
        for (name, mine), its in zip(
            pair.ours.module.named_parameters(), unwritten.module.parameters(), strict=True
        ):
            check_same(mine.grad, its.grad, f"eager raises; this goes through, and the gradient of {name}")


def _raised(script: Callable[[Side], Any], side: Side) -> RuntimeError | None:
    torch.manual_seed(5)
    try:
        script(side)
    except RuntimeError as error:
        if isinstance(error, IrcError):
            raise
        return error
    return None


def _user_write(name: str, promise: str, change: Change) -> None:
    def run(trial: Trial) -> None:
        _same_or_raises(trial, trial.pair(), change)

    check(5, every(), name=name, in_backward=True, promise=promise)(run)


def _weights(side: Side) -> list[Tensor]:
    return [parameter for parameter in side.module.parameters() if parameter.ndim > 1]


def _first(result: Any) -> Tensor:
    if isinstance(result, Tensor):
        return result
    return result.scores if hasattr(result, "scores") else result[0]


_user_write(
    "a weight is written before backward",
    "Raises where eager raises (backward reads the weight), with the version counter's message.",
    lambda side, result: _weights(side)[-1].mul_(2.0),
)
_user_write(
    "an early weight is written before backward",
    "Raises where eager raises, also where only a recomputation would read the weight.",
    lambda side, result: _weights(side)[0].mul_(2.0),
)
_user_write(
    "a bias is written before backward",
    "Goes through where eager goes through (no bias is read by its backward), with eager's gradients.",
    lambda side, result: [p.add_(1.0) for n, p in side.module.named_parameters() if n.endswith("lin.bias")],
)
_user_write(
    "the input is written before backward",
    "Raises where eager raises, with eager's gradients where it does not.",
    lambda side, result: [t.zero_() for t in side.arguments.tensors],
)
_user_write(
    "the result is written before backward",
    "Raises where eager raises, with eager's gradients where it does not.",
    lambda side, result: _first(result).mul_(2.0),
)
_user_write(
    "statistics are written before backward",
    "A buffer that backward does not read may be written, as in eager.",
    lambda side, result: [b.zero_() for b in side.module.buffers()],
)


@check(5, having("batch norm"))
def statistics_are_written_before_backward_in_eval(trial: Trial) -> None:
    """In eval() BatchNorm's backward reads its statistics: a write raises, as in eager."""
    pair = trial.fit(trial.subject.make().eval(), trial.subject.arguments())

    def change(side: Side, result: Any) -> None:
        for buffer in side.module.buffers():
            buffer.add_(1)

    _same_or_raises(trial, pair, change)


@check_script(5, every(), raises=RuntimeError)
def an_optimizer_s_step_before_backward(side: Side) -> Any:
    """forward, optimizer step, backward: raises where eager raises."""
    optimizer = torch.optim.SGD(side.module.parameters(), lr=0.05)
    one_step(side, optimizer)
    loss = side.loss()
    optimizer.step()
    side.mark()
    loss.backward()


@check_step(5, having("tensor"))
def the_script_writes_into_the_result_and_trains_on_it(side: Side, optimizer: torch.optim.Optimizer) -> Any:
    """A result that the script changes in place before its loss: gradients are eager's."""
    optimizer.zero_grad()
    result = side()
    result.mul_(0.5).add_(1.0)
    result[0] = 0.0
    loss = side.lossy(result)
    loss.backward()
    optimizer.step()
    return loss.detach()
