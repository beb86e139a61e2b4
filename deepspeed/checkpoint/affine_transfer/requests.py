# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What a callable replica policy is asked."""

from dataclasses import dataclass

import numpy as np

from deepspeed.checkpoint.affine_transfer.meetings import Meetings, Side
from deepspeed.checkpoint.affine_transfer.replicas import ReplicaCandidate, ReplicaSelectionRequest


@dataclass(frozen=True)
class Requests:
    """Makes the requests that a callable policy is asked."""
    source: Side
    target: Side
    meetings: Meetings
    ndim: int

    def order(self):
        """Targets by location and place in the parameter, and for each its regions by their place."""
        blocks, regions, at = self.target.blocks, self.source.regions, self.meetings
        rank = self.target.columns.location_ids[blocks.shard[at.target]]
        keys = [rank, *blocks.lower[at.target].T, *blocks.extent[at.target].T, *regions.lower[at.region].T]
        return np.lexsort(keys[::-1])

    def make(self, read, candidates):
        ndim = self.ndim
        row = np.array([read])
        own = self.meetings.part(self.target.blocks, self.meetings.target[row], row)
        held = self.meetings.part(self.source.blocks, candidates, np.repeat(row, len(candidates)))
        ranks = self.source.columns.location_ids[self.source.blocks.shard[candidates]].tolist()
        return ReplicaSelectionRequest(
            target_rank=int(self.target.columns.location_ids[own.shard[0]]),
            logical_origin=tuple(own.lower[0, :ndim].tolist()),
            shape=tuple(own.extent[0, :ndim].tolist()),
            target_offset=int(own.offset[0]),
            target_strides=tuple(own.strides[0, :ndim].tolist()),
            candidates=tuple(
                ReplicaCandidate(rank, offset, tuple(strides[:ndim]))
                for rank, offset, strides in zip(ranks, held.offset.tolist(), held.strides.tolist())))
