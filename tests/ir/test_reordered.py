"""The tensors that sums in another order reach, with the bound of each."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from irc.ir import (
    Reordered,
    Rounding,
    VerificationError,
    computed_from,
    gradients_through,
    parse_graph,
    reordered,
    verify_graph,
)

TEXT = """\
graph loss_bytes=0 {
  storage @w 16 cpu
  storage @u 16 cpu
  storage @b 16 cpu
  storage @x 48 cpu
  storage @y 48 cpu
  storage @t 48 cpu
  storage @a 16 cpu
  storage @e 16 cpu
  storage @d 16 cpu
  storage @s 16 cpu
  storage @z 48 cpu
  input %w: float32[2,2]{2,1} @w parameter "w" requires_grad
  input %u: float32[2,2]{2,1} @u parameter "u" requires_grad
  input %b: float32[2,2]{2,1} @b buffer "b"
  input %x: float32[6,2]{2,1} @x input "0" requires_grad
  input %t: float32[2,6]{6,1} @t tangent "0"
forward:
  y = aten.mm.default(%x, %w) -> %y: float32[6,2]{2,1} @y
backward:
  a = aten.mm.default(%t, %x) -> %a: float32[2,2]{2,1} @a traits(reordered)
  a2 = aten.addmm_.default(%a, %t, %x) -> %a2: float32[2,2]{2,1} @a traits(effect, reordered)
  e = aten.mm.default(%t, %x) -> %e: float32[2,2]{2,1} @e
  d = aten.add.Tensor(%a2, %e) -> %d: float32[2,2]{2,1} @d
  v = aten.t.default(%d) -> %v: float32[2,2]{1,2} @d traits(view)
  s = aten.mul.Tensor(%d, %d) -> %s: float32[2,2]{2,1} @s
  k = aten.copy_.default(%b, %s) -> %k: float32[2,2]{2,1} @b traits(effect)
  z = aten.mm.default(%x, %s) -> %z: float32[6,2]{2,1} @z
  output %y "0"
  gradient %v "parameter:w"
  gradient %e "parameter:u"
  gradient %z "input:0"
}
"""
UNIT = 2.0**-24


def gamma(terms: int) -> float:
    return terms * UNIT / (1 - terms * UNIT)


def test_names_may_hold_colons() -> None:
    text = TEXT.replace('"w"', '"a::w"').replace('"parameter:w"', '"parameter:a::w"')
    assert reordered(parse_graph(text))[1].name == "a::w"


def test_sums_have_bounds_and_what_is_computed_from_them_has_none() -> None:
    verify_graph(parse_graph(TEXT))
    assert reordered(parse_graph(TEXT)) == (
        Reordered("b"),
        Reordered("w", 13, 2 * gamma(13)),
        Reordered("input 0"),
    )


def test_without_marks_all_bits_are_kept() -> None:
    plain = TEXT.replace(" traits(reordered)", "").replace("effect, reordered", "effect")
    assert reordered(parse_graph(plain)) == ()
    with pytest.raises(VerificationError, match="a2 adds to a sum, and is not marked as reordered") as caught:
        verify_graph(parse_graph(plain))
    assert caught.value.code == "IRC144"


def test_a_marked_product_reaches_what_is_computed_from_it() -> None:
    graph = parse_graph(
        TEXT.replace("%y: float32[6,2]{2,1} @y", "%y: float32[6,2]{2,1} @y traits(reordered)")
    )
    names = ("output 0", "w", "u", "input 0")
    assert reordered(graph)[1:] == (Reordered("output 0", 2, 2 * gamma(2)), *map(Reordered, names[1:]))
    assert computed_from(graph, graph.nodes[:1]) == ("b", *names)  # the loss computes %t from it
    assert computed_from(graph, graph.nodes[3:4]) == ("b", "w", "u", "input 0")


def test_the_gradients_through_an_output_are_those_of_what_it_is_computed_from() -> None:
    graph = parse_graph(TEXT)
    assert gradients_through(graph, [graph.nodes[0].values[0]]) == ("w", "input 0")


def test_a_rounding_is_read_as_it_is_written() -> None:
    roundings = Rounding("all numbers"), Rounding("buffer b", ("b",), is_more=True)
    assert [Rounding.from_json(asdict(each)) for each in roundings] == [*roundings]
    assert Rounding.from_json("all numbers") == roundings[0]
    for row in ({"text": 1, "tensors": None, "is_more": False}, {"text": "", "tensors": [1], "is_more": 0}):
        with pytest.raises(ValueError, match="a rounding is"):
            Rounding.from_json(row)


def test_in_16_bits_each_part_is_rounded_once_more() -> None:
    text = TEXT.replace("float32", "bfloat16")
    found = {each.name: each for each in reordered(parse_graph(text))}
    rounded = 3 * 2.0**-8
    assert found["w"] == Reordered("w", 13, 2 * (gamma(13) + rounded / (1 - rounded)))


def test_in_64_bits_the_bound_is_nearer() -> None:
    (_, found, _) = reordered(parse_graph(TEXT.replace("float32", "float64")))
    assert found.bound is not None and found.bound == pytest.approx(2 * 13 * 2.0**-53)


def test_a_plan_says_which_numbers_may_be_off() -> None:
    assert str(Reordered("w", 1024, 1.2e-4)) == (
        "w, a sum of 1,024 terms in another order, by at most 0.00012 of their magnitudes' sum"
    )
    assert str(Reordered("b")) == "b, which is computed from sums in another order, or by kernels"


@pytest.mark.parametrize(
    "changed",
    [
        {"name": 3},
        {"terms": "many"},
        {"terms": True},
        {"terms": -1},
        {"bound": 2.0},
        {"bound": float("nan")},
        {"bound": "small"},
    ],
)
def test_what_is_no_sum_is_refused(changed: dict[str, Any]) -> None:
    row = {"name": "w", "terms": 13, "bound": 1e-6}
    assert Reordered.from_json(row) == Reordered("w", 13, 1e-6)
    assert Reordered.from_json({"name": "w", "terms": None, "bound": None}) == Reordered("w")
    with pytest.raises(ValueError, match="a sum in another order is"):
        Reordered.from_json({**row, **changed})
