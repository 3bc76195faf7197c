"""Names of modules in which equal layers are one."""

from __future__ import annotations

from irc.ir import ModuleGroups

LAYER = ("attn.q", "attn.k", "mlp")


def names(*made: tuple[str, str, int]) -> list[str]:
    groups = ModuleGroups(made)
    return [groups.name(path) for path, _, _ in made]


def test_equal_layers_share_a_name() -> None:
    made = [(f"h.{layer}.{inner}", "mm", 8) for layer in range(12) for inner in LAYER]
    assert set(names(*made)) == {f"h.*.{inner}" for inner in LAYER}


def test_a_layer_may_lack_a_module_or_have_one_more() -> None:
    made = [(f"layer1.{block}.conv{n}", "conv", 8) for block in range(3) for n in (1, 2, 3)]
    made += [("layer1.0.downsample.0", "conv", 8), ("layer1.0.downsample.1", "norm", 8)]
    found = names(*made[:9], *made[9:])
    assert set(found[:9]) == {f"layer1.*.conv{n}" for n in (1, 2, 3)}
    assert found[9:] == ["layer1.*.downsample.0", "layer1.*.downsample.1"]


def test_modules_of_one_list_that_are_not_alike_keep_their_numbers() -> None:
    made = [("features.0", "conv", 64), ("features.1", "relu", 64), ("features.2", "conv", 64)]
    made += [("features.3", "conv", 32), ("features.4", "conv", 32), ("features.10", "conv", 32)]
    assert names(*made) == [
        "features.0,2",
        "features.1",
        "features.0,2",
        *["features.3-4,10"] * 3,
    ]


def test_layers_of_layers_are_grouped_at_each_level() -> None:
    made = [(f"{block}.{layer}", "mm", 8 * layer) for block in range(3) for layer in range(2)]
    assert set(names(*made)) == {"*.0", "*.1"}


def test_layers_of_other_operations_are_not_alike() -> None:
    made = [(f"{block}.{place}", op, 8) for block in range(4) for place, op in enumerate(("mm", "relu"))]
    made += [("4.0", "tanh", 8), ("4.1", "mm", 8)]
    assert names(*made)[:2] == ["0-3.0", "0-3.1"] and names(*made)[8:] == ["4.0", "4.1"]


def test_names_that_are_no_numbers_of_a_list_stay() -> None:
    made = [(name, "relu", 8) for name in ("a.01", "a.1", "a.٣", f"a.{'9' * 5000}", "a.x")]
    assert names(*made) == [path for path, _, _ in made]


def test_deep_and_many_modules_are_named_in_little_time() -> None:
    deep = ".".join("a" * 3000)
    assert names((f"0.{deep}", "relu", 8), (f"1.{deep}", "relu", 8)) == [f"*.{deep}"] * 2
    many = [(f"h.{k}", "relu", k) for k in range(20_000)] + [(f"g.{k}.{k}", "mm", 8) for k in range(5_000)]
    assert names(*many) == [path for path, _, _ in many]


def test_a_module_alone_or_unknown_is_its_path() -> None:
    assert names(("0.act", "relu", 8), ("", "add", 8)) == ["0.act", ""]
    assert ModuleGroups([]).name("h.3.mlp") == "h.3.mlp"
    assert ModuleGroups([("h.0", "mm", 8), ("h.1", "mm", 8)]).name("h.7.mlp") == "h.7.mlp"
