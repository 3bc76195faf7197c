"""A request: the options of a plan, and the one pipeline of passes that follows from them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, cast

import torch

from ..backends.torch import TierConfig, pack_signature, unpack_signature
from ..frontends.torch import Captured, Loss
from ..ir import Graph, Signature, UsageError
from ..passes import (
    Cost,
    FuseOperations,
    HoldForwards,
    LossGradientsInForward,
    Observer,
    OfferTiers,
    Pass,
    PassManager,
    PlanMemory,
    Program,
    ReleaseGradients,
    ReplayDraws,
    SplitConvolutions,
    TileRows,
    WriteInPlace,
)
from ..passes.costs.optimizer_costs import OptimizerFactory
from ..passes.costs.table import StepCost
from ..passes.remat.choice import GAP
from .lengths.axis import LengthAxis
from .tiers import measured_tiers, offer, tier_configs, what_moves

__all__ = ["INDUCTOR", "MEASURED", "SUMS", "Example", "Request", "cost_passes", "renamed", "renamed_costs"]

MEASURED = "measured"
"""The costs of a plan unless others are asked for: operations measured on the device of the model."""


Dynamic = (
    str | Mapping[str, Mapping[int, tuple[int, int]]] | Mapping[int, Mapping[int, tuple[int, int]]] | None
)
"""The sizes that vary: `"batch"`, `"sequence"`, or dimensions of arguments with their range."""

INDUCTOR = "inductor"
"""The compiler of kernels, torch's own."""

SUMS = "sums"
"""The value of `exact` that lets sums be taken in another order than the model's."""


_MOST_RUN_BYTES = 1 << 30
"""The most bytes of an operation that runs to be compared, where none runs to be measured."""


@dataclass(frozen=True)
class Example:
    """The call that the first plan was made for, as plans of other calls need it.

    Args:
        graph: The call, captured.
        signature: How it is called.
        program: Its schedule, if calls that differ from it in their batch alone take it over.
    """

    graph: Graph
    signature: Signature
    program: Program | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _example, (self.graph, pack_signature(self.signature), self.program)


def _example(graph: Graph, signature: Any, program: Program | None) -> Example:
    return Example(graph, unpack_signature(signature), program)


@dataclass(frozen=True)
class Request:
    """The options of a plan. Every way into the compiler makes one, with `of` or `of_passes`.

    Args:
        rewrites: Passes that change the graph before its operations have costs.
        cost: The pass that finds the costs.
        plan: The pass that chooses a schedule; its `budget` is the budget.
        tiers: The pass that offers tiers to copy to.
        release: The pass that lets gradients go within backward.
        loss: As in `irc.optimize`.
        specialize_branches: As in `irc.optimize`.
        plans: How many plans are kept; 1 refuses other calls than the example.
        dynamic: As in `irc.optimize`.
        exact: As in `irc.optimize`.
        compiler: As in `irc.optimize`.
        may_tile: Whether layers may be tiled; not if the user wrote the rewrites down.
        observers: Told of each pass of the first plan.
        example: The call of the first plan; None before there is one.
    """

    rewrites: tuple[Pass, ...]
    cost: Cost
    plan: PlanMemory
    tiers: OfferTiers | None = None
    release: ReleaseGradients | None = None
    loss: Loss | None = None
    specialize_branches: bool = False
    plans: int = 1
    dynamic: Dynamic | LengthAxis = None
    exact: bool | str = True
    compiler: str | None = None
    may_tile: bool = True
    observers: Sequence[Observer] = ()
    example: Example | None = None

    @staticmethod
    def of(
        budget: int | str,
        *,
        strategy: str = "auto",
        time_limit: float = 60.0,
        gap: float = GAP,
        costs: str = MEASURED,
        swap: str | Sequence[str] | None = None,
        accumulate_gradients: bool = False,
        optimizer: OptimizerFactory | None = None,
        forwards_in_flight: int = 1,
        **others: Any,
    ) -> Request:
        """Makes the request of a user's options, checked; see `irc.optimize`, whose options these are.

        Args:
            budget: As there.
            strategy: As there.
            time_limit: As there.
            gap: As there.
            costs: As there.
            swap: As there; None offers no tier.
            accumulate_gradients: As there.
            optimizer: As `optimizer_in_backward` there.
            forwards_in_flight: As there.
            **others: Fields of the request.

        Raises:
            UsageError: IRC401, IRC403, IRC406 to IRC410, IRC413 to IRC418, IRC423 to IRC429 or IRC565 for a
                malformed option.
        """
        *rewrites, cost = cost_passes(costs)
        assert isinstance(cost, Cost)
        tiers, offload = None, "none"
        if swap is not None:
            named, offload = what_moves(swap)
            tiers = offer(named, costs)
        plan = PlanMemory(budget, strategy, time_limit, offload, gap)
        hold = HoldForwards(forwards_in_flight)
        hold.check(applies=optimizer is not None)
        if forwards_in_flight > 1:
            rewrites.insert(0, hold)
        release = _release(accumulate_gradients, optimizer)
        request = Request(tuple(rewrites), cost, plan, tiers, release, **others)
        request.check()
        return request

    @staticmethod
    def of_passes(passes: Sequence[Pass], **others: Any) -> Request:
        """Makes the request of a pipeline that the user wrote down.

        Args:
            passes: Rewrites, `cost` (analytic costs without it), perhaps `offer-tiers`, and the pass that
                chooses a schedule, in this order.
            **others: Fields of the request.

        Raises:
            UsageError: IRC405 for a pipeline in another order, or without a choice; as of `of`.
        """
        found: dict[str, Any] = {}
        rewrites: list[Pass] = []
        for step in passes:
            role = next((role for role, kind in _ROLES.items() if isinstance(step, kind)), None)
            if role is None and not found:
                rewrites.append(step)
            elif role is None or any(later in found for later in list(_ROLES)[list(_ROLES).index(role) :]):
                raise UsageError(
                    "IRC405",
                    f"pass {step.name} comes too late in the pipeline",
                    help="write rewrites of the graph, release-gradients, cost, offer-tiers and the pass "
                    "that chooses a schedule, in this order",
                )
            else:
                found[role] = step
        if "plan" not in found:
            raise UsageError(
                "IRC405",
                "no pass of the pipeline chooses a schedule",
                help="add plan-memory{budget=...}",
            )
        found.setdefault("cost", Cost(profile="cpu"))
        request = Request(tuple(rewrites), **found, may_tile=False, **others)
        request.check()
        return request

    def check(self) -> None:
        """Refuses malformed options before a model is traced.

        Raises:
            UsageError: As of `of`.
        """
        loss, plans, dynamic = self.loss, self.plans, self.dynamic
        if loss is not None and not callable(loss):
            raise UsageError("IRC406", f"the loss is a {type(loss).__name__}, not a function of the result")
        if isinstance(cast(object, plans), bool) or not isinstance(cast(object, plans), int) or plans < 1:
            raise UsageError(
                "IRC406",
                f"plans is {plans!r}, not a number of plans",
                help="give 1 or more; 1 refuses other calls",
            )
        if dynamic not in (None, "batch") and not isinstance(dynamic, LengthAxis):
            self._check_lengths(LengthAxis.of(dynamic))
        if dynamic is not None and plans == 1:
            raise UsageError(
                "IRC406",
                "dynamic shapes need more than one plan",
                help="give plans=8, or leave dynamic out",
            )
        if self.exact is not True and self.exact != SUMS:
            raise UsageError(
                "IRC406",
                f"exact is {self.exact!r}",
                help=f'give exact="{SUMS}" to let sums be taken in another order, or leave it out',
            )
        self._check_compiler()
        for step in self.passes():
            check = getattr(step, "check", None)
            if check is not None:
                check()
        self.plan.check_tiers(has_tiers=self.tiers is not None)

    def _check_compiler(self) -> None:
        """Refuses a compiler that is not known, and what its plans have not.

        Raises:
            UsageError: IRC406.
        """
        if self.compiler is None:
            return
        if self.compiler != INDUCTOR:
            raise UsageError(
                "IRC406",
                f"there is no compiler {self.compiler!r}",
                help=f'give compiler="{INDUCTOR}", or leave it out',
            )
        if self.cost.measure is None:
            raise UsageError(
                "IRC406",
                "kernels of a compiler have no costs on a described machine",
                help='give costs="measured" or "thorough", or leave compiler out',
            )
        if self.dynamic not in (None, "batch"):
            raise UsageError(
                "IRC406",
                f"dynamic={self.dynamic!r} and compiler={self.compiler!r} exclude each other",
                help="leave one of them out: a kernel is compiled for the shapes of one call",
            )

    def _check_lengths(self, axis: LengthAxis) -> None:
        """Refuses what plans for a range of lengths have not.

        Raises:
            UsageError: IRC406.
        """
        others = {"swap=": self.tiers is not None, f'exact="{SUMS}"': self.exact == SUMS}
        others["specialize_branches=True"] = self.specialize_branches
        for option, is_given in others.items():
            if is_given:
                raise UsageError(
                    "IRC406",
                    f"dynamic={self.dynamic!r} and {option} exclude each other",
                    help="leave one of them out: plans for a range of lengths copy to no tier, have no "
                    "tiles, and take one way through the model",
                )

    # ------------------------------------------------------------------ the pipeline

    def passes(self) -> tuple[Pass, ...]:
        """The whole pipeline, in order."""
        return (*self.costing, *self.choosing)

    @property
    def preparing(self) -> tuple[Pass, ...]:
        """The part of the pipeline before costs."""
        return self.rewrites if self.release is None else (*self.rewrites, self.release)

    @property
    def costing(self) -> tuple[Pass, ...]:
        """The part of the pipeline that ends with the costs of a graph."""
        if self.fusing is None:
            return (*self.preparing, self.cost)
        return (*self.without_writes.preparing, self.fusing, *self.writing, self.cost)

    @property
    def writing(self) -> tuple[Pass, ...]:
        """The pass that writes in place, if there is one: rewrites that know no writes come before it."""
        return tuple(step for step in self.rewrites if isinstance(step, WriteInPlace))

    @property
    def without_writes(self) -> Request:
        """The request of a graph that later rewrites can read."""
        return replace(self, rewrites=tuple(step for step in self.rewrites if step not in self.writing))

    @property
    def bounded_cost(self) -> Cost:
        """The pass that finds the costs of a plan: amid training, what takes more than the budget never runs.

        The first plan is made before training, when nothing else is there: its operations run unless `cost`
        itself has a limit.
        """
        if self.example is None:
            return self.cost
        assert not isinstance(self.budget, str)
        return replace(self.cost, most_bytes=self.budget)

    @property
    def compares_kernels(self) -> bool:
        """Whether operations run to see which others give the same bits: not if a machine is described."""
        return any(isinstance(step, SplitConvolutions) and step.transpose for step in self.rewrites)

    def in_tiles(self, tiles: int) -> Iterator[Pass]:
        """Yields the passes that run layers in tiles, where their numbers may be off as the request says.

        Kernels round otherwise anyway: beside them, the gradients of a loss head are computed in forward.
        """
        if self.compiler is not None and self.exact == SUMS:
            yield LossGradientsInForward()
        most_bytes = self.bounded_cost.most_bytes
        if self.cost.measure is None:
            most_bytes = min(most_bytes or _MOST_RUN_BYTES, _MOST_RUN_BYTES)
        yield TileRows(tiles, exact=self.exact is True, compare=self.compares_kernels, most_bytes=most_bytes)

    @property
    def fusing(self) -> FuseOperations | None:
        """The pass that fuses operations for the compiler; None if there is none."""
        return (
            None
            if self.compiler is None
            else FuseOperations(overwrite=self.tiers is None, cost=self.bounded_cost)
        )

    @property
    def choosing(self) -> tuple[Pass, ...]:
        """The part of the pipeline that chooses a schedule."""
        return (self.plan,) if self.tiers is None else (self.tiers, self.plan)

    def without_times(self, program: Program) -> Request | None:
        """The request, for a program whose schedule does not depend on what operations take; else None."""
        plan = None if self.tiers is not None else self.plan.without_times(program)
        return None if plan is None else replace(self, plan=plan)

    def rewritten(self, captured: Captured) -> Program:
        """The program of a captured call, rewritten as one with costs is."""
        return PassManager(self.preparing).run(Program(captured.graph))

    def costed(self, captured: Captured) -> Program:
        """The program of a captured call, with costs."""
        return PassManager(self.costing, self.observers).run(Program(captured.graph, eager=captured.eager))

    # ------------------------------------------------------------------ what passes say of it

    @property
    def lengths(self) -> LengthAxis | None:
        """The lengths of the calls that it is for; None if it is for the shapes of one."""
        if isinstance(self.dynamic, LengthAxis):
            return self.dynamic
        return None if self.dynamic in (None, "batch") else LengthAxis.of(self.dynamic)

    @property
    def optimizer(self) -> OptimizerFactory | None:
        """The factory of the optimizers that step within backward."""
        return None if self.release is None else self.release.optimizer

    @property
    def budget(self) -> int | str:
        """The budget of the device."""
        return self.plan.budget

    # ------------------------------------------------------------------ what becomes of it

    def on(self, device: torch.device) -> Request:
        """The request for a model on a device: tiers of this machine are measured now."""
        return self if self.tiers is None else replace(self, tiers=measured_tiers(self.tiers, device))

    def tier_configs(self, device: torch.device) -> tuple[TierConfig, ...]:
        """The configurations of the tiers for a model on a device."""
        return () if self.tiers is None else tier_configs(self.tiers, device)

    def with_less(self, nbytes: int) -> Request:
        """The request within a budget in bytes of which some are taken already."""
        if not nbytes:
            return self
        assert isinstance(self.budget, int), "the budget of another plan is in bytes"
        return replace(self, plan=replace(self.plan, budget=max(self.budget - nbytes, 1)))

    def settled(self, captured: Captured, program: Program) -> Request:
        """The request of later calls: what the first plan settled is taken from it.

        Its budget in bytes, what lives in a tier, and what steps of optimizers take.

        Args:
            captured: The example's call.
            program: Its schedule, costs and certificate.
        """
        assert program.plan is not None
        plan = replace(self.plan, budget=program.plan.budget_bytes)
        if plan.which:
            names = tuple(offloaded.name for offloaded in program.graph.offloaded_parameters)
            plan = replace(plan, offloaded_names=names)
        example = Example(captured.graph, captured.signature, program if self.dynamic == "batch" else None)
        return replace(self.with_known_steps(program), plan=plan, example=example, observers=())

    def with_known_steps(self, program: Program) -> Request:
        """The request, to which the cost of each optimizer's step in a program is known."""
        release = self.release
        if release is None or release.optimizer is None:
            return self
        known = {node.operands[0].type: StepCost.of(node) for node in program.graph.releases}
        return replace(self, release=replace(release, known=known))

    def __reduce__(self) -> tuple[Any, ...]:
        return _request, ({each.name: getattr(self, each.name) for each in fields(self)},)


def _request(known: Mapping[str, Any]) -> Request:
    return Request(**known)


_ROLES: Mapping[str, type] = {
    "release": ReleaseGradients,
    "cost": Cost,
    "tiers": OfferTiers,
    "plan": PlanMemory,
}
"""The fields of a request that are passes, in the order in which they run, behind the rewrites."""


def renamed(name: str, value: Any, old_name: str, old_value: Any) -> Any:
    """The value of an option that has a new name; its old name is taken too, with a warning.

    Args:
        name: The new name.
        value: What was given by it, or its default.
        old_name: The name before, which goes with the next version.
        old_value: What was given by that; None if nothing was.
    """
    if old_value is None:
        return value
    # the caller's line: this function, the public one that has the option, and who called that
    warnings.warn(f"{old_name}= is now {name}=", DeprecationWarning, stacklevel=3)
    return old_value


def renamed_costs(costs: str, profile: bool | str | None) -> str:
    """The value of `costs`, which `profile` was before, as of `renamed`."""
    named = ("thorough" if profile else "analytic") if isinstance(profile, bool) else profile
    if named is not None:
        warnings.warn(f"profile={profile!r} is now costs={named!r}", DeprecationWarning, stacklevel=3)
    return costs if named is None else named


def cost_passes(costs: str) -> list[Pass]:
    """The passes that every pipeline begins with: rewrites that are always worth it, and costs.

    Args:
        costs: As of `irc.optimize`.

    Raises:
        UsageError: IRC410 if it is not a text.
    """
    match cast(object, costs):
        case "measured":
            return [ReplayDraws(), SplitConvolutions(measure=True), WriteInPlace(), Cost(repeats=3)]
        case "thorough":
            return [ReplayDraws(), SplitConvolutions(measure=True), WriteInPlace(), Cost(repeats=8)]
        case "analytic":
            return [ReplayDraws(), SplitConvolutions(), WriteInPlace(), Cost(profile="cpu")]
        case str():
            split = SplitConvolutions(transpose=costs == "cpu")
            return [ReplayDraws(), split, WriteInPlace(), Cost(profile=costs)]
        case _:
            raise UsageError(
                "IRC410",
                f"costs is {costs!r}, not a text",
                help='give "measured", "thorough", "analytic", or the name or file of a machine',
            )


def _release(accumulate: object, optimizer: OptimizerFactory | None) -> ReleaseGradients | None:
    """The pass that two options of `irc.optimize` ask for.

    Raises:
        UsageError: IRC406 for what these are not, or both.
    """
    if not isinstance(accumulate, bool):
        raise UsageError("IRC406", f"accumulate_gradients is a {type(accumulate).__name__}, not a bool")
    if optimizer is not None and not callable(optimizer):
        raise UsageError(
            "IRC406",
            f"optimizer_in_backward is a {type(optimizer).__name__}, not a function of a list of parameters",
            help="give a function such as lambda params: torch.optim.AdamW(params, lr=1e-3)",
        )
    if accumulate and optimizer is not None:
        raise UsageError(
            "IRC406",
            "accumulate_gradients and optimizer_in_backward exclude each other",
            help="an optimizer in backward takes each gradient and frees it: nothing is accumulated",
        )
    if optimizer is not None:
        return ReleaseGradients("apply", optimizer)
    return ReleaseGradients("accumulate") if accumulate else None
