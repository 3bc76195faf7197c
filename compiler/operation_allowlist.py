"""The limits of a written program: operations that make tensors of tensors and numbers, and plain indices."""

from __future__ import annotations

import re
from typing import Any

from ..backends.torch import check_names
from ..ir import (
    FUSED,
    PAUSE,
    RECEIVE,
    SEND,
    Graph,
    InputRole,
    Kernel,
    Node,
    OutputRole,
    Trait,
    VerificationError,
    printable,
    steps_of,
    values_in,
)
from ..torch_support.fusible import is_fusible
from ..torch_support.operations import OWN_FUNCTIONS, overload_of

__all__ = ["check_operations"]

_NAMESPACES = ("aten", "prims")
_TENSORS = ("Tensor", "Optional[Tensor]", "List[Tensor]", "List[Optional[Tensor]]")
_NUMBERS = ("int", "bool", "float", "complex", "number")
_READ = frozenset(
    (
        *_TENSORS,
        *(form.format(kind) for kind in _NUMBERS for form in ("{}", "Optional[{}]", "List[{}]")),
        *("Optional[List[int]]", "Optional[List[float]]", "Device", "Optional[Device]"),
        "Optional[Generator]",  # no text form holds a generator
    )
)
"""The types of arguments that name nothing outside of the program, as schemas of torch print them."""

_CHOICES = frozenset(
    (
        *("activation", "algorithm", "api_name", "approximate", "assert_msg", "driver", "indexing"),
        *("interpolation", "mode", "norm", "ord", "p", "pad_mode", "padding", "padding_side", "reduce"),
        *("rounding_mode", "side", "UPLO"),
    )
)
"""The arguments of operations that are texts, and choose a way to compute or are part of an error."""

_REFUSED = re.compile(
    r"_test_.*|_?backward|set_.*|_?resize.*|requires_grad_|detach_|_make_dual.*|_fw_primal.*|_version|.*_unsafe"
    r"|_nested_view_from_.*|_?pin_memory|_fused_(adam|sgd|adagrad).*|_cslt_.*|_empty_affine_.*|as_strided_"
    r"|_convert_indices_from_.*|segment_reduce"
)
"""The operations, by name, that change what a tensor is, and not its numbers, that no capture holds, or whose
kernels read or write where their index tensors say without a look."""

_INDEX = re.compile("0|[1-9][0-9]{0,8}")


def check_operations(graph: Graph) -> None:
    """Refuses what a program of a file may not run, before anything of it does.

    An operation that takes the name of a file, a storage or a generator, that prints, or that is of a library
    other than torch, is refused.

    Raises:
        VerificationError: IRC132.
    """
    indexed = [i.target for i in graph.inputs if i.role in (InputRole.INPUT, InputRole.TANGENT)]
    indexed += [o.target for o in graph.outputs if o.role is OutputRole.OUTPUT]
    for target in indexed:
        if not _INDEX.fullmatch(target):
            raise VerificationError("IRC132", f"{printable(target)} is not the index of an input or output")
    if min(graph.loss_bytes, graph.loss_held_bytes, graph.loss_saved_bytes) < 0:
        raise VerificationError("IRC132", f"the loss takes {graph.loss_bytes} B")
    for node in graph.nodes:
        if node.releases is not None or node.op in (SEND, RECEIVE, PAUSE):
            continue
        if node.op == FUSED:
            _check_fused(node)
            continue
        check_names(node)
        if node.op in OWN_FUNCTIONS and node.op.startswith("irc."):
            continue  # their arguments are tensors, numbers and the names of devices
        if node.is_view and len([*values_in((node.arguments, *(given for _, given in node.keywords)))]) > 1:
            # it is derived again at each use: a chain of such views would be written out exponentially
            raise VerificationError(
                "IRC132", f"{printable(node.op)} is a view of several tensors", at=node.at
            )
        found = overload_of(node.op)
        if found is None or not _is_pure(found):
            raise VerificationError(
                "IRC132", f"{printable(node.op)} is not an operation that a file may hold", at=node.at
            )
        if found._schema.is_mutable and not node.traits & {Trait.EFFECT, Trait.OVERWRITES}:
            raise VerificationError(
                "IRC132", f"{printable(node.op)} writes into an operand, and does not say so", at=node.at
            )


def _check_fused(node: Node) -> None:
    """Refuses a fused operation of others than those that a kernel is made of."""
    try:
        Kernel.of(node)
        unknown = [step.op for step in steps_of(node)[0] if not is_fusible(step.op)]
    except ValueError as error:
        raise VerificationError("IRC132", f"{printable(node.name)}: {error}", at=node.at) from error
    if unknown:
        raise VerificationError(
            "IRC132", f"{printable(unknown[0])} is not an operation that can be fused", at=node.at
        )


def _is_pure(operation: Any) -> bool:
    """Whether an operation reads tensors and numbers, and does nothing but make and write tensors."""
    schema = operation._schema
    types = [str(each.type) for each in (*schema.arguments, *schema.returns)]
    return (
        operation.namespace in _NAMESPACES
        and not _REFUSED.fullmatch(schema.name.partition("::")[2])
        and not set(_TENSORS).isdisjoint(types)
        and all(
            str(argument.type) in _READ
            or (str(argument.type) in ("str", "Optional[str]") and argument.name in _CHOICES)
            for argument in schema.arguments
        )
        and all(str(result.type) in (*_TENSORS, *_NUMBERS) for result in schema.returns)
    )
