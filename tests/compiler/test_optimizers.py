"""Optimizers as text: every one of the table takes its steps, what is wrong is named, what is read prints."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from irc.compiler.optimizers import OPTIMIZERS, parse_optimizer
from irc.ir import DType, Storage, TensorType, UsageError, Value
from irc.passes.costs.optimizer_costs import step_costs


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_steps_parameter_by_parameter(name: str) -> None:
    described = parse_optimizer(name)
    types = [TensorType.contiguous(shape, DType.FLOAT32, "cpu") for shape in ((2, 3, 4), (8, 4), (5,), ())]
    values = [Value(f"v{k}", t, Storage(f"s{k}", t.nbytes, "cpu")) for k, t in enumerate(types)]
    assert len(step_costs(described, values)) == 4  # refused where a step needs more than one gradient
    one = described([nn.Parameter(torch.ones(2))])
    assert type(one) is OPTIMIZERS[name] and type(one).__name__.lower() == name
    assert one.defaults == OPTIMIZERS[name]([nn.Parameter(torch.ones(2))]).defaults  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize(
    ("text", "settings", "printed"),
    [
        ("sgd", {}, "sgd"),
        ("adamw:lr=1e-3", {"lr": 1e-3}, "adamw:lr=0.001"),
        (
            "adamw: betas=0.9/0.98, amsgrad=True,lr=3",
            {"betas": (0.9, 0.98), "amsgrad": True, "lr": 3.0},
            "adamw:betas=0.9/0.98,amsgrad=true,lr=3.0",
        ),
        (
            "sgd:momentum=.9,foreach=false",
            {"momentum": 0.9, "foreach": False},
            "sgd:momentum=0.9,foreach=false",
        ),
        ("adafactor:eps=1e-30/1e-3", {"eps": (1e-30, 1e-3)}, "adafactor:eps=1e-30/0.001"),
    ],
)
def test_what_is_read_is_set_and_prints_back(text: str, settings: dict[str, object], printed: str) -> None:
    described = parse_optimizer(text)
    assert dict(described.settings) == settings and str(described) == printed
    for same in (parse_optimizer(printed), pickle.loads(pickle.dumps(described)), copy.deepcopy(described)):
        assert same == described
    defaults = described([nn.Parameter(torch.ones(2))]).defaults
    assert {key: defaults[key] for key in settings} == settings


@pytest.mark.parametrize(
    ("text", "code", "message", "help"),
    [
        ("lion", "IRC453", "no optimizer 'lion'", "adamw"),
        ("", "IRC453", "no optimizer ''", "optimizer_in_backward="),
        ("AdamW", "IRC453", "no optimizer 'AdamW'", "adamw"),
        ("adamw:momentum=0.9", "IRC454", "adamw has no option 'momentum'", "betas"),
        ("adamw:params=1", "IRC454", "no option 'params'", "lr"),
        ("adamw:", "IRC454", "no option ''", "lr"),
        ("adamw:lr", "IRC454", "option lr of adamw has no value", "adamw:KEY=VALUE"),
        ("adamw:lr=1,lr=2", "IRC454", "option lr of adamw is given twice", "adamw:KEY=VALUE"),
        ("adamw:lr=fast", "IRC455", "lr=fast of adamw is not a number", "give lr a number"),
        ("adamw:lr=nan", "IRC455", "lr=nan", "a number"),
        ("adamw:lr=1/2", "IRC455", "lr=1/2", "a number"),
        ("adamw:betas=0.9", "IRC455", "betas=0.9 of adamw is not 2 numbers", "0.5/0.5"),
        ("adamw:amsgrad=1", "IRC455", "amsgrad=1 of adamw is not true or false", "true or false"),
        ("adamw:lr=-1", "IRC456", "Invalid learning rate: -1.0", "torch.optim.AdamW"),
        ("sgd:nesterov=true", "IRC456", "Nesterov momentum requires", "torch.optim.SGD"),
    ],
)
def test_what_is_wrong_is_named(text: str, code: str, message: str, help: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_optimizer(text)
    assert caught.value.code == code and message in caught.value.message
    assert caught.value.help is not None and help in caught.value.help
