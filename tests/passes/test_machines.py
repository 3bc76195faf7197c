"""Machines are described, written to files and read back; a file that describes none is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from irc.ir import Tier, UsageError
from irc.passes import Cost, PassManager, parse_passes
from irc.passes.costs.machines import MACHINES, Machine, machine_named, read_machine

RATES = st.floats(1e-3, 1e20)
TIERS = st.builds(
    Tier, st.just("host"), st.integers(0, 1 << 60), RATES, RATES, st.floats(0, 10), st.booleans()
)


def machines() -> st.SearchStrategy[Machine]:
    several = st.lists(TIERS, max_size=3).map(
        lambda tiers: tuple(replace(tier, name=f"tier {k}") for k, tier in enumerate(tiers))
    )
    names = st.text(min_size=1, max_size=64).filter(str.isprintable)
    sizes, half_flops = st.integers(0, 1 << 50), st.just(0.0) | RATES
    return st.builds(Machine, names, RATES, RATES, st.floats(0, 1), sizes, several, half_flops, sizes)


@given(machines())
def test_what_was_written_is_read(machine: Machine) -> None:
    assert Machine.from_json(json.loads(json.dumps(machine.to_json()))) == machine


@pytest.mark.parametrize("machine", MACHINES.values(), ids=lambda machine: machine.name)
def test_described_machines_have_tiers_that_are_slower_than_their_memory(machine: Machine) -> None:
    assert machine_named(machine.name) is machine
    assert Machine.from_json(machine.to_json()) == machine
    assert (machine.tier("host") is None) == (machine.name == "cpu") and machine.tier("tape") is None
    assert [tier.name for tier in machine.tiers][-1] == "disk"
    rates = [min(tier.out_bytes_per_second, tier.in_bytes_per_second) for tier in machine.tiers]
    assert rates == sorted(rates, reverse=True) and rates[0] < machine.bandwidth_bytes
    capacities = [machine.capacity_bytes, *(tier.capacity_bytes for tier in machine.tiers)]
    assert capacities == sorted(capacities)


def test_a_gtx_1080_is_of_its_class() -> None:
    machine, host = MACHINES["gtx1080"], MACHINES["gtx1080"].tier("host")
    assert machine.capacity_bytes == 8 << 30 and 0.7 <= machine.flops / 8.87e12 <= 0.9
    assert host is not None and 11e9 <= host.out_bytes_per_second <= 13e9 and host.is_duplex


def test_a_machine_is_named_by_the_path_of_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = replace(MACHINES["gtx1080"], name="mine")
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**machine.to_json(), "measured": {"threads": 2}}))
    assert machine_named(str(path)) == read_machine(path) == machine
    monkeypatch.chdir(tmp_path)
    assert machine_named("mine.json") == machine
    (passed,) = parse_passes(f"cost{{profile={path}}}")
    assert isinstance(passed, Cost) and passed.profile == str(path)
    passed.check()
    assert parse_passes(str(PassManager([passed]))) == (passed,)


def refused(code: str, data: object, path: Path) -> str:
    """Checks that a file is refused with that code; its message, with the help."""
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    with pytest.raises(UsageError) as raised:
        machine_named(str(path))
    assert raised.value.code == code and str(path) in raised.value.message and raised.value.help
    return str(raised.value)


def test_a_machine_that_nobody_described_is_refused_by_name() -> None:
    with pytest.raises(UsageError) as raised:
        machine_named("abacus")
    assert raised.value.code == "IRC410" and "choose one of cpu, gtx1080" in str(raised.value)
    with pytest.raises(UsageError) as raised:
        Cost(profile="abacus").check()
    assert raised.value.code == "IRC410"


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file") as raised:
        machine_named(str(tmp_path / "missing.json"))
    assert raised.value.code == "IRC414" and "irc machine -o" in str(raised.value)
    with pytest.raises(UsageError, match="Is a directory") as raised:
        machine_named(str(tmp_path))
    assert raised.value.code == "IRC414"
    assert "is not JSON" in refused("IRC414", "{", tmp_path / "half.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="is not JSON") as raised:
        machine_named(str(tmp_path / "binary.json"))
    assert raised.value.code == "IRC414"


@pytest.mark.parametrize("data", [[], {}, {"format": "irc-machine-2"}, "3"])
def test_a_file_of_something_else_is_refused(data: object, tmp_path: Path) -> None:
    assert "irc-machine-1" in refused("IRC415", data, tmp_path / "other.json")


def described(**changed: object) -> dict[str, Any]:
    return {**MACHINES["gtx1080"].to_json(), **changed}


def described_tier(**changed: object) -> dict[str, Any]:
    data = described()
    return {**data, "tiers": [{**data["tiers"][0], **changed}]}


def test_entries_that_are_missing_or_unknown_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    data = described()
    del data["launch_seconds"]
    assert "no entry 'launch_seconds'" in refused("IRC416", data, path)
    assert "an unknown entry 'speed'" in refused("IRC416", described(speed=3), path)
    message = refused("IRC416", described_tier(bandwidth=1.0), path)
    assert f"tier 1 of {path}" in message and "'bandwidth'" in message and "out_bytes_per_second" in message


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        (described(flops_per_second=0), "a number above 1e-06, at most 1e+30"),
        (described(flops_per_second=1e31), "a number above 1e-06, at most 1e+30"),
        (described(memory_bytes_per_second=1e-6), "a number above 1e-06, at most 1e+30"),
        (described(half_flops_per_second=-1), "a number not below 0"),
        (described(half_flops_per_second=1e31), "a number not below 0, at most 1e+30"),
        (described(half_flops_per_second="6e14"), "a number not below 0"),
        (described(product_workspace_bytes=-1), "a whole number not below 0"),
        (described(product_workspace_bytes=8.5e6), "a whole number not below 0"),
        (described(name="\x1b[31mred"), "that can be printed"),
        (described(memory_bytes_per_second="8e9"), "a number above 1e-06, at most 1e+30"),
        (described(flops_per_second=float("inf")), "a number above 1e-06, at most 1e+30"),
        (described(flops_per_second=10**400), "a number above 1e-06, at most 1e+30"),
        (described(launch_seconds=-1e-6), "a number not below 0"),
        (described(launch_seconds=float("nan")), "a number not below 0"),
        (described(launch_seconds=1e7), "a number not below 0, at most 1e+06"),
        (described(capacity_bytes=8.5e9), "a whole number not below 0"),
        (described(capacity_bytes=True), "a whole number not below 0"),
        (described(name=""), "a text"),
        (described(tiers={}), "a list"),
        (described(tiers=["host"]), "an object"),
        (described_tier(in_bytes_per_second=-1), "a number above 1e-06, at most 1e+30"),
        (described_tier(is_duplex=1), "true or false"),
        (described_tier(capacity_bytes=-1), "a whole number not below 0"),
    ],
)
def test_values_that_cannot_be_are_refused(data: object, wanted: str, tmp_path: Path) -> None:
    assert wanted in refused("IRC417", data, tmp_path / "machine.json")


def test_two_tiers_of_one_name_are_refused(tmp_path: Path) -> None:
    data = described()
    data["tiers"].append(data["tiers"][0])
    assert "'host'" in refused("IRC418", data, tmp_path / "machine.json")
