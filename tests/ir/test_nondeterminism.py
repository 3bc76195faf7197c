"""Operations that may give other numbers when they run again: the table, by device."""

from __future__ import annotations

import pytest

from irc.ir import NONDETERMINISTIC, Node, nondeterminism, parse_graph


def node_of(call: str, device: str, results: str = "float32[4]{1}") -> Node:
    """The node of one call; its operands are `%x` and `%y` (float32), `%i` (int64) and `%m` (a mask)."""
    made = ", ".join(f"%r{k}: {kind} @r{k}" for k, kind in enumerate(results.split("; ")))
    count = results.count(";") + 1
    bracketed = f"({made})" if count > 1 else made
    storages = "\n".join(f"  storage @{name} 64 {device}" for name in ("x", "y", "i", "m"))
    storages += "".join(f"\n  storage @r{k} 64 {device}" for k in range(count))
    return parse_graph(f"""graph loss_bytes=0 {{
{storages}
  input %x: float32[4]{{1}} @x input "0"
  input %y: float32[4]{{1}} @y input "1"
  input %i: int64[4]{{1}} @i input "2"
  input %m: bool[4]{{1}} @m input "3"
forward:
  n = {call} -> {bracketed}
}}
""").nodes[0]


ADDS = "adds in the order of the threads"
EITHER = "an index that is there twice takes either value"
TIES = "of equal elements it takes either"
REDUCES = "reduces in the order of the threads"
SCANS = "a parallel scan joins its parts in the order of the threads"
ANY = "equal elements come in any order"
UNKNOWN = "an operation of mylib, of which nothing is known"
UNKNOWN_THERE = UNKNOWN.replace("mylib", "bitsandbytes")
PAIR = "float32[2]{1}; int64[2]{1}"

CASES = [
    # call, results, reason on the CPU, reason on an accelerator
    ("aten.index_put.default(%x, (%i,), %y, true)", "float32[4]{1}", ADDS, ADDS),
    ("aten.index_put.default(%x, (none, %i), %y, accumulate=true)", "float32[4]{1}", ADDS, ADDS),
    ("aten.index_put.default(%x, (%i,), %y, true)", "bfloat16[4]{1}", None, ADDS),
    ("aten.index_put.default(%x, (%i,), %i, true)", "int64[4]{1}", None, None),
    ("aten.index_put.default(%x, (%i,), %y)", "float32[4]{1}", EITHER, EITHER),
    ("aten.index_put.default(%x, (%m,), %y)", "float32[4]{1}", None, None),
    ("aten.index_put.default(%x, (%m,), %y, true)", "float32[4]{1}", None, None),
    ("aten.index_put.default(%x, (%m, %i), %y)", "float32[4]{1}", EITHER, EITHER),
    ("aten.put.default(%x, %i, %y, true)", "float32[4]{1}", ADDS, ADDS),
    ("aten.index_put_.default(%x, (%i,), %y, true)", "float32[4]{1}", ADDS, ADDS),
    ("aten.scatter_.value(%x, 0, %i, 1.0)", "float32[4]{1}", None, None),
    ("aten.scatter_add_.default(%x, 0, %i, %y)", "float32[4]{1}", None, ADDS),
    ("aten.index_copy.default(%x, 0, %i, %y)", "float32[4]{1}", EITHER, EITHER),
    ("aten.scatter.src(%x, 0, %i, %y)", "float32[4]{1}", None, EITHER),
    ("aten.scatter.value(%x, 0, %i, 1.0)", "float32[4]{1}", None, None),
    ("aten.scatter_add.default(%x, 0, %i, %y)", "float32[4]{1}", None, ADDS),
    ("aten.scatter_add.default(%i, 0, %i, %i)", "int64[4]{1}", None, None),
    ("aten.index_add.default(%x, 0, %i, %y)", "float32[4]{1}", None, ADDS),
    ('aten.scatter_reduce.two(%x, 0, %i, %y, "amax")', "float32[4]{1}", None, None),
    ('aten.scatter_reduce.two(%x, 0, %i, %y, "mean")', "float32[4]{1}", None, REDUCES),
    ("aten.cumsum.default(%x, 0)", "float32[4]{1}", None, SCANS),
    ("aten.cumsum.default(%i, 0)", "int64[4]{1}", None, None),
    ("aten.topk.default(%x, 2)", PAIR, None, TIES),
    ("aten.kthvalue.default(%x, 2)", PAIR, None, TIES),
    ("aten.median.dim(%x, 0)", PAIR, None, TIES),
    ("aten.median.default(%x)", "float32[]{}", None, None),
    ("aten.mode.default(%x)", PAIR, None, TIES),
    ("aten.sort.default(%x)", PAIR, None, ANY),
    ("aten.sort.stable(%x, stable=false)", PAIR, None, ANY),
    ("aten.sort.stable(%x, stable=true)", PAIR, None, None),
    ("aten.max_unpool2d.default(%x, %i, (2, 2))", "float32[4]{1}", EITHER, EITHER),
    ("aten.mm.default(%x, %y)", "float32[4]{1}", None, None),
    ("aten.gather.default(%x, 0, %i)", "float32[4]{1}", None, None),
    ("bitsandbytes.dequantize_4bit.default(%x)", "float32[4]{1}", None, None),
    ("bitsandbytes.quantize_blockwise.default(%x)", "float32[4]{1}", UNKNOWN_THERE, UNKNOWN_THERE),
    ("mylib.fused.default(%x)", "float32[4]{1}", UNKNOWN, UNKNOWN),
]  # fmt: skip


@pytest.mark.parametrize(("call", "results", "on_cpu", "elsewhere"), CASES)
def test_the_table_by_device(call: str, results: str, on_cpu: str | None, elsewhere: str | None) -> None:
    assert nondeterminism(node_of(call, "cpu", results)) == on_cpu
    for device in ("cuda:0", "cuda:1", "xpu:0"):
        assert nondeterminism(node_of(call, device, results)) == elsewhere


def test_every_operation_of_the_table_is_one_of_torch_s() -> None:
    torch = pytest.importorskip("torch")
    for rule in NONDETERMINISTIC:
        for name in rule.operations:
            library, _, operation = name.partition(".")
            assert hasattr(getattr(torch.ops, library), operation), name
