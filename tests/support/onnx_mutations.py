"""Small ONNX models, and ways to spoil them: bytes are flipped, cut and spliced, and graphs are rewired.

Run for longer than the tests do, from the root of the repository:

    python tests/onnx_mutations.py --examples 5000
"""

from __future__ import annotations

import argparse
import collections
import functools
import math
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import numpy as np
import onnx
import torch
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, numpy_helper, parser
from torch._subclasses.fake_tensor import FakeTensorMode

from irc.frontends.onnx import example_inputs, from_onnx
from irc.frontends.onnx.bounds import Bounded
from irc.frontends.onnx.lowerings import operators
from irc.ir.errors import IrcError

__all__ = ["SECONDS", "TooSlow", "corpus", "mutate_bytes", "mutate_model", "outcome"]

SECONDS = 20
"""Time within which a file must be imported, and then run."""
_RUN_BYTES = 1 << 28

_TEXTS = {
    "conv": """<ir_version: 9, opset_import: ["" : 17]>
        g (float[2,3,8,8] x) => (float[2,4] y) <float[4,3,3,3] w, float[4] s, float[4] b, float[4] m,
            float[4] v, float[4,4] k, float[4] kb> {
          a = Conv<pads=[1,1,1,1], strides=[2,2], kernel_shape=[3,3]>(x, w)
          n = BatchNormalization<epsilon=0.001>(a, s, b, m, v)
          r = Relu(n)  p = MaxPool<kernel_shape=[2,2], strides=[2,2]>(r)
          q = AveragePool<kernel_shape=[2,2], pads=[1,0,1,0]>(p)
          e = GlobalAveragePool(q)  f = Flatten<axis=1>(e)
          h = Gemm<alpha=0.5, transB=1>(f, k, kb)  y = Softmax<axis=-1>(h) }""",
    "transposed": """<ir_version: 9, opset_import: ["" : 17]>
        g (float[1,2,5,5] x) => (float[1,3,"h","w"] y) <float[2,3,3,3] w> {
          a = ConvTranspose<strides=[2,2], output_padding=[1,1], pads=[1,1,1,1]>(x, w)
          y = InstanceNormalization(a, one, zero)
          one = Constant<value=float[3] {1.,1.,1.}>()  zero = Constant<value=float[3] {0.,0.,0.}>() }""",
    "lstm": """<ir_version: 9, opset_import: ["" : 17]>
        g (float[3,2,4] x) => (float[3,1,2,5] y, float h) <float[1,20,4] w, float[1,20,5] r, float[1,40] b> {
          y, hh, c = LSTM<hidden_size=5, direction="forward">(x, w, r, b)
          h = ReduceMean<keepdims=0>(hh) }""",
    "gru": """<ir_version: 9, opset_import: ["" : 17]>
        g (float[3,2,4] x) => (float[3,2,2,5] y) <float[2,15,4] w, float[2,15,5] r, float[2,30] b> {
          y, h = GRU<hidden_size=5, direction="bidirectional", linear_before_reset=1>(x, w, r, b) }""",
    "loop": """<ir_version: 9, opset_import: ["" : 17]>
        g (float[2,3] x) => (float[2,3] y, float[4,2,3] z) <float[3] w> {
          n = Constant<value=int64 {4}>()  t = Constant<value=bool {1}>()
          y, z = Loop<body = body (int64 i, bool go, float[2,3] a) => (bool go2, float[2,3] b, float[2,3] c) {
              go2 = Identity(go)  b = Mul(a, w)  c = Tanh(b) }>(n, t, x) }""",
    "while": """<ir_version: 9, opset_import: ["" : 17]>
        g (float[2,3] x) => (float[2,3] y) <float[3] w> {
          n = Constant<value=int64 {3}>()  s = ReduceSum<keepdims=0>(x)  l = Constant<value=float {100.}>()
          t = Less(s, l)
          y = Loop<body = body (int64 i, bool go, float[2,3] a) => (bool go2, float[2,3] b) {
              b = Add(a, w)  u = ReduceSum<keepdims=0>(b)  go2 = Less(u, l) }>(n, t, x) }""",
    "if": """<ir_version: 9, opset_import: ["" : 17]>
        g (float[2,3] x) => (float[2,3] y) <float[3] w> {
          s = ReduceSum<keepdims=0>(x)  o = Constant<value=float {0.}>()  c = Greater(s, o)
          y = If<then_branch = one () => (float[2,3] a) { a = Mul(x, w) },
                 else_branch = two () => (float[2,3] b) { d = Sigmoid(x) b = Sub(d, w) }>(c) }""",
    "scan": """<ir_version: 9, opset_import: ["" : 17]>
        g (float[2] h, float[3,2] x) => (float[2] y, float[3,2] z) {
          y, z = Scan<num_scan_inputs=1, body = body (float[2] a, float[2] e) => (float[2] b, float[2] c) {
              b = Add(a, e)  c = Identity(b) }>(h, x) }""",
    "resize": """<ir_version: 9, opset_import: ["" : 17]>
        g (float[1,2,4,4] x) => (float[1,2,"h","w"] y) {
          s = Constant<value=float[4] {1.,1.,2.,1.5}>()  z = Constant<value=int64[4] {1,2,5,7}>()
          a = Resize<mode="linear", coordinate_transformation_mode="asymmetric">(x, , s)
          y = Resize<mode="nearest">(a, , , z) }""",
    "quantised": """<ir_version: 9, opset_import: ["" : 17]>
        g (float[2,4] x) => (float[2,3] y) <float[4,3] w> {
          s = Constant<value=float {0.1}>()  o = Constant<value=int8 {0}>()
          q = QuantizeLinear(x, s, o)  d = DequantizeLinear(q, s, o)  y = MatMul(d, w) }""",
    "shapes": """<ir_version: 9, opset_import: ["" : 17]>
        g (float[2,3,4] x, int64[2,3] i) => (float[2,"n"] y, float[2,3,6] e, int64[2,3] m) <float[6,4] w> {
          sh = Shape(x)  zero = Constant<value=int64[1] {0}>()  one = Constant<value=int64[1] {1}>()
          first = Gather<axis=0>(sh, zero)  rest = Constant<value=int64[1] {-1}>()
          target = Concat<axis=0>(first, rest)  flat = Reshape(x, target)
          two = Constant<value=int64[1] {9}>()  cut = Slice(flat, zero, two, one)
          pads = Constant<value=int64[4] {0,1,0,2}>()  y = Pad<mode="reflect">(cut, pads)
          t = Transpose<perm=[1,0]>(w)  e = MatMul(x, t)
          full = ConstantOfShape<value=int64[1] {2}>(one)  a = Constant<value=int64 {0}>()
          b = Constant<value=int64 {3}>()  d = Constant<value=int64 {1}>()  r = Range(a, b, d)
          j = Add(i, r)  c = Expand(full, one)  m = Mul(j, c) }""",
    "attention": """<ir_version: 9, opset_import: ["" : 17]>
        g (int64[2,5] ids) => (float[2,5,4] y)
            <float[7,4] table, float[4,12] w, float[12] b, float[4] s, float[4] o> {
          e = Gather(table, ids)  p = MatMul(e, w)  pb = Add(p, b)
          sizes = Constant<value=int64[3] {4,4,4}>()  q, k, v = Split<axis=2>(pb, sizes)
          kt = Transpose<perm=[0,2,1]>(k)  a = MatMul(q, kt)  n = Softmax<axis=2>(a)  c = MatMul(n, v)
          u = Einsum<equation="bij,jk->bik">(c, mix)  mix = EyeLike(dummy)
          z = Constant<value=int64[2] {4,4}>()
          dummy = ConstantOfShape(z)  y = LayerNormalization<axis=-1>(u, s, o) }""",
    "indices": """<ir_version: 9, opset_import: ["" : 17]>
        g (float[3,4] x, int64[2] i) => (float[3,2] t, float[2,4] g, float[3,4] s, float[2,5] h) {
          k = Constant<value=int64[1] {2}>()  t, ti = TopK<axis=1>(x, k)  g = Gather<axis=0>(x, i)
          w = Constant<value=int64[1,2] {0,1}>()  u = Constant<value=float[1] {3.}>()
          s1 = ScatterND(x, w, u)  c = Constant<value=int64 {1}>()  s = CumSum(s1, c)
          d = Constant<value=int64 {5}>()  v = Constant<value=float[2] {0.,1.}>()
          h = OneHot<axis=-1>(i, d, v) }""",
    "lists": """<ir_version: 9, opset_import: ["" : 17]>
        g (float[4,3] x) => (float[4,3] y, float[2,3] z) {
          n = Constant<value=int64 {2}>()  l = SplitToSequence<axis=0>(x, n)
          p = Constant<value=int64 {1}>()  z = SequenceAt(l, p)  y = ConcatFromSequence<axis=0>(l) }""",
    "functions": """<ir_version: 9, opset_import: ["" : 17, "my" : 1]>
        g (float[2,3] x) => (float[2,3] y) <float[3] w> { a = my.twice(x)  b = my.twice(a)  y = Mul(b, w) }
        <domain: "my", opset_import: ["" : 17, "my" : 1]> twice (a) => (c) { b = my.once(a)  c = my.once(b) }
        <domain: "my", opset_import: ["" : 17]> once (a) => (b) { b = Tanh(a) }""",
    "dropout": """<ir_version: 9, opset_import: ["" : 17]>
        g (float[2,3] x) => (float[2,3] y) <float[3] w> {
          r = Constant<value=float {0.5}>()  t = Constant<value=bool {1}>()  a = Dropout(x, r, t)
          lo = Constant<value=float {-1.}>()  b = Clip(a, lo)  m = Greater(b, lo)  y = Where(m, b, w) }""",
}


@functools.cache
def corpus() -> dict[str, bytes]:
    """The models as they would stand in files, by name; their weights are drawn."""
    found: dict[str, bytes] = {}
    for name, text in _TEXTS.items():
        if name == "quantised" and "DequantizeLinear" not in operators():
            continue
        model = parser.parse_model(text)
        _give_weights(model)
        _sort(model.graph)
        onnx.checker.check_model(model)
        found[name] = model.SerializeToString()
    return found


def _give_weights(model: ModelProto) -> None:
    generator = np.random.default_rng(0)
    stored = {t.name for t in model.graph.initializer}
    for value in list(model.graph.value_info):
        dims = [d.dim_value for d in value.type.tensor_type.shape.dim]
        if value.name not in stored:
            array = np.abs(generator.standard_normal(dims)).astype(np.float32)
            model.graph.initializer.append(numpy_helper.from_array(array, value.name))


def _sort(graph: GraphProto) -> None:
    """Nodes without operands first, so that the texts can name constants where they like."""
    nodes, known = list(graph.node), {v.name for v in graph.input} | {t.name for t in graph.initializer}
    del graph.node[:]
    while nodes:
        ready = next(n for n in nodes if all(not i or i in known for i in n.input))
        nodes.remove(ready)
        known.update(ready.output)
        graph.node.append(ready)


# Bytes


def mutate_bytes(data: bytes, random_: random.Random) -> bytes:
    """Some bytes flipped, dropped, doubled or replaced, or the file cut."""
    spoilt = bytearray(data)
    for _ in range(random_.randint(1, 4)):
        if not spoilt:
            break
        at = random_.randrange(len(spoilt))
        end = min(at + random_.randint(1, 32), len(spoilt))
        way = random_.randrange(6)
        if way == 0:
            spoilt[at] ^= 1 << random_.randrange(8)
        elif way == 1:
            spoilt[at] = random_.choice((0, 1, 0x7F, 0x80, 0xFF))
        elif way == 2:
            del spoilt[at:end]
        elif way == 3:
            spoilt[at:at] = spoilt[at:end]
        elif way == 4:
            other = random_.randrange(len(spoilt))
            spoilt[at:end] = spoilt[other : other + end - at]
        elif random_.random() < 0.3:
            del spoilt[at:]
    return bytes(spoilt)


# Graphs

_NUMBERS = (0, 1, -1, 2, 3, 5, 8, -7, 63, 1000, 10**5, 10**9, 2**31, 2**40, 2**62, 2**63 - 1, -(2**63))
_ATTRIBUTES = (AttributeProto.FLOAT, AttributeProto.INTS, AttributeProto.STRING, AttributeProto.GRAPH)
_TEXT = ("", "hello", "linear", "cubic", "floor", "half_pixel", "reverse", "bidirectional", "((", "ij,jk->ik")


def mutate_model(data: bytes, random_: random.Random) -> bytes:
    """One to three changes to the graph: sizes, types, attributes, names, operators, nodes or weights."""
    model = ModelProto.FromString(data)
    for _ in range(random_.randint(1, 3)):
        random_.choice(_WAYS)(model, random_)
    return model.SerializeToString()


def _graphs(graph: GraphProto) -> Iterator[GraphProto]:
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _graphs(attribute.g)


def _any_graph(model: ModelProto, random_: random.Random) -> GraphProto:
    return random_.choice(list(_graphs(model.graph)))


def _any_node(model: ModelProto, random_: random.Random) -> NodeProto:
    nodes = [n for graph in _graphs(model.graph) for n in graph.node]
    nodes += [n for function in model.functions for n in function.node]
    return random_.choice(nodes) if nodes else NodeProto()


def _any_name(model: ModelProto, random_: random.Random) -> str:
    graph = _any_graph(model, random_)
    names = [v.name for v in graph.input] + [t.name for t in graph.initializer]
    names += [o for n in graph.node for o in n.output]
    return random_.choice([*names, "", "ghost"])


def _any_tensor(model: ModelProto, random_: random.Random) -> TensorProto | None:
    tensors = [t for graph in _graphs(model.graph) for t in graph.initializer]
    for graph in _graphs(model.graph):
        tensors += [a.t for n in graph.node for a in n.attribute if a.HasField("t")]
    return random_.choice(tensors) if tensors else None


def _change_dim(model: ModelProto, random_: random.Random) -> None:
    graph = _any_graph(model, random_)
    dims = [d for v in (*graph.input, *graph.output) for d in v.type.tensor_type.shape.dim]
    if dims:
        random_.choice(dims).dim_value = random_.choice(_NUMBERS)


def _change_element(model: ModelProto, random_: random.Random) -> None:
    graph = _any_graph(model, random_)
    values = [*graph.input, *graph.output]
    if values:
        random_.choice(values).type.tensor_type.elem_type = random_.randrange(30)


def _change_tensor(model: ModelProto, random_: random.Random) -> None:
    tensor = _any_tensor(model, random_)
    if tensor is None:
        return
    way = random_.randrange(4)
    if way == 0 and tensor.dims:
        tensor.dims[random_.randrange(len(tensor.dims))] = random_.choice(_NUMBERS)
    elif way == 1:
        tensor.data_type = random_.randrange(30)
    elif way == 2:
        tensor.dims[:] = list(tensor.dims)[::-1]
    else:
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", random_.choice(("w.bin", "../w", "", "."))), ("offset", "-1")):
            entry = tensor.external_data.add()
            entry.key, entry.value = key, value


def _change_values(model: ModelProto, random_: random.Random) -> None:
    tensor = _any_tensor(model, random_)
    if tensor is None:
        return
    try:
        array = numpy_helper.to_array(tensor).copy()
    except Exception:
        return
    if not array.size or array.dtype.kind not in "iuf":
        return
    flat = array.reshape(-1)
    for _ in range(random_.randint(1, 2)):
        number = random_.choice((*_NUMBERS, float("nan"), float("inf"), 0.5, -1e30))
        with np.errstate(all="ignore"):
            wide = np.array([number if array.dtype.kind == "f" or number == number else 0])
            limited = np.nan_to_num(wide, posinf=2.0**62) if array.dtype.kind != "f" else wide
            flat[random_.randrange(flat.size)] = limited.astype(array.dtype)[0]
    shape = (flat.size * 2,) if random_.random() < 0.1 else array.shape
    tensor.CopyFrom(numpy_helper.from_array(np.resize(flat, shape), tensor.name))


def _change_attribute(model: ModelProto, random_: random.Random) -> None:
    node = _any_node(model, random_)
    if not node.attribute:
        return
    attribute = random_.choice(node.attribute)
    way = random_.randrange(6)
    if way == 0:
        node.attribute.remove(attribute)
    elif way == 1:
        attribute.i = random_.choice(_NUMBERS)
    elif way == 2 and attribute.ints:
        attribute.ints[random_.randrange(len(attribute.ints))] = random_.choice(_NUMBERS)
    elif way == 3:
        attribute.s = random_.choice(_TEXT).encode()
    elif way == 4:
        attribute.type = random_.choice(_ATTRIBUTES)
    elif attribute.ints and random_.random() < 0.5:
        attribute.ints.append(random_.choice(_NUMBERS))
    else:
        del attribute.ints[-1:]


def _add_attribute(model: ModelProto, random_: random.Random) -> None:
    names = (
        "axis",
        "axes",
        "to",
        "mode",
        "group",
        "perm",
        "pads",
        "keepdims",
        "direction",
        "layout",
        "dtype",
    )
    value: object = random_.choice((*_NUMBERS, *_TEXT, [0, 1], [1.5], [-1, 2**62]))
    node = _any_node(model, random_)
    node.attribute.append(onnx.helper.make_attribute(random_.choice(names), value))


def _change_operand(model: ModelProto, random_: random.Random) -> None:
    node = _any_node(model, random_)
    way = random_.randrange(4)
    if way == 0:
        node.input.append(_any_name(model, random_))
    elif way == 1 and node.input:
        del node.input[random_.randrange(len(node.input))]
    elif node.input:
        node.input[random_.randrange(len(node.input))] = _any_name(model, random_)


def _change_result(model: ModelProto, random_: random.Random) -> None:
    node = _any_node(model, random_)
    if random_.random() < 0.2:
        node.output.append("more")
    elif node.output:
        node.output[random_.randrange(len(node.output))] = _any_name(model, random_)


def _change_operator(model: ModelProto, random_: random.Random) -> None:
    names = [name for name in operators() if "::" not in name]
    node = _any_node(model, random_)
    if random_.random() < 0.05:
        node.domain = random_.choice(("my", "ai.onnx", "com.microsoft", "ghost"))
    else:
        node.op_type = random_.choice(names)


def _change_nodes(model: ModelProto, random_: random.Random) -> None:
    graph = _any_graph(model, random_)
    if not graph.node:
        return
    at = random_.randrange(len(graph.node))
    way = random_.randrange(4)
    if way == 0:
        del graph.node[at]
    elif way == 1:
        graph.node.append(graph.node[at])
    elif way == 2:
        other = random_.randrange(len(graph.node))
        kept = NodeProto()
        kept.CopyFrom(graph.node[at])
        graph.node[at].op_type, graph.node[other].op_type = graph.node[other].op_type, kept.op_type
    else:
        graph.output.append(graph.input[0] if graph.input else graph.output[0])


def _swap_weights(model: ModelProto, random_: random.Random) -> None:
    graph = _any_graph(model, random_)
    if len(graph.initializer) < 2:
        return
    one, other = random_.sample(list(graph.initializer), 2)
    if random_.random() < 0.2:
        graph.initializer.append(one)
    else:
        one.name, other.name = other.name, one.name


def _change_model(model: ModelProto, random_: random.Random) -> None:
    way = random_.randrange(4)
    if way == 0 and model.opset_import:
        versions = (-1, 0, 1, 6, 9, 11, 13, 15, 18, 20, 22, 24, 25, 99)
        random_.choice(model.opset_import).version = random_.choice(versions)
    elif way == 1 and model.functions:
        del model.functions[random_.randrange(len(model.functions))]
    elif way == 2 and model.functions:
        function = random_.choice(model.functions)
        random_.choice(function.node).op_type = random_.choice(("once", "twice"))
    elif model.graph.input:
        del model.graph.input[random_.randrange(len(model.graph.input))]


def _change_bodies(model: ModelProto, random_: random.Random) -> None:
    graphs = list(_graphs(model.graph))
    if len(graphs) < 2:
        return
    kept = GraphProto()
    kept.CopyFrom(random_.choice(graphs))
    target = random_.choice(graphs[1:])
    if random_.random() < 0.7:
        target.CopyFrom(kept)
    elif target.input:
        del target.input[-1:]
    elif target.output:
        del target.output[-1:]


_WAYS: tuple[Callable[[ModelProto, random.Random], None], ...] = (
    _change_dim,
    _change_element,
    _change_tensor,
    _change_values,
    _change_values,
    _change_attribute,
    _change_attribute,
    _add_attribute,
    _change_operand,
    _change_operand,
    _change_result,
    _change_operator,
    _change_operator,
    _change_nodes,
    _swap_weights,
    _change_model,
    _change_bodies,
)


# What must hold


class TooSlow(BaseException):
    """A file took longer than it may; no importer catches this."""


@contextmanager
def _within(seconds: int) -> Generator[None]:
    def late(signum: int, frame: FrameType | None) -> None:
        raise TooSlow(f"longer than {seconds} s")

    previous = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def outcome(path: Path) -> str:
    """Import a file and run it: `ran`, `large` where that takes too much, or the code of the error.

    Raises:
        TooSlow: It took longer than `SECONDS`.
        Exception: Whatever is no `IrcError`.
    """
    with _within(SECONDS):
        try:
            module = from_onnx(path).eval()
            sizes = (math.prod(n for n in s if isinstance(n, int)) for _, s, _ in module.input_specs if s)
            if 8 * sum(sizes) > _RUN_BYTES:
                return "large"
            inputs = example_inputs(module)
            # A run may take what its file asks for; a test may not.
            with torch.no_grad(), Bounded("the test", "", _RUN_BYTES, FakeTensorMode()):
                module(*inputs)
        except IrcError as error:
            return error.code
    return "ran"


# By hand


def main(arguments: Sequence[str] | None = None) -> int:
    """Spoil models at random, in this process under a memory limit, and print what is no clear error."""
    options = argparse.ArgumentParser(description=main.__doc__)
    options.add_argument("--examples", type=int, default=1000)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--gigabytes", type=int, default=8)
    options.add_argument("--seconds", type=float, default=1e9)
    given = options.parse_args(arguments)
    resource.setrlimit(resource.RLIMIT_AS, (given.gigabytes << 30, given.gigabytes << 30))
    counts, faults, slowest = collections.Counter[str](), collections.Counter[str](), (0.0, "")
    began, names = time.monotonic(), sorted(corpus())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.onnx"
        for seed in range(given.seed, given.seed + given.examples):
            if time.monotonic() - began > given.seconds:
                break
            random_ = random.Random(seed)
            name = random_.choice(names)
            mutate = mutate_model if random_.random() < 0.7 else mutate_bytes
            path.write_bytes(mutate(corpus()[name], random_))
            start = time.monotonic()
            try:
                counts[outcome(path)] += 1
            except (Exception, TooSlow) as error:
                place = traceback.extract_tb(error.__traceback__)[-1]
                told = (
                    f"{type(error).__name__}: {str(error)[:120]} ({Path(place.filename).name}:{place.lineno})"
                )
                if not faults[told]:
                    print(f"seed {seed} ({name}): {told}", flush=True)
                faults[told] += 1
            slowest = max(slowest, (time.monotonic() - start, f"seed {seed} ({name})"))
    print(f"{sum(counts.values())} refused or run: {dict(counts.most_common())}")
    print(f"{sum(faults.values())} faults; the slowest took {slowest[0]:.1f} s: {slowest[1]}")
    print(f"most memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10} MiB")
    return min(sum(faults.values()), 1)


if __name__ == "__main__":
    sys.exit(main())
