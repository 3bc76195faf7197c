"""The plan cache of a fitted module: one plan for each kind of call; the least recently used is given up."""

# torch tells of its dispatch modes through no other door.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ...ir import BudgetError, IrcError, Plan, UnsupportedError, UsageError, format_bytes
from ...torch_support.autocast import autocast_state
from ...torch_support.pytree import flatten_arguments
from ...torch_support.without_data import lacks_data
from .beside_plan import BesidePlan
from .cache_entry import CacheEntry, Explain
from .compiled_plan import Compilation, CompiledPlan, ReservedMemory, VariedCall
from .constants import constants_of, fits_beside, sharing, storage_bytes
from .guards.call_key import CallKey
from .guards.dynamo_call import TraceAnswers
from .guards.free_numbers import NO_NUMBERS, FreeNumbers, free_numbers
from .guards.guard_failure import FORWARD, PAD, RANGE, GuardFailure, part_failure
from .guards.module_state import ModuleState
from .guards.settings import is_same
from .hooks import refuse_hooks_of
from .live_forwards import LiveForwards
from .offload import Tiers
from .optimizer_hooks import guard_optimizer_calls
from .optimizer_in_backward import OptimizersInBackward, check_deliveries, check_parameters
from .original import ORIGINAL, Original, unfitted_with
from .plan_cache_state import PlanCacheState
from .planned_forward import forward_key, replacement, watched
from .planning_locks import is_tracing, parameters_lock, planning
from .refuse_transforms import refuse_transforms
from .refuse_wrappers import (
    refuse_cached_parametrizations,
    refuse_subclass,
    refuse_subclasses,
    refuse_without_data,
)
from .varied_call import varied_call

__all__ = ["PlanCache", "PlannedCall"]

_log = logging.getLogger("irc")

_IN_A_ROW = 3
"""The number of plans in a row for one argument after which a warning says so."""


_NESTINGS = 64
"""The number of nestings of arguments for which it is remembered which numbers are looked at."""


class PlannedCall(NamedTuple):
    """A plan, with the call that it was made for in words."""

    call: str
    plan: Plan | None

    @property
    def peak_bytes(self) -> int | None:
        """The predicted peak of the plan's step, in bytes; None without a plan."""
        return None if self.plan is None else self.plan.peak_bytes

    def __repr__(self) -> str:
        peak = "" if self.peak_bytes is None else f": {format_bytes(self.peak_bytes)}"
        return f"<plan for ({self.call}){peak}>"


class PlanCache:
    """The plans of a fitted module, by which it trains.

    Plans hold no parameter, buffer or input. What they hold on the device is constants that the model's code
    writes down; equal ones are shared.

    Args:
        state: The plans, and the compiler of other calls.
        root: The module whose parameters it trains.
    """

    def __init__(self, state: PlanCacheState, root: nn.Module) -> None:
        self.first_plan, self._plans_eval = state.first_plan, state.plans_eval
        self._compile, self._request, self.limit = state.compile, state.request, state.limit
        self.in_backward = OptimizersInBackward(state.optimizers)
        self.live_forwards = LiveForwards()
        self._beside = BesidePlan()
        self.tiers = Tiers(state.tiers)
        self.reserved = dict(state.reserved)
        self._stand_in: nn.Module | None = None
        """The module that is traced in place of the root while a call of it is planned."""
        self._has_range = getattr(state.request, "dynamic", None) is not None
        """Whether a range of sizes was asked for."""
        self._latest_entry: CacheEntry | None = None
        """The entry that was planned last."""
        self._deciding_numbers: list[tuple[Any, frozenset[int]]] = []
        """The numbers among the arguments that may decide something, by the arguments' nesting."""
        parameters = tuple(root.parameters())
        self._lacks_data = bool(parameters) and all(map(lacks_data, parameters))
        """Whether it was planned without weights: no step runs before they are there."""
        self._changing, self._plans_in_a_row = "", 0
        """The argument or attribute that asked for it, and for how many plans in a row."""
        self._told_to_change: set[str] = set()
        """The arguments and attributes of which it was said that they ask for plan after plan."""
        with parameters_lock:
            module_state = ModuleState(root, _ignored(state.compiled_plans, root))
            planned = (
                replace(compiled, state=compiled.state or module_state.state)
                for compiled in state.compiled_plans
            )
            self._entries = tuple(CacheEntry(each.with_attribute_paths(root), root) for each in planned)
            """The plans, the most recently used one first."""
            self._module_state = self._known(module_state)
        for entry in self._entries:
            self._guard(entry)
        if self._entries:
            self._watch(root, module_state)

    def state(self, root: nn.Module) -> PlanCacheState:
        """Returns the plans apart from the module, without those for submodules that it no longer has."""
        kept: tuple[CompiledPlan, ...] = ()
        with parameters_lock:
            if self._module_state.changed_part() is None:
                state = ModuleState(root).state
                kept = tuple(
                    replace(compiled, state=() if compiled.is_for(state) else compiled.state)
                    for compiled in self.compiled_plans
                )
        return PlanCacheState(
            self._compile,
            self._request,
            self.limit,
            self._plans_eval,
            kept,
            self.first_plan,
            self.in_backward.optimizers,
            self.reserved,
            self.tiers.configs,
        )

    @property
    def compiled_plans(self) -> tuple[CompiledPlan, ...]:
        """All plans, the most recently used one first."""
        return tuple(entry.compiled for entry in self._entries)

    @property
    def calls(self) -> tuple[PlannedCall, ...]:
        """The calls that there are plans for, the most recently used one first."""
        return tuple(PlannedCall(compiled.reason, compiled.noticing_plan) for compiled in self.compiled_plans)

    @property
    def example_plan(self) -> Plan | None:
        """The plan of the example arguments, with the roundings that its steps showed."""
        plans = (compiled for compiled in self.compiled_plans if compiled.plan is self.first_plan)
        compiled = next(plans, None)
        return self.first_plan if compiled is None else compiled.noticing_plan

    def check(self) -> None:
        """Makes sure that nobody else waits for gradients that are released, and that copies have a place.

        Raises:
            TierError: IRC575 or IRC576 for a tier that is not made for a plan's tensors, or not given.
            UnsupportedError: IRC509 or IRC510 for what stands in the way of releasing gradients.
        """
        for entry in self._entries:
            self._check(entry)

    def apply_to(self, root: nn.Module) -> bool:
        """Whether a call with gradients enabled is a step of training.

        It is not in eval(), unless the first plan was made for it, and while a module around it is traced.
        """
        return (root.training or self._plans_eval) and not is_tracing()

    def stand_in(self) -> nn.Module | None:
        """Returns the module that this thread traces in place of the fitted one; None if it does not."""
        return self._stand_in if is_tracing() else None

    def find(
        self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], forward: Any = None
    ) -> tuple[CompiledPlan, list[Tensor]] | None:
        """Returns the plan for a call and the inputs of its program; plans now if there is none.

        Args:
            root: The fitted module.
            args: The positional arguments.
            kwargs: The keyword arguments.
            forward: The forward that the module has itself; None for that of its class.

        Returns:
            None if nothing asks for a gradient.

        Raises:
            IrcError: IRC501, IRC502, IRC503 or IRC507 for another call than planned, if that one is refused.
            BudgetError: IRC520 when no schedule for this call fits into the budget.
            UsageError: IRC521 when what the call is made of changes while it is planned; IRC527 if the
                weights are still missing; IRC530 if the class of the module was changed.
            UnsupportedError: IRC505, IRC532 and IRC534 for hooks and wrappers of submodules; IRC538 within
                `parametrize.cached()`; IRC523 within a dispatch mode; IRC531 for tensors of
                other classes; IRC533 within a transform.
            Exception: The one that the model's forward raises, as in eager.
        """
        if kwargs:
            kwargs = dict(sorted(kwargs.items()))  # as at capture: their order makes no difference
        leaves, tree = flatten_arguments((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if self._lacks_data:
            refuse_without_data(root, tensors)
            self._lacks_data = False
        for index, tensor in enumerate(tensors):
            refuse_subclass(tensor, "input", str(index))
        refuse_transforms(chain(tensors, root.parameters()))
        with parameters_lock:
            state, key = self._current(root), forward_key(forward)
            call = CallKey(root, args, kwargs, leaves, tree, tensors, state, autocast_state(), key)
            binding = self._hit(call)
        if callable(binding):
            if self._request is not None and not call.trains():
                return None
            with planning:
                free, answers = self._free_numbers(root, call, forward)
                with parameters_lock:
                    self._widen(root, call, free.unread, answers)
                    binding = self._hit(call)  # another thread may have planned it by now
                if callable(binding):
                    failure = binding()
                    if self._request is None or not failure.is_plannable:
                        raise failure.error()
                    _refuse_modes(failure)
                    refuse_subclasses(root, leaves)
                    call = self._with_all_settings(root, call)
                    binding = self._plan(root, call, forward, failure, free, answers)
        entry, inputs = binding
        return entry.compiled_for(inputs), inputs

    def warm(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Compilation:
        """Plans the example's call, which misses an empty cache as any other call does.

        Raises:
            IrcError: As the compiler raises it; the module is as it was.
            TierError: IRC575 or IRC576 for a tier that is not made for the plan's tensors, or not given.
            UnsupportedError: IRC509 and IRC510 for what stands in the way of releasing gradients.
        """
        with planning:
            compilation = self._compiled(root, args, kwargs, replacement(root))
            with parameters_lock:
                now = self._current(root)
                plans = (*compilation.others, compilation.compiled)
                entries = [CacheEntry(replace(each, state=now.state), root) for each in plans]
                self._adopt(entries[-1], compilation.optimizers)
                for entry in entries:
                    self._add(entry)
            self.first_plan = compilation.compiled.plan
            self._request = compilation.request if self.limit > 1 else None
            self._watch(root, now)
        return compilation

    # ------------------------------------------------------------------ looking up

    def _current(self, root: nn.Module) -> ModuleState:
        """Returns the modules as they are now; gives up plans for other modules."""
        part = self._module_state.changed_part()
        if part is not None:
            if self._request is None:
                raise part_failure(part).error()
            self._entries, self._module_state = (), ModuleState(root)
        elif not self._module_state.has_same_state(root):
            self._module_state = self._known(ModuleState(root, _ignored(self.compiled_plans, root)))
        refuse_hooks_of(root, self._module_state.names[1:], self._module_state.submodules)
        self._module_state.hooks.refuse_uncompared()
        refuse_cached_parametrizations(root)
        return self._module_state

    def _known(self, module_state: ModuleState) -> ModuleState:
        """Replaces the state by an equal one of a plan, so that the next comparison is by identity."""
        states = (entry.compiled.state for entry in self._entries)
        module_state.state = next(
            (state for state in states if is_same(state, module_state.state)), module_state.state
        )
        return module_state

    def _with_all_settings(self, root: nn.Module, call: CallKey) -> CallKey:
        """Returns a call with the settings that no plan looks at so far: a new one may."""
        if not call.module_state.ignored:
            return call
        with parameters_lock:
            self._module_state = self._known(ModuleState(root))
        return replace(call, module_state=self._module_state)

    def _hit(self, call: CallKey) -> tuple[CacheEntry, list[Tensor]] | Explain:
        """Returns the plan for a call with its inputs, or tells how it differs from the nearest plan."""
        explains: dict[CacheEntry, Explain] = {}
        for place, entry in enumerate(self._entries):
            inputs = entry.bind(call)
            if not callable(inputs):
                if place:
                    self._entries = (entry, *(other for other in self._entries if other is not entry))
                return entry, inputs
            explains[entry] = inputs
        if not explains:
            return partial(part_failure, None)
        return explains[min(explains, key=lambda entry: entry.distance(call))]

    # ------------------------------------------------------------------ numbers that decide nothing

    def _free_numbers(
        self, root: nn.Module, call: CallKey, forward: Any
    ) -> tuple[FreeNumbers, TraceAnswers | None]:
        """Finds the numbers that decide nothing in a call, if a plan differs from it in numbers, or may.

        It holds for plans whose capture got the same answers. It is asked in vain at most once for each
        number, and each nesting of the arguments.
        """
        deciding = self._deciding(call)
        varying = ((entry, entry.varying_numbers(call) - deciding) for entry in self._entries)
        entry, asked = next(((entry, numbers) for entry, numbers in varying if numbers), (None, frozenset()))
        answers = None if entry is None else entry.compiled.answers
        if answers is None or _get_current_dispatch_mode_stack():
            return NO_NUMBERS, None
        started = time.perf_counter()
        free = free_numbers(unfitted_with(root, forward), call.leaves, call.tree, answers, asked)
        self._deciding(call, asked - free.places)
        if free.places:
            _log.info(
                "nothing is decided by %s: one plan is for all values (found in %.1f s)",
                ", ".join(call.name_of(place) for place in sorted(free.places)),
                time.perf_counter() - started,
            )
        return free, answers

    def _deciding(self, call: CallKey, more: frozenset[int] = frozenset()) -> frozenset[int]:
        """Returns the numbers that are asked for no more in calls that nest alike, and adds to them."""
        alike = (numbers for tree, numbers in self._deciding_numbers if tree == call.tree)
        known = next(alike, frozenset[int]())
        if more:
            others = [pair for pair in self._deciding_numbers if pair[0] != call.tree]
            self._deciding_numbers = [(call.tree, known | more), *others][:_NESTINGS]
        return known | more

    def _widen(
        self, root: nn.Module, call: CallKey, unread: frozenset[int], answers: TraceAnswers | None
    ) -> None:
        """Frees unread numbers in each plan that differs from a call in them alone."""
        entries = list(self._entries)
        for place, entry in enumerate(entries):
            free = entry.compiled.free
            if unread - free.places and entry.compiled.answers == answers and entry.varying_numbers(call):
                freed = replace(free, unread=free.unread | unread - free.places)
                wide = CacheEntry(replace(entry.compiled, free=freed), root)
                if not callable(wide.bind(call)):
                    entries[place] = wide
        self._entries = tuple(entries)

    # ------------------------------------------------------------------ planning

    def _compiled(
        self,
        root: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        forward: Any,
        varied: VariedCall | None = None,
    ) -> Compilation:
        """Compiles a call; its plan shares the constants of the plans beside it, and counts them."""
        assert self._compile is not None
        original = Original(root, forward)
        reserved = ReservedMemory(dict(self.reserved), storage_bytes(constants_of(self.compiled_plans)))
        self._stand_in = original.module
        try:
            with torch.inference_mode(False), watched(root, forward) as readings:
                compilation = self._compile(original.module, args, kwargs, self._request, reserved, varied)
        finally:
            self._stand_in = None
        for each in (root, vars(root)[ORIGINAL]):
            original.add_reads(readings.names_of(each))
        written = constants_of(self.compiled_plans, are_held=False)

        def completed(compiled: CompiledPlan) -> CompiledPlan:
            compiled = compiled.with_attribute_paths(root)
            return replace(
                compiled,
                program=sharing(compiled.program, written, compiled.attribute_paths or ()),
                forward=forward_key(forward),
                reads=original.reads(compiled.signature.assignments),
                constants_bytes=reserved.constants_bytes,
            )

        others = tuple(map(completed, compilation.others))
        return replace(compilation, compiled=completed(compilation.compiled), others=others)

    def _plan(
        self,
        root: nn.Module,
        call: CallKey,
        forward: Any,
        failure: GuardFailure,
        free: FreeNumbers,
        answers: TraceAnswers | None,
    ) -> tuple[CacheEntry, list[Tensor]]:
        """Plans a call that differs from those before; returns the plan and its inputs."""
        started = time.perf_counter()
        failure = self._advised(failure, call)
        varied = None if answers is None else varied_call(call, free, answers)
        try:
            compilation = self._compiled(root, call.args, call.kwargs, forward, varied)
        except BudgetError as error:
            raise BudgetError(
                "IRC520",
                f"this call is not the planned one ({failure.message}), and no schedule for it fits: "
                f"{error.message}",
                minimum_bytes=error.minimum_bytes,
                at=error.at,
                help=f"{failure.help}, and with a larger budget"
                if failure.changing == FORWARD
                else "call the module with less at once, or call irc.optimize with a larger budget",
            ) from error
        except IrcError as error:
            cause = error.__cause__ if error.code == "IRC349" else None
            (cause or error).add_note(f"while irc planned for another call: {failure.message}")
            if cause is not None:
                raise cause from None
            raise
        compiled, state = compilation.compiled, call.module_state.state
        plans = [replace(each, state=state) for each in (compiled, *compilation.others)]
        if compiled.answers == answers:
            self._deciding(call, free.places - free.unread - compiled.free.places)
            plans = [replace(each, free=replace(each.free, unread=free.unread)) for each in plans]
        if compiled.lengths is None and not compilation.others:
            plans = [replace(each, reason=failure.message) for each in plans]
        entries = [CacheEntry(each, root) for each in plans]
        with parameters_lock:
            entry, inputs = _entry_for(call, entries)
            self._adopt(entry, compilation.optimizers)
            is_next = self._entries[:1] == (self._latest_entry,)
            others = [each for each in reversed(entries) if each is not entry]
            given_up = [plan for each in (*others, entry) for plan in self._add(each)]
            self._request = compilation.request
            self._watch(root, call.module_state)
        self._tell(entry, failure, time.perf_counter() - started, given_up)
        self._count(entry, failure, is_next=is_next)
        return entry, inputs

    def _advised(self, failure: GuardFailure, call: CallKey) -> GuardFailure:
        """Returns a failure that names a range of sizes as the way out only where it is one.

        It is none if a range is planned already, or if calls differ in two sizes of the tensor.
        """
        if failure.advice != RANGE:
            return failure
        shapes = {
            tuple(shape) for entry in self._entries for shape in entry.shapes_of(failure.changing, call)
        }
        varying = [len(set(sizes)) > 1 for sizes in zip(*shapes, strict=True)]
        is_out = sum(varying) == 1 and not self._has_range
        return failure if is_out else replace(failure, advice=PAD)

    def _watch(self, root: nn.Module, state: ModuleState) -> None:
        """Names parts that train beside the plan from now on."""
        self._beside.watch(state.names, (vars(root)[ORIGINAL], *state.submodules))

    def _adopt(self, entry: CacheEntry, optimizers: Mapping[str, Optimizer]) -> None:
        """Lets a new plan release gradients, some of them to new optimizers."""
        self.in_backward.optimizers.update(optimizers)
        try:
            self._check(entry)
        except IrcError:
            for name in optimizers:
                del self.in_backward.optimizers[name]
            raise
        self._guard(entry)

    def _check(self, entry: CacheEntry) -> None:
        program = entry.compiled.program
        self.tiers.check(program.copies)
        if program.released:
            check_parameters(program, entry.parameter, self.in_backward)
            check_deliveries(program, entry.compiled.signature.deliveries)
        self.tiers.residents(program.copies, entry.parameter, self.in_backward.optimizers)

    def _guard(self, entry: CacheEntry) -> None:
        """Guards the functions that would come too late for gradients that are applied."""
        if self.in_backward.optimizers:
            released = entry.compiled.program.released.values()
            guard_optimizer_calls((entry.parameter(at.index) for at in released), self.in_backward)

    def _add(self, entry: CacheEntry) -> list[CompiledPlan]:
        """Makes a plan the most recently used one.

        Returns:
            The plans that are given up: those beyond the limit, and those whose peak does not count all that
            stays.
        """
        self.reserved |= entry.compiled.reserved
        kept = [entry]
        given_up: list[CompiledPlan] = []
        for other in self._entries:
            others = [each.compiled for each in (*kept, *self._entries)]
            counts_all = self.reserved.items() <= other.compiled.reserved.items()
            kinds = {_kind(each) for each in (*kept, other)}
            if len(kinds) <= self.limit and counts_all and fits_beside(other.compiled, others):
                kept.append(other)
            else:
                given_up.append(other.compiled)
        self._entries = tuple(kept)
        return given_up

    def _count(self, entry: CacheEntry, failure: GuardFailure, *, is_next: bool) -> None:
        """Warns once for each argument that has asked for plan after plan."""
        is_same = is_next and failure.changing == self._changing
        self._plans_in_a_row = self._plans_in_a_row + 1 if is_same else 1
        self._latest_entry, self._changing = entry, failure.changing
        is_new = bool(failure.changing) and failure.changing not in self._told_to_change
        if self._plans_in_a_row == _IN_A_ROW and is_new:
            self._told_to_change.add(failure.changing)
            _log.warning(
                "%s differed in %d plans in a row: if it differs in every step, every step is planned anew%s",
                failure.changing,
                _IN_A_ROW,
                f"; {failure.advice}" if failure.advice else "",
            )

    def _tell(
        self, entry: CacheEntry, failure: GuardFailure, seconds: float, given_up: Sequence[CompiledPlan]
    ) -> None:
        plan = entry.compiled.plan
        advice = f"; {failure.advice}" if failure.advice and not entry.compiled.free.places else ""
        peak = "" if plan is None else f", with a predicted peak of {format_bytes(plan.peak_bytes)}"
        _log.warning(
            "planned again in %.1f s%s (plan %d of at most %d): %s%s",
            seconds,
            peak,
            len({_kind(each) for each in self._entries}),
            self.limit,
            entry.compiled.reason,
            advice,
        )
        for compiled in given_up:
            if len({_kind(each) for each in self._entries}) < self.limit:
                _log.warning(
                    "gave up the plan for (%s): its peak does not count what the new plan keeps; calls like "
                    "that are planned once more",
                    compiled.reason,
                )
                continue
            _log.warning(
                "gave up the plan for (%s): if such calls come again, give irc.optimize plans=%d or more, "
                "pad to fewer shapes, or pass numbers that change as tensors",
                compiled.reason,
                self.limit + 1,
            )


def _entry_for(call: CallKey, entries: Sequence[CacheEntry]) -> tuple[CacheEntry, list[Tensor]]:
    """Returns the one of the plans made for a call that takes it, and its inputs: a range has several.

    Raises:
        UsageError: IRC521 if none takes it, as the call is not what it was when its planning began.
    """
    explains: list[Explain] = []
    for entry in entries:
        inputs = entry.bind(call)
        if not callable(inputs):
            return entry, inputs
        explains.append(inputs)
    cause = "the forward, a hook or a property of the model changes them while it is traced"
    if others := [each.name for each in threading.enumerate() if each is not threading.current_thread()]:
        cause = f"another thread ({', '.join(others)}) may change them meanwhile, or {cause}"
    raise UsageError(
        "IRC521",
        f"the call does not match the plan that was made for it: {explains[0]().message}",
        help=f"keep the module and its arguments as they are while a call is planned: {cause}",
    )


def _kind(entry: CacheEntry) -> int:
    """The calls that an entry is for, whatever their length: the plans of a family count as one."""
    lengths = entry.compiled.lengths
    return id(entry) if lengths is None else id(lengths.family)


def _ignored(plans: Sequence[CompiledPlan], root: nn.Module) -> dict[str, frozenset[str]]:
    """Returns the attributes that calls change and no plan looks at, by the paths of their submodules."""
    changed = {(each.module, each.name) for plan in plans for each in plan.signature.assignments}
    ignored: dict[str, frozenset[str]] = {}
    for index, (path, _) in enumerate(root.named_modules() if changed else ()):
        names = frozenset(name for module, name in changed if module == path)
        ignored[path] = names.difference(*(_looked_at(plan, index, path, names) for plan in plans))
    return ignored


def _looked_at(plan: CompiledPlan, index: int, path: str, names: frozenset[str]) -> frozenset[str]:
    """Returns those attributes of a submodule that a plan looks at before it changes them, or may."""
    own = frozenset(each.name for each in plan.signature.assignments if each.module == path)
    read = plan.names[index] if plan.names else None
    return (names if read is None else names & read) - own


def _refuse_modes(failure: GuardFailure) -> None:
    """Refuses to plan within a dispatch mode: it would be traced and measured with the operations.

    Raises:
        UnsupportedError: IRC523.
    """
    modes = [type(mode).__name__ for mode in _get_current_dispatch_mode_stack()]
    if modes:
        raise UnsupportedError(
            "IRC523",
            f"this call is not the planned one ({failure.message}), and no other is planned within "
            f"{modes[-1]}",
            help="call the module once in the same way outside of it",
        )
