"""Pipelines: order, verification between passes, and their text form."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.exhaustive import chains
from support.strategies import Sample

import irc.passes
from irc.ir import (
    BudgetError,
    Compute,
    IrcError,
    Schedule,
    UsageError,
    VerificationError,
    print_graph,
    print_schedule,
)
from irc.passes import (
    Cost,
    Costs,
    Observer,
    Pass,
    PassManager,
    PlanMemory,
    Program,
    ReleaseGradients,
    parse_passes,
)

FEW = examples(20)


def program_of(sample: Sample) -> Program:
    return Program(sample.graph, Costs(sample.seconds, sample.workspace_bytes, "analytic:test"))


# ------------------------------------------------------------------------------------- as text

steps = st.one_of(
    st.builds(
        Cost,
        profile=st.sampled_from(("device", "cpu", "a100", "h100")),
        repeats=st.integers(1, 50),
        cache=st.booleans(),
    ),
    st.builds(
        PlanMemory,
        budget=st.integers(1, 1 << 50) | st.sampled_from(("4GiB", "1.5 GB", "60%", "100%")),
        strategy=st.sampled_from(("auto", "ilp", "eviction", "sqrt-n", "every-8", "keep-all")),
        time_limit=st.floats(0, 1e9),
    ),
    st.builds(ReleaseGradients, mode=st.sampled_from(("accumulate", "apply"))),
)


@given(st.lists(steps, min_size=1, max_size=4))
def test_a_pipeline_reads_back_what_it_prints(passes: list[Pass]) -> None:
    assert parse_passes(str(PassManager(passes))) == tuple(passes)


def test_a_pass_is_read_by_its_name_in_the_version_before() -> None:
    with pytest.warns(DeprecationWarning, match="the pass select-checkpoints is now plan-memory"):
        (step,) = parse_passes("select-checkpoints{budget=4GiB,strategy=sqrt-n}")
    assert step == PlanMemory("4GiB", "sqrt-n")
    with pytest.warns(DeprecationWarning, match="SelectCheckpoints is now PlanMemory"):
        assert irc.passes.SelectCheckpoints is PlanMemory


def test_a_pipeline_in_words() -> None:
    text = " cost{ profile = cpu } , plan-memory{budget=4GiB,time_limit=5},cost"
    passes = parse_passes(text)
    assert passes == (Cost("cpu"), PlanMemory("4GiB", time_limit=5.0), Cost())
    assert str(PassManager(passes)) == (
        "cost{profile=cpu,repeats=5,cache=true},"
        "plan-memory{budget=4GiB,strategy=auto,time-limit=5.0,offload=none,gap=0.005},"
        "cost{profile=device,repeats=5,cache=true}"
    )


@pytest.mark.parametrize(
    ("text", "message", "advice"),
    [
        (
            "",
            "the pipeline is empty",
            "passes: release-gradients, replay-draws, split-convolutions, loss-gradients-in-forward, "
            "tile-rows, fuse-operations, write-in-place, hold-forwards, cost, offer-tiers, plan-memory",
        ),
        ("cost,", "the pipeline ends in a comma", "name another pass, or drop the comma"),
        (
            "cost,,cost",
            "the pipeline cannot be read at column 6: ',cost'",
            "write name{option=value,...},name{...}",
        ),
        (
            "cost{profile=cpu",
            "the pipeline cannot be read at column 1: 'cost{profile=cpu'",
            "write name{option=value,...},name{...}",
        ),
        (
            "cost cost",
            "the pipeline cannot be read at column 1: 'cost cost'",
            "write name{option=value,...},name{...}",
        ),
        (
            "costs",
            "there is no pass 'costs'",
            "passes: release-gradients, replay-draws, split-convolutions, loss-gradients-in-forward, "
            "tile-rows, fuse-operations, write-in-place, hold-forwards, cost, offer-tiers, plan-memory",
        ),
        (
            "cost{machine=cpu}",
            "pass cost has no option 'machine=cpu'",
            "options: profile, repeats, cache (as option=value)",
        ),
        (
            "cost{profile}",
            "pass cost has no option 'profile'",
            "options: profile, repeats, cache (as option=value)",
        ),
        ("cost{cache=1}", "option cache of pass cost is '1'", "give a value like true"),
        ("cost{repeats=5.0}", "option repeats of pass cost is '5.0'", "give a value like 5"),
        (
            "plan-memory{time-limit=soon}",
            "option time-limit of pass plan-memory is 'soon'",
            "give a value like 60.0",
        ),
        ("cost{cache=true,cache=false}", "option cache of pass cost is given twice", "give it once"),
    ],
)
def test_text_that_is_no_pipeline_is_refused(text: str, message: str, advice: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_passes(text)
    assert (caught.value.code, caught.value.message, caught.value.help) == ("IRC404", message, advice)


# ------------------------------------------------------------------------------------- running


@dataclass
class Recorder:
    """Writes down what it sees, in a list that several share."""

    name: str
    seen: list[str] = field(default_factory=list[str])

    def before(self, step: Pass, program: Program) -> None:
        self.seen.append(f"{self.name} before {step.name} {program.plan is not None}")

    def after(self, step: Pass, program: Program, seconds: float) -> None:
        assert seconds >= 0
        self.seen.append(f"{self.name} after {step.name} {program.plan is not None}")


@dataclass(frozen=True)
class Rename:
    """Does nothing."""

    name: ClassVar[str] = "rename"

    def run(self, program: Program, /) -> Program:
        return program


@dataclass(frozen=True)
class ForgetsTheOutput:
    """Drops the operation that makes the output, from the schedule or from the graph."""

    name: ClassVar[str] = "forgets-the-output"

    def run(self, program: Program, /) -> Program:
        graph = program.graph
        (output,) = (graph.producers[s] for s in graph.output_storages if graph.producers[s].name[0] == "f")
        if program.schedule is None:
            return replace(
                program, graph=replace(graph, nodes=tuple(n for n in graph.nodes if n is not output))
            )
        kept = (i for i in program.schedule.instructions if not (isinstance(i, Compute) and i.node is output))
        return replace(program, schedule=Schedule(graph, tuple(kept)))


@dataclass(frozen=True)
class ClaimsLess:
    """Says that the peak is a byte below what it is."""

    name: ClassVar[str] = "claims-less"

    def run(self, program: Program, /) -> Program:
        assert program.plan is not None
        return replace(program, plan=replace(program.plan, peak_bytes=program.plan.peak_bytes - 1))


def failure(passes: Sequence[Pass], program: Program, observers: Sequence[Observer] = ()) -> IrcError:
    with pytest.raises(IrcError) as caught:
        PassManager(passes, observers).run(program)
    return caught.value


@given(chains())
@FEW
def test_observers_are_called_in_order(sample: Sample) -> None:
    seen: list[str] = []
    observers: list[Observer] = [Recorder("a", seen), Recorder("b", seen)]
    result = PassManager([Rename(), PlanMemory(), Rename()], observers).run(program_of(sample))
    assert result.plan is not None and result.schedule is not None
    assert seen == [
        f"{who} {when} {what} {planned}"
        for what, *states in (
            ("rename", False, False),
            ("plan-memory", False, True),
            ("rename", True, True),
        )
        for when, planned in zip(("before", "after"), states, strict=True)
        for who in ("a", "b")
    ]


@given(chains(), st.booleans())
@FEW
def test_a_pass_that_breaks_the_program_is_named(sample: Sample, planned: bool) -> None:
    passes = [PlanMemory(), ForgetsTheOutput(), Rename()] if planned else [ForgetsTheOutput(), Rename()]
    seen: list[str] = []
    error = failure(passes, program_of(sample), [Recorder("a", seen)])
    assert isinstance(error, VerificationError)
    assert error.__notes__ == ["in pass forgets-the-output{}"]
    assert seen[-1] == f"a before forgets-the-output {planned}"


@given(chains())
@FEW
def test_a_claim_that_is_not_true_is_caught(sample: Sample) -> None:
    error = failure([PlanMemory(), ClaimsLess()], program_of(sample))
    assert error.code == "IRC129"
    assert error.__notes__ == ["in pass claims-less{}"]


@given(chains())
@FEW
def test_an_error_of_a_pass_names_it_with_its_options(sample: Sample) -> None:
    error = failure([Rename(), PlanMemory(1)], program_of(sample))
    assert isinstance(error, BudgetError)
    options = "budget=1,strategy=auto,time-limit=60.0,offload=none,gap=0.005"
    assert error.__notes__ == [f"in pass plan-memory{{{options}}}"]
    error = failure([PlanMemory(strategy="best")], program_of(sample))
    assert error.code == "IRC403"


@given(chains())
@FEW
def test_what_is_broken_from_the_start_is_refused_before_any_pass(sample: Sample) -> None:
    program = program_of(sample)
    seen: list[str] = []
    broken = ForgetsTheOutput().run(program)
    with pytest.raises(VerificationError) as caught:
        PassManager([Rename()], [Recorder("a", seen)]).run(broken)
    assert not hasattr(caught.value, "__notes__") and seen == []


@given(chains())
@FEW
def test_a_program_prints_its_graph_and_then_its_schedule(sample: Sample) -> None:
    program = program_of(sample)
    assert str(program) == print_graph(sample.graph)
    result = PassManager([PlanMemory()]).run(program)
    assert result.schedule is not None
    assert str(result) == print_schedule(result.schedule)
    first = result.schedule.instructions[0]
    assert isinstance(first, Compute) and first.node is sample.graph.operations[0]
