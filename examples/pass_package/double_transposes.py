"""A pass of another distribution: `pip install ./examples/pass_package`, then `irc passes` lists it."""

from dataclasses import dataclass, replace
from typing import ClassVar

from irc.ir import Argument, Value
from irc.passes import Program

_TRANSPOSE = "aten.t.default"


@dataclass(frozen=True, slots=True)
class DropDoubleTransposes:
    """Lets what reads the transpose of a transpose read the matrix itself."""

    name: ClassVar[str] = "drop-double-transposes"

    def run(self, program: Program, /) -> Program:
        """The program without transposes of transposes."""
        made = {node.values[0]: node for node in program.graph.nodes if node.op == _TRANSPOSE}
        instead = {
            value: made[node.operands[0]].operands[0]
            for value, node in made.items()
            if node.operands[0] in made and made[node.operands[0]].operands[0].type == value.type
        }

        def mapped(argument: Argument) -> Argument:
            if isinstance(argument, tuple):
                return tuple(map(mapped, argument))
            return instead.get(argument, argument) if isinstance(argument, Value) else argument

        kept = [node for node in program.graph.nodes if not node.values or node.values[0] not in instead]
        nodes = tuple(replace(node, arguments=tuple(map(mapped, node.arguments))) for node in kept)
        outputs = tuple(replace(o, value=instead.get(o.value, o.value)) for o in program.graph.outputs)
        graph = replace(program.graph, nodes=nodes, outputs=outputs)
        return replace(program, graph=graph, original=program.original or program.graph)
