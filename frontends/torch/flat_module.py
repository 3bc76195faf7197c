"""A module as what AOTAutograd traces: a function from tensors to tensors, with what a run of it shows."""

# The stack of torch's modes has no public name.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch._C import _len_torch_function_stack
from torch.overrides import _pop_mode_temporarily
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ...ir import Assignment, Delivery, Sharing, UnsupportedError
from .assignments import unkept_attributes
from .branches import Branches
from .fixups.packed_weights import PackedParts
from .fixups.tensor_hooks import Hooked, keeps_zeros, refuse_hooks_that_stay
from .fixups.tied_parameters import TiedParameters
from .global_settings import GlobalSettings
from .gradients_apart import Seeing, reaching_hooks, refuse_gradients_apart
from .known_values import known_values
from .length_conditions import SymbolicLength
from .loss import Loss, has_own_loss, loss_gradients, own_loss
from .results import flattened, refusing_writes
from .sharing import own_output, sharings
from .state import State
from .tensor_attributes import TensorAttributes, refuse_attributes_of_results
from .tensor_writes import TensorWrites
from .tracer import TRACE_MODES
from .view_gradients import ViewGradients

__all__ = ["FlatModule", "LossFails"]


class FlatModule(nn.Module):
    """Calls a module with its tensor leaves alone, and returns the tensor leaves of its result."""

    def __init__(
        self,
        module: nn.Module,
        tree: pytree.TreeSpec,
        leaves: list[Any],
        loss: Loss | None,
        packed: PackedParts,
        *,
        stepwise: bool,
        time_limit: float,
    ) -> None:
        super().__init__()
        self.module = module
        self.packed = packed
        self.tree = tree
        self.state = State(module)
        self.leaves = [self.state.generators.leaf(leaf) for leaf in leaves]
        self.tensors = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
        """The tensors among the arguments."""
        self.attributes = TensorAttributes(module, self.tensors)
        self.tied = TiedParameters(module)
        self.result_leaves: list[Any] = []
        self.result_tree: pytree.TreeSpec | None = None
        self.assignments: tuple[Assignment, ...] = ()
        self.delivered: list[Any] = []
        """The leaves of the result, and of the values that attributes get."""
        self.delivered_tree: pytree.TreeSpec | None = None
        self.places: list[int] = []
        self.sharings: list[Sharing] = []
        """The way in which each distinct tensor that is delivered gets its gradient."""
        self.hooked: Hooked = []
        self.seeing: Seeing = {}
        self.apart: set[str] = set()
        self.reaching_hooks: set[frozenset[int]] = set()
        """For each gradient that a hook sees, the places of the tensors that it comes from."""
        self.losses = (loss,)  # in a tuple: a loss that is a module must not become a submodule
        self.gradients: Mapping[int, tuple[int, ...] | None] | None = {} if loss is None else None
        """As of `loss_gradients`; None until a loss that is known was asked."""
        self.layouts: dict[int, tuple[int, ...]] = {}
        """The strides of the gradients of outputs, if the loss is known."""
        self.branches: Branches | None = None
        self.without_gradients: list[str] = []
        self.stepwise = stepwise
        self.layers: dict[str, set[str]] = {}
        self.parts: set[str] = set()
        self.derivatives: set[str] = set()
        self.scripted: Collection[str] = ()
        """As of `scripted_parts`."""
        self.mode = TRACE_MODES[0]
        self.first_failure: UnsupportedError | None = None
        """The reason for which the module was not traced in the first mode."""
        self.time_limit = time_limit
        self.lengths: SymbolicLength | None = None

    def call(self, *tensors: Tensor) -> Any:
        """Returns the result of the module's forward; its hooks run around the planned forward."""
        given = iter(tensors)
        leaves = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.tree)
        refusing = refusing_writes((args, kwargs)), self.state.generators.one_run()
        with refusing[0], refusing[1], self.packed.standing_in(), self.attributes.shown(tensors):
            return self.module.forward(*args, **kwargs)

    def run(self, *tensors: Tensor) -> Any:
        """Returns what `call` does, and keeps the state of Python as it was."""
        branches = self.branches.replayed() if self.branches else contextlib.nullcontext()
        with (
            self.state.one_run(),
            branches,
            self.tied.as_one(),
            known_values(self.lengths),
            TensorWrites(self.parts),
            ViewGradients(),
            GlobalSettings(),
        ):
            return self.call(*tensors)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Runs the module; returns its distinct tensors, and those that branches read."""
        self.hooked.clear()
        self.seeing.clear()
        result = self.run(*tensors)
        refuse_hooks_that_stay(self.hooked, (*self.module.parameters(), *self.module.buffers()))
        self.result_leaves, self.result_tree = flattened(result)
        refuse_attributes_of_results(self.result_leaves)
        if self.losses == (None,):
            self.assume_loss(result)
        if self.gradients is None:
            self.ask_loss()
        self.take_assigned(result)
        found = [leaf for leaf in self.delivered if isinstance(leaf, Tensor)]
        if self.losses == (None,):
            self.apart = refuse_gradients_apart(self.seeing, found)
        unused = self.unused_places()
        used = {k: leaf for k, leaf in enumerate(found) if k not in unused}
        hooked = [tensor for tensor, hook in self.hooked if not keeps_zeros(tensor, hook)]
        self.reaching_hooks = reaching_hooks(used, hooked)
        inputs = (*tensors, *self.module.parameters(), *self.module.buffers())
        as_they_are = {id(t) for t in inputs}
        as_they_are |= set(map(id, used.values()))
        # a tensor that is returned twice is one output with one gradient, as in eager
        distinct = {id(leaf): leaf for leaf in found}
        order = {key: place for place, key in enumerate(distinct)}
        self.places = [order[id(leaf)] for leaf in found]
        layouts = ((self.places[k], strides) for k, strides in (self.gradients or {}).items())
        self.layouts.update((place, strides) for place, strides in layouts if strides is not None)
        read = [] if self.branches is None else self.branches.tensors
        self.sharings = sharings(distinct.values(), inputs, [tensor for tensor, _ in self.hooked])
        results = (leaf if key in as_they_are else leaf.detach() for key, leaf in distinct.items())
        outputs = (
            own_output(result) if sharing is Sharing.OWN else result
            for result, sharing in zip(results, self.sharings, strict=True)
        )
        return (*outputs, *read)

    def take_assigned(self, result: Any) -> None:
        """Adds the values that the forward left in attributes to its result.

        Raises:
            UnsupportedError: IRC338 for a value that a planned step could not make anew.
        """
        self.assignments = tuple(assignment for assignment, _ in self.state.assignments)
        self.delivered, self.delivered_tree = self.result_leaves, self.result_tree
        values = tuple(value for assignment, value in self.state.assignments if assignment.is_delivered)
        if values:
            try:
                self.delivered, self.delivered_tree = flattened((result, values))
            except UnsupportedError as error:
                paths = (f"{a.module}.{a.name}".strip(".") for a in self.assignments if a.is_delivered)
                raise unkept_attributes(list(paths)) from error

    def assigned_for_loss(self) -> list[Tensor]:
        """Returns the tensors in attributes that may be added to a loss."""
        assigned = self.delivered[len(self.result_leaves) :]
        return [leaf for leaf in assigned if isinstance(leaf, Tensor) and leaf.requires_grad]

    def unused_places(self) -> frozenset[int]:
        """Returns the places, among the tensors that are delivered, of those that the loss does not use.

        Nobody knows what is done with attributes. If the loss of the result is known, single numbers in them
        may be added to it, as auxiliary losses are, and larger tensors are there to be looked at.
        """
        assert self.gradients is not None
        tensors = [leaf for leaf in self.delivered if isinstance(leaf, Tensor)]
        returned = sum(isinstance(leaf, Tensor) for leaf in self.result_leaves)
        unused = {place for place, strides in self.gradients.items() if strides is None}
        if self.losses != (None,):
            places = range(returned, len(tensors))
            unused |= {k for k in places if tensors[k].requires_grad and tensors[k].numel() != 1}
        used = {id(leaf) for k, leaf in enumerate(tensors) if k not in unused}
        return frozenset(k for k in unused if id(tensors[k]) not in used)

    def with_sharing(self, deliveries: Sequence[Delivery]) -> list[Delivery]:
        """Marks the deliveries of the result's tensors that share memory in another way than plain views."""
        found = [deliveries[place] for place in self.places]
        marks = [self.sharings[place] for place in self.places]
        return [
            d if d.view is None and sharing is Sharing.DETACHED else replace(d, sharing=sharing)
            for d, sharing in zip(found, marks, strict=True)
        ]

    def assume_loss(self, result: Any) -> None:
        """Takes the loss of a result that has one, if nothing is known about the caller's."""
        if has_own_loss(result):
            self.losses, self.gradients = (own_loss,), None

    def ask_loss(self) -> None:
        """Finds the tensors of the result on which the loss does not depend, outside of the trace's modes.

        Raises:
            LossFails: The loss fails, perhaps because a trace is under way.
        """
        try:
            with _disable_current_modes(), _without_function_modes(), _WithoutWrites():
                self.ask_loss_alone()
        except Exception as error:
            raise LossFails from error

    def ask_loss_alone(self) -> None:
        """Does what `ask_loss` does, while nothing is traced."""
        (loss,) = self.losses
        assert loss is not None
        self.gradients = loss_gradients(loss, self.result_leaves, self.result_tree)


class _WithoutWrites(TorchDispatchMode):
    """Lets nothing be written: the parameters of a module that is traced are not its own."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable:
            raise RuntimeError(f"{func} writes while the module is traced")
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _without_function_modes() -> Generator[None]:
    with contextlib.ExitStack() as stack:
        for _ in range(_len_torch_function_stack()):
            stack.enter_context(_pop_mode_temporarily())
        yield


class LossFails(BaseException):
    """Ends a trace in the first run of the forward, after which the loss is asked again."""
