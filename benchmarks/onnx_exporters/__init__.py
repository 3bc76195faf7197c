"""Round trips through torch's ONNX exporters.

`python -m benchmarks.onnx_exporters` exports seven models at opsets 18 to 23, imports each file, and holds
the module to the original: outputs, parameters, ties, names, gradients, statistics.
"""
