"""Parameters and optimizer states that are offloaded to a tier between steps.

Between steps such a parameter is still a tensor of the host's memory that anybody may read and write: its
bytes are a mapping of its slot in the tier. A step computes with a copy on the device. If an optimizer has
changed that copy, the copy is the parameter until it has been copied back. So a failing copy loses nothing:
a tensor that was not copied back stays where it is, and the next step moves it to the tier.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ....ir import TierError
from ....torch_support.optimizer_state import moving_state
from .memory import checksum
from .slots import AnySlot
from .table import CopiedTensor, CopyTable
from .tier import ResidentTier, RunningTier, Ticket

__all__ = ["OffloadedParameters", "Resident", "State"]


@dataclass(frozen=True, slots=True)
class _Kept:
    """A tensor in a tier.

    Args:
        slot: Its slot.
        tensor: The bytes of the slot as a tensor, for use between steps.
        tier: The tier.
        address: The address of the tensor at first; torch.multiprocessing may move it.
    """

    slot: AnySlot
    tensor: Tensor
    tier: ResidentTier
    address: int

    @staticmethod
    def at(slot: AnySlot, like: Tensor, tier: ResidentTier) -> _Kept:
        """Makes the tensor of a slot, with the type and layout of another tensor."""
        there = tier.tensor_at(slot).view(like.dtype).as_strided(like.shape, like.stride())
        return _Kept(slot, there, tier, there.data_ptr())

    def has(self, tensor: Tensor) -> bool:
        """Whether a tensor is the one in the tier."""
        is_here = self.address == self.tensor.data_ptr() == tensor.data_ptr()
        return is_here and _is_like(tensor, self.tensor)


def _is_like(a: Tensor, b: Tensor) -> bool:
    return (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


def _keep(tensor: Tensor, tier: ResidentTier) -> _Kept:
    """Copies a tensor to a new slot of a tier."""
    slot = tier.take_resident(tensor.nbytes)
    tier.begin_out(tensor, slot).wait()
    return _Kept.at(slot, tensor, tier)


@dataclass(slots=True)
class State:
    """The state of an optimizer for one parameter while it is on the device.

    Args:
        tensors: Its tensors, by their keys.
        sources: The tensor in the tier that each was fetched from, and the version that this had.
    """

    tensors: dict[str, Tensor]
    sources: dict[str, tuple[Tensor, int]]

    def into(self, held: dict[str, Any]) -> None:
        """Puts the tensors into the optimizer's own state; values written there since the fetch win."""
        for key, tensor in self.tensors.items():
            source, version = self.sources[key]
            now = held.get(key)
            if now is source:
                if source._version != version:
                    tensor.copy_(source)
                held[key] = tensor
            elif isinstance(now, Tensor) and _is_like(now, tensor):
                held[key] = tensor.copy_(now)
        self.tensors = {}  # so that a tensor that the optimizer replaces is freed at once


class _All(Ticket):
    """Several copies that are waited for together."""

    def __init__(self, tickets: Sequence[Ticket]) -> None:
        self._tickets = tickets

    def wait(self) -> None:
        for ticket in self._tickets:
            ticket.wait()

    def cancel(self) -> None:
        for ticket in self._tickets:
            ticket.cancel()

    def settle(self) -> None:
        for ticket in self._tickets:
            ticket.settle()


class Resident(ABC):
    """A parameter or an optimizer state that is offloaded between steps, for the copies of one step.

    Args:
        copied: Its entry in the plan's table of copies.
        checks: Whether checksums are compared after each copy.
    """

    def __init__(self, copied: CopiedTensor, *, checks: bool) -> None:
        self.copied = copied
        self.checks = checks

    @abstractmethod
    def fetch(self) -> tuple[Any, Ticket]:
        """Begins to copy it to the device; returns the tensors there, and the copy."""

    @abstractmethod
    def offload(self, held: Any) -> Ticket:
        """Begins to copy the new values back."""

    @abstractmethod
    def arrived(self) -> None:
        """Replaces the tensors on the device by those in the tier, after they were copied back."""

    def compare(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Compares the tensors on the device with those in the tier, if checksums are on.

        Raises:
            TierError: IRC574.
        """
        if not self.checks:
            return
        for here, there in pairs:
            found, expected = checksum(here), checksum(there)
            if found != expected:
                raise TierError(
                    "IRC574",
                    f"{self.copied.name} ({here.nbytes} B) was copied between the device and tier "
                    f"{self.copied.tier} with other bytes: their checksums are {found:#010x} and "
                    f"{expected:#010x}",
                    help="see that disk and memory are in order; the step can be repeated",
                )


class _OffloadedParameter(Resident):
    def __init__(
        self, names: Sequence[nn.Parameter], kept: _Kept, copied: CopiedTensor, *, checks: bool
    ) -> None:
        super().__init__(copied, checks=checks)
        self.names = names
        self.kept = kept

    def fetch(self) -> tuple[Tensor, Ticket]:
        here = torch.empty_like(self.kept.tensor)
        self.kept.tier.count(in_bytes=here.nbytes)
        return here, _Compared(
            self.kept.tier.begin_in(self.kept.slot, here), self, [(here, self.kept.tensor)]
        )

    def offload(self, held: Tensor) -> Ticket:
        self.kept.tier.count(out_bytes=held.nbytes)
        return _Compared(self.kept.tier.begin_out(held, self.kept.slot), self, [(held, self.kept.tensor)])

    def arrived(self) -> None:
        for parameter in self.names:
            parameter.data = self.kept.tensor


class _OffloadedState(Resident):
    def __init__(
        self,
        optimizer: Optimizer,
        parameter: nn.Parameter,
        kept: dict[str, _Kept],
        tier: ResidentTier,
        copied: CopiedTensor,
        *,
        checks: bool,
    ) -> None:
        super().__init__(copied, checks=checks)
        self.optimizer = optimizer
        self.parameter = parameter
        self.kept = kept
        self.tier = tier

    def fetch(self) -> tuple[State, Ticket]:
        """Begins to copy the state; it is empty before the optimizer's first step, which makes it."""
        sources = {key: kept.tensor for key, kept in self.kept.items()}
        state = State(
            {key: torch.empty_like(source) for key, source in sources.items()},
            {key: (source, source._version) for key, source in sources.items()},
        )
        return state, self._all(self._begin_in, state)

    def offload(self, held: State) -> Ticket:
        for key in self.kept.keys() - held.tensors.keys():  # the optimizer does not hold it any more
            del self.kept[key]
        for key, tensor in held.tensors.items():
            if key not in self.kept or not _is_like(tensor, self.kept[key].tensor):
                self.kept[key] = _Kept.at(self.tier.take_resident(tensor.nbytes), tensor, self.tier)
        return self._all(self._begin_out, held)

    def arrived(self) -> None:
        if self.kept:  # an optimizer may ask whether it has any state
            there = {key: kept.tensor for key, kept in self.kept.items()}
            self.optimizer.state[self.parameter].update(there)

    def _begin_in(self, kept: _Kept, tensor: Tensor) -> Ticket:
        self.tier.count(in_bytes=tensor.nbytes)
        return self.tier.begin_in(kept.slot, tensor)

    def _begin_out(self, kept: _Kept, tensor: Tensor) -> Ticket:
        self.tier.count(out_bytes=tensor.nbytes)
        return self.tier.begin_out(tensor, kept.slot)

    def _all(self, begin: Callable[[_Kept, Tensor], Ticket], state: State) -> Ticket:
        tickets = [begin(self.kept[key], tensor) for key, tensor in state.tensors.items()]
        pairs = [(tensor, self.kept[key].tensor) for key, tensor in state.tensors.items()]
        return _Compared(_All(tickets), self, pairs)


class _Compared(Ticket):
    """A copy after which both ends are compared, if checksums are on."""

    def __init__(self, ticket: Ticket, resident: Resident, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._ticket = ticket
        self._resident = resident
        self._pairs = pairs if resident.checks else []

    def wait(self) -> None:
        self._ticket.wait()
        self._resident.compare(self._pairs)
        self._pairs = []

    def cancel(self) -> None:
        self._pairs = []
        self._ticket.cancel()

    def settle(self) -> None:
        self._ticket.settle()


class OffloadedParameters:
    """The offloaded parameters and states of a module. They are never part of its copies and pickles."""

    def __init__(self) -> None:
        self._parameters: dict[str, _Kept] = {}
        self._states: dict[str, dict[str, _Kept]] = {}

    def residents(
        self,
        table: CopyTable,
        parameter: Callable[[int], Any],
        optimizers: Mapping[str, Optimizer],
        opened: Callable[[str], RunningTier],
        checks: frozenset[str] = frozenset(),
    ) -> dict[int, Resident]:
        """Returns the offloaded tensors of a plan by their keys; moves those elsewhere to their tier now.

        Args:
            table: The plan's table of copies.
            parameter: Returns the parameter that a static input of the plan binds.
            optimizers: The optimizers within backward, by the names of their parameters.
            opened: Returns the tier of a name.
            checks: The names of the tiers whose copies are compared.

        Raises:
            TierError: IRC577 if a tier is full; IRC570 or IRC572 if its disk is full, or fails.
        """
        found: dict[int, Resident] = {}
        for key, copied in enumerate(table.tensors):
            offloaded = copied.offloaded
            if offloaded is None:
                continue
            tier = opened(copied.tier)
            assert isinstance(tier, ResidentTier), f"nothing can live in tier {copied.tier}"
            checks_copies = copied.tier in checks
            mine = parameter(offloaded.index)
            if offloaded.is_state:
                optimizer = optimizers[offloaded.parameter]
                kept = self._states.setdefault(offloaded.parameter, {})
                self._adopt_state(optimizer, mine, kept, tier)
                found[key] = _OffloadedState(optimizer, mine, kept, tier, copied, checks=checks_copies)
            else:
                kept = self._adopt_parameter(offloaded.parameter, mine, tier)
                names = [mine, *map(parameter, offloaded.tied)]
                found[key] = resident = _OffloadedParameter(names, kept, copied, checks=checks_copies)
                resident.arrived()
        return found

    def _adopt_parameter(self, name: str, parameter: nn.Parameter, tier: ResidentTier) -> _Kept:
        """Moves a parameter to the tier if it is elsewhere, as after `load_state_dict` or a failure."""
        known = self._parameters.get(name)
        if known is None or known.tier is not tier or not known.has(parameter.data):
            known = None  # its slot is free for the new one
            self._parameters.pop(name, None)
            self._parameters[name] = known = _keep(parameter.data, tier)
        return known

    def _adopt_state(
        self, optimizer: Optimizer, parameter: nn.Parameter, kept: dict[str, _Kept], tier: ResidentTier
    ) -> None:
        """Moves the optimizer's tensors to the tier if they are elsewhere, as in `_adopt_parameter`."""
        there = moving_state(optimizer, parameter)
        for key in [*kept]:
            if key not in there:
                del kept[key]
        for key, tensor in there.items():
            known = kept.get(key)
            if known is None or known.tier is not tier or not known.has(tensor):
                known = None  # its slot is free for the new one
                kept.pop(key, None)
                kept[key] = known = _keep(tensor, tier)
                optimizer.state[parameter][key] = known.tensor
