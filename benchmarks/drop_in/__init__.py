"""Whether a fitted module behaves as the original in every way that a training script relies on.

`python -m benchmarks.drop_in` runs every check under every plan on every small model that it applies to, and
prints a table. A check is written from the script's point of view: it knows `irc.optimize` and what a user
can see of a module, and nothing of how plans are made or run.
"""
