"""A backend of `torch.compile`: the graphs that Dynamo finds in a model, planned within one budget."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo import callback_handler, config
from torch._dynamo.utils import get_hook_for_recompile_user_context, register_hook_for_recompile_user_context
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from ...backends.torch import check_tensor, deliver, planning, run_step, tracing
from ...backends.torch.guards.free_numbers import (
    NO_NUMBERS,
    FreeNumbers,
    free_numbers_of_graph,
    take_number_results,
)
from ...backends.torch.varied_call import numbers_of, varied_numbers
from ...frontends.torch import (
    CapturedGraph,
    call_arguments,
    capture_graph,
    compile_options,
    compiled_frame,
    draws_from_numpy,
    forward_bytes,
    graph_name,
    is_given_up,
    lifted_names,
    numbers_among,
    refuse_uncompiled_module,
)
from ...ir import InputRole, Plan, UnsupportedError, UsageError, parse_budget
from ...passes import Program
from ...passes.remat.choice import GAP
from ...passes.subgraphs.subgraph import SubgraphSolutions
from ..number_slots import OperationSlots, slots_of_operations
from ..request import MEASURED, Request, renamed_costs
from ..time_steps import kernels_or_time_steps, seconds_to_capture
from .outside_meter import OutsideMeter
from .pending_runs import Variant
from .step_budget import StepBudget

__all__ = ["Backend", "backend"]

_LOG = logging.getLogger(__name__)

_VARIANTS = 8
"""The number of sets of sizes that are kept of one graph."""


def backend(
    budget: int | str,
    *,
    time_limit: float = 60.0,
    gap: float = GAP,
    costs: str = MEASURED,
    outside: int | str | None = None,
    model: nn.Module | None = None,
    compiler: str | None = None,
    profile: bool | str | None = None,
) -> Backend:
    """A backend for `torch.compile` that keeps each training step within `budget` bytes on the device.

    `torch.compile(model, backend=irc.backend(budget="4GiB"))` takes models whose Python depends on data:
    Dynamo cuts such a model into graphs, and each is captured and planned when it first runs. The budget is
    that of the whole step. Its graphs share it: what a graph saves for its backward is alive while the later
    ones run. A graph that is new to a step is planned in what is left; if that does not suffice, those that
    ran before it free what they can compute again, so that the budget holds in this step too. When the step
    comes again, its graphs are planned together. A graph whose LSTM kernels do not fit is planned with their
    time steps from then on, as in `irc.optimize`.

    Graphs that have nothing to differentiate run as they are, if there is room for them; under `no_grad`,
    which is not a training step, nothing is counted.

    Args:
        budget: Bytes, `"4GiB"` or `"4GB"`. It covers the parameters, buffers, inputs and outputs of all
            graphs that were compiled with this backend, as long as they are alive, with `.grad`, and what the
            graphs take; a loss outside of them is assumed to take twice the bytes of the outputs it is given.
            Measuring operations, when a graph runs for the first time, takes memory of its own.
        time_limit: Seconds for each search of schedules.
        gap: As in `irc.optimize`, for each search.
        costs: As in `irc.optimize`.
        outside: Bytes that the step takes outside of the compiled graphs, which are not known here: code that
            Dynamo leaves to Python, a larger loss, the state of the optimizer. They come off the budget.
            `"measured"` measures them in each step with a new graph and in the one after it, mostly the first
            two: from the next one on the budget holds, as long as that code takes no more than it did. What
            the loop does between two steps counts, the state of the optimizer does not. A graph that no plan
            can hold runs as eager does, and so does a step of which nothing is planned: the log says so, and
            the second one is measured, from the call to the end of its backward; if that is over the budget,
            later backwards are refused (IRC540). Without it, a graph
            that takes what such code has computed with autograd is refused, and so is, in backward, a
            gradient of a parameter that no graph of the step has read.
        model: What will be compiled. Its parameters and buffers count from the start. Without it, the modules
            that the compiled function can see do, which is all of them if the model itself is compiled.
        compiler: As in `irc.optimize`; a graph that fits only without kernels is refused.
        profile: The old name of `costs`, until the next version.

    Raises:
        UsageError: IRC401 for a malformed budget, IRC403 for a malformed time limit or gap, IRC410 for the
            name of no machine, IRC541 for a budget in percent.

    `model.compile(backend=...)` raises UnsupportedError (IRC544) where torch would compile nothing, which is
    so if the forward is one of torch's own, as that of `nn.Sequential`; `torch.compile(model)` takes these.

    The step itself raises BudgetError (IRC540), which names its graphs, before a graph would go over the
    budget, and UnsupportedError for a graph that cannot be captured (IRC543 and others), and for what was
    computed outside of graphs (IRC542).
    """
    return Backend(budget, time_limit, gap, renamed_costs(costs, profile), outside, model, compiler)


class Backend:
    """A backend of `torch.compile`: one for each model, or for all models that share a budget.

    Args:
        budget: As in `irc.backend`.
        time_limit: As there.
        gap: As there.
        costs: As there.
        outside: As there.
        model: As there.
        compiler: As there.
    """

    def __init__(
        self,
        budget: int | str,
        time_limit: float,
        gap: float,
        costs: str,
        outside: int | str | None,
        model: nn.Module | None,
        compiler: str | None,
    ) -> None:
        for amount in filter(None, (budget, outside)):
            if isinstance(amount, str) and amount.strip().endswith("%"):
                raise UsageError(
                    "IRC541",
                    f"{amount!r} of what? Which graphs a step has is not known before it runs",
                    help="give bytes, such as 4GiB; baseline_bytes of this backend tells after a step what "
                    "it takes without a plan",
                )
        self._request = Request.of(budget, time_limit=time_limit, gap=gap, costs=costs, compiler=compiler)
        meter = OutsideMeter() if outside == MEASURED else None
        outside_bytes = None if outside is None or meter else parse_budget(outside) if outside else 0
        self._budget = StepBudget(parse_budget(budget), time_limit, outside_bytes, gap, meter)
        self._given = [] if model is None else [model]
        self._budget.count(self._given)
        self._lock = threading.RLock()
        self._numbers = itertools.count(1)
        if _look not in callback_handler.start_callbacks:  # torch._dynamo.reset() drops it
            callback_handler.register_start_callback(_look)
        if _look_again not in (get_hook_for_recompile_user_context() or ()):
            register_hook_for_recompile_user_context(_look_again)

    @property
    def __name__(self) -> str:
        """The name of the backend, for which `torch.compile` asks before it compiles anything.

        Raises:
            UnsupportedError: IRC544 for `model.compile()` of a model that Dynamo would leave to Python, with
                no call to its backend.
        """
        refuse_uncompiled_module()
        options = compile_options()
        if options is not None:
            options.backend_ctx_ctor = self._around_call
        return "irc"

    @contextlib.contextmanager
    def _around_call(self) -> Generator[None]:
        """Goes around each call of what is compiled, in which numpy draws its own random numbers."""
        with self._lock:
            self._budget.begin_call(filter(_is_countable, call_arguments()))
        patched: Any = config.patch  # pyright: ignore[reportAttributeAccessIssue]
        with patched(use_numpy_random_stream=True):
            yield

    def __call__(self, graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Returns the function that runs a graph; Dynamo calls this once for each."""
        _, variables = compiled_frame() or (None, [])
        self.see(variables)
        return _Compiled(self, graph).run

    def __deepcopy__(self, memo: dict[int, Any]) -> Backend:
        """The same: a budget is one, for every copy of what was compiled with it."""
        return self

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans in force: one for each graph and each set of graphs that wait below it, oldest first."""
        with self._lock:
            return self._budget.plans

    @property
    def peak_bytes(self) -> int:
        """The largest peak predicted of the steps so far, static bytes included; 0 before the first."""
        with self._lock:
            return self._budget.peak_bytes

    @property
    def latest_peak_bytes(self) -> int:
        """The same of the latest step, which began when nothing waited for its backward."""
        with self._lock:
            return self._budget.latest_peak_bytes

    @property
    def baseline_bytes(self) -> int:
        """The same if nothing runs twice, which is modelled: each graph as it was captured."""
        with self._lock:
            return self._budget.baseline_bytes

    @property
    def outside_bytes(self) -> int | None:
        """The bytes that come off the budget for what runs outside of graphs; None if nobody has said.

        With `outside="measured"` it is None until a step without a new graph has been measured.
        """
        with self._lock:
            return self._budget.known_outside_bytes

    def summary(self) -> str:
        """The step in a few lines: the budget, and each graph with what it takes."""
        with self._lock:
            return self._budget.summary()

    def see(self, variables: Iterable[nn.Module | Tensor], *, gave_up: bool = False) -> None:
        """Takes down what a frame that is compiled with this backend can see, or if Dynamo gave it up."""
        variables = list(variables)
        seen = [*self._given, *(variable for variable in variables if isinstance(variable, nn.Module))]
        with self._lock:
            self._budget.alive.note(v for v in variables if isinstance(v, Tensor) and _is_countable(v))
            self._budget.eager_parameters.gave_up |= gave_up
            self._budget.count(seen)
            self._budget.watch(seen)

    def let_go(self) -> None:
        """Leaves the backwards of a step that ends with an error alone."""
        self._budget.let_go()

    def run(self, variant: Variant, inputs: list[Tensor], numbers: Sequence[Any]) -> tuple[Tensor, ...]:
        """Runs a graph's forward once there is room for it; returns its flat outputs.

        Args:
            variant: The graph.
            inputs: Its static inputs.
            numbers: The scalar operands that its program takes.

        Raises:
            BudgetError: IRC540; nothing has run.
        """
        with self._lock:
            pending_run = self._budget.admit(variant, inputs)
            outputs = run_step(pending_run.program, [*inputs, *numbers])
            self._budget.ran(pending_run, inputs, outputs)
        return outputs

    def pass_by(self, unplanned: Unplanned, graph: fx.GraphModule, args: Sequence[Any]) -> Any:
        """Runs a graph as it is, once there is room for it."""
        inputs = [arg for arg in args if isinstance(arg, Tensor)]
        with self._lock:
            if torch.is_grad_enabled():
                self._budget.pass_by(unplanned.name, inputs, unplanned.nbytes)
            else:  # an evaluation is no part of the step before it
                self._budget.is_between_steps()
            result = graph(*args)
            if torch.is_grad_enabled():
                self._budget.alive.note(
                    leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)
                )
        return result

    def forget(self, variant: Variant) -> None:
        """Drops the plans of a graph that is not kept any more."""
        with self._lock:
            self._budget.forget(variant)

    def variant(
        self, graph: fx.GraphModule, args: Sequence[Any], names: Sequence[str | None], free: FreeNumbers
    ) -> Variant | Unplanned:
        """A graph captured for these arguments, with what its operations cost, if it has a backward.

        Args:
            graph: The graph.
            args: Its arguments in a call.
            names: Those of parameters and buffers.
            free: The numbers among the arguments that decide nothing; the program takes them if it can.
        """
        name = f"graph {next(self._numbers)} ({graph_name(graph)})"
        with self._budget.measuring_paused():
            try:
                with planning, tracing():
                    captured = capture_graph(graph, args, names)
            except UnsupportedError as error:
                if self._budget.meter is None:
                    raise _by_measuring(error) from error
                _LOG.warning("%s runs as it is, since no plan can hold it: %s", name, error.brief)
                return Unplanned(name, 0, is_capturable=False)
            if captured is None:
                _LOG.info("%s has nothing to differentiate and runs as it is", name)
                return Unplanned(name, forward_bytes(graph, args) if torch.is_grad_enabled() else 0)
            solutions = SubgraphSolutions(self._costed(captured))
            slots = self._number_slots(captured, graph, args, names, free)
            expressions = free.expressions if slots else ()
            return Variant(name, captured, solutions, expressions, slots)

    def _number_slots(
        self,
        captured: CapturedGraph,
        graph: fx.GraphModule,
        args: Sequence[Any],
        names: Sequence[str | None],
        free: FreeNumbers,
        **options: Any,
    ) -> OperationSlots:
        """The operands of a captured graph that are computed from numbers; none if they cannot be told."""
        varied = varied_numbers(args, free)
        if varied is None or self._request.compiler is not None:
            return {}
        try:
            with planning, tracing():
                other = capture_graph(graph, varied.leaves, names, **options)
        except UnsupportedError:
            return {}
        if other is None:
            return {}
        both = captured.captured, other.captured
        with planning, torch._C._DisableAutocast():  # pyright: ignore[reportPrivateUsage]
            rewritten = self._request.rewritten(both[0]), self._request.rewritten(both[1])
        return slots_of_operations(both, rewritten, varied) or {}

    def _costed(self, captured: CapturedGraph) -> Program:
        """A captured graph with what its operations cost."""
        with planning, torch._C._DisableAutocast():  # pyright: ignore[reportPrivateUsage]
            return self._request.costed(captured.captured)

    def time_steps(
        self,
        kernels: Variant,
        graph: fx.GraphModule,
        args: Sequence[Any],
        names: Sequence[str | None],
        free: FreeNumbers,
    ) -> Variant:
        """The same graph captured with the time steps of its LSTM layers in place of kernels.

        Raises:
            TimeLimitError: IRC205 for too many time steps.
        """
        options: dict[str, Any] = {
            "stepwise": True,
            "time_limit": seconds_to_capture(self._request.plan.time_limit),
        }
        with self._budget.measuring_paused():
            with planning, tracing():
                captured = capture_graph(graph, args, names, **options)
            assert captured is not None, "its kernels have something to differentiate"
            _LOG.info("%s does not fit by kernels: its LSTM layers are planned as time steps", kernels.name)
            program = replace(self._costed(captured), kernels=kernels.solutions.program)
        return Variant(kernels.name, captured, SubgraphSolutions(program))


def _is_countable(tensor: Tensor) -> bool:
    """Whether a tensor has memory of its own here: no stand-in of a tracer, no sparse tensor."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and not is_lazy(tensor)


def _look(_: object) -> None:
    """Shows a backend the modules of a frame before Dynamo compiles it, or leaves it to Python."""
    found = compiled_frame()
    if found is not None and isinstance(found[0], Backend):
        found[0].see(found[1])


def _look_again() -> str:
    """Does the same before a frame is compiled anew, or left to Python since that was too often."""
    found = compiled_frame()
    if found is not None and isinstance(found[0], Backend):
        found[0].see(found[1], gave_up=is_given_up())
    return ""


@dataclass(frozen=True, slots=True)
class Unplanned:
    """A graph that has nothing to differentiate, or that no plan can hold.

    Args:
        name: Its number, and where it is in the user's code.
        nbytes: What it takes beside its arguments; 0 if gradients are off, which is not a training step, or
            if it is measured with what is outside of graphs.
        is_capturable: Whether it has nothing to differentiate.
    """

    name: str
    nbytes: int
    is_capturable: bool = True


class _Compiled:
    """One graph of Dynamo, with a variant for each set of sizes, and of numbers that decide something."""

    def __init__(self, backend: Backend, graph: fx.GraphModule) -> None:
        self.backend = backend
        self.unplannable: Unplanned | None = None
        """The note that a call of it could not be captured; earlier calls keep their plans."""
        self.graph = graph
        self.names = lifted_names(graph)
        numbers = numbers_among(graph)
        self.numbers = frozenset(numbers.values())
        self.results = take_number_results(graph.graph, numbers)
        graph.recompile()
        self.free = free_numbers_of_graph(graph.graph, numbers)
        self.variants: OrderedDict[Hashable, Variant | Unplanned] = OrderedDict()
        self.draws_from_numpy = draws_from_numpy(graph)

    def run(self, *args: Any) -> Any:
        """Runs the graph on these arguments."""
        try:
            args = tuple(_number(arg) if k in self.numbers else arg for k, arg in enumerate(args))
            results = self._run(args)
        except BaseException:
            self.backend.let_go()
            raise
        if not self.results:
            return results
        return [
            self.results[place].of(args) if place in self.results else result
            for place, result in enumerate(results)
        ]

    def _run(self, args: Sequence[Any]) -> Any:
        if self.draws_from_numpy:
            raise _numpy_random(self.graph)
        variant = self._variant(args)
        if isinstance(variant, Unplanned):
            return self.backend.pass_by(variant, self.graph, args)

        def by_time_steps() -> Any:
            steps = self.backend.time_steps(variant, self.graph, args, self.names, self._free(args))
            result = self._run_variant(steps, args)
            self.variants[self._key(args)] = steps
            self.backend.forget(variant)
            return result

        return kernels_or_time_steps(variant.graph, lambda: self._run_variant(variant, args), by_time_steps)

    def _run_variant(self, variant: Variant, args: Sequence[Any]) -> Any:
        captured = variant.captured
        inputs = captured.inputs(args)
        statics = (i for i in captured.captured.graph.inputs if i.role is not InputRole.TANGENT)
        for tensor, static in zip(inputs, statics, strict=True):
            check_tensor(tensor, static)
        numbers = numbers_of(variant.expressions, args)
        assert numbers is not None, "the key of the variant says that there are some"
        outputs = self.backend.run(variant, inputs, numbers)
        signature = captured.captured.signature
        tree: Any = signature.out_tree
        return pytree.tree_unflatten(deliver(signature.deliveries, inputs, outputs), tree)

    def _variant(self, args: Sequence[Any]) -> Variant | Unplanned:
        """Returns the capture for arguments of these sizes, and numbers; Dynamo may have left both open."""
        key = self._key(args)
        if key in self.variants:
            self.variants.move_to_end(key)
            return self.variants[key]
        if self.unplannable is not None and torch.is_grad_enabled():
            return self.unplannable
        free = self._free(args)
        variant = self.backend.variant(self.graph, args, self.names, free)
        if isinstance(variant, Unplanned) and not variant.is_capturable:
            self.unplannable = variant
        if isinstance(variant, Variant) and variant.expressions != free.expressions:
            self.free = NO_NUMBERS  # each number has a plan of its own
            key = self._key(args)
        self.variants[key] = variant
        if len(self.variants) > _VARIANTS:
            _, oldest = self.variants.popitem(last=False)
            if isinstance(oldest, Variant):
                _LOG.info("%s has run with more than %d sizes; the oldest is dropped", oldest.name, _VARIANTS)
                self.backend.forget(oldest)
        return variant

    def _free(self, args: Sequence[Any]) -> FreeNumbers:
        """The numbers of a call that decide nothing: none if what is computed from them is not a number."""
        return NO_NUMBERS if numbers_of(self.free.expressions, args) is None else self.free

    def _key(self, args: Sequence[Any]) -> Hashable:
        free = self._free(args)
        pairs = enumerate(zip(args, self.names, strict=True))
        own = (
            type(arg) if place in free.places else _size(arg) for place, (arg, name) in pairs if name is None
        )
        kinds = map(type, numbers_of(free.expressions, args) or ())
        return (torch.is_grad_enabled(), *own, *kinds)


def _by_measuring(error: UnsupportedError) -> UnsupportedError:
    """The refusal of a graph, with the advice for one of Dynamo's."""
    return UnsupportedError(
        error.code,
        error.message,
        at=error.at,
        help='give irc.backend outside="measured": then the graph runs as eager does, and is measured; or '
        "rewrite what is named here",
    )


def _numpy_random(graph: fx.GraphModule) -> UnsupportedError:
    return UnsupportedError(
        "IRC338",
        f"a compiled graph ({graph_name(graph)}) draws from numpy.random, for which Dynamo takes torch's "
        "generator",
        help="set torch._dynamo.config.use_numpy_random_stream = True before the first step, or compile by "
        "an object, as in torch.compile(model, backend=irc.backend(...))",
    )


def _number(arg: object) -> object:
    """Returns a number that Dynamo may have put into a tensor."""
    return arg.item() if isinstance(arg, Tensor) else arg


def _size(arg: object) -> Hashable:
    if isinstance(arg, Tensor):
        return tuple(arg.shape), arg.stride(), arg.dtype, arg.requires_grad
    return type(arg), repr(arg)  # as nan is not nan, and 0.0 is -0.0
