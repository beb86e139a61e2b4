# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Receivers of the same bytes complete each other, so that those bytes leave their source once.

All blocks which one process would send to the same set of m receivers are laid end to end and cut into m stripes of
equal bytes. Each receiver gets one stripe from the source, and passes it on to the other m - 1 out of its own target
buffer once it has all of its stripe. Only blocks that lie across the edge of a stripe are cut.
"""

from dataclasses import dataclass, replace
from typing import Dict, List, Mapping, Optional, Tuple

import numpy as np

from deepspeed.checkpoint.affine_geometry.columns import row_ids
from deepspeed.checkpoint.affine_geometry.runs import lower_run
from deepspeed.checkpoint.affine_transfer_executor.moves import DOUBLES, SECOND_HOP, Moves

# Block, owner, origin and extent of one box of _Stripes.
_Box = Tuple[int, int, np.ndarray, np.ndarray]
# A second hop costs time of its own: a few vectors that several receivers need are no reason for it.
WORTH = 0.95


def pass_on(moves: Moves, nodes: Optional[Mapping[int, int]] = None) -> Moves:
    """The moves of all processes, with forwarding where that spares the busiest sender 5 % or more, else as they are.

    Args:
        moves: of all processes, all in the FIRST_HOP.
        nodes: process -> node. Receivers on the source's own node then read from the source itself, and what leaves
            the node leaves it once. Default: every process is alone on its node.

    Example: process 0 has 100 bytes that 1 and 2 need. Then 0 sends bytes 0 to 49 to 1 and the rest to 2, 1 sends
    what it has to 2 and 2 what it has to 1. The busiest sender sends 100 bytes rather than 200.
    """
    blocks = _shared_blocks(moves, nodes)
    if not len(blocks.rows):
        return moves
    stripes = _stripes(moves, blocks)
    kept = np.setdiff1d(np.arange(len(moves)), np.concatenate([blocks.rows, blocks.doubles]))
    forwarded = moves.take(kept).joined(_first_hops(moves, blocks, stripes))
    forwarded = forwarded.joined(_second_hops(moves, blocks, stripes)).joined(_doubles(moves, blocks))
    return forwarded if busiest_sender_bytes(forwarded) <= WORTH * busiest_sender_bytes(moves) else moves


def busiest_sender_bytes(moves: Moves) -> int:
    """Most bytes that one process sends to others."""
    remote = ~moves.is_local
    if not remote.any():
        return 0
    _, sender = np.unique(moves.source_process[remote], return_inverse=True)
    total = np.zeros(sender.max() + 1, np.int64)
    np.add.at(total, sender, moves.numbytes[remote])
    return int(total.max())


@dataclass(frozen=True, eq=False)
class _Blocks:
    """G blocks of sources that several locations of other processes need.

    Attributes:
        rows: moves of a block, one for each of its receivers, ascending by process; block g has ``rows[starts[g]:
            starts[g + 1]]``.
        starts: int64[G + 1].
        doubles: further moves into processes that receive the block already.
        first: int64[len(doubles)], the move among ``rows`` which brings that process the block.
    """
    rows: np.ndarray
    starts: np.ndarray
    doubles: np.ndarray
    first: np.ndarray


def _shared_blocks(moves: Moves, nodes: Optional[Mapping[int, int]]) -> _Blocks:
    candidates = np.flatnonzero(_leaves_node(moves, nodes) & (moves.numel > 0))
    part = moves.take(candidates)
    block, _ = row_ids(part.request, part.source_rank, part.source_offset, part.source_strides, part.shape,
                       part.source_scale, part.target_scale)
    order = np.lexsort((part.target_offset, part.target_rank, part.target_process, block))
    rows, block, process = candidates[order], block[order], part.target_process[order]
    new = np.ones(len(rows), bool)
    new[1:] = (block[1:] != block[:-1]) | (process[1:] != process[:-1])
    needed = np.bincount(block)
    shared = needed[block] > 1
    lead = np.maximum.accumulate(np.where(new, np.arange(len(rows)), 0))
    counts = np.bincount(block[new])[needed > 1]
    return _Blocks(rows[new & shared], np.concatenate([[0], np.cumsum(counts)]), rows[~new & shared],
                   rows[lead[~new & shared]])


def _leaves_node(moves: Moves, nodes: Optional[Mapping[int, int]]) -> np.ndarray:
    if nodes is None:
        return ~moves.is_local
    processes, where = np.unique(np.concatenate([moves.source_process, moves.target_process]), return_inverse=True)
    node = np.array([nodes[process] for process in processes.tolist()], np.int64)[where.reshape(-1)]
    return node[:len(moves)] != node[len(moves):]


@dataclass(frozen=True, eq=False)
class _Stripes:
    """B boxes which cover the blocks: which block, which of its receivers gets it first, and where it lies in it."""
    block: np.ndarray
    owner: np.ndarray
    origin: np.ndarray
    extent: np.ndarray


def _stripes(moves: Moves, blocks: _Blocks) -> _Stripes:
    leads = blocks.rows[blocks.starts[:-1]]
    numbytes, shapes = moves.numbytes[leads], moves.shape[leads]
    found: List[_Box] = []
    for members, receivers in _families(moves, blocks):
        stops = np.cumsum(numbytes[members])
        edges = [int(stops[-1]) * stripe // receivers for stripe in range(receivers + 1)]
        for block, stop in zip(members.tolist(), stops.tolist()):
            found += _cut(block, stop - int(numbytes[block]), edges, shapes[block], int(moves.width[leads[block]]))
    block, owner, origin, extent = zip(*found)
    return _Stripes(np.array(block), np.array(owner),
                    np.array(origin).reshape(len(found), -1),
                    np.array(extent).reshape(len(found), -1))


def _families(moves: Moves, blocks: _Blocks) -> List[Tuple[np.ndarray, int]]:
    """Blocks of one source process and one set of receivers, with the number of receivers."""
    families: Dict[Tuple[int, ...], List[int]] = {}
    source = moves.source_process[blocks.rows[blocks.starts[:-1]]].tolist()
    target = moves.target_process[blocks.rows].tolist()
    starts = blocks.starts.tolist()
    for block, sender in enumerate(source):
        families.setdefault((sender, *target[starts[block]:starts[block + 1]]), []).append(block)
    return [(np.array(members), len(key) - 1) for key, members in families.items()]


def _cut(block: int, start: int, edges: List[int], shape: np.ndarray, width: int) -> List[_Box]:
    """The boxes of a block that begins at byte ``start`` of its family, by stripe."""
    numel = int(shape.prod())
    owner = int(np.searchsorted(edges, start, side='right')) - 1
    boxes = []
    done = 0
    while done < numel:
        last = numel if owner == len(edges) - 2 else min((edges[owner + 1] - start) // width, numel)
        if (done, last) == (0, numel):
            return [(block, owner, np.zeros_like(shape), shape)]
        for box in lower_run(tuple(shape.tolist()), done, last) if last > done else ():
            boxes.append((block, owner, np.array(box.origin, np.int64), np.array(box.extent, np.int64)))
        done, owner = max(done, last), owner + 1
    return boxes


def _first_hops(moves: Moves, blocks: _Blocks, stripes: _Stripes) -> Moves:
    """From the source to the receiver that owns the stripe."""
    to_owners = blocks.rows[blocks.starts[stripes.block] + stripes.owner]
    return _box_of(moves.take(to_owners), stripes.origin, stripes.extent)


def _second_hops(moves: Moves, blocks: _Blocks, stripes: _Stripes) -> Moves:
    """From the owner of a stripe to all other receivers of its block."""
    receivers = np.diff(blocks.starts)[stripes.block]
    box = np.repeat(np.arange(len(receivers)), receivers)
    other = np.arange(len(box)) - np.repeat(np.cumsum(receivers) - receivers, receivers)
    box, other = box[other != stripes.owner[box]], other[other != stripes.owner[box]]
    start = blocks.starts[stripes.block[box]]
    reader, writer = blocks.rows[start + stripes.owner[box]], blocks.rows[start + other]
    return _box_of(_between_targets(moves, reader, writer, SECOND_HOP), stripes.origin[box], stripes.extent[box])


def _box_of(moves: Moves, origin: np.ndarray, extent: np.ndarray) -> Moves:
    """The moves of one box of each."""
    return replace(moves,
                   shape=extent,
                   source_offset=moves.source_offset + (origin * moves.source_strides).sum(axis=1),
                   target_offset=moves.target_offset + (origin * moves.target_strides).sum(axis=1))


def _doubles(moves: Moves, blocks: _Blocks) -> Moves:
    """Within a process that needs a block in several of its locations."""
    return _between_targets(moves, blocks.first, blocks.doubles, DOUBLES)


def _between_targets(moves: Moves, reader: np.ndarray, writer: np.ndarray, stage: int) -> Moves:
    """What move ``reader`` has written, copied to where move ``writer`` would write it."""
    read = moves.take(reader)
    ones = np.ones(len(reader))
    return replace(moves.take(writer),
                   stage=np.full(len(reader), stage),
                   source_process=read.target_process,
                   source_rank=read.target_rank,
                   source_offset=read.target_offset,
                   source_strides=read.target_strides,
                   source_scale=ones,
                   target_scale=ones)
