"""Steps that grow with a graph alone: twice the operations take twice the calls of functions."""

import cProfile
from collections.abc import Callable

import pytest

from irc.backends.torch import compile_program
from irc.ir import (
    DType,
    Graph,
    Input,
    InputRole,
    Node,
    Output,
    OutputRole,
    Region,
    Storage,
    TensorType,
    Trait,
    Value,
    verify_graph,
    verify_schedule,
)
from irc.passes import Cost, Program
from irc.passes.remat.planner import Planner
from irc.passes.remat.strategies import known_strategies

TYPE = TensorType.contiguous((4, 8), DType("float32"), "cpu")


def chain(length: int) -> Graph:
    """A product with a parameter, and so many activations after it, with their backward."""
    nodes: list[Node] = []

    def fresh(name: str) -> Value:
        return Value(name, TYPE, Storage(f"s_{name}", TYPE.nbytes, "cpu"))

    def add(op: str, *operands: Value | int, region: Region = Region.BACKWARD) -> Value:
        name = f"v{len(nodes)}"
        is_view = op == "aten.detach.default"
        base = operands[0]
        assert isinstance(base, Value)
        value = Value(name, TYPE, base.storage) if is_view else fresh(name)
        traits = frozenset({Trait.VIEW}) if is_view else frozenset[Trait]()
        nodes.append(Node(name, op, operands, (value,), region=region, traits=traits))
        return value

    weight, given, tangent = fresh("weight"), fresh("given"), fresh("tangent")
    made = [add("aten.mul.Tensor", given, weight, region=Region.FORWARD)]
    for _ in range(length):
        made.append(add("aten.relu.default", made[-1], region=Region.FORWARD))
    gradient = tangent
    for value in reversed(made[1:]):
        gradient = add("aten.threshold_backward.default", gradient, add("aten.detach.default", value), 0)
    gradient = add("aten.mul.Tensor", gradient, given)
    return Graph(
        (
            Input(weight, InputRole.PARAMETER, "weight", requires_grad=True),
            Input(given, InputRole.INPUT, "0"),
            Input(tangent, InputRole.TANGENT, "0"),
        ),
        tuple(nodes),
        (
            Output(made[-1], OutputRole.OUTPUT, "0"),
            Output(gradient, OutputRole.GRADIENT, "parameter:weight"),
        ),
    )


def verified(graph: Graph) -> object:
    return verify_graph(graph)


def planned(graph: Graph) -> object:
    return list(known_strategies(Planner(Cost(profile="cpu").run(Program(graph))).problem))


def emitted(graph: Graph) -> object:
    problem = Planner(Cost(profile="cpu").run(Program(graph))).problem
    schedule = problem.keep_all.schedule
    verify_schedule(schedule, problem.costs.workspace_bytes)
    return compile_program(schedule, {})


def calls(step: Callable[[Graph], object], length: int) -> int:
    graph = chain(length)
    profile = cProfile.Profile()
    profile.runcall(step, graph)
    return sum(entry.callcount for entry in profile.getstats())  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("step", [verified, planned, emitted])
def test_twice_the_operations_take_twice_the_calls(step: Callable[[Graph], object]) -> None:
    calls(step, 8)  # what is imported or made at the first call
    once, twice = calls(step, 64), calls(step, 128)
    # known strategies have one more setting for twice the operations
    assert twice < 2.4 * once
