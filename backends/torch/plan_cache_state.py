"""The plans of a module apart from it: what its copies share, and what its pickles carry."""

from __future__ import annotations

import copy
import logging
import pickle
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from torch.optim import Optimizer

from ...ir import Plan
from .compiled_plan import Compile, CompiledPlan
from .offload import TierConfig

__all__ = ["PlanCacheState"]

_log = logging.getLogger("irc")
_trial = threading.local()


@dataclass(frozen=True)
class PlanCacheState:
    """A cache of plans apart from its module.

    Args:
        compile: Compiles what misses.
        request: The request that its plans meet; None refuses calls that miss.
        limit: The number of plans that are kept.
        plans_eval: Whether a call in eval() is a step of training: the root was in eval() when it was bound.
        compiled_plans: The plans, the most recently used first.
        first_plan: The plan of the example arguments, which may be given up by now.
        optimizers: The optimizer of each parameter alone, by its name, if gradients are applied.
        reserved: The memory that gradients released by any plan take from step to step, by the name of
            the parameter: bytes of `.grad`, or of the optimizer's state.
        tiers: The configs of the tiers that plans copy to; each module opens its own.
    """

    compile: Compile | None
    request: Any
    limit: int
    plans_eval: bool
    compiled_plans: tuple[CompiledPlan, ...] = ()
    first_plan: Plan | None = None
    optimizers: Mapping[str, Optimizer] = field(default_factory=dict[str, Optimizer])
    reserved: Mapping[str, int] = field(default_factory=dict[str, int])
    tiers: tuple[TierConfig, ...] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> PlanCacheState:
        return replace(self, optimizers=copy.deepcopy(self.optimizers, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        known = {each.name: getattr(self, each.name) for each in fields(self)}
        known["compiled_plans"] = tuple(
            each
            for each in self.compiled_plans
            if _why_not((each.forward, each.state, each.reads, each.code_reads, each.tensor_reads)) is None
        )
        why_not = _why_not(self.request)
        if why_not is not None:
            known["request"] = None
            _log.warning(
                "a fitted module is pickled without what plans other calls, and refuses them when it is "
                "read: its loss or its optimizer cannot be pickled (%s)",
                why_not,
            )
        return _plan_cache_state, (known,)


def _plan_cache_state(known: dict[str, Any]) -> PlanCacheState:
    return PlanCacheState(**known)


def _why_not(value: object) -> Exception | None:
    """Returns why a value cannot be pickled, such as a class that no file holds; None if it can be.

    A value that is pickled on trial may hold the module that asks; that one then carries nothing.
    """
    if value is None:
        return None
    if getattr(_trial, "runs", False):
        return pickle.PicklingError("on trial")
    _trial.runs = True
    try:
        pickle.dumps(value)
    except Exception as error:  # whatever the objects in it raise
        return error
    finally:
        _trial.runs = False
    return None
