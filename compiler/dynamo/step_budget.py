"""One budget for the graphs of a step: what each may take, given what waits for its backward when it runs."""

from __future__ import annotations

import contextlib
import gc
import logging
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy

from ...backends.torch import AliveTensors, held_by_history
from ...ir import BudgetError, Plan, TimeLimitError, format_bytes, reordered
from ...passes import CheckpointProblem
from ...passes.remat.choice import GAP
from ...passes.subgraphs.choose_together import choose_together
from ...passes.subgraphs.footprint import Footprint, footprint, outputs_bytes, saved_by, tangents_bytes
from ...passes.subgraphs.leaner_backward import leaner_backwards
from ...passes.subgraphs.plan_subgraph import minimum_bytes, plan_subgraph
from ...passes.subgraphs.subgraph import AmbientMemory, Choice, Subgraph
from ...torch_support.allocated import allocated_bytes
from .eager_parameters import EagerParameters, outside_of_graphs
from .outside_meter import Outside, OutsideMeter, Stretch
from .pending_runs import Backward, Gradient, PendingRun, Run, Variant, gradients_of
from .unplanned_steps import UnplannedSteps

__all__ = ["StepBudget"]

_LOG = logging.getLogger(__name__)

_PARTS = 64
"""The number of runs, each above certain others, that are known at once."""

_OTHERS = 4
"""The number of choices kept of a run, beside the one that was planned with the others of its step."""

_FIRST_LOOK = 8
"""A new graph above others is first planned in one part in so many of the time limit."""

_SPARE = 128
"""One part in this many of the budget is left for more, if what is alive grew since the last planning."""


class StepBudget:
    """Admits runs of graphs one by one, so that the whole step stays within the budget.

    A run is known by the runs that wait for their backward when it begins. For a new one, a plan is made in
    what is left; if that does not suffice, the runs that wait give up what they can compute again. When a
    known run comes again, all runs of its step are planned together.

    Args:
        budget_bytes: Of a step, on one device.
        time_limit: Seconds for each planning.
        outside_bytes: What the step takes outside of the graphs; None if nobody said.
        gap: The distance from the best at which a search stops.
        meter: Measures what the step takes outside of the graphs, and `outside_bytes` grows to that.

    Attributes:
        peak_bytes: The largest peak that was predicted of a step so far; 0 before the first.
        latest_peak_bytes: The same of the latest: since a graph ran that nothing waited below.
    """

    def __init__(
        self,
        budget_bytes: int,
        time_limit: float,
        outside_bytes: int | None,
        gap: float = GAP,
        meter: OutsideMeter | None = None,
    ) -> None:
        self.budget_bytes, self._outside_bytes, self.meter = budget_bytes, outside_bytes, meter
        self.knows_outside = outside_bytes is not None or meter is not None
        self.time_limit, self.gap = time_limit, gap
        self.alive = AliveTensors()
        self.unplanned = UnplannedSteps(budget_bytes, meter, self.alive) if meter is not None else None
        self.eager_parameters = EagerParameters(self.unplanned.note if self.unplanned else None)
        self.pending_runs: list[PendingRun] = []
        self._at_loss_bytes = 0
        self._at_start: Mapping[int, tuple[StorageWeakRef, int]] = {}
        self._before_backward: dict[PendingRun, int] = {}
        self.subgraphs: OrderedDict[tuple[int, ...], Subgraph] = OrderedDict()
        self._variants: dict[int, Variant] = {}  # keeps the ids unique that are keys of subgraphs
        self._others: dict[Subgraph, list[Choice]] = {}
        self._unplanned: set[Subgraph] = set()
        self.peak_bytes = 0
        self.latest_peak_bytes = 0

    @property
    def outside(self) -> Outside:
        """The bytes that the step takes beside its graphs, as it was said or measured."""
        return Outside.throughout(self._outside_bytes or 0) if self.meter is None else self.meter.outside

    @property
    def outside_bytes(self) -> int:
        """The most that the step takes beside its graphs while they run, or wait for their backward."""
        return self.outside.beside_bytes

    @property
    def known_outside_bytes(self) -> int | None:
        """The same; None if nobody has said, or if it is still to be measured."""
        if self.meter is None:
            return self._outside_bytes
        return self.outside_bytes if self.meter.is_settled else None

    @property
    def between_bytes(self) -> int:
        """The bytes that are alive between two steps, if they are measured."""
        return 0 if self.meter is None else self.meter.outside.between_bytes

    def count(self, modules: Iterable[nn.Module]) -> None:
        """Counts the parameters and buffers that modules have, from now on."""
        for module in modules:
            tensors = (*module.parameters(), *module.buffers())
            self.alive.note(tensor for tensor in tensors if not is_lazy(tensor))

    def watch(self, modules: Iterable[nn.Module]) -> None:
        """Refuses gradients of modules that no graph makes, unless the bytes outside of graphs are known."""
        if self.meter is not None and self.unplanned is not None:
            self.meter.expect_change()  # or code that is left to Python from now on
            self.unplanned.expect_change()
        waits = any(pending_run.is_pending for pending_run in self.pending_runs)
        if not waits:
            self.eager_parameters.begin_step()
        if not self.knows_outside or (self.meter is not None and not waits):
            for module in modules:
                self.eager_parameters.watch(module)

    # ------------------------------------------------------------------ before and after a run

    def admit(self, variant: Variant, inputs: Sequence[Tensor]) -> PendingRun:
        """A run of a graph, with what it may take, once there is room for it.

        Args:
            variant: The graph.
            inputs: Its static inputs.

        Raises:
            BudgetError: IRC540 when it does not fit beside what the step holds already.
            TimeLimitError: IRC205.
            UnsupportedError: IRC542 when it takes what was computed outside of graphs, and nobody said what
                that takes.
        """
        self.alive.note(inputs)
        if self.unplanned is not None:
            self.unplanned.drop()
        is_first = self.is_between_steps()
        if is_first:
            self.latest_peak_bytes = 0
            self.eager_parameters.begin_step()
        if self.between_bytes > self.budget_bytes:
            raise self._over_between()
        self.eager_parameters.read(inputs)
        gradients = gradients_of(variant, inputs, self.pending_runs)
        upstream, outside = self._behind(variant, inputs)
        run = Run(self._part(variant), variant, (*gradients, *outside), upstream)
        subgraph = run.subgraph
        is_new = subgraph.choice is None
        parts = [subgraph, *(pending_run.subgraph for pending_run in self.pending_runs)]
        ambients = [part.ambient for part in parts]
        now, has_grown = self._look(run)
        if subgraph.choice is None or (has_grown and not self._fits(now, subgraph.choice.footprint)):
            gc.collect()  # outputs of earlier steps may wait in cycles of references
            for part, ambient in zip(parts, ambients, strict=True):
                part.ambient = ambient
            now, has_grown = self._look(run)
        if subgraph.choice is None:
            subgraph.choice = self._first(subgraph, now)
            _report(subgraph)
            if subgraph.parent is not None:
                self._unplanned.add(_root(subgraph))
        elif _root(subgraph) in self._unplanned or (
            has_grown and not self._fits(now, subgraph.choice.footprint)
        ):
            self._plan_together(_root(subgraph))
        choice = self._chosen(subgraph, now)
        self._count(self._needed(now, choice.footprint))
        pending_run = PendingRun(subgraph, variant, run.gradients, upstream, choice)
        if self.meter is not None:
            if is_new:
                self.meter.expect_change()
            if is_first:
                self.meter.begin(_device(inputs), now.alive_bytes)
                self._at_start = self.alive.storages()
            if self.meter.is_recording:
                self._measure(self.meter, pending_run, now)
        return pending_run

    def is_between_steps(self) -> bool:
        """Whether no run waits for its backward; if so, takes what was measured of the step before."""
        self.pending_runs = [pending_run for pending_run in self.pending_runs if pending_run.is_pending]
        if not self.pending_runs and self.meter is not None and self.meter.end(*self._alive_since_start()):
            _LOG.info(
                "a step takes %s beside its graphs, and %s at most between two steps, as measured",
                *map(format_bytes, (self.outside_bytes, self.between_bytes)),
            )
            self._unplanned.update(_root(subgraph) for subgraph in self.subgraphs.values())
        return not self.pending_runs

    def _alive_since_start(self) -> tuple[int, int]:
        """The bytes that are alive, and those that were when the step began and are not any more."""
        alive_bytes = self.alive.alive_bytes()
        return alive_bytes, self.alive.gone_bytes(self._at_start)

    def let_go(self) -> None:
        """Leaves what is left of a step that ends with an error alone."""
        self.eager_parameters.let_go()
        if self.meter is not None:
            self.meter.stop()

    def begin_call(self, arguments: Iterable[Tensor]) -> None:
        """Takes down that what is compiled is called with these tensors, by code that is not."""
        if self.unplanned is not None:
            self.unplanned.begin_call(arguments)
            self._count(0)

    def measuring_paused(self) -> contextlib.AbstractContextManager[None]:
        """Lets what is planned be measured within a step that is measured itself."""
        return contextlib.nullcontext() if self.meter is None else self.meter.paused()

    def _measure(self, meter: OutsideMeter, pending_run: PendingRun, now: _Now) -> None:
        """Marks the forward of a run, and takes down what is predicted from there on."""
        taken = pending_run.choice.footprint
        self._before_backward = {p: now.backwards[p].nbytes(taken.saved_bytes) for p in now.pending_runs}
        self._before_backward[pending_run] = now.backwards[now.run].nbytes(0)
        forward_bytes, self._at_loss_bytes, _ = now.moments(taken)
        meter.mark(Stretch.FORWARD, forward_bytes)

    def _mark_backward(self, meter: OutsideMeter, pending_run: PendingRun) -> None:
        """Marks the end of a run's forward, and where its backward will begin and end."""
        meter.mark(Stretch.LOSS, self._at_loss_bytes)
        assert pending_run.step is not None

        def begin() -> None:
            beside_bytes = self._before_backward.get(pending_run)
            if beside_bytes is not None:
                meter.settle(beside_bytes + pending_run.held_bytes)
                meter.mark(Stretch.BACKWARD, beside_bytes + pending_run.choice.footprint.backward_bytes)

        pending_run.step.call_around(begin, lambda: meter.mark(Stretch.WAITING))

    def pass_by(self, name: str, inputs: Iterable[Tensor], nbytes: int) -> None:
        """Makes sure that a graph without a backward has room.

        Args:
            name: Of the graph.
            inputs: Its arguments, which count from here on.
            nbytes: What it takes beside them.

        Raises:
            BudgetError: IRC540.
        """
        self.pending_runs = [pending_run for pending_run in self.pending_runs if pending_run.is_pending]
        self.alive.note(inputs)
        alive_bytes = self.alive.alive_bytes()
        needed_bytes = alive_bytes + sum(f.choice.footprint.saved_bytes for f in self.pending_runs) + nbytes
        needed_bytes += self.outside_bytes
        if needed_bytes > self.budget_bytes:
            raise self._refusal(name, needed_bytes, alive_bytes)
        self._count(needed_bytes)

    def ran(self, pending_run: PendingRun, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Takes down a run whose forward is over."""
        self.alive.note(outputs)
        pending_run.takes_off(inputs, outputs)
        self.pending_runs.append(pending_run)
        if pending_run.step is not None:
            self.eager_parameters.follow(pending_run.step)
        if self.meter is not None and self.meter.is_recording:
            self._mark_backward(self.meter, pending_run)

    def forget(self, variant: Variant) -> None:
        """Drops all that is known of a graph that is not used any more."""
        for key in [key for key in self.subgraphs if id(variant) in key]:
            self._drop(key)
        self._variants.pop(id(variant), None)

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans in force, oldest first, with the roundings that their steps have shown."""
        choices = [(key, part.choice) for key, part in self.subgraphs.items() if part.choice is not None]
        return tuple(
            replace(
                choice.plan,
                roundings=self._variants[key[-1]].roundings,
                reordered=reordered(choice.schedule.graph),
            )
            for key, choice in choices
        )

    # ------------------------------------------------------------------ who is who

    def _part(self, variant: Variant) -> Subgraph:
        """Returns the run as a part of its step: a graph above those that wait."""
        waiting = [pending_run.subgraph for pending_run in self.pending_runs]
        parent = waiting[-1] if waiting else None
        is_chain = parent is None or [*parent.below, parent] == waiting
        marks = (*(id(pending_run.variant) for pending_run in self.pending_runs), id(variant))
        key = marks if is_chain else (0, *marks)
        self._variants[id(variant)] = variant
        if key in self.subgraphs:
            self.subgraphs.move_to_end(key)
            return self.subgraphs[key]
        subgraph = Subgraph(variant.name, variant.solutions, parent if is_chain else None)
        if subgraph.parent is not None:
            subgraph.parent.children.append(subgraph)
        self.subgraphs[key] = subgraph
        for oldest in list(self.subgraphs)[:-1]:
            if len(self.subgraphs) > _PARTS and not self.subgraphs[oldest].children:
                self._drop(oldest)
        return subgraph

    def _drop(self, key: tuple[int, ...]) -> None:
        subgraph = self.subgraphs.pop(key)
        self._unplanned.discard(subgraph)
        self._others.pop(subgraph, None)
        if subgraph.parent is not None:
            subgraph.parent.children.remove(subgraph)

    def _behind(
        self, variant: Variant, inputs: Sequence[Tensor]
    ) -> tuple[frozenset[Run], tuple[Gradient, ...]]:
        """The runs that the inputs come from, and the gradients of leaves that were used on the way.

        What autograd holds on the way is counted from here on.
        """
        makers: set[PendingRun] = set()

        def is_known(node: object) -> bool:
            found = [pending_run for pending_run in self.pending_runs if pending_run.is_behind(node)]
            makers.update(found)
            return bool(found)

        saved, leaves = held_by_history(inputs, is_known)
        if (saved or leaves) and not self.knows_outside:
            raise outside_of_graphs(f"{variant.name} takes what")
        self.alive.note((*saved, *leaves))
        upstream = frozenset(makers).union(*(maker.upstream for maker in makers))
        given = tuple(Gradient(allocated_bytes(leaf), leaf=id(leaf)) for leaf in leaves if leaf.grad is None)
        return upstream, given

    # ------------------------------------------------------------------ what is alive around a run

    def _look(self, run: Run) -> tuple[_Now, bool]:
        """Returns the memory alive around a run and those that wait, and whether it never was more."""
        alive_bytes = self.alive.alive_bytes()
        graph = run.variant.graph
        handed_bytes = outputs_bytes(graph)
        loose_bytes = sum(pending_run.loose_bytes for pending_run in self.pending_runs)
        runs = (*self.pending_runs, run)
        backwards: dict[Run, Backward] = {}
        for other in self.pending_runs:
            outputs = handed_bytes - self.alive.bytes_of(other.outputs)
            ambient = alive_bytes + outputs + self._loose_beside(other) + graph.loss_held_bytes
            backwards[other] = Backward.of(other, runs, ambient)
        beside_bytes = self._loose_beside(run)
        backwards[run] = Backward.of(run, runs, alive_bytes + graph.loss_held_bytes + beside_bytes)
        # the loss takes twice the bytes of the outputs, and makes their gradients
        strangers_bytes = beside_bytes - loose_bytes
        at_loss = alive_bytes + handed_bytes + tangents_bytes(graph) + graph.loss_bytes + 3 * loose_bytes
        pending_runs = tuple(self.pending_runs)
        now = _Now(run, pending_runs, alive_bytes, 2 * strangers_bytes, at_loss, backwards, self.outside)
        subgraph = run.subgraph
        before = [subgraph.ambient, *(pending_run.subgraph.ambient for pending_run in self.pending_runs)]
        own = now.ambient
        if subgraph.parent is None:  # what waits is not planned with it
            own = own.plus(now.waiting_bytes)
        subgraph.ambient = own if subgraph.ambient is None else subgraph.ambient | own
        for pending_run in self.pending_runs:
            assert pending_run.subgraph.ambient is not None
            fixed_bytes, handed_bytes = backwards[pending_run].fixed_bytes, _handed_bytes(pending_run)
            pending_run.subgraph.ambient |= AmbientMemory(
                forward_bytes=0,
                loss_bytes=fixed_bytes + handed_bytes + self.outside.waiting_bytes,
                backward_bytes=fixed_bytes + self.outside.backward_bytes,
            )
        return now, before != [
            subgraph.ambient,
            *(pending_run.subgraph.ambient for pending_run in self.pending_runs),
        ]

    def _loose_beside(self, run: Run) -> int:
        """Returns the bytes of output gradients that losses of other runs hold while this one runs backward.

        A run that this one does not depend on may have a loss of its own, which still waits for its backward.
        """
        total = 0
        for pending_run in self.pending_runs:
            if pending_run is not run:
                is_related = pending_run in run.upstream or run in pending_run.upstream
                total += pending_run.loose_bytes if is_related else 2 * pending_run.loose_bytes
        return total

    def _fits(self, now: _Now, taken: Footprint) -> bool:
        """Whether a run, and the backwards of those that wait, stay within the budget as things are."""
        return self._needed(now, taken) <= self.budget_bytes

    def _needed(self, now: _Now, taken: Footprint | None) -> int:
        """The most that will be alive if a run takes this; if None, in the backwards of those that wait."""
        new_bytes = 0 if taken is None else taken.saved_bytes
        needed = (now.needed_bytes(pending_run, new_bytes) for pending_run in now.pending_runs)
        most = max(needed, default=0)
        return most if taken is None else max(most, *now.moments_beside(taken))

    # ------------------------------------------------------------------ planning

    def _first(self, subgraph: Subgraph, now: _Now) -> Choice:
        """A first choice for a subgraph, in what is left of the budget; runs that wait give way if needed."""
        if not self.pending_runs:
            return self._planned_or_refused(subgraph, now)
        try:
            return self._planned(subgraph, now, self.time_limit / _FIRST_LOOK)
        except (BudgetError, TimeLimitError):
            self._give_way(now, None)
            return self._planned_or_refused(subgraph, now)

    def _chosen(self, subgraph: Subgraph, now: _Now) -> Choice:
        """Chooses the schedule of a subgraph for this time: the planned one, if it fits beside what waits."""
        assert subgraph.choice is not None
        if not self._fits(now, subgraph.choice.footprint):
            self._give_way(now, subgraph.choice.footprint)
        others = self._others.get(subgraph, [])
        for choice in (subgraph.choice, *sorted(others, key=lambda choice: choice.solution.seconds)):
            if self._fits(now, choice.footprint):
                return choice
        choice = self._planned_or_refused(subgraph, now)
        self._others[subgraph] = [*others, choice][-_OTHERS:]
        return choice

    def _planned_or_refused(self, subgraph: Subgraph, now: _Now) -> Choice:
        """The best schedule for this run alone, beside what waits as it is.

        Raises:
            BudgetError: IRC540.
            TimeLimitError: IRC205.
        """
        try:
            choice = self._planned(subgraph, now, self.time_limit)
        except BudgetError as error:
            raise self._over(subgraph, now) from error
        if not self._fits(now, choice.footprint):
            raise self._over(subgraph, now)
        return choice

    def _planned(self, subgraph: Subgraph, now: _Now, time_limit: float) -> Choice:
        here, chosen = self._here(subgraph, now)
        return plan_subgraph(here, self.budget_bytes, chosen, time_limit=time_limit, gap=self.gap)

    def _here(self, subgraph: Subgraph, now: _Now) -> tuple[Subgraph, dict[Subgraph, Footprint]]:
        """A subgraph as it stands in this very run, with what those below it take."""
        taken = {pending_run.subgraph: pending_run.choice.footprint for pending_run in self.pending_runs}
        if subgraph.parent is not None:
            return Subgraph(subgraph.name, subgraph.solutions, subgraph.parent, ambient=now.ambient), taken
        return Subgraph(subgraph.name, subgraph.solutions, ambient=now.ambient.plus(now.waiting_bytes)), {}

    def _plan_together(self, root: Subgraph) -> None:
        """Plans all subgraphs of a tree; with something to spare if they were planned before."""
        started = time.thread_time()
        rooms = [self.budget_bytes - self.budget_bytes // _SPARE, self.budget_bytes]
        choices: dict[Subgraph, Choice] | None = None
        for room_bytes in rooms[1:] if root in self._unplanned else rooms:
            if choices is None:
                choices = choose_together(root, room_bytes, time_limit=self.time_limit, gap=self.gap)
        self._unplanned.discard(root)
        if choices is None:
            _LOG.info("no plans were found that fit together; each graph goes on with its own")
            return
        for subgraph, choice in choices.items():
            subgraph.choice = choice
            _report(subgraph)
        if len(choices) > 1:
            seconds = time.thread_time() - started
            _LOG.info("planned %d graphs of a step together in %.1f s", len(choices), seconds)

    # ------------------------------------------------------------------ those that wait give way

    def _give_way(self, now: _Now, taken: Footprint | None) -> None:
        """Frees what runs that wait can compute again, the largest first, until there is room for `taken`."""
        new_bytes = 0 if taken is None else taken.saved_bytes
        for pending_run in sorted(
            self.pending_runs, key=lambda pending_run: -pending_run.choice.footprint.saved_bytes
        ):
            if taken is not None and self._fits(now, taken):
                return
            ambient = now.backwards[pending_run].nbytes(new_bytes) + self.outside.backward_bytes
            self._shrink(pending_run, self.budget_bytes - ambient)

    def _shrink(self, pending_run: PendingRun, own_bytes: int) -> None:
        """Makes a run that waits hold as little as can be; its backward may take `own_bytes` above static."""
        before = pending_run.choice.footprint
        graph = replace(pending_run.choice.schedule.graph, loss_bytes=0, loss_held_bytes=0)
        costs = pending_run.choice.problem.costs
        problem = CheckpointProblem(graph, costs, pending_run.choice.problem.sequence)
        held = saved_by(pending_run.choice.schedule)
        for solution in leaner_backwards(problem, held, own_bytes + graph.static_bytes):
            taken = footprint(solution.schedule, costs.workspace_bytes)
            smaller = taken.saved_bytes < before.saved_bytes or taken.backward_bytes < before.backward_bytes
            fits = taken.saved_bytes <= before.saved_bytes and taken.backward_bytes <= own_bytes
            if not smaller or not fits:
                continue
            if pending_run.goes_on_by(Choice(problem, solution, taken, pending_run.choice.plan)):
                pending_run.subgraph.solutions.add_solution(problem, solution)
                _LOG.info(
                    "%s gives way: it holds %s instead of %s until its backward",
                    pending_run.subgraph.name,
                    format_bytes(taken.saved_bytes),
                    format_bytes(before.saved_bytes),
                )
                return

    # ------------------------------------------------------------------ reports

    def _count(self, needed_bytes: int) -> None:
        """Takes down what is predicted of the step so far."""
        needed_bytes = max(needed_bytes, self.outside_bytes, self.between_bytes)
        self.latest_peak_bytes = max(self.latest_peak_bytes, needed_bytes)
        self.peak_bytes = max(self.peak_bytes, needed_bytes)

    @property
    def baseline_bytes(self) -> int:
        """The peak if nothing runs twice, which is modelled: each graph as it was captured."""
        chosen = {subgraph: subgraph.solutions.baseline for subgraph in self.subgraphs.values()}
        peaks = (
            subgraph.peak_bytes(chosen) for subgraph in chosen if all(p in chosen for p in subgraph.below)
        )
        most = max(peaks, default=None)
        return 0 if most is None else max(most, self.between_bytes)

    def summary(self) -> str:
        """The budget, and each graph with what it takes."""
        lines = [
            f"{'budget':>16}  {format_bytes(self.budget_bytes)} ({self.budget_bytes:,} bytes)",
            f"{'predicted peak':>16}  {format_bytes(self.peak_bytes)} ({self.peak_bytes:,} bytes)",
            f"{'baseline peak':>16}  {format_bytes(self.baseline_bytes)}, modelled: each graph as it was "
            "captured, with everything kept",
        ]
        if self.outside_bytes:
            how = "" if self.meter is None else ", as measured"
            lines.append(f"{'outside of graphs':>16}  {format_bytes(self.outside_bytes)}{how}")
        for subgraph in self.subgraphs.values():
            if subgraph.choice is not None:
                lines.append(f"{' ' * 16}  {'  ' * len(subgraph.below)}{_described(subgraph)}")
        if self.unplanned is not None and self.unplanned.has_any:
            lines.append(
                f"{'as in eager':>16}  {format_bytes(self.between_bytes)}, as measured: no graph is planned"
            )
        elif not self.subgraphs:
            lines.append(f"{' ' * 16}  no graph was compiled: the budget binds nothing")
        return "\n".join(lines)

    def _over(self, subgraph: Subgraph, now: _Now) -> BudgetError:
        """The refusal of a run, with what each graph of the step holds."""
        here, chosen = self._here(subgraph, now)
        latest = time.thread_time() + self.time_limit
        needed = max(minimum_bytes(here, self.budget_bytes, chosen, latest), self._needed(now, None))
        gradients_bytes = tangents_bytes(now.run.variant.graph)
        is_cause = needed - gradients_bytes <= self.budget_bytes
        return self._refusal(subgraph.name, needed, now.alive_bytes, gradients_bytes if is_cause else 0)

    def _over_between(self) -> BudgetError:
        """The refusal of a budget that what is alive between two steps does not fit into."""
        return BudgetError(
            "IRC540",
            f"{format_bytes(self.between_bytes)} ({self.between_bytes} bytes) are alive between the last "
            "backward of a graph and the next step's first graph, as measured, over the budget of "
            f"{format_bytes(self.budget_bytes)} ({self.budget_bytes} bytes)",
            minimum_bytes=self.between_bytes,
            help=f"raise the budget to {self.between_bytes} bytes; parameters, gradients, the optimizer's "
            "step, the next batch and code before the first graph take it",
        )

    def _refusal(self, name: str, needed: int, alive_bytes: int, gradients_bytes: int = 0) -> BudgetError:
        held = [(f.subgraph.name, format_bytes(f.choice.footprint.saved_bytes)) for f in self.pending_runs]
        held_gradients = (
            f"; {gradients_bytes} bytes are gradients of its outputs, which it holds until its backward ends"
            if gradients_bytes
            else ""
        )
        waiting = "".join(f"; {name} holds {amount} until its backward" for name, amount in held)
        return BudgetError(
            "IRC540",
            f"the step needs {format_bytes(needed)} ({needed} bytes) at least where {name} runs, over "
            f"the budget of {format_bytes(self.budget_bytes)} ({self.budget_bytes} bytes); "
            f"{format_bytes(alive_bytes)} are parameters, buffers, inputs, and other tensors of "
            f"the model that are alive{waiting}{held_gradients}",
            minimum_bytes=needed,
            help=f"raise the budget to {needed} bytes, or lower the batch size; clear gradients before "
            "forward, and keep no outputs of earlier steps",
        )


@dataclass(frozen=True)
class _Now:
    """The memory alive around a run, and around the backwards of the runs that wait, whatever is chosen.

    Args:
        run: The run.
        pending_runs: Those that wait for their backward.
        alive_bytes: Tensors that are alive now.
        losses_bytes: What losses may hold already, of runs that this one does not depend on.
        loss_bytes: What is alive at the loss, if it comes right after the run, without what is saved.
        backwards: Of the run, and of those that wait.
        outside: What the step takes outside of graphs.
    """

    run: Run
    pending_runs: tuple[PendingRun, ...]
    alive_bytes: int
    losses_bytes: int
    loss_bytes: int
    backwards: Mapping[Run, Backward]
    outside: Outside

    @property
    def waiting_bytes(self) -> int:
        """The bytes that the runs that wait have saved."""
        return sum(pending_run.choice.footprint.saved_bytes for pending_run in self.pending_runs)

    @property
    def ambient(self) -> AmbientMemory:
        """The same without what those that wait have saved.

        While the run waits, the backwards of those that it does not depend on may run.
        """
        waiting_bytes = self.waiting_bytes
        strangers = [self.needed_bytes(f, 0) for f in self.pending_runs if f not in self.run.upstream]
        backward_bytes, outside = self.backwards[self.run].nbytes(0) - waiting_bytes, self.outside
        return AmbientMemory(
            forward_bytes=self.alive_bytes + self.losses_bytes + outside.forward_bytes,
            loss_bytes=max(
                self.loss_bytes + outside.loss_bytes,
                backward_bytes + _handed_bytes(self.run) + outside.waiting_bytes,
                *(nbytes - waiting_bytes for nbytes in strangers),
            ),
            backward_bytes=backward_bytes + outside.backward_bytes,
        )

    def needed_bytes(self, pending_run: PendingRun, new_bytes: int) -> int:
        """The most that is alive in the backward of a run that waits, and right before it.

        Args:
            pending_run: The run that waits.
            new_bytes: What the run that has not run yet will save.
        """
        return self.backwards[pending_run].nbytes(new_bytes) + max(
            pending_run.held_bytes + self.outside.waiting_bytes,
            pending_run.choice.footprint.backward_bytes + self.outside.backward_bytes,
        )

    def moments(self, taken: Footprint) -> tuple[int, int, int]:
        """The most that is alive in the run's forward, at the loss and in its backward, if it takes this."""
        return (
            self.alive_bytes + self.losses_bytes + self.waiting_bytes + taken.forward_bytes,
            self.loss_bytes + self.waiting_bytes + taken.saved_bytes,
            self.backwards[self.run].nbytes(0) + taken.backward_bytes,
        )

    def moments_beside(self, taken: Footprint) -> tuple[int, int, int, int]:
        """The same with what the step takes outside of graphs, and right before the run's backward."""
        forward_bytes, loss_bytes, backward_bytes = self.moments(taken)
        waiting_bytes = self.backwards[self.run].nbytes(0) + taken.saved_bytes + _handed_bytes(self.run)
        outside = self.outside
        return (
            forward_bytes + outside.forward_bytes,
            loss_bytes + outside.loss_bytes,
            waiting_bytes + outside.waiting_bytes,
            backward_bytes + outside.backward_bytes,
        )


def _handed_bytes(run: Run) -> int:
    """The bytes of a run's outputs and of their gradients."""
    return outputs_bytes(run.variant.graph) + tangents_bytes(run.variant.graph)


def _device(tensors: Iterable[Tensor]) -> str:
    """The device that a graph runs on: a GPU if one of its inputs is there."""
    return max((str(tensor.device) for tensor in tensors), default="cpu")


def _root(subgraph: Subgraph) -> Subgraph:
    return subgraph.below[0] if subgraph.parent is not None else subgraph


def _report(subgraph: Subgraph) -> None:
    numbers = ", ".join(other.name.split(" (")[0] for other in subgraph.below)
    _LOG.info("%s%s", _described(subgraph), f", above {numbers}" if numbers else "")


def _described(subgraph: Subgraph) -> str:
    assert subgraph.choice is not None
    plan, taken = subgraph.choice.plan, subgraph.choice.footprint
    return (
        f"{subgraph.name}: {format_bytes(taken.saved_bytes)} held until backward, peak "
        f"{format_bytes(plan.peak_bytes)} of the {format_bytes(plan.budget_bytes)} left to it, overhead "
        f"{plan.overhead:.2%}"
    )
