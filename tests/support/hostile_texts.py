"""ONNX files with a text of an attacker in each field that holds text.

PYTHONPATH=src:tests python -m support.hostile_texts

The command writes each text of a model, wherever it stands, as each kind of hostile text, plans, runs and
inspects the file, and prints a table of what came of it. Exit status: 1 where code of the file ran, an
internal error came, or a terminal would have been told something.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.descriptor import FieldDescriptor
from onnx import TensorProto, helper, numpy_helper

from irc.tools import cli

__all__ = ["KINDS", "fields_of", "hostile", "model", "outcome", "rewritten", "text_fields", "texts_of"]


def hostile(ran: Path) -> dict[str, str]:
    """Texts that would make the file `ran` if they ran, or confuse a terminal."""
    code = f"open({str(ran)!r}, 'w').close()"
    return {
        "line": f"w\n{code}\n#",
        "return": f"w\r{code}\r#",
        "separator": f"w\u2028{code}\u2028#",
        "quote": f"'''\"\"\"\n{code}\n\"\"\"'''",
        "call": f"x=({code})",
        "terminal": "\x1b[2J\x1b]0;owned\x07\u202e",
        "nul": "a\x00b",
        "long": "n" * 100_000,
    }


KINDS = tuple(hostile(Path()))


_WEIGHTS = np.eye(4, dtype=np.float32)


def model() -> onnx.ModelProto:
    """A model with a text of its own in every field that can hold one; its weights lie in `weights.bin`."""
    weight = numpy_helper.from_array(_WEIGHTS, "w")
    weight.ClearField("raw_data")
    weight.data_location, weight.doc_string = TensorProto.EXTERNAL, "of a tensor"
    for key, text in (("location", "weights.bin"), ("checksum", "of weights")):
        weight.external_data.add(key=key, value=text)
    labels = helper.make_tensor("labels", TensorProto.STRING, [1], [b"a label"])  # pyright: ignore[reportArgumentType]
    true = numpy_helper.from_array(np.array(True), "truth")
    value = helper.make_tensor_value_info
    branches = [
        helper.make_graph(
            [helper.make_node("Relu", ["t"], [f"{name} out"])], name, [], [value(f"{name} out", 1, None)]
        )
        for name in ("then", "else")
    ]
    leaky = helper.make_node("LeakyRelu", ["a"], ["b"], name="within")
    leaky.attribute.add(name="alpha", ref_attr_name="slope", type=onnx.AttributeProto.FLOAT)
    function = helper.make_function(
        "own", "Leaky", ["a"], ["b"], [leaky], [helper.make_opsetid("", 20)], attributes=["slope"]
    )
    function.doc_string, function.overload = "of a function", "overload"
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], name="first", doc_string="of a node"),
        helper.make_node("Gelu", ["h"], ["g"], name="second", approximate="tanh"),
        helper.make_node("Leaky", ["g"], ["t"], name="called", domain="own", overload="overload", slope=0.1),
        helper.make_node("If", ["truth"], ["z"], then_branch=branches[0], else_branch=branches[1]),
        helper.make_node("Constant", [], ["texts"], name="unread", value_strings=["a text"]),
        helper.make_node("ReduceSum", ["z"], ["y"], name="third", keepdims=0),
    ]
    nodes[1].attribute[0].doc_string = "of an attribute"
    nodes[1].metadata_props.add(key="node key", value="node value")
    sharded = nodes[0].device_configurations.add(configuration_id="mesh")
    spec = sharded.sharding_spec.add(tensor_name="h")
    spec.sharded_dim.add(axis=0).simple_sharding.add(dim_param="shards", num_shards=1)
    given, made = (
        value("x", TensorProto.FLOAT, ["n", 4], doc_string="of a value"),
        value("y", TensorProto.FLOAT, []),
    )
    given.type.denotation, given.type.tensor_type.shape.dim[0].denotation = "IMAGE", "DATA_BATCH"
    opaque = onnx.ValueInfoProto(name="opaque")
    opaque.type.opaque_type.domain, opaque.type.opaque_type.name = "opaque domain", "opaque name"
    graph = helper.make_graph(
        nodes, "graph", [given], [made], [weight, true, labels], doc_string="of a graph", value_info=[opaque]
    )
    note = graph.quantization_annotation.add(tensor_name="g")
    note.quant_parameter_tensor_names.add(key="SCALE_TENSOR", value="scale of g")
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("own", 1)]
    whole = helper.make_model(graph, opset_imports=opsets, ir_version=10, functions=[function])
    whole.producer_name, whole.producer_version = "producer", "version"
    whole.domain, whole.doc_string = "domain", "of a model"
    whole.configuration.add(name="mesh", num_devices=1).device.append("device")
    helper.set_model_props(whole, {"key": "value"})
    return whole


def _is_text(field: Any) -> bool:
    return field.type == FieldDescriptor.TYPE_STRING or field.name in ("s", "strings", "string_data")


def texts_of(message: Any) -> Iterator[tuple[Any, str, int | None, str]]:
    """The fields of a message that are text: the message that has it, its name, its index and the text."""
    for field, value in message.ListFields():
        many = list(value) if field.is_repeated else [value]
        for index, each in enumerate(many):
            if field.type == FieldDescriptor.TYPE_MESSAGE:
                yield from texts_of(each)
            elif _is_text(field) and each:
                text = each if isinstance(each, str) else each.decode()
                yield message, field.name, index if field.is_repeated else None, text


def fields_of(whole: onnx.ModelProto, text: str) -> list[str]:
    """The fields in which a text stands, such as `NodeProto.name`."""
    return sorted({f"{m.DESCRIPTOR.name}.{name}" for m, name, _, each in texts_of(whole) if each == text})


def text_fields() -> set[str]:
    """The fields of ONNX's messages that can hold text."""
    found, pending = dict[str, Any](), list[Any]([onnx.ModelProto.DESCRIPTOR])
    while pending:
        descriptor = pending.pop()
        if descriptor is not None and descriptor.full_name not in found:
            found[descriptor.full_name] = descriptor
            pending.extend(field.message_type for field in descriptor.fields)
    return {f"{d.name}.{field.name}" for d in found.values() for field in d.fields if _is_text(field)}


def rewritten(whole: onnx.ModelProto, old: str, new: str) -> onnx.ModelProto:
    """The model with a text, wherever it stands, written as another."""
    changed = onnx.ModelProto()
    changed.CopyFrom(whole)
    for message, name, index, text in list(texts_of(changed)):
        if text != old:
            continue
        value: Any = (
            new
            if message.DESCRIPTOR.fields_by_name[name].type == FieldDescriptor.TYPE_STRING
            else new.encode()
        )
        if index is None:
            setattr(message, name, value)
        else:
            getattr(message, name)[index] = value
    return changed


_PLAN = ("--budget", "100%", "--strategy", "keep-all", "--costs", "analytic", "--batch", "2", "--explain")


def outcome(whole: onnx.ModelProto, folder: Path) -> str:
    """Plans, runs and inspects a file in `folder`; the exit status in words, or what must not be.

    Raises:
        AssertionError: Code of the file ran, an internal error came, or what is printed is not printable.
    """
    path, out = folder / "m.onnx", folder / "plan"
    path.write_bytes(whole.SerializeToString())
    (folder / "weights.bin").write_bytes(_WEIGHTS.tobytes())
    printed, codes = "", list[int]()
    commands = [("optimize", str(path), *_PLAN, "-o", str(out)), ("inspect", str(path), "--batch", "2")]
    commands += [("run", str(out), "--steps", "1", "--check")]
    for command in commands:
        stdout, stderr = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            codes.append(cli.main(list(command)))
        text = stdout.getvalue() + stderr.getvalue()
        printed += text
        assert "IRC000" not in text, text[:2000]
        assert all(line.isprintable() for line in text.split("\n")), repr(text[:2000])
        assert len(text) < 20_000, len(text)
        if command[0] == "inspect" and codes[0]:
            break
    assert not (folder / "ran").exists(), "code of the file ran"
    if not codes[0]:
        assert codes[-1] == 0, printed[-2000:]
        return "trains"
    assert codes[0] in (2, 4), printed[-2000:]
    return re.findall(r"IRC\d+", printed)[0]


def main() -> int:
    """Prints the table; returns the exit status."""
    warnings.simplefilter("ignore")
    base, failed = model(), 0
    print(f"| fields of a text | {' | '.join(KINDS)} |", "|---" * (len(KINDS) + 1) + "|", sep="\n")
    for text in sorted({each for *_, each in texts_of(base)}):
        cells = list[str]()
        for kind in KINDS:
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                try:
                    cells.append(outcome(rewritten(base, text, hostile(folder / "ran")[kind]), folder))
                except AssertionError as error:
                    failed += 1
                    cells.append(f"FAIL {error!s:.60}")
        print(f"| {', '.join(fields_of(base, text))} | {' | '.join(cells)} |", flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
