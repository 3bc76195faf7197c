"""What torch's two exporters write comes back as it was: same numbers, same weights, gradients everywhere."""

from __future__ import annotations

import copy
import logging
import pickle
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

from benchmarks.onnx_exporters.exporting import Way
from benchmarks.onnx_exporters.exporting import export as export_as
from benchmarks.onnx_exporters.round_trip import Original, Row
from benchmarks.onnx_exporters.round_trip import round_trip as trip
from benchmarks.onnx_exporters.subjects import SUBJECTS
from irc.frontends.onnx import OnnxModule, from_model, from_onnx


class Residual(nn.Module):
    def __init__(self, n: int, out: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(n, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.down = nn.Sequential(nn.Conv2d(n, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.down(x))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        self.layers = nn.Sequential(Residual(8, 8), Residual(8, 16, 2))
        self.fc = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.adaptive_avg_pool2d(self.layers(self.stem(x)), 1).flatten(1))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = (
            part.view(b, t, self.heads, -1).transpose(1, 2) for part in self.qkv(self.ln1(x)).split(d, 2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        x = x + self.drop(self.proj(y))
        return x + self.drop(self.mlp(self.ln2(x)))


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(23, 16), nn.Embedding(8, 16)
        self.drop = nn.Dropout(0.1)
        self.h = nn.ModuleList([Block(16, 2), Block(16, 2)])
        self.ln_f, self.head = nn.LayerNorm(16), nn.Linear(16, 23, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.drop(self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1])))
        for block in self.h:
            x = block(x)
        return self.head(self.ln_f(x))


class UNet(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.down1, self.down2 = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)
        self.up = nn.ConvTranspose2d(16, 8, 2, 2) if how == "transposed" else nn.Conv2d(16, 8, 1)
        self.out = nn.Conv2d(16, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        a = F.relu(self.down1(x))
        b = self.up(F.relu(self.down2(F.max_pool2d(a, 2))))
        if self.how == "bilinear":
            b = F.interpolate(b, scale_factor=2, mode="bilinear", align_corners=False)
        elif self.how == "corners":
            b = F.interpolate(b, size=(16, 16), mode="bilinear", align_corners=True)
        elif self.how == "nearest":
            b = F.interpolate(b, scale_factor=2, mode="nearest")
        return self.out(torch.cat([a, b], 1))


class Classifier(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], *, layers: int = 1, both: bool = False) -> None:
        super().__init__()
        self.emb = nn.Embedding(11, 6)
        self.rnn = kind(6, 5, layers, bidirectional=both, batch_first=True)  # pyright: ignore
        self.fc = nn.Linear(10 if both else 5, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.fc(self.rnn(self.emb(tokens))[0][:, -1])


def image() -> Tensor:
    return torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def tokens() -> Tensor:
    return torch.randint(0, 11, (2, 7), generator=torch.Generator().manual_seed(0))


NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "resnet": (ResNet, image),
    "gpt": (Gpt, tokens),
    "unet-transposed": (lambda: UNet("transposed"), image),
    "unet-bilinear": (lambda: UNet("bilinear"), image),
    "unet-corners": (lambda: UNet("corners"), image),
    "unet-nearest": (lambda: UNet("nearest"), image),
    "lstm": (lambda: Classifier(nn.LSTM), tokens),
    "lstm-both-2": (lambda: Classifier(nn.LSTM, layers=2, both=True), tokens),
    "gru": (lambda: Classifier(nn.GRU, both=True), tokens),
    "rnn": (lambda: Classifier(nn.RNN), tokens),
}


@dataclass
class Exported:
    net: nn.Module
    x: Tensor
    path: Path

    def load(self) -> OnnxModule:
        return from_onnx(self.path)


EXPORTERS = ("dynamo", "dynamo-plain", "legacy", "legacy-training")


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Exported]:
    folder = tmp_path_factory.mktemp("exported")
    cache: dict[tuple[str, str], Exported] = {}

    def make(name: str, exporter: str) -> Exported:
        if (name, exporter) not in cache:
            cache[name, exporter] = _export(name, exporter, folder / f"{name}-{exporter}.onnx")
        return cache[name, exporter]

    return make


def _export(name: str, exporter: str, path: Path) -> Exported:
    torch.manual_seed(0)
    build, inputs = NETS[name]
    net, x = build(), inputs()
    for p in net.parameters():  # biases and norms start equal, and the exporter shares equal tensors
        p.data += 0.05 * torch.randn_like(p)
    options = {
        "dynamo": {"dynamo": True, "verbose": False},
        "dynamo-plain": {"dynamo": True, "verbose": False, "optimize": False},
        "legacy": {"dynamo": False},
        "legacy-training": {
            "dynamo": False,
            "training": torch.onnx.TrainingMode.TRAINING,
            "do_constant_folding": False,
        },
    }[exporter]
    net.train(exporter == "legacy-training")
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.25
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(net, (x,), str(path), **options)  # pyright: ignore
    finally:
        logging.disable(logging.NOTSET)
    return Exported(net.eval(), x, path)


def onnxruntime(path: Path, name: str, x: Tensor) -> np.ndarray:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {name: x.numpy()})[0])


@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("name", NETS)
def test_round_trip(export: Callable[[str, str], Exported], name: str, exporter: str) -> None:
    case = export(name, exporter)
    module = case.load().eval()
    actual = module(case.x)
    torch.testing.assert_close(actual, case.net(case.x), rtol=1e-3, atol=1e-3)
    if not (exporter == "legacy-training" and name == "resnet"):  # there onnxruntime normalises by the batch
        expected = onnxruntime(case.path, module.input_specs[0][0], case.x)
        np.testing.assert_allclose(actual.detach().numpy(), expected, rtol=1e-3, atol=1e-3)
    module.train()(case.x).square().sum().backward()
    assert [n for n, p in module.named_parameters() if p.grad is None] == []
    assert module.current_node is None


@pytest.mark.parametrize("exporter", ["dynamo-plain", "legacy-training"])
@pytest.mark.parametrize("name", NETS)
def test_parameters_keep_their_names_and_gradients(
    export: Callable[[str, str], Exported], name: str, exporter: str
) -> None:
    case = export(name, exporter)
    module = case.load().eval()
    theirs, ours = dict(case.net.named_parameters()), dict(module.named_parameters())
    assert set(ours) == set(theirs)
    statistics = {k for k, _ in case.net.named_buffers() if not k.endswith("num_batches_tracked")}
    assert set(module.state_dict()) == set(theirs) | statistics
    case.net.zero_grad()
    case.net(case.x).square().sum().backward()
    module(case.x).square().sum().backward()
    for key, p in ours.items():
        torch.testing.assert_close(p.grad, theirs[key].grad, rtol=1e-3, atol=1e-4)


def test_training_updates_statistics_by_the_exported_momentum(export: Callable[[str, str], Exported]) -> None:
    case = export("resnet", "legacy-training")
    module, net = case.load(), copy.deepcopy(case.net).train()
    module.load_state_dict(
        {k: v for k, v in net.state_dict().items() if not k.endswith("num_batches_tracked")}
    )
    torch.testing.assert_close(module(case.x), net(case.x))
    for key, buffer in net.named_buffers():
        if not key.endswith("num_batches_tracked"):
            torch.testing.assert_close(module.get_buffer(key), buffer)


def test_dropout_lives_in_train_mode_only(export: Callable[[str, str], Exported]) -> None:
    case = export("gpt", "legacy-training")
    module = case.load()
    assert not torch.equal(module(case.x), module(case.x))
    module.eval()
    assert torch.equal(module(case.x), module(case.x))


class Told(nn.Module):
    """What only the exporter's metadata can tell: a scalar that is trained, and tables that are not."""

    inv: Tensor
    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("inv", torch.rand(16))
        self.register_buffer("shift", torch.rand(16), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale.exp() * x * self.inv + self.shift


def test_the_exporters_word_on_parameters_and_buffers(tmp_path: Path) -> None:
    NETS["told"] = (Told, image)
    case = _export("told", "dynamo-plain", tmp_path / "told.onnx")
    module = case.load()
    assert [n for n, _ in module.named_parameters()] == ["scale"]
    assert set(module.state_dict()) == {"scale", "inv"}
    assert torch.equal(module.get_buffer("shift"), case.net.get_buffer("shift"))
    torch.testing.assert_close(module(case.x), case.net(case.x))


@pytest.mark.parametrize("name", ["resnet", "gpt", "lstm-both-2"])
def test_copies_and_pickles(export: Callable[[str, str], Exported], name: str) -> None:
    case = export(name, "dynamo")
    module = case.load().eval()
    again = pickle.loads(pickle.dumps(copy.deepcopy(module)))
    assert torch.equal(module(case.x), again(case.x))
    assert again.input_specs == module.input_specs and again.onnx_names == module.onnx_names


def test_nodes_are_visible_while_they_run(export: Callable[[str, str], Exported]) -> None:
    case = export("resnet", "dynamo-plain")
    module = case.load()
    seen: list[str | None] = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(module.current_node)
            return func(*args, **(kwargs or {}))

    with Watch():
        module(case.x)
    assert len({n for n in seen if n is not None}) >= 20 and module.current_node is None


def test_traces_to_a_joint_graph(export: Callable[[str, str], Exported]) -> None:
    from torch._functorch.aot_autograd import aot_export_module

    case = export("resnet", "dynamo-plain")
    module = case.load()

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = module

        def forward(self, x: Tensor) -> tuple[Tensor]:
            return (self.net(x).square().mean(),)

    traced, signature = aot_export_module(Loss(), (case.x,), trace_joint=True, output_loss_index=0)
    assert signature.backward_signature is not None
    assert len(signature.backward_signature.gradients_to_parameters) == len(list(module.parameters()))
    statistics = module.state_dict().keys() - dict(module.named_parameters()).keys()
    assert set(signature.buffers_to_mutate.values()) == {f"net.{key}" for key in statistics}
    assert isinstance(traced, torch.fx.GraphModule)
    assert not [n for n in traced.graph.nodes if n.op == "get_attr"]


# ---------------------------------------------------------------------- seven known models, opsets 18 to 23

OPSETS_OF = {
    "ResNet-50": (18, 22),
    "U-Net": (19, 23),
    "LSTM": (20, 21),
    "GPT-2": (18, 21, 23),
    "BERT": (19, 22),
    "ViT": (20, 23),
    "T5": (18, 23),
}
TIES = {"GPT-2": 1, "BERT": 2, "T5": 1}
COUNTERS_AND_TIED = {"ResNet-50": 9, "U-Net": 18, "GPT-2": 1, "BERT": 2, "T5": 3}


@pytest.fixture(scope="module")
def original() -> Callable[[str], Original]:
    cache: dict[str, Original] = {}

    def make(name: str) -> Original:
        if name not in cache:
            cache[name] = Original(SUBJECTS[name](True))
        return cache[name]

    return make


@pytest.mark.parametrize(("name", "opset"), [(name, o) for name, opsets in OPSETS_OF.items() for o in opsets])
def test_known_models_come_back_whole(
    original: Callable[[str], Original], name: str, opset: int, tmp_path: Path
) -> None:
    known = original(name)
    export_as(known.subject, Way("kept", opset), tmp_path / "model.onnx")
    row = trip(known, tmp_path / "model.onnx", Row(name, f"kept {opset}"))
    assert row.failures == () and row.opset == opset
    assert row.parameters == row.original and row.named == row.original[0]
    assert (row.moved, row.folded, row.made) == (0, 0, 0)
    assert row.ties == (TIES.get(name, 0),) * 2
    assert row.statistics == {"ResNet-50": 18, "U-Net": 36}.get(name, 0)
    ours, in_file, all_keys = row.keys
    assert ours == in_file == all_keys - COUNTERS_AND_TIED.get(name, 0)
    assert row.outputs < 1e-5 and row.gradients < 1e-4 and row.compared == 1


@pytest.mark.parametrize("exporter", ["dynamo", "legacy"])
def test_weights_that_an_exporter_rewrites_get_their_gradients(
    original: Callable[[str], Original], exporter: str, tmp_path: Path
) -> None:
    known = original("T5")
    way = Way(exporter, 23 if exporter == "dynamo" else None)
    export_as(known.subject, way, tmp_path / "model.onnx")
    row = trip(known, tmp_path / "model.onnx", Row("T5", way.name))
    assert row.failures == () and row.moved == 32 and row.made == 0
    assert row.compared > 0.99 and row.gradients < 1e-4


def _sum_of(tensors: dict[str, np.ndarray], constants: dict[str, np.ndarray], told: bool) -> OnnxModule:
    """The input, with these added: initializers, Constant nodes, and one that torch's exporter tells of."""
    names = [*tensors, *constants]
    shape = np.broadcast_shapes(*(a.shape for a in (*tensors.values(), *constants.values())))
    nodes = [
        helper.make_node("Constant", [], [n], value=numpy_helper.from_array(a)) for n, a in constants.items()
    ]
    left = "x"
    for index, name in enumerate([*names, "weight"]):
        nodes.append(helper.make_node("Add", [left, name], [left := f"y{index}"]))
    weight = numpy_helper.from_array(np.ones(shape, np.float32), "weight")
    said = helper.make_tensor_value_info("weight", TensorProto.FLOAT, shape)
    if told:
        key = "pkg.torch.export.graph_signature.InputSpec.kind"
        said.metadata_props.add(key=key, value="PARAMETER")
    graph = helper.make_graph(
        nodes,
        "sums",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info(left, TensorProto.FLOAT, shape)],
        [weight, *(numpy_helper.from_array(a, n) for n, a in tensors.items())],
        value_info=[said],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    return from_model(ir.from_proto(model))


@pytest.mark.parametrize("told", [True, False])
def test_zeros_that_an_exporter_computed_are_no_weights(told: bool) -> None:
    zeros = np.zeros((2, 3, 4), np.float32)
    used = zeros.copy()
    used[0, 0, 0] = 1
    initializers = {"mask": zeros, "bias": np.zeros((1, 3, 1), np.float32), "table": used}
    module = _sum_of(initializers, {"bias_mask": zeros, "row": np.zeros(4, np.float32)}, told)
    trained = {name for name, _ in module.named_parameters()}
    assert trained == {"bias", "table", "weight", "row"} | (set() if told else {"mask"})
    why = {stored.name: stored.why for stored in module.stored}
    assert why["bias_mask"] == "zeros that an exporter computed"
