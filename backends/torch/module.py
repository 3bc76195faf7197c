"""An `nn.Module` that runs a schedule in one autograd node and shares the parameters of the user's module."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from ...ir import Delivery, InputRole, IrcError, Location, Origin, Plan, Signature, Slot
from .call import (
    check_arguments,
    check_autocast,
    check_submodules,
    check_tensor,
    refuse_hooks,
    settings,
)
from .guards import guard
from .in_flight import InFlight
from .program import Program
from .release import Release, check_deliveries, check_parameters
from .step import run_step

__all__ = ["deliver_leaf", "fit"]


def fit(
    module: nn.Module,
    program: Program,
    signature: Signature,
    plan: Plan | None = None,
    optimizers: Mapping[str, Optimizer] | None = None,
) -> nn.Module:
    """A module that trains by `program` and is in every other way `module`.

    It is of a subclass of the module's class and shares its parameters, buffers, submodules and hooks.
    With gradients enabled and in the captured modes it runs the program; in eval() or under no_grad it
    runs the original forward.

    Args:
        module: What was captured.
        program: What its schedule compiled to.
        signature: How to call it.
        plan: The certificate, for the attribute `irc_plan`, and `plan` where the module has none of its own.
        optimizers: Where the program applies gradients: an optimizer of each parameter alone, by its name.

    Raises:
        UnsupportedError: IRC505 for hooks on submodules; IRC509 and IRC510 for what stands in the way of
            releasing gradients.
    """
    original = type(module)
    refuse_hooks(module)
    members: dict[str, Any] = {"__module__": original.__module__}
    if not hasattr(module, "plan"):
        members["plan"] = _Fitted.irc_plan
    fitted_type = type(f"Fitted{original.__name__}", (_Fitted, original), members)
    fitted = fitted_type.__new__(fitted_type)
    fitted.__dict__.update(module.__dict__)
    program = replace(program, unused=signature.unused)
    fitted.__dict__["_irc"] = _Binding.of(module, program, signature, plan, optimizers or {})
    return fitted


@dataclass
class _Binding:
    """Where a fitted module finds the program's inputs, and what takes its gradients."""

    program: Program
    signature: Signature
    plan: Plan | None
    release: Release | None
    in_flight: InFlight
    modules: list[nn.Module]
    settings: list[dict[str, object]]
    slots: list[tuple[dict[str, Tensor | None], str] | Slot | Tensor]

    @staticmethod
    def of(
        module: nn.Module,
        program: Program,
        signature: Signature,
        plan: Plan | None,
        optimizers: Mapping[str, Optimizer],
    ) -> _Binding:
        slots: list[tuple[dict[str, Tensor | None], str] | Slot | Tensor] = []
        for static in program.statics:
            match static.role:
                case InputRole.PARAMETER | InputRole.BUFFER:
                    path, _, name = static.target.rpartition(".")
                    owner = module.get_submodule(path)
                    held: Any = owner._parameters if static.role is InputRole.PARAMETER else owner._buffers
                    slots.append((held, name))
                case InputRole.INPUT:
                    slots.append(Slot(int(static.target)))
                case _:
                    slots.append(program.constants[static.target])
        modules = list(module.modules())[1:]
        release = Release(optimizers) if program.released else None
        in_flight = InFlight(program.forwards_in_flight)
        planned = [settings(m) for m in modules]
        binding = _Binding(program, signature, plan, release, in_flight, modules, planned, slots)
        binding.take_over()
        return binding

    def take_over(self) -> None:
        """Makes sure that nobody else waits for gradients that are released."""
        if self.release is None:
            return
        check_parameters(self.program, self.held, self.release)
        check_deliveries(self.program, self.signature.deliveries)
        if self.release.optimizers:
            guard((self.held(released.index) for released in self.program.released.values()), self.release)

    def held(self, index: int) -> Tensor:
        """The parameter that the program's input `index` binds."""
        slot = self.slots[index]
        assert isinstance(slot, tuple), "only parameters are looked for"
        found = slot[0][slot[1]]
        assert found is not None
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> _Binding:
        slots = [
            (memo.get(id(slot[0]), slot[0]), slot[1]) if isinstance(slot, tuple) else slot
            for slot in self.slots
        ]
        modules = [memo.get(id(child), child) for child in self.modules]
        release = copy.deepcopy(self.release, memo)
        in_flight = copy.deepcopy(self.in_flight)
        copied = _Binding(
            self.program, self.signature, self.plan, release, in_flight, modules, self.settings, slots
        )
        copied.take_over()
        return copied

    def tensor(self, index: int, leaves: list[Any]) -> Tensor:
        """The tensor that the program's input `index` binds in this call."""
        slot = self.slots[index]
        match slot:
            case Slot():
                tensor = leaves[slot.index]
            case Tensor():
                tensor = slot
            case (held, name):
                tensor = held[name]
        assert isinstance(tensor, Tensor)
        check_tensor(tensor, self.program.statics[index])
        return tensor


class _Fitted(nn.Module):
    """Runs the program where it applies, and the original forward elsewhere."""

    @property
    def irc_plan(self) -> Plan | None:
        """What was chosen, and the proof of how good it is."""
        return self.__dict__["_irc"].plan

    @property
    def irc_optimizers(self) -> dict[str, Optimizer]:
        """The optimizers that take their steps within backward, by the name of their parameter."""
        release: Release | None = self.__dict__["_irc"].release
        return dict(release.optimizers) if release is not None else {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        binding: _Binding = self.__dict__["_irc"]
        if not torch.is_grad_enabled() or not self._is_planned(binding.signature):
            return super().forward(*args, **kwargs)
        leaves, tree = pytree.tree_flatten((args, kwargs))
        check_arguments(binding.signature, leaves, tree)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        inputs = [binding.tensor(index, tensors) for index in range(len(binding.slots))]
        outputs = run_step(binding.program, inputs, binding.release, binding.in_flight)
        _check_branches(binding.signature, inputs, outputs)
        return _deliver(binding.signature, inputs, outputs)

    def _is_planned(self, signature: Signature) -> bool:
        modes = dict(signature.modes)
        if modes[""] != self.training and not self.training:
            return False
        changed = [
            name for name, child in self.named_modules() if child.training != modes.get(name, child.training)
        ]
        if not changed:
            refuse_hooks(self)
            check_autocast(signature)
            binding: _Binding = self.__dict__["_irc"]
            check_submodules(self, binding.modules, binding.settings)
            return True
        if not self.training:
            return False
        raise IrcError(
            "IRC502",
            f"submodule {changed[0] or '(root)'!r} is in {'eval' if modes[changed[0]] else 'train'}() mode; "
            f"the plan was made for the other ({len(changed)} submodules differ)",
            help="call irc.optimize with the modules in the modes that you train in",
        )


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
                f"the model's code reads {found} where it read {branch.value} from the example arguments: "
                "this step takes another branch than the plan",
                at=Location(source=branch.where),
                help="plan without same_branches to see what can be done about this line, or use the "
                "original model for such batches",
            )


def _deliver(signature: Signature, inputs: list[Tensor], outputs: tuple[Tensor, ...]) -> Any:
    tree: Any = signature.out_tree
    return pytree.tree_unflatten([deliver_leaf(d, inputs, outputs) for d in signature.deliveries], tree)


def deliver_leaf(delivery: Delivery, inputs: list[Tensor], outputs: tuple[Tensor, ...]) -> Any:
    """One leaf of the user's result, from the program's static inputs and forward outputs."""
    match delivery.origin:
        case Origin.CONSTANT:
            return delivery.constant
        case Origin.COMPUTED:
            return outputs[delivery.index]
        case Origin.INPUT | Origin.OUTPUT:
            base = (inputs if delivery.origin is Origin.INPUT else outputs)[delivery.index]
            return base if delivery.view is None else base.as_strided(*delivery.view)
