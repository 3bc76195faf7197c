"""How much of ONNX an importer takes, by the backend suite that ships in the onnx wheel.

`python -m irc.tools.onnx_conformance` runs every case of the suite against irc, and against other importers,
each in a virtual environment of its own. `cases`, `comparison`, `results`, `running`, `importers` and `alone`
import nothing but onnx and numpy, so that they run in those environments, where irc is not installed; `own`,
`environments`, `page` and `command` are irc's.
"""
