"""Row 12: train and eval, with and without gradients, as a whole and in parts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .cases import check_script, check_step
from .models import Arguments, Calls
from .registry import check, every, having, the
from .steps import one_step, train, trains
from .trial import Script, Side, Trial


@check_step(12, every())
def evaluation(side: Side, optimizer: torch.optim.Optimizer) -> Any:
    """eval() under no_grad gives eager's results between the steps, and no graph."""
    seen = one_step(side, optimizer)
    side.module.eval()
    with torch.no_grad():
        result = side()
    side.module.train()
    return seen, result


@check_step(12, every())
def without_gradients(side: Side, optimizer: torch.optim.Optimizer) -> Any:
    """no_grad, set_grad_enabled(False) and inference_mode in train(), between the steps."""
    seen: list[Any] = []
    for context in (torch.no_grad(), torch.set_grad_enabled(False), torch.inference_mode()):
        with context:
            result = side()
            seen.append((result, torch.is_inference_mode_enabled()))
    return pytree.tree_map_only(Tensor, _values, seen), one_step(side, optimizer)


def _values(tensor: Tensor) -> tuple[Tensor, bool, bool]:
    return tensor.detach().clone(), tensor.requires_grad, tensor.is_inference()


@check(12, every())
def evaluation_on_other_shapes(trial: Trial) -> None:
    """eval() and no_grad take any batch, as the original."""
    other = trial.subject.arguments(batch=3, length=3)

    def script(side: Side) -> Any:
        side.module.eval()
        with torch.no_grad():
            return side.module(*other.args, **other.kwargs)

    trial.same(trial.pair(), script)


@check_script(12, every())
def gradients_in_eval(side: Side) -> Any:
    """A backward in eval() after planning in train() gives eager's gradients."""
    side.module.eval()
    loss = side.loss()
    loss.backward()
    return loss.detach()


def _submodule_eval(side: Side) -> nn.Module:
    return next(side.module.children()).eval()


_PARTS = the("convolution", "transformer", "u-net", "recurrent")


@check_script(12, having("dropout"), refusable=True)
def a_submodule_in_eval_after_planning(side: Side) -> Any:
    """A submodule that goes into eval() after a step is honoured, or refused."""
    before = train("SGD", 1)(side)
    for child in side.module.modules():
        if isinstance(child, (nn.Dropout, nn.GRU)):
            child.eval()
    return before, train("SGD", 2)(side)


@check(12, having("dropout"))
def a_submodule_in_eval_at_planning(trial: Trial) -> None:
    """A submodule that is in eval() when the model is planned stays in it."""
    module = trial.subject.make()
    for child in module.modules():
        if isinstance(child, (nn.Dropout, nn.GRU)):
            child.eval()
    trains(trial, trial.fit(module, trial.subject.arguments()))


@check_script(12, _PARTS)
def modes_there_and_back(side: Side) -> Any:
    """A submodule in eval() and back in train(): training goes on."""
    before = train("SGD", 1)(side)
    _submodule_eval(side).train()
    side.module.eval().train()
    return before, train("SGD", 2)(side)


@check_script(12, _PARTS)
def a_submodule_called_alone(side: Side) -> Any:
    """A submodule that the script calls by itself runs as in the original, with gradients."""
    first = next(side.module.children())
    if isinstance(first, nn.ModuleList):
        first = first[0]
    result = first(side.arguments.args[0])
    result.square().mean().backward()
    return result.detach(), train("SGD", 1)(side)


class _Methods(nn.Module):
    """A model with methods and attributes of its own, as scripts use them."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 6)
        self.decoder = nn.Linear(6, 4)
        self.calls: list[str] = []

    @property
    def width(self) -> int:
        return self.encoder.out_features

    def encode(self, x: Tensor) -> Tensor:
        return torch.tanh(self.encoder(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encode(x))


@check(12)
def methods_of_the_model_s_own(trial: Trial) -> None:
    """Other methods than forward, properties and attributes are the original's; so is a direct forward()."""

    def step(side: Side, optimizer: torch.optim.Optimizer) -> Any:
        optimizer.zero_grad()
        encoded = side.module.encode(side.arguments.args[0])
        loss = side.module.forward(*side.arguments.args).square().mean() + encoded.square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach(), side.module.width, isinstance(side.module, _Methods)

    trains(trial, trial.fit(_Methods(), Arguments((torch.randn(8, 4),))), step=step)


@check(12)
def a_model_that_asks_for_its_mode(trial: Trial) -> None:
    """A model whose forward branches on self.training gives in each mode what the original gives."""

    def forward(m: Any, x: Tensor) -> Any:
        h = torch.tanh(m.lin(x))
        return {"h": h, "auxiliary": m.lin(h)} if m.training else h

    def script(side: Side) -> Any:
        seen: list[Any] = []
        for _ in range(2):
            result = side.module.train()(*side.arguments.args)
            (result["h"].square().mean() + result["auxiliary"].mean()).backward()
            seen += [list(result), side.module.eval()(*side.arguments.args).detach()]
        return seen

    module = Calls(forward, lin=nn.Linear(4, 4))
    trial.same(trial.fit(module, Arguments((torch.randn(8, 4),)), lambda result: result["h"].mean()), script)


_TO_FLOAT64: Script = train("SGD", 2)


@check_script(12, the("convolution", "transformer"), refusable=True)
def another_element_type_after_planning(side: Side) -> Any:
    """model.double() after planning trains in float64, or is refused."""
    side.module.double()
    side.arguments = _doubled(side.arguments)
    side.mark()
    return _TO_FLOAT64(side)


def _doubled(arguments: Arguments) -> Arguments:
    return Arguments(tuple(t.double() if t.is_floating_point() else t for t in arguments.args))
