"""
An ONNX file, trained and written back
======================================

ONNX in, training out. Here the file is made on the spot; any file with float weights will do.
"""

import tempfile
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

import irc

# %%
# Four perceptrons, one after the other, as an ONNX file. The batch is free (``"n"``).

random = np.random.default_rng(0)
weights, nodes = {}, []
for layer in range(4):
    weights[f"up.{layer}"] = random.normal(0, 0.1, (16, 64)).astype(np.float32)
    weights[f"down.{layer}"] = random.normal(0, 0.1, (64, 16)).astype(np.float32)
    nodes += [
        helper.make_node("MatMul", [f"x{layer}", f"up.{layer}"], [f"hidden{layer}"], f"/layers.{layer}/up"),
        helper.make_node("Gelu", [f"hidden{layer}"], [f"active{layer}"], f"/layers.{layer}/act"),
        helper.make_node(
            "MatMul", [f"active{layer}", f"down.{layer}"], [f"x{layer + 1}"], f"/layers.{layer}/down"
        ),
    ]
graph = helper.make_graph(
    nodes,
    "perceptrons",
    [helper.make_tensor_value_info("x0", TensorProto.FLOAT, ["n", 16])],
    [helper.make_tensor_value_info("x4", TensorProto.FLOAT, ["n", 16])],
    [numpy_helper.from_array(value, name) for name, value in weights.items()],
)
folder = Path(tempfile.mkdtemp())
file = folder / "perceptrons.onnx"
onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]), file)

# %%
# The file becomes a torch module: its weights are parameters, by the names that they have in the file.

module = irc.from_onnx(file)
print([name for name, _ in module.named_parameters()])

# %%
# The plan is as for any module. On the command line this is ``irc optimize perceptrons.onnx --batch 256
# --budget 70%``.

x = torch.randn(256, 16)
fitted = irc.optimize(module, (x,), "70%", loss=lambda y: (y - x).square().mean())
print(fitted.plan.summary())

# %%
# Train, and write the weights back into a copy of the file.

optimizer = torch.optim.SGD(fitted.parameters(), lr=0.5)
for _ in range(5):
    loss = (fitted(x) - x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"loss {loss.item():.4f}")

irc.export_onnx(fitted, folder / "trained.onnx")
print(sorted(path.name for path in folder.iterdir()))
