"""The programme over cuts with copies to tiers: a bound for every schedule with swaps, and a first choice."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ...ir import Direction, Storage, Tier
from ..milp import Term, Variable
from ..remat.cut_ilp import Relaxation

__all__ = ["OffloadRelaxation"]

_Variables = dict[Storage, Variable]


_MOST_UNITS = 1e6
"""The longest that a copy counts for: with more, HiGHS takes feasible rows for infeasible ones."""


@dataclass
class OffloadRelaxation(Relaxation):
    r"""The programme over cuts in which storages may also be copied to a tier and back.

    Cut j stands at time step t_j. Window j lies between the beginnings of the operations at t_{j-1} and t_j:
    the first one begins with the step and the last one ends with it. Beside the variables k and x of
    `Relaxation`, for storages that a tier can take:

    - out[w, s], in[w, s] in [0, 1]: the part of s that is copied out, or back, in window w, for each tier;
    - f[j, s] in [0, 1]: a copy back ends in the window behind cut j; it provides s there, as x does;
    - g[j, s], d[j, s] in [0, 1]: the part of s that is there at cut j for its copy out, or for one back;
    - w[w] >= 0: seconds of a window in which nothing of the programme is computed.

    Minimise the seconds of all x and w, subject to the rows of `Relaxation` with f beside x, and

    - copy out: what is copied behind cut j is there, or made since: the sum of out over later windows <= k[j,
      s] + g[j, s] + the sum of later x of its maker; if s was made before cut j-1, g[j, s] <= k[j-1, s] +
      g[j-1, s] + x[j-1, maker(s)];
    - once: the sum of out[., s] <= 1, and f[j, s] <= that sum up to the window behind cut j;
    - copy back: d[j+1, s] = d[j, s] + in[j+1, s] - f[j, s];
    - channel: seconds of the copies of a window, on one channel <= base seconds of the window + its x + w;
    - memory: k + g + d.

    A schedule with swaps satisfies these with the part of each copy that lies in a window, so the optimum is
    a lower bound for all of them. The programme may give memory back while a copy is under way; schedules
    cannot.

    Args:
        tiers: The tiers.
    """

    tiers: Sequence[Tier] = ()
    going: list[_Variables] = field(default_factory=list[_Variables], init=False)
    coming: list[_Variables] = field(default_factory=list[_Variables], init=False)

    def _arrivals(self, cut: int, made: Sequence[Storage]) -> _Variables:
        copyable = self.problem.graph.copyable_storages
        time_step = self.time_steps[cut]
        useful = (s for s in made if s in copyable and self.problem.is_useful(s, time_step + 1))
        return {s: self.model.add_variable(lower=0.0, upper=1.0) for s in useful}

    def _add_copies(self) -> Sequence[Variable]:
        problem, model = self.problem, self.model
        cuts = range(len(self.time_steps))
        swapped = list(dict.fromkeys(s for arrived in self.arrived for s in arrived))
        self.waits = [model.add_variable(lower=0.0) for _ in range(len(self.time_steps) + 1)]
        self.out = [self._copies(swapped, window) for window in range(len(self.time_steps) + 1)]
        self.back = [self._copies(swapped, window) for window in range(len(self.time_steps) + 1)]
        for cut in cuts:
            time_step = self.time_steps[cut]
            made = [s for s in swapped if problem.index[problem.producer[s]] < time_step]
            self.going.append({s: model.add_variable(lower=0.0, upper=1.0) for s in made})
            self.coming.append({s: model.add_variable(lower=0.0, upper=1.0) for s in made})
        for storage in swapped:
            self._add_copies_of(storage)
        self._add_channels()
        return self.waits

    def _copies(self, swapped: Sequence[Storage], window: int) -> dict[Storage, list[Variable]]:
        """For each tier, the part of each storage that is copied in a window; it was made before its end."""
        end = self.time_steps[window] if window < len(self.time_steps) else self.problem.time_steps
        return {
            s: [self.model.add_variable(lower=0.0, upper=1.0) for _ in self.tiers]
            for s in swapped
            if self.problem.index[self.problem.producer[s]] < end
        }

    def _add_copies_of(self, storage: Storage) -> None:
        problem, model = self.problem, self.model
        maker = problem.producer[storage]
        parts = [window.get(storage, []) for window in self.out]
        model.add_row(_sum(parts), upper=1.0)
        for cut, time_step in enumerate(self.time_steps):
            if problem.index[maker] >= time_step:
                continue
            again = [x[maker] for x in self.again[cut:] if maker in x]
            there = _sum([self._here(cut, storage), again], -1.0)
            model.add_row([*_sum(parts[cut + 1 :]), *there], upper=0.0)
            going, coming = self.going[cut][storage], self.coming[cut][storage]
            if cut and problem.index[maker] < self.time_steps[cut - 1]:
                between = [x[maker] for x in self.again[cut - 1 : cut] if maker in x]
                before = _sum([self._here(cut - 1, storage), between], -1.0)
                model.add_row([(1.0, going), *before], upper=0.0)
            arrives = [(1.0, self.arrived[cut][storage])] if storage in self.arrived[cut] else []
            if arrives:
                model.add_row([*arrives, *_sum(parts[: cut + 2], -1.0)], upper=0.0)
            back = [window.get(storage, []) for window in self.back[cut : cut + 2]]
            following = [(1.0, c[storage]) for c in self.coming[cut + 1 : cut + 2]]
            change = [*following, (-1.0, coming), *_sum(back[1:], -1.0), *arrives]
            model.add_row(change, lower=0.0, upper=0.0)
            if not cut or problem.index[maker] >= self.time_steps[cut - 1]:
                model.add_row([(1.0, coming), *_sum(back[:1], -1.0)], upper=0.0)

    def _here(self, cut: int, storage: Storage) -> list[Variable]:
        """That a storage stays at a cut, or is there for its copy out."""
        stays = self.resident[cut].get(storage)
        return [variable for variable in (stays, self.going[cut][storage]) if variable is not None]

    def _add_channels(self) -> None:
        problem = self.problem
        marks = [0, *self.time_steps, problem.time_steps]
        for window, (start, end) in enumerate(itertools.pairwise(marks)):
            nodes = (problem.base_of(time_step) for time_step in range(start, end))
            base = sum(problem.costs.seconds[node] for node in nodes if node is not None)
            again = self._seconds_again(window - 1) if window else []
            elapsed = [(-1.0, self.waits[window]), *((-seconds, x) for seconds, x in again)]
            loads: dict[object, list[Term]] = {}
            for direction, copies in ((Direction.OUT, self.out), (Direction.IN, self.back)):
                for storage, parts in copies[window].items():
                    for tier, part in zip(self.tiers, parts, strict=True):
                        seconds = tier.copy_seconds(storage.nbytes, direction) / self.unit_seconds
                        seconds = min(seconds, _MOST_UNITS)
                        loads.setdefault(tier.channel(direction), []).append((seconds, part))
            for load in loads.values():
                self.model.add_row([*load, *elapsed], upper=base / self.unit_seconds)

    @property
    def _forced_bytes(self) -> int:
        return 0  # what cannot be made again may be away

    @property
    def _dominates(self) -> bool:
        return False  # a storage can be copied out before its user has run

    def _swapped(self, values: Mapping[Variable, float]) -> dict[int, frozenset[Storage]]:
        found: dict[int, frozenset[Storage]] = {}
        later: frozenset[Storage] = frozenset()
        for cut in reversed(range(len(self.time_steps))):
            later |= {s for s, v in self.arrived[cut].items() if values[v] > 0.5}
            made = (s for s in later if self.problem.index[self.problem.producer[s]] < self.time_steps[cut])
            found[cut] = frozenset(made)
        return found

    def _copied(self, cut: int) -> Sequence[tuple[int, Variable]]:
        inputs = set(self.problem.read_at(self.time_steps[cut]))
        parts = (*self.going[cut].items(), *self.coming[cut].items())
        return [(s.nbytes, part) for s, part in parts if s not in inputs]


def _sum(parts: Iterable[Iterable[Variable]], sign: float = 1.0) -> list[Term]:
    """The terms of all variables in some parts."""
    return [(sign, variable) for part in parts for variable in part]
