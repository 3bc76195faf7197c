"""
An ONNX file, trained and written back
======================================

This tutorial reads an ONNX file, trains it within 70% of its memory, and writes the trained weights back
into a copy of the file. :doc:`/howto/onnx` describes which files irc takes.
"""

import tempfile
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

import irc

# %%
# Make a file
# -----------
#
# The file holds four perceptrons, one after the other. Use your own file instead, if it has float weights.
# The batch size is left open: its dimension has the name ``"n"``.

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
# Read it
# -------
#
# ``irc.from_onnx`` makes a torch module of the file. The weights become parameters. They keep their names
# in the file.

module = irc.from_onnx(file)
print([name for name, _ in module.named_parameters()])

# %%
# Plan the step
# -------------
#
# You plan this module like any other. The loss is not part of the file, so you give it as ``loss=``. irc
# then counts its memory.

x = torch.randn(256, 16)
fitted = irc.optimize(module, (x,), "70%", loss=lambda y: (y - x).square().mean())
print(fitted.plan.summary())

# %%
# The command line plans a file too, and takes the mean of the squares of the output as its loss::
#
#     irc optimize perceptrons.onnx --batch 256 --budget 70%
#
# Train, and write the file
# -------------------------
#
# ``irc.export_onnx`` writes a copy of the file with the trained weights.

optimizer = torch.optim.SGD(fitted.parameters(), lr=0.5)
for _ in range(5):
    loss = (fitted(x) - x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"loss {loss.item():.4f}")

irc.export_onnx(fitted, folder / "trained.onnx")
print(sorted(path.name for path in folder.iterdir()))
