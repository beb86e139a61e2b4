# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Rounds with their memory: what is posted, and the copies before and after, all made once."""

from dataclasses import dataclass
from typing import Dict, Iterator, List, Optional, Sequence, Tuple

import numpy as np
import torch

from deepspeed.checkpoint.affine_transfer_executor.aliases import same_memory
from deepspeed.checkpoint.affine_transfer_executor.buffers import Piece, as_run
from deepspeed.checkpoint.affine_transfer_executor.copies import Buffers, Copies, Part, copy, pack, parts_of, unpack
from deepspeed.checkpoint.affine_transfer_executor.links import Message, Round
from deepspeed.checkpoint.affine_transfer_executor.moves import FIRST_HOP, Moves

# While one round travels, the next one is packed.
SLOTS = 2
# Rounds that stage nothing wait for no memory, only for operations to end: several travel at one time.
IN_FLIGHT = 8


class Staging:
    """Staging memory: for each slot and place in a round one buffer, as large as its largest message.

    Args:
        device: where messages must lie.
        sizes: ``(slot, place)`` -> bytes.
    """

    def __init__(self, device: torch.device, sizes: Dict[Tuple[int, int], int]):
        self._held = {key: torch.empty(size, dtype=torch.uint8, device=device) for key, size in sizes.items()}

    @property
    def numbytes(self) -> int:
        """Bytes of all of it."""
        return sum(data.numel() for data in self._held.values())

    def message(self, key: Tuple[int, int], numbytes: int) -> torch.Tensor:
        """Memory for one message, uint8[numbytes]."""
        return self._held[key][:numbytes]


@dataclass(frozen=True, eq=False)
class BoundRound:
    """A round that can be run.

    Attributes:
        round: the messages.
        receives, sends: peers and memory of the messages, in their order.
        pack, unpack: what to copy before and after. local: what to copy meanwhile.
    """
    round: Round
    receives: Tuple[Tuple[int, torch.Tensor], ...]
    sends: Tuple[Tuple[int, torch.Tensor], ...]
    pack: Copies
    unpack: Copies
    local: Copies

    @property
    def staged(self) -> int:
        """Bytes that are packed or unpacked."""
        return self.pack.numbytes + self.unpack.numbytes


@dataclass(frozen=True, eq=False)
class Stage:
    """Rounds of one stage, and the local copies that no round is left for. ``in_place``: bytes that stay."""
    rounds: Tuple[BoundRound, ...]
    local: Copies
    in_place: int


def bind(rounds: Sequence[Round], moves: Moves, buffers: Buffers, device: torch.device) -> Tuple[List[Stage], int]:
    """Give rounds their memory.

    Args:
        rounds: of this process, in order.
        moves: of this process.
        buffers: what they read and write.
        device: where messages must lie.

    Returns:
        The stages in order, and the bytes of staging memory.
    """
    direct = {
        id(message): _direct(buffers, moves, message, sending, device)
        for item in rounds
        for sending, messages in ((False, item.receives), (True, item.sends))
        for message in messages
    }
    slots = _slots(rounds, direct)
    staging = Staging(device, _sizes(rounds, slots, direct))
    stages = []
    for number in sorted({*(item.key[0] for item in rounds), *moves.stage[moves.is_local].tolist()}):
        places = [place for place, item in enumerate(rounds) if item.key[0] == number]
        locals_, in_place = _locals(moves, buffers, number, max(len(places), 1))
        bound = tuple(
            _bound(rounds[place], slots[place], moves, direct, buffers, staging, local)
            for place, local in zip(places, locals_))
        stages.append(Stage(bound, Copies() if places else locals_[0], in_place))
    return stages, staging.numbytes


def _direct(buffers: Buffers, moves: Moves, message: Message, sending: bool,
            device: torch.device) -> Optional[torch.Tensor]:
    """The bytes of a message in the tensor itself, where they lie there as they travel."""
    if len(message.rows) != 1:
        return None
    part, = _whole(moves, message.rows)
    run = as_run(part.source if sending else part.target)
    shard = buffers.source(part) if sending else buffers.target(part)
    tensor = shard.tensor
    as_it_is = not part.is_scaled and tensor.dtype == buffers.wire_dtype(part)
    if run is None or tensor.device != device or sending and not as_it_is or tensor.is_conj() or tensor.is_neg():
        return None
    first, last = int(message.first[0]), int(message.last[0])
    view = shard.view(Piece(run[0] + first, (1, ), (last - first, )))
    if view is None or not view.is_contiguous():
        return None
    # The strides of axes of size 1 are anything.
    return torch.as_strided(view, (view.numel(), ), (1, )).view(torch.uint8)


def _slots(rounds: Sequence[Round], direct: Dict[int, Optional[torch.Tensor]]) -> List[int]:
    """Which part of the staging memory each round may use: rounds that stage something take turns."""
    slots, staged = [], 0
    for item in rounds:
        slots.append(staged % SLOTS)
        staged += any(direct[id(message)] is None for message in item.receives + item.sends)
    return slots


def _sizes(rounds: Sequence[Round], slots: Sequence[int],
           direct: Dict[int, Optional[torch.Tensor]]) -> Dict[Tuple[int, int], int]:
    sizes: Dict[Tuple[int, int], int] = {}
    for slot, item in zip(slots, rounds):
        for position, message in enumerate(item.receives + item.sends):
            if direct[id(message)] is None:
                key = slot, position
                sizes[key] = max(sizes.get(key, 0), message.numbytes)
    return sizes


def _bound(item: Round, slot: int, moves: Moves, direct: Dict[int, Optional[torch.Tensor]], buffers: Buffers,
           staging: Staging, local: Copies) -> BoundRound:
    packing, unpacking = Copies(), Copies()
    posted: List[Tuple[int, torch.Tensor]] = []
    for position, message in enumerate(item.receives + item.sends):
        data = direct[id(message)]
        if data is None:
            data = staging.message((slot, position), message.numbytes)
            for part in parts_of(moves, message.rows, message.first, message.last):
                if position < len(item.receives):
                    unpack(unpacking, buffers, part, data)
                else:
                    pack(packing, buffers, part, data)
        posted.append((message.peer, data))
    receives = len(item.receives)
    return BoundRound(item, tuple(posted[:receives]), tuple(posted[receives:]), packing, unpacking, local)


def _whole(moves: Moves, rows: np.ndarray) -> Iterator[Part]:
    """The parts of moves of which all is meant."""
    return parts_of(moves, rows, np.zeros(len(rows), np.int64), moves.take(rows).numel)


def _locals(moves: Moves, buffers: Buffers, stage: int, shares: int) -> Tuple[List[Copies], int]:
    """The local copies of a stage in so many shares of about the same bytes, and the bytes which stay in place."""
    rows = np.flatnonzero(moves.is_local & (moves.stage == stage))
    numbytes = moves.numbytes[rows]
    share = np.cumsum(numbytes) * shares // (int(numbytes.sum()) + 1)
    in_place = 0
    made = []
    for those in np.split(rows, np.searchsorted(share, np.arange(1, shares))):
        made.append(Copies())
        for part in _whole(moves, those):
            if _stays(buffers, part):
                in_place += part.numbytes
            else:
                copy(made[-1], buffers, part)
    return made, in_place


def _stays(buffers: Buffers, part: Part) -> bool:
    """Whether a part would be copied onto itself."""
    unchanged = part.stage == FIRST_HOP and not part.is_scaled
    return unchanged and same_memory(buffers.source(part), part.source, buffers.target(part), part.target)
