"""How much of ONNX an importer takes, by the backend suite that ships in the onnx wheel.

`python -m benchmarks.onnx_conformance` runs every case of the suite against irc, and against other importers,
each in a virtual environment of its own. `own`, `environments`, `page` and `__main__` are irc's; the other
modules need nothing but onnx, numpy and the importer, so that they run where irc is not installed.
"""
