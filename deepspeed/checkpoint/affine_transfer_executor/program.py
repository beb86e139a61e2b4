# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""A transfer that was prepared once and can be run after every training step."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Callable, List, Optional, Sequence, Tuple

import torch
from torch.autograd.graph import increment_version

from deepspeed.checkpoint.affine_transfer.endpoints import TransferEndpoints
from deepspeed.checkpoint.affine_transfer_executor.agreement import BROKE_BEFORE
from deepspeed.checkpoint.affine_transfer_executor.bindings import Bindings
from deepspeed.checkpoint.affine_transfer_executor.channel import Channel
from deepspeed.checkpoint.affine_transfer_executor.copies import Buffers
from deepspeed.checkpoint.affine_transfer_executor.errors import (AffineTransferExecutionError, TransferBrokenError,
                                                                  described)
from deepspeed.checkpoint.affine_transfer_executor.links import Round
from deepspeed.checkpoint.affine_transfer_executor.options import Options
from deepspeed.checkpoint.affine_transfer_executor.prepare import Prepared, with_buffers
from deepspeed.checkpoint.affine_transfer_executor.report import TransferStats
from deepspeed.checkpoint.affine_transfer_executor.rounds import Stage, bind
from deepspeed.checkpoint.affine_transfer_executor.running import BROKE, run_once
from deepspeed.checkpoint.affine_transfer_executor.shadows import Shadows
from deepspeed.checkpoint.affine_transfer_executor.streams import beside
from deepspeed.checkpoint.affine_transfer_executor.verification import Verification, prepare_verification


@dataclass(frozen=True, eq=False)
class Recipe:
    """What a program is made from, beside its buffers.

    Attributes:
        channel: the group, or None where all is local.
        rank: this process.
        endpoints: the owners of locations.
        options: as given.
        message_bytes: most bytes of a message, the same on every process.
        rounds: the messages of this process.
        digest: 16 bytes, equal on processes whose programs belong together.
        stream: what the program's work runs on, None on the CPU.
        arrange: brings the buffers of a side, ``source`` or ``target``, from the form in which the caller gives them
            into one mapping per parameter.
    """
    channel: Optional[Channel]
    rank: int
    endpoints: TransferEndpoints
    options: Options
    message_bytes: int
    rounds: Tuple[Round, ...]
    digest: bytes
    stream: Optional[Any]
    arrange: Callable[[str, Any], List[Mapping]]

    @property
    def device(self) -> torch.device:
        """Where messages must lie."""
        return torch.device('cpu') if self.channel is None else self.channel.device


@dataclass(frozen=True, eq=False)
class Bound:
    """A program's buffers, with everything that is made for them.

    Attributes:
        prepared: the batch.
        stages: rounds and local copies. staging_bytes: of their memory.
        shadows: what receives in place of the targets, with ``staged``.
        verification: what is compared afterwards, with ``verify``.
        bindings: the buffers, to see whether they are still what they were.
        written: the targets that autograd may know.
    """
    prepared: Prepared
    stages: Sequence[Stage]
    staging_bytes: int
    shadows: Optional[Shadows]
    verification: Optional[Verification]
    bindings: Bindings
    written: Sequence[torch.Tensor]


class TransferProgram:
    """A compiled transfer; ``compile_transfer`` makes it. All processes of the group run it together.

    It keeps its buffers alive and reads the sources' values anew in every run. What it stages is allocated when it is
    compiled; scaled values and those that strides cannot address go through small temporaries.
    """

    def __init__(self, recipe: Recipe, prepared: Prepared):
        self._recipe = recipe
        self._bound = _bind(recipe, prepared)
        self._unusable = ''

    def run(self) -> TransferStats:
        """Transfer once.

        Returns:
            What this process did.

        Raises:
            AffineTransferExecutionError: refused before it began, on every process alike, with no target changed: then
                it can be run again at once. With ``verify`` also where targets are not what was sent.
            TransferBrokenError: broken by a process that died, was late or failed. Neither program nor group can be
                used again. Targets may be partly written; with ``staged`` they are as they were.

        Example::

            for step in range(steps):
                train()
                program.run()
        """
        self._check_usable()
        try:
            stats = run_once(self._recipe, self._bound)
            # Autograd is to notice that weights have changed which a backward pass still needs.
            for target in self._bound.written:
                increment_version(target)
            return stats
        except BaseException as error:
            refused = isinstance(error, AffineTransferExecutionError) and not isinstance(error, TransferBrokenError)
            if self._recipe.channel is not None and not refused:
                how = described(error)
                self._unusable = f'{how}. Compile it for a new group'
                if not isinstance(error, TransferBrokenError):
                    # An interrupt, wherever it came: the others must not wait for this process.
                    self._recipe.channel.leave(BROKE, f'process {self._recipe.rank} {how}')
            raise

    def rebind(self, source_buffers=None, target_buffers=None) -> None:
        """Use other tensors of the same layout from the next run on. No other process takes part.

        Args:
            source_buffers, target_buffers: in the form in which ``compile_transfer`` was given them; None keeps those
                of that side. Sizes and dtypes must be as before, strides and devices need not.

        Raises:
            AffineTransferExecutionError: something does not fit; the program keeps the buffers that it has.
            TransferBrokenError: the program broke before, or an earlier ``rebind`` found no memory.
            RuntimeError, MemoryError: no memory for what the program stages; it keeps the buffers that it has.
                Should there be none even for that, the group ends.

        Example::

            program.rebind(source_buffers={'w': {0: new_shard}})
        """
        sides = [
            None if buffers is None else self._recipe.arrange(side, buffers)
            for side, buffers in (('source', source_buffers), ('target', target_buffers))
        ]
        self._check_usable()
        prepared = with_buffers(self._bound.prepared, *sides, self._recipe.endpoints, self._recipe.rank)
        # The old memory is given back before new memory is taken.
        kept, self._bound = self._bound.prepared, None
        try:
            self._bound = _bind(self._recipe, prepared)
        except BaseException as error:
            self._bound = self._bind_again(kept, described(error))
            raise

    def _bind_again(self, kept: Prepared, reason: str) -> Bound:
        """With the memory that was given back a moment ago. Should it be gone, the others must not wait."""
        try:
            return _bind(self._recipe, kept)
        except BaseException:
            self._unusable = f'it has no memory any more: {reason}. Compile it again'
            if self._recipe.channel is not None:
                self._recipe.channel.leave(BROKE_BEFORE, f'process {self._recipe.rank} lost its buffers: {reason}')
            raise

    def _check_usable(self) -> None:
        if self._unusable:
            raise TransferBrokenError(f'this program cannot be used any more: {self._unusable}')


# Weights may have been made in inference mode, where only inference mode may write to them.
@torch.inference_mode()
def _bind(recipe: Recipe, prepared: Prepared) -> Bound:
    with beside(recipe.stream):
        requests, moves = prepared.requests, prepared.moves
        shadows = Shadows(requests, moves, recipe.rank) if recipe.options.staged else None
        buffers = Buffers(requests, shadows.shards if shadows else [request.targets for request in requests])
        stages, staging_bytes = bind(recipe.rounds, moves, buffers, recipe.device)
        verification = None
        if recipe.options.verify:
            verification = prepare_verification(recipe.rounds, moves, buffers, recipe.rank, recipe.message_bytes,
                                                recipe.device)
            staging_bytes += verification.staging_bytes
    written = [
        shard.tensor for request in requests for shard in request.targets.values() if not shard.tensor.is_inference()
    ]
    return Bound(prepared, stages, staging_bytes, shadows, verification, Bindings(requests), written)
