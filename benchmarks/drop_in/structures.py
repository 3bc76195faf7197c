"""Row 16: how arguments and results may be built."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import rnn
from torch.utils import _pytree as pytree

from .models import Arguments, Calls
from .registry import check, having, the
from .steps import train, trains
from .trial import Side, Trial, Unavailable

_SEVERAL = having("several results")


@check(16, the("structures"))
def structures_train(trial: Trial) -> None:
    """Dicts, dataclasses, tuples, texts, numbers and None come in and go out as in eager."""
    trains(trial, trial.fit(trial.subject.make(), trial.subject.arguments()))


@check(16, the("structures"))
def structures_are_eager_s(trial: Trial) -> None:
    """The result has eager's type, nesting and constants, tensors of its own, and integer leaves."""
    trial.same(trial.pair(), lambda side: side())


class _Pair(NamedTuple):
    first: Tensor
    second: Tensor


@dataclass
class _Plain:
    """A dataclass that pytree knows nothing of, as scripts write them."""

    scores: Tensor
    hidden: Tensor
    count: int = 3


class _Attributes:
    """An object of the script's own."""

    def __init__(self, scores: Tensor) -> None:
        self.scores = scores


class _Dict(dict[str, Any]):
    """A dict of the script's own, as tokenizers return them."""


def _tensors(result: Any) -> list[Tensor]:
    """The float tensors of a result that require gradients, dataclasses and objects opened."""
    if isinstance(result, Tensor):
        return [result] if result.requires_grad else []
    if isinstance(result, dict):
        return [t for value in result.values() for t in _tensors(value)]
    if isinstance(result, (list, tuple, set)):
        return [t for value in result for t in _tensors(value)]
    return (
        [t for value in vars(result).values() for t in _tensors(value)] if hasattr(result, "__dict__") else []
    )


def _any_loss(result: Any) -> Tensor:
    return torch.stack([t.square().mean() for t in _tensors(result)]).sum()


def _structure(
    name: str,
    forward: Callable[..., Any],
    arguments: Callable[[], Arguments] = lambda: Arguments((torch.randn(8, 4),)),
    promise: str = "It comes in or goes out as in eager, and trains.",
    *,
    refusable: bool = False,
) -> None:
    """Enters a check of a linear layer between arguments and results of some kind."""

    def run(trial: Trial) -> None:
        def script(side: Side) -> Any:
            seen = [side()]
            side.mark()
            seen.append(train("SGD", 2)(side))
            return seen

        module = Calls(forward, lin=nn.Linear(4, 6))
        trial.same(trial.fit(module, arguments(), _any_loss), script)

    check(16, name=name, refusable=refusable, promise=promise)(run)


def _h(m: Any, x: Tensor) -> Tensor:
    return torch.tanh(m.lin(x)) * 2


# ---------------------------------------------------------------------- results

_structure("a list", lambda m, x: [_h(m, x), [_h(m, x).mean()], ()])
_structure("a dict", lambda m, x: {"h": _h(m, x), "none": None, "n": 3, "x": {"name": "net", 2: True}})
_structure("a named tuple", lambda m, x: _Pair(_h(m, x), _h(m, x).sum()))
_structure("an ordered dict", lambda m, x: collections.OrderedDict(b=_h(m, x), a=_h(m, x).mean()))
_structure(
    "a default dict",
    lambda m, x: collections.defaultdict(list, {"h": [_h(m, x)]}),
)
_structure("integers and booleans beside", lambda m, x: (_h(m, x), _h(m, x).argmax(1), _h(m, x) > 0))
_structure("a result of no elements", lambda m, x: (_h(m, x), x[:0], _h(m, x)[:0]))
_structure("sizes and types", lambda m, x: (_h(m, x), x.shape, x.dtype, x.device))
_EITHER = "It goes out as in eager, with tensors that train, or is refused by name."
_structure("a dataclass unknown to pytree", lambda m, x: _Plain(_h(m, x), _h(m, x)))
_structure("an object", lambda m, x: (h := _h(m, x), _Attributes(h.mean())), promise=_EITHER, refusable=True)
_structure("a dict of the script's own", lambda m, x: _Dict(h=_h(m, x)), promise=_EITHER, refusable=True)
_structure("a set", lambda m, x: (_h(m, x), {1, 2}), promise=_EITHER, refusable=True)
_structure("a function", lambda m, x: (_h(m, x), _h), promise=_EITHER, refusable=True)
_structure(
    "a distribution",
    lambda m, x: (h := _h(m, x), torch.distributions.Normal(h, h.exp())),
    promise=_EITHER,
    refusable=True,
)

# ---------------------------------------------------------------------- arguments


def _named(kwargs: dict[str, Any]) -> Callable[[], Arguments]:
    return lambda: Arguments((torch.randn(8, 4),), kwargs)


_structure(
    "an argument that is None",
    lambda m, x, mask=None: _h(m, x if mask is None else x * mask),
    _named({"mask": None}),
)
_structure("an argument that is not used", lambda m, x, unused: _h(m, x), _named({"unused": torch.ones(3)}))
_structure(
    "an integer and a text",
    lambda m, x, n, how: _h(m, x) * n if how == "times" else x,
    _named({"n": 3, "how": "times"}),
)
_structure("indices", lambda m, x, i: _h(m, x)[i], _named({"i": torch.tensor([0, 2, 2, 7])}))
_structure(
    "a boolean mask as argument",
    lambda m, x, keep: _h(m, x).masked_fill(keep, 0.0),
    _named({"keep": torch.arange(6) > 3}),
)
_structure(
    "nested lists of tensors",
    lambda m, x, more: _h(m, x) + more[0][1]["a"],
    _named({"more": [(1, {"a": torch.ones(6)})]}),
)
_structure(
    "a slice and a size",
    lambda m, x, s, size: _h(m, x)[s].expand(*size),
    _named({"s": slice(0, 1), "size": torch.Size([5, 6])}),
)
_structure(
    "a named tuple as argument",
    lambda m, x, p: _h(m, x) * p.first + p.second,
    _named({"p": _Pair(torch.ones(6), torch.ones(8, 1))}),
)
_structure(
    "a dataclass as argument",
    lambda m, x, p: _h(m, x) * p.scores + p.hidden,
    lambda: Arguments((torch.randn(8, 4),), {"p": _Plain(torch.ones(6), torch.ones(8, 1))}),
)
_structure(
    "a dict as argument that the forward writes into",
    lambda m, x, p: _h(m, x) * p.pop("scale"),
    _named({"p": {"scale": torch.ones(6), "more": [1]}}),
    "The caller's dict is as after eager, or it is refused by name.",
    refusable=True,
)
_structure(
    "a dict of the script's own as argument",
    lambda m, x, p: _h(m, x) * p["a"],
    lambda: Arguments((torch.randn(8, 4),), {"p": _Dict(a=torch.ones(6))}),
    "It comes in as in eager, or is refused by name.",
    refusable=True,
)
_structure(
    "a packed sequence",
    lambda m, x, p: torch.tanh(m.lin(p.data)),
    lambda: Arguments(
        (torch.randn(2, 4),),
        {"p": rnn.pack_padded_sequence(torch.randn(2, 3, 4), torch.tensor([3, 2]), batch_first=True)},
    ),
    "It comes in as in eager, or is refused by name.",
    refusable=True,
)
_structure(
    "a parameter as argument",
    lambda m, x, w: _h(m, x) * w,
    lambda: Arguments((torch.randn(8, 4),), {"w": torch.ones(6, requires_grad=True)}),
)


# ---------------------------------------------------------------------- calls that differ from the example


def _called(
    name: str,
    promise: str,
    forward: Callable[..., Any],
    example: tuple[tuple[Any, ...], dict[str, Any]],
    *calls: tuple[tuple[Any, ...], dict[str, Any]],
) -> None:
    """Enters a check that calls a module in other ways than it was planned for."""

    def run(trial: Trial) -> None:
        def script(side: Side) -> Any:
            seen: list[Any] = []
            for args, kwargs in calls:
                side.mark()
                result = side.module(*args, **kwargs)
                result.square().mean().backward()
                seen.append(result.detach())
            return seen

        module = Calls(forward, lin=nn.Linear(4, 6))
        trial.same(trial.fit(module, Arguments(*example)), script)

    check(16, name=name, refusable=True, promise=promise)(run)


_X = torch.linspace(-1, 1, 32).view(8, 4)
_MASK = (torch.arange(32).view(8, 4) % 3 > 0).float()


def _masked(m: Any, x: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> Tensor:
    return _h(m, x if mask is None else x * mask) * scale


_OR_REFUSED = "Equal, or refused."
_called(
    "by position and by name",
    _OR_REFUSED,
    _masked,
    ((_X,), {"mask": _MASK}),
    ((_X, _MASK), {}),
    ((), {"mask": _MASK, "x": _X}),
)
_called(
    "names in another order",
    _OR_REFUSED,
    _masked,
    ((_X,), {"mask": _MASK, "scale": 2.0}),
    ((_X,), {"scale": 2.0, "mask": _MASK}),
)
_called(
    "a default that is spelled out", _OR_REFUSED, _masked, ((_X,), {}), ((_X,), {"mask": None, "scale": 1.0})
)
_called("a tensor in place of None", _OR_REFUSED, _masked, ((_X,), {"mask": None}), ((_X,), {"mask": _MASK}))
_called("None in place of a tensor", _OR_REFUSED, _masked, ((_X,), {"mask": _MASK}), ((_X,), {"mask": None}))
_called(
    "a number that changes from step to step",
    _OR_REFUSED,
    _masked,
    ((_X,), {"scale": 0.5}),
    ((_X,), {"scale": 0.5}),
    ((_X,), {"scale": 0.75}),
    ((_X,), {"scale": 1}),
)
_called(
    "more keys in a dict",
    _OR_REFUSED,
    lambda m, d: _h(m, d["x"]),
    (({"x": _X},), {}),
    (({"x": _X, "more": _X},), {}),
)


# ---------------------------------------------------------------------- losses on some of the results


@check(16, _SEVERAL)
def a_loss_on_any_subset_of_the_results(trial: Trial) -> None:
    """Whichever results the loss uses, the same gradients are None and the others are eager's."""

    def leaves(result: Any) -> list[Tensor]:
        found = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]
        return [t for t in found if t.requires_grad and not t.is_leaf]

    def script(side: Side) -> Any:
        count = len(leaves(side()))
        seen: list[Any] = []
        for size in range(1, count + 1):
            for subset in itertools.combinations(range(count), size):
                side.module.zero_grad()
                results = leaves(side())
                torch.stack([(results[k] * (k + 1)).sin().mean() for k in subset]).sum().backward()
                seen.append([None if p.grad is None else p.grad.clone() for p in side.module.parameters()])
        return seen

    trial.same(trial.pair(), script)


@check(16)
def heads_that_share_nothing(trial: Trial) -> None:
    """A loss on one of two heads leaves the other's parameters without gradients, not with zeros."""

    def forward(m: Any, x: Tensor) -> Any:
        h = torch.tanh(m.body(x))
        return {"a": m.a(h), "b": m.b(h)}

    def step(side: Side, optimizer: torch.optim.Optimizer) -> Any:
        optimizer.zero_grad()
        side()["a"].square().mean().backward()
        optimizer.step()
        return [p.grad is None for p in side.module.parameters()]

    parts = {"body": nn.Linear(4, 8), "a": nn.Linear(8, 4), "b": nn.Linear(8, 4)}
    pair = trial.fit(
        Calls(forward, **parts), Arguments((torch.randn(8, 4),)), lambda result: result["a"].mean()
    )
    trains(trial, pair, step=step)


@check(16)
def model_output_of_transformers(trial: Trial) -> None:
    """A ModelOutput comes back as one, with attributes, keys and positions, and its loss trains."""
    try:
        from transformers.modeling_outputs import SequenceClassifierOutput
    except ImportError as error:
        raise Unavailable("transformers is not installed") from error

    def forward(m: Any, x: Tensor) -> Any:
        h = _h(m, x)
        return SequenceClassifierOutput(loss=h.square().mean(), logits=h, hidden_states=(x, h))  # pyright: ignore[reportArgumentType]

    def script(side: Side) -> Any:
        result = side()
        seen = type(result), list(result.keys()), result[0].detach(), result["logits"].detach()
        return seen, train("SGD")(side)

    module = Calls(forward, lin=nn.Linear(4, 6))
    trial.same(trial.fit(module, Arguments((torch.randn(8, 4),)), lambda result: result.loss), script)


@check(16)
def a_tiny_bert_of_transformers(trial: Trial) -> None:
    """A BertForSequenceClassification with random weights trains as in eager, called by keywords."""
    try:
        from transformers import BertConfig, BertForSequenceClassification
    except ImportError as error:
        raise Unavailable("transformers is not installed") from error
    config = BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    kwargs = {
        "input_ids": torch.randint(30, (4, 8)),
        "attention_mask": torch.ones(4, 8, dtype=torch.int64),
        "labels": torch.tensor([0, 1, 1, 0]),
    }
    pair = trial.fit(BertForSequenceClassification(config), Arguments((), kwargs), lambda result: result.loss)
    trains(trial, pair)
