"""Row 11: state, names, copies and files."""

from __future__ import annotations

import copy
import io
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .cases import check_script, check_step
from .comparison import Difference, check_same, state_of
from .registry import check, every, the
from .steps import OPTIMIZERS, one_step, train
from .trial import Pair, Side, Trial

_MODELS = the("convolution", "transformer", "structures")


@check_script(11, every())
def names_of_the_state(side: Side) -> Any:
    """state_dict has eager's keys, order, shapes and metadata; so have parameters, buffers and modules."""
    module = side.module
    state = module.state_dict()
    names = [
        list(state),
        [tuple(value.shape) for value in state.values()],
        dict(getattr(state, "_metadata", {})),
        [name for name, _ in module.named_parameters()],
        [name for name, _ in module.named_buffers()],
        [name for name, _ in module.named_modules()],
        [name for name, _ in module.named_children()],
    ]
    return names, [type(child).__name__ for child in list(module.modules())[1:]], repr(state)


@check(11, _MODELS)
def paths_resolve(trial: Trial) -> None:
    """get_submodule and get_parameter find what they found before; isinstance holds."""
    module = trial.subject.make()
    paths = [name for name, _ in module.named_modules()]
    named = dict(module.named_parameters())
    kept = {path: module.get_submodule(path) for path in paths[1:]}
    ours = trial.fit(module, trial.subject.arguments()).ours.module
    if not isinstance(ours, type(module)):
        raise Difference(f"the fitted module is no {type(module).__name__}")
    for path, child in kept.items():
        if ours.get_submodule(path) is not child:
            raise Difference(f"the submodule {path} is another")
    for name, parameter in named.items():
        if ours.get_parameter(name) is not parameter:
            raise Difference(f"the parameter {name} is another")


@check(11, every())
def strict_loading_both_ways(trial: Trial) -> None:
    """The original loads the fitted module's state, and the other way round, strictly; both train on."""
    pair = trial.pair()
    train("SGD", 2)(pair.ours)
    pair.original.module.load_state_dict(pair.ours.module.state_dict(), strict=True)
    pair.ours.module.zero_grad()
    pair.original.module.zero_grad()
    trial.same(trial.twin(pair), train("SGD"))
    train("AdamW", 2)(pair.original)
    pair.ours.module.load_state_dict(pair.original.module.state_dict(), strict=True)
    pair.ours.module.zero_grad()
    pair.original.module.zero_grad()
    trial.same(pair, train("AdamW"))


@check_script(11, every())
def a_file_of_the_state(side: Side) -> Any:
    """torch.save of the state, torch.load with weights_only, and loading into both modules."""
    seen = train("SGD", 1)(side)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state.pt"
        torch.save(side.module.state_dict(), path)
        train("SGD", 1)(side)
        side.module.load_state_dict(torch.load(path, weights_only=True))
    return seen, train("SGD", 1)(side)


@check_script(11, every())
def a_checkpoint_that_is_resumed(side: Side) -> Any:
    """Model, optimizer and generator saved after a step and loaded into a new fitted module: goes on."""
    optimizer = OPTIMIZERS["AdamW"](side.module.parameters())
    one_step(side, optimizer)
    file = io.BytesIO()
    torch.save((side.module.state_dict(), optimizer.state_dict(), torch.get_rng_state()), file)
    one_step(side, optimizer)
    file.seek(0)
    model, steps, generator = torch.load(file, weights_only=True)
    side.module.load_state_dict(model)
    resumed = OPTIMIZERS["AdamW"](side.module.parameters())
    resumed.load_state_dict(steps)
    torch.set_rng_state(generator)
    return [one_step(side, resumed) for _ in range(2)]


@check(11, _MODELS)
def an_optimizer_of_the_original(trial: Trial) -> None:
    """An optimizer made before planning, over the original's parameters, trains the fitted module."""
    module = trial.subject.make()
    twin = copy.deepcopy(module)
    optimizers = {id(m): OPTIMIZERS["AdamW"](m.parameters()) for m in (module, twin)}
    pair = trial.fit(module, trial.subject.arguments())
    original = Side(twin, pair.original.arguments, pair.original.lossy)
    made = {id(pair.ours.module): optimizers[id(module)], id(twin): optimizers[id(twin)]}

    def script(side: Side) -> Any:
        return [one_step(side, made[id(side.module)]) for _ in range(3)]

    trial.same(Pair(original, pair.ours), script)


def _copied(name: str, promise: str, copied: Callable[[nn.Module], nn.Module], models: Any = None) -> None:
    """Enters a check that a copy trains as the original, and leaves what it was copied from alone."""

    def run(trial: Trial) -> None:
        pair = trial.fit(trial.subject.make(), trial.subject.arguments())
        train("SGD", 1)(pair.original)
        torch.manual_seed(5)
        train("SGD", 1)(pair.ours)
        before = state_of(pair.ours.module)
        ours = copied(pair.ours.module)
        if any(a is b for a, b in zip(ours.parameters(), pair.ours.module.parameters(), strict=True)):
            raise Difference("the copy shares parameters")
        pair.original.module.load_state_dict(pair.ours.module.state_dict())
        for module in (ours, pair.original.module):
            module.zero_grad()
        twin = Pair(pair.original, Side(ours, pair.ours.arguments.copied(), pair.ours.lossy))
        trial.same(twin, train("AdamW"))
        after = state_of(pair.ours.module)
        for state in (before, after):
            state.pop("the generator's state")
        check_same(after, before, "what was copied")
        pair.original.module.load_state_dict(pair.ours.module.state_dict())
        for module in (pair.ours.module, pair.original.module):
            module.zero_grad()
        trial.same(pair, train("SGD"))

    check(11, models or every(), name=name, promise=promise)(run)


def _through_file(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


_PICKLED = the("convolution", "transformer", "u-net", "recurrent", "experts")
_TRAINS = "The copy has tensors of its own and trains as the original; what it was copied from goes on."
_copied("a deep copy", _TRAINS, copy.deepcopy)
_copied("a pickled module", _TRAINS, lambda module: pickle.loads(pickle.dumps(module)), _PICKLED)
_copied("torch.save of a whole module", _TRAINS, _through_file, _PICKLED)


@check_script(11, _PICKLED)
def averaged_weights(side: Side) -> Any:
    """torch.optim.swa_utils.AveragedModel (an EMA) of the fitted module follows it, and evaluates."""
    averaged = torch.optim.swa_utils.AveragedModel(
        side.module, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
    )
    optimizer = OPTIMIZERS["SGD"](side.module.parameters())
    for _ in range(3):
        one_step(side, optimizer)
        averaged.update_parameters(side.module)
    averaged.eval()
    with torch.no_grad():
        return averaged(*side.arguments.args), list(averaged.state_dict())


@check(11, _MODELS)
def within_another_module(trial: Trial) -> None:
    """A fitted module as a part of another: state, names and training are those of the original as a part."""

    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner
            self.scale = nn.Parameter(torch.tensor(0.5))

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.inner(*args, **kwargs)

    def script(side: Side) -> Any:
        outer = Outer(side.module)
        optimizer = OPTIMIZERS["SGD"](outer.parameters())
        seen: list[Any] = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = side.lossy(outer(*side.arguments.args, **side.arguments.kwargs)) * outer.scale
            loss.backward()
            optimizer.step()
            seen.append(loss.detach())
        return seen, list(outer.state_dict()), [name for name, _ in outer.named_modules()], outer.scale.grad

    trial.same(trial.pair(), script)


@check_script(11, _MODELS)
def parameters_are_written_and_replaced(side: Side) -> Any:
    """Weights that the script writes (init functions), and .data that it sets, are those of the next step."""
    seen = train("SGD", 1)(side)
    with torch.no_grad():
        for parameter in side.module.parameters():
            nn.init.normal_(parameter, std=0.1)
    seen = seen, train("SGD", 1)(side)
    for parameter in side.module.parameters():
        parameter.data = parameter.data * 0.5
    return seen, train("SGD", 1)(side)


@check_script(11, _MODELS, refusable=True)
def state_that_is_assigned(side: Side) -> Any:
    """load_state_dict(assign=True) and setattr of a new Parameter are seen by the next step."""
    module = side.module
    state: dict[str, Tensor] = {name: value.clone() for name, value in module.state_dict().items()}
    module.load_state_dict(state, assign=True)
    side.mark()
    name = next(name for name, _ in module.named_parameters())
    path, _, last = name.rpartition(".")
    setattr(module.get_submodule(path), last, nn.Parameter(state[name] * 0.5))
    side.mark()
    return train("SGD", 2)(side)


@check_step(11, _MODELS)
def flattened_parameters(side: Side, optimizer: torch.optim.Optimizer) -> Any:
    """parameters_to_vector, clip_grad_norm_, zero_grad, requires_grad_ and apply work as before."""
    seen: list[str] = []
    side.module.apply(lambda child: seen.append(type(child).__name__))
    side.module.zero_grad()
    side.loss().backward()
    norm = nn.utils.clip_grad_norm_(side.module.parameters(), 0.1)
    nn.utils.clip_grad_value_(side.module.parameters(), 0.01)
    optimizer.step()
    return norm, seen[:-1], nn.utils.parameters_to_vector(side.module.parameters()).detach()
