"""An `nn.Module` that runs a schedule in one autograd node and shares the parameters of the user's module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from ...ir import THROUGH_DYNAMO, InputRole, IrcError, Location, Plan, Signature
from .assignments import Assigned
from .beside_plan import as_they_are
from .compiled_plan import CompiledPlan
from .deliver import deliver, deliver_leaf
from .guards.module_state import CALL
from .hooks import refuse_hooks
from .offload import TierConfig, Traffic
from .original import FITTED, ORIGINAL, unfitted
from .persistence import Persistent, fitted_class
from .plan_cache import PlanCache, PlannedCall
from .plan_cache_state import PlanCacheState
from .planned_forward import forward_key, rebound, replacement
from .program import Program
from .refuse_wrappers import refuse_shards
from .step import run_step

__all__ = ["bind", "bind_program"]


def bind_program(
    module: nn.Module,
    program: Program,
    signature: Signature,
    plan: Plan | None = None,
    optimizers: Mapping[str, Optimizer] | None = None,
    tiers: Sequence[TierConfig] = (),
) -> nn.Module:
    """Binds one program to a module; other calls than its own are refused.

    Args:
        module: The module that was captured.
        program: The compiled schedule.
        signature: Its calling convention.
        plan: Its certificate.
        optimizers: The optimizer of each parameter alone, by its name, if the program applies gradients.
        tiers: The configs of the tiers that the program copies to, one for each name.

    Raises:
        TierError: IRC575 or IRC576 for a tier that is not made for the plan's tensors, or not given.
        UnsupportedError: IRC505 for hooks on submodules; IRC509 and IRC510 for what stands in the way of
            releasing gradients.
    """
    compiled = CompiledPlan(program, signature, plan, forward=forward_key(replacement(unfitted(module))))
    plans_eval = not dict(signature.modes)[""]
    state = PlanCacheState(None, None, 1, plans_eval, (compiled,), plan, optimizers or {}, tiers=tuple(tiers))
    fitted, plans = bind(module, state)
    plans.check()
    return fitted


def bind(module: nn.Module, state: PlanCacheState) -> tuple[nn.Module, PlanCache]:
    """Binds a cache of plans to a module: makes one that trains by them, and is in every other way `module`.

    It is of a subclass of the module's class and shares its parameters, buffers, submodules and hooks.
    With gradients enabled and in training it runs the program of the call, which is compiled if the cache
    misses it; in eval() or under no_grad it runs the original forward. The certificate of the first plan is
    its attribute `irc_plan`, and `plan` if the module has none of its own.

    Args:
        module: The module that trains.
        state: The cache, which may be empty.

    Returns:
        The module, and its cache.

    Raises:
        UnsupportedError: IRC505 for hooks on submodules.
    """
    module = unfitted(module)
    refuse_hooks(module)
    fitted = object.__new__(fitted_class(_Fitted, module))
    fitted.__dict__.update({ORIGINAL: module, **vars(module)})
    fitted.__dict__.pop(CALL, None)  # it calls the module, not the plan
    if (forward := replacement(module)) is not None:
        fitted.__dict__["forward"] = rebound(forward, module, fitted)
    plans = fitted.__dict__[FITTED] = PlanCache(state, fitted)
    return fitted, plans


class _Fitted(Persistent):
    """Runs a program if one applies, else the original forward."""

    @property
    def irc_plan(self) -> Plan | None:
        """The plan for the example arguments, with the proof of how good it is."""
        return self.__dict__[FITTED].example_plan

    @property
    def irc_plans(self) -> tuple[PlannedCall, ...]:
        """The plans that are kept, each with the call that it was made for; the last used one first."""
        return self.__dict__[FITTED].calls

    @property
    def irc_optimizers(self) -> dict[str, Optimizer]:
        """The optimizers that take their steps within backward, by the name of their parameter."""
        plans: PlanCache = self.__dict__[FITTED]
        return dict(plans.in_backward.optimizers)

    @property
    def irc_written(self) -> tuple[Tensor, ...]:
        """The parameters that the forward itself writes."""
        plans: PlanCache = self.__dict__[FITTED]
        programs = (compiled.program for compiled in plans.compiled_plans)
        written = dict.fromkeys(program.statics[k] for program in programs for k in program.written)
        return tuple(self.get_parameter(i.target) for i in written if i.role is InputRole.PARAMETER)

    @property
    def irc_traffic(self) -> dict[str, Traffic]:
        """The bytes copied to each tier and back so far, and the seconds that computing waited for them."""
        return self.__dict__[FITTED].tiers.traffic

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.irc_run(None, args, kwargs)

    def irc_run(self, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a forward by its plan, or as it is if no plan applies.

        Args:
            forward: The forward that the module has itself; None for that of its class.
            args: Its arguments.
            kwargs: Its keyword arguments.
        """
        if torch.compiler.is_dynamo_compiling():  # of a miss, Dynamo would compile the compiler
            run: Any = torch.compiler.disable(_run_apart)
            return run(self, args, kwargs)
        plans: PlanCache | None = self.__dict__.get(FITTED)
        if plans is None:  # somebody called the class for another module
            return super().forward(*args, **kwargs) if forward is None else forward(*args, **kwargs)
        if torch.is_grad_enabled() and plans.apply_to(self):
            found = plans.find(self, args, kwargs, forward)
            if found is not None:
                compiled, inputs = found
                program, signature = compiled.program, compiled.signature
                for index in signature.switched:
                    if program.statics[index].requires_grad:
                        inputs[index].requires_grad_()
                    else:
                        inputs[index].detach_()
                in_backward = plans.in_backward if program.released else None
                if program.copies.has_offloaded:
                    refuse_shards(type(self))
                assigned = Assigned(self, signature.assignments) if signature.assignments else None
                outputs = run_step(
                    program,
                    inputs,
                    in_backward,
                    plans.live_forwards,
                    signature.unused,
                    signature.reaching_hooks,
                    plans.tiers,
                    compiled.reason,
                )
                _check_branches(signature, inputs, outputs)
                return _deliver(signature, inputs, outputs, assigned)
        traced = plans.stand_in()  # what the forward reads and changes there is seen
        if traced is not None:
            if forward is None:
                return type(traced).forward(traced, *args, **kwargs)
            return rebound(forward, self, traced)(*args, **kwargs)
        with as_they_are():
            return super().forward(*args, **kwargs) if forward is None else forward(*args, **kwargs)


def _run_apart(fitted: _Fitted, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs the forward that the module has now: Dynamo does not look again whether it has got its own."""
    return fitted.irc_run(replacement(fitted), args, kwargs)


def _check_branches(signature: Signature, inputs: list[Tensor], outputs: tuple[Tensor, ...]) -> None:
    """Refuses a step in which the module's Python code would see other values than the plan was made for.

    Raises:
        IrcError: IRC347. Buffers that the forward writes are written by then.
    """
    for branch in signature.branches:
        tensor: Tensor = deliver_leaf(branch.delivery, inputs, outputs)
        found = getattr(tensor, branch.read)()
        if found != branch.value and (found == found or branch.value == branch.value):  # two NaN are the same
            raise IrcError(
                "IRC347",
                f"the model's code reads {found}; it read {branch.value} from the example arguments: "
                "this step takes another branch than the plan, or the model raises there",
                at=Location(source=branch.where),
                help="train such batches with the original model, which raises if they are not valid; or "
                f"{THROUGH_DYNAMO}, which leaves the branch to Python",
            )


def _deliver(
    signature: Signature, inputs: list[Tensor], outputs: tuple[Tensor, ...], assigned: Assigned | None
) -> Any:
    tree: Any = signature.out_tree
    result: Any = pytree.tree_unflatten(deliver(signature.deliveries, inputs, outputs), tree)
    if assigned is None:
        return result
    result, values = result if signature.delivers_assigned else (result, ())
    assigned.assign(values)
    return result
