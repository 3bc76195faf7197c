"""What torch's caching allocator of CUDA memory has reserved, for tensors that come and go."""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

__all__ = ["Block", "CachingAllocator"]

_MIB = 2**20
_ROUND = 512
_SMALL = _MIB
"""Up to here, blocks are cut from segments of 2 MiB."""
_MEDIUM = 10 * _MIB
"""Below this, from segments of 20 MiB."""

_Pool = tuple[int, bool]
"""Blocks of one stream are not given to another; small ones are apart from others."""


@dataclass(eq=False)
class Block:
    """A part of a segment.

    Args:
        pool: Where it goes when it is free.
        address: Of its first byte; segments lie far apart.
        nbytes: How large it is.
        before: What lies before it in its segment.
        after: What lies after it.
        is_free: Whether it may be given out.
    """

    pool: _Pool
    address: int
    nbytes: int
    before: Block | None = None
    after: Block | None = None
    is_free: bool = False


@dataclass
class CachingAllocator:
    """Reserves segments from a device, and cuts them into blocks.

    Sizes are rounded up to 512 bytes. A request takes the smallest free block of its pool that is large
    enough, and gives back what is left where that is at least 512 bytes (of small blocks) or more than
    1 MiB. Where none is free a segment is reserved: 2 MiB for requests up to 1 MiB, 20 MiB up to 10 MiB,
    else the request in whole 2 MiB. Neighbours that are free become one. Segments are never given back.

    Source:
        torch/c10/cuda/CUDACachingAllocator.cpp with its default settings; without the waiting for other
        streams to have read a block.
    """

    reserved_bytes: int = 0
    alive_bytes: int = 0
    peak_bytes: int = 0
    """The most that was alive."""
    _segments: int = 0
    _free: dict[_Pool, list[tuple[int, int]]] = field(default_factory=dict[_Pool, list[tuple[int, int]]])
    """Sizes and addresses of free blocks, in order."""
    _blocks: dict[int, Block] = field(default_factory=dict[int, Block])
    """All blocks by address."""

    def take(self, nbytes: int, stream: int = 0) -> Block:
        """A block of at least `nbytes`, in the pool of a stream."""
        size = max(-(-nbytes // _ROUND) * _ROUND, _ROUND)
        is_small = size <= _SMALL
        pool = (stream, is_small)
        block = self._found(pool, size) or self._segment(pool, size)
        block.is_free = False
        rest = block.nbytes - size
        if rest >= _ROUND if is_small else rest > _SMALL:
            other = Block(pool, block.address + size, rest, block, block.after)
            if block.after is not None:
                block.after.before = other
            block.after, block.nbytes = other, size
            self._blocks[other.address] = other
            self._put(other)
        self.alive_bytes += block.nbytes
        self.peak_bytes = max(self.peak_bytes, self.alive_bytes)
        return block

    def give(self, block: Block) -> None:
        """Makes a block free."""
        assert not block.is_free, "given back twice"
        self.alive_bytes -= block.nbytes
        if block.after is not None and block.after.is_free:
            self._drop(block.after)
            self._absorb(block, block.after)
        if block.before is not None and block.before.is_free:
            before = block.before
            self._drop(before)
            self._absorb(before, block)
            block = before
        self._put(block)

    def _found(self, pool: _Pool, size: int) -> Block | None:
        free = self._free.setdefault(pool, [])
        place = bisect.bisect_left(free, (size, -1))
        return self._blocks[free.pop(place)[1]] if place < len(free) else None

    def _segment(self, pool: _Pool, size: int) -> Block:
        least = 2 * _MIB if pool[1] else 20 * _MIB
        nbytes = least if size < _MEDIUM else -(-size // (2 * _MIB)) * 2 * _MIB
        self._segments += 1
        block = Block(pool, self._segments << 48, nbytes)
        self._blocks[block.address] = block
        self.reserved_bytes += nbytes
        return block

    def _put(self, block: Block) -> None:
        block.is_free = True
        bisect.insort(self._free[block.pool], (block.nbytes, block.address))

    def _drop(self, block: Block) -> None:
        free = self._free[block.pool]
        free.pop(bisect.bisect_left(free, (block.nbytes, block.address)))

    def _absorb(self, block: Block, after: Block) -> None:
        block.nbytes += after.nbytes
        block.after = after.after
        if after.after is not None:
            after.after.before = block
        del self._blocks[after.address]
