"""Runs the checks of the matrix, in this process or in several."""

from __future__ import annotations

import functools
import logging
import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor

import torch

from . import families
from .plans import PLANS
from .registry import CHECKS, Check, Outcome, run_check
from .table import Line
from .trial import Workshop

__all__ = ["run_lines"]

assert families


def run_lines(chosen: Sequence[tuple[Check, str]], plans: Sequence[str], jobs: int = 1) -> Iterator[Line]:
    """The lines of the matrix, in this order, each as soon as it and those before it are known.

    Args:
        chosen: Checks, each with the name of a model.
        plans: The names of the plans.
        jobs: How many processes share the lines; each plans the models for itself.
    """
    names = [(check.name, model) for check, model in chosen]
    run = functools.partial(_run, tuple(plans))
    if jobs == 1:
        for (check, model), outcomes in zip(chosen, map(run, names), strict=True):
            yield Line(check, model, outcomes)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, _prepare, (torch.get_num_threads(),)) as pool:
        for (check, model), outcomes in zip(chosen, pool.map(run, names), strict=True):
            yield Line(check, model, outcomes)


def _prepare(threads: int) -> None:
    torch.set_num_threads(threads)
    logging.getLogger("irc").setLevel(logging.ERROR)


@functools.cache
def _workshop() -> Workshop:
    return Workshop()


def _run(plans: tuple[str, ...], named: tuple[str, str]) -> dict[str, Outcome]:
    name, model = named
    return {plan: run_check(CHECKS[name], PLANS[plan], model, _workshop()) for plan in plans}
