"""Caches of functions as libraries have them: in objects, classes, containers and files that code names."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Box:
    table: Tensor


@functools.cache
def table(size: int) -> Tensor:
    return torch.arange(size).sin()


@functools.lru_cache(maxsize=4)
def box(size: int) -> Box:
    return Box(torch.arange(size).sin())


@functools.cache
def closure(size: int) -> Callable[[], Tensor]:
    numbers = torch.arange(size).sin()
    return lambda: numbers


class Tables:
    @functools.lru_cache(maxsize=4)  # noqa: B019
    def of_object(self, size: int) -> Tensor:
        return torch.arange(size).sin()

    @classmethod
    @functools.lru_cache(maxsize=4)
    def of_class(cls, size: int) -> Tensor:
        return torch.arange(size).sin()


TABLES = Tables()
BY_NAME = {"table": functools.partial(functools.cache(lambda size: torch.arange(size).sin()), 4)}
