"""A heap that is frozen while something is planned: what the collector sees meanwhile and afterwards."""

from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
import gc, weakref
from irc.compiler.frozen_heap import frozen_heap

class Ring:
    def __init__(self):
        self.me = self

gc.collect()
gc.disable()
before = weakref.ref(Ring())
try:
    with frozen_heap():
        during = weakref.ref(Ring())
        with frozen_heap():
            assert gc.get_freeze_count()
        assert gc.get_freeze_count(), "the inner block leaves the outer one's heap frozen"
        gc.collect()
        assert before() is not None and during() is None
        raise KeyError
except KeyError:
    pass
assert gc.get_freeze_count() == 0
gc.collect()
assert before() is None
gc.freeze()
with frozen_heap():
    pass
assert gc.get_freeze_count(), "what the user froze stays so"
"""


def test_only_new_objects_are_collected_until_the_block_ends() -> None:
    subprocess.run([sys.executable, "-c", _PROGRAM], check=True)
