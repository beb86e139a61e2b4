# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Which ranks a parameter is cut over."""

from dataclasses import dataclass
from typing import Tuple

import torch.distributed as dist

from deepspeed.checkpoint.affine.checks import groups


@dataclass(frozen=True)
class PartitionGroups:
    """The groups of ranks that hold a parameter whole, cut over their members.

    Attributes:
        groups: for each group its global ranks, in the order of the parts.
        ranks: the group of this process. position: this process' place in it.
    """
    groups: Tuple[Tuple[int, ...], ...]
    ranks: Tuple[int, ...]
    position: int

    @property
    def rank(self):
        """The global rank of this process."""
        return self.ranks[self.position]


def partition_groups(group, replica_groups, what):
    """Return the ``PartitionGroups`` of a parameter.

    Args:
        group: the process group that the parameter is cut over.
        replica_groups: global ranks of all groups that hold it, one sequence for each; None: of ``group`` alone.
        what: how to call the parameter in an error.

    Raises:
        TypeError: ``replica_groups`` that are no sequences of integers.
        ValueError: ``group`` is not among ``replica_groups``.
    """
    ranks = tuple(dist.get_process_group_ranks(group))
    known = (ranks, ) if replica_groups is None else groups(replica_groups, 'replica_groups')
    if ranks not in known:
        raise ValueError(f'{what} is cut over the ranks {list(ranks)}, but replica_groups are '
                         f'{[list(one) for one in known]}. Name every group that holds a copy, with its global ranks '
                         'in the order of the group.')
    return PartitionGroups(known, ranks, dist.get_rank(group))
