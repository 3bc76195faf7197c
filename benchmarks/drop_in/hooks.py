"""Row 17: hooks on modules, tensors and parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.nn.utils import prune
from torch.utils import _pytree as pytree

from irc.ir import IrcError

from .cases import check_script, trains_own
from .comparison import Difference
from .models import Arguments, Calls
from .registry import check, every, the
from .steps import one_step, train
from .trial import Side, Trial

_MODELS = the("convolution", "transformer")
Register = Callable[[nn.Module, Callable[..., None]], Any]
"""Registers a hook that records its calls, and returns the handle."""


def _recorder(calls: list[Any], name: str) -> Callable[..., None]:
    """A hook that notes which it is and the values that it is given."""

    def hook(*given: Any) -> None:
        leaves = pytree.tree_leaves([g for g in given if not isinstance(g, nn.Module)])
        calls.append((name, [t.detach().clone() for t in leaves if isinstance(t, Tensor)]))

    return hook


def _recorded(register: Register, of: Callable[[Any], Any]) -> Callable[[Side], Any]:
    """A script that registers a hook, takes two steps, removes it, and takes one more."""

    def script(side: Side) -> Any:
        calls: list[Any] = []
        handle = register(of(side.module), _recorder(calls, "hook"))
        seen = train("SGD", 2)(side)
        counted = len(calls)
        handle.remove()
        return seen, train("SGD", 1)(side), calls, counted

    return script


def _root(module: nn.Module) -> nn.Module:
    return module


def _child(module: nn.Module) -> nn.Module:
    """A layer within the model that has parameters."""
    return [child for child in module.modules() if next(child.parameters(recurse=False), None) is not None][
        -1
    ]


def _container(module: nn.Module) -> nn.Module:
    """A submodule that holds others."""
    return next(c for c in module.modules() if c is not module and isinstance(c, nn.Sequential))


_KINDS: dict[str, Register] = {
    "forward pre-hook": lambda m, hook: m.register_forward_pre_hook(hook),
    "forward hook": lambda m, hook: m.register_forward_hook(hook),
    "forward hook with keywords": lambda m, hook: m.register_forward_hook(hook, with_kwargs=True),
    "full backward pre-hook": lambda m, hook: m.register_full_backward_pre_hook(hook),
    "full backward hook": lambda m, hook: m.register_full_backward_hook(hook),
}
_PLACES: dict[str, Callable[[Any], Any]] = {"the model": _root, "a layer": _child, "a container": _container}


def _before_planning(register: Register, of: Callable[[Any], Any], trial: Trial) -> None:
    """The hook is on the module when it is planned; its deep copy has a copy of it that records likewise."""
    calls: list[Any] = []
    module = trial.subject.make()
    register(of(module), _recorder(calls, "hook"))
    pair = trial.fit(module, trial.subject.arguments(), is_tried=False)
    if calls:
        raise Difference(f"planning has called the hook {len(calls)} times")

    def script(side: Side) -> Any:
        calls.clear()
        seen = train("SGD", 2)(side)
        return seen, list(calls)

    trial.same(pair, script)


def _named(run: Callable[[], None]) -> None:
    """Whether a refusal names what it is about."""
    try:
        run()
    except IrcError as refusal:
        if "hook" not in refusal.message:
            raise Difference(f"the refusal names no hook: {refusal.code}: {refusal.message}") from refusal
        raise


def _module_hooks() -> None:
    for kind, register in _KINDS.items():
        for place, of in _PLACES.items():

            def after(trial: Trial, register: Register = register, of: Any = of) -> None:
                _named(lambda: trial.same(trial.pair(), _recorded(register, of)))

            def before(trial: Trial, register: Register = register, of: Any = of) -> None:
                _named(lambda: _before_planning(register, of, trial))

            after.__doc__ = before.__doc__ = (
                "The same calls with the same values, or a refusal that names it."
            )
            check(17, _MODELS, name=f"{kind} on {place}, after planning", refusable=True)(after)
            check(17, _MODELS, name=f"{kind} on {place}, before planning", refusable=True)(before)


_module_hooks()


# ---------------------------------------------------------------------- parameters and tensors


@check_script(17, every())
def hooks_on_parameters(side: Side) -> Any:
    """register_hook on every parameter sees eager's gradients once each; what it returns is the gradient."""
    calls: dict[str, list[Tensor]] = {}
    handles = [
        parameter.register_hook(lambda g, name=name: calls.setdefault(name, []).append(g.clone()) or g * 2)
        for name, parameter in side.module.named_parameters()
    ]
    seen = train("SGD", 2)(side)
    for handle in handles:
        handle.remove()
    return seen, dict(sorted(calls.items())), train("SGD", 1)(side)


@check_script(17, every())
def hooks_after_accumulation(side: Side) -> Any:
    """register_post_accumulate_grad_hook is called once for each parameter, with .grad in place."""
    calls: dict[str, list[Tensor]] = {}
    for name, parameter in side.module.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda p, name=name: calls.setdefault(name, []).append(p.grad.clone())
        )
    side.loss().backward()
    side.loss().backward()
    return dict(sorted(calls.items()))


@check_script(17, every())
def an_optimizer_in_a_hook(side: Side) -> Any:
    """The recipe with an optimizer for each parameter, stepped in a post-accumulate hook."""
    parameters = list(side.module.parameters())
    optimizers = {p: torch.optim.SGD([p], lr=0.05) for p in parameters}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(step)
    for _ in range(3):
        side.loss().backward()


@check_script(17, every(), in_backward=True)
def hooks_on_results(side: Side) -> Any:
    """register_hook and retain_grad on the results see and change eager's gradients."""
    calls: list[Tensor] = []
    result = side()
    leaves = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor) and t.requires_grad]
    for leaf in leaves:
        if not leaf.is_leaf:
            leaf.retain_grad()
            leaf.register_hook(lambda g: calls.append(g.clone()) or g * 0.5)
    side.lossy(result).backward()
    return sorted(calls, key=lambda g: (g.numel(), float(g.sum()))), [leaf.grad for leaf in leaves]


@check(17, the("convolution", "u-net", "experts"))
def hooks_on_inputs(trial: Trial) -> None:
    """register_hook on an input that asks for a gradient sees eager's gradient once."""
    arguments = trial.subject.arguments()
    arguments.args[0].requires_grad_(True)

    def script(side: Side) -> Any:
        calls: list[Tensor] = []
        handle = side.arguments.args[0].register_hook(lambda g: calls.append(g.clone()))
        side.loss().backward()
        handle.remove()
        return calls

    trial.same(trial.fit(trial.subject.make(), arguments), script)


@check_script(17, every())
def hooks_on_the_graph_of_a_result(side: Side) -> Any:
    """A hook on the result's grad_fn is called once in backward."""
    calls: list[int] = []
    loss = side.loss()
    assert loss.grad_fn is not None
    loss.grad_fn.register_hook(lambda *given: calls.append(len(given)))
    loss.backward()
    return calls


# ---------------------------------------------------------------------- values changed, globals, torch's own


def _halves(module: nn.Module, args: Any, result: Any) -> Any:
    return result * 0.5


@check_script(17, _MODELS, refusable=True)
def a_hook_that_changes_a_layer_s_result(side: Side) -> Any:
    """A forward hook on a layer that returns another result, after planning: honoured, or refused."""
    handle = _child(side.module).register_forward_hook(_halves)
    seen = train("SGD", 2)(side)
    handle.remove()
    return seen


def _global_hook(
    name: str, register: Callable[[Callable[..., None]], Any], models: tuple[str, ...] = _MODELS
) -> None:
    def run(trial: Trial) -> None:
        def script(side: Side) -> Any:
            calls: list[Any] = []
            handle = register(_recorder(calls, "hook"))
            try:
                seen = train("SGD", 1)(side)
            finally:
                handle.remove()
            return seen, len(calls), calls

        _named(lambda: trial.same(trial.pair(), script))

    check(
        17,
        models,
        name=name,
        refusable=True,
        promise="A hook on every module of the process: the same calls, or a refusal.",
    )(run)


_global_hook("global forward hook", lambda hook: module_hooks.register_module_forward_hook(hook))
_global_hook("global forward pre-hook", lambda hook: module_hooks.register_module_forward_pre_hook(hook))
_global_hook(
    "global full backward hook",
    lambda hook: module_hooks.register_module_full_backward_hook(hook),
    the("transformer"),
)


@check_script(17, _MODELS, refusable=True)
def saved_tensors_hooks(side: Side) -> Any:
    """Within saved_tensors_hooks (such as save_on_cpu) the numbers are eager's, or the step is refused."""
    with torch.autograd.graph.save_on_cpu():
        loss = side.loss()
    loss.backward()
    return loss.detach()


@check_script(17, _MODELS)
def hooks_on_state(side: Side) -> Any:
    """state_dict and load_state_dict hooks are called as in the original."""
    calls: list[Any] = []
    module = side.module
    module.register_state_dict_post_hook(lambda m, state, prefix, local: calls.append(("saved", prefix)))
    module.register_load_state_dict_pre_hook(lambda *given: calls.append(("loads", given[2])))
    module.register_load_state_dict_post_hook(lambda m, keys: calls.append("loaded"))
    module.load_state_dict(module.state_dict())
    return calls, train("SGD", 1)(side)


def _small(part: nn.Module) -> tuple[nn.Module, Arguments]:
    def forward(m: Any, x: Tensor) -> Tensor:
        return torch.sigmoid(m.part(torch.tanh(x)))

    return Calls(forward, part=part), Arguments((torch.randn(8, 4),))


def _pruned(part: nn.Module) -> nn.Module:
    """The weight that pruning leaves behind has no graph, so that the module can be copied."""
    with torch.no_grad():
        return prune.l1_unstructured(part, "weight", 0.3)


_TORCH_S: dict[str, Callable[[], nn.Module]] = {
    "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 6)),
    "spectral_norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 6)),
    "orthogonal": lambda: nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)),
    "spectral_norm with hooks": lambda: nn.utils.spectral_norm(nn.Linear(4, 6)),
    "pruning": lambda: _pruned(nn.Linear(4, 6)),
}
for _name, _part in _TORCH_S.items():
    trains_own(17, f"torch's {_name}", lambda part=_part: _small(part()), refusable=True)


@check(17, refusable=True)
def pruned_after_planning(trial: Trial) -> None:
    """torch.nn.utils.prune after planning: the pruned weight trains, or the next step is refused."""

    def script(side: Side) -> Any:
        before = train("SGD", 1)(side)
        prune.l1_unstructured(side.module.part, "weight", 0.5)
        side.mark()
        optimizer = torch.optim.SGD(side.module.parameters(), lr=0.05)
        return before, [one_step(side, optimizer) for _ in range(2)]

    module, arguments = _small(nn.Linear(4, 6))
    trial.same(trial.fit(module, arguments), script)


@check(17, refusable=True)
def parametrized_after_planning(trial: Trial) -> None:
    """weight_norm after planning: the new parameters train, or the next step is refused."""

    def script(side: Side) -> Any:
        before = train("SGD", 1)(side)
        nn.utils.parametrizations.weight_norm(side.module.part)
        side.mark()
        optimizer = torch.optim.SGD(side.module.parameters(), lr=0.05)
        return before, [one_step(side, optimizer) for _ in range(2)]

    module, arguments = _small(nn.Linear(4, 6))
    trial.same(trial.fit(module, arguments), script)


@check_script(17, _MODELS)
def a_hook_that_changes_the_model_s_result(side: Side) -> Any:
    """A forward hook on the model itself that returns another result: it trains as in eager."""
    handle = side.module.register_forward_hook(_halves)
    seen = train("SGD", 2)(side)
    handle.remove()
    return seen
