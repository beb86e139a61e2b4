# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Which models move from where to where, and by what."""

from dataclasses import dataclass
from functools import partial
from typing import Callable, Dict

import workloads
from deepspeed.checkpoint.affine import contiguous_split_map, replicated_map, zero3_partition_map
from deepspeed.checkpoint.affine_transfer import ParameterTransfer, TransferEndpoints
from movers import DTYPE, Broadcast, BroadcastParts, Copy, Executor, GatherThenCut, PackedRaw, Raw, Redistribute

# Names of Llama's matrices with their rows and columns in Llama-3-8B.
LLAMA_LAYER = {'self_attn.q_proj': (4096, 4096), 'self_attn.k_proj': (1024, 4096), 'self_attn.v_proj': (1024, 4096),
               'self_attn.o_proj': (4096, 4096), 'mlp.gate_proj': (14336, 4096), 'mlp.up_proj': (14336, 4096),
               'mlp.down_proj': (4096, 14336)}  # yapf: disable
LLAMA_VECTORS = ('input_layernorm', 'post_attention_layernorm')
BUCKET = 256 << 20
REPLICAS = 4
SLICES = 8
RAW, PACKED, OURS, COPY = 'send/recv', 'send/recv and a copy at each end', 'this executor', 'copy_'
MULTICAST_OFF = 'this executor, multicast off'
GATHERED, AT_ONE, PARTS = 'all_gather, broadcast, cut', 'gather, broadcast, cut', 'broadcast of parts, cut'


@dataclass(frozen=True)
class Move:
    """One move that is measured.

    Attributes:
        title: in words. build: makes ``(transfers, endpoints)``.
        processes: how many take part.
        movers: by label; the first is what the others are compared with.
    """
    title: str
    build: Callable
    processes: int
    movers: Dict[str, Callable]


def llama(layers, matrices=tuple(LLAMA_LAYER), vectors=LLAMA_VECTORS):
    """Name to shape of some layers of Llama-3-8B."""
    shapes = {name: LLAMA_LAYER[name] for name in matrices} | {name: (4096, ) for name in vectors}
    return {f'model.layers.{layer}.{name}.weight': shape for layer in range(layers) for name, shape in shapes.items()}


def alternating(shapes):
    """Name to shape of matrices of which every second is cut by its columns."""
    return {
        f'layers.{index}.{("up_proj", "down_proj")[index % 2]}.weight': shape
        for index, shape in enumerate(shapes)
    }


def large():
    """291 parameters of 1 to 64 MiB, as many between 1 and 2 as between 32 and 64; 128 rows of 4096 are 1 MiB."""
    return alternating([(2 * round(64 * 64**(index / 290)), 4096) for index in range(291)])


def small():
    """20,000 parameters of 4 to 64 KiB; 8 rows of 256 columns are 4 KiB."""
    return alternating([(8 * (index // 2 % 16 + 1), 256) for index in range(20000)])


def to_replicas(parameters, replicas):
    """One process that has all, to some that want all."""
    transfers = {
        name: ParameterTransfer(replicated_map(shape, replicas), replicated_map(shape, 1), DTYPE)
        for name, shape in parameters.items()
    }
    return transfers, TransferEndpoints({0: 0}, {replica: 1 + replica for replica in range(replicas)})


def rows_to_columns(parameters, ranks):
    """Shards of rows to shards of columns, among the same processes."""
    transfers = {
        name:
        ParameterTransfer(contiguous_split_map(shape, workloads.even(shape[1], ranks), 1),
                          contiguous_split_map(shape, workloads.even(shape[0], ranks), 0), DTYPE)
        for name, shape in parameters.items()
    }
    owners = {rank: rank for rank in range(ranks)}
    return transfers, TransferEndpoints(owners, owners)


def within_one_process(parameters, slices, back):
    """Full parameters to their ZeRO-3 slices, or back."""
    transfers = {}
    for name, shape in parameters.items():
        ends = replicated_map(shape, 1), zero3_partition_map(shape, slices)
        target, source = ends if back else reversed(ends)
        transfers[name] = ParameterTransfer(target, source, DTYPE)
    owners = {0: 0}, dict.fromkeys(range(slices), 0)
    return transfers, TransferEndpoints(*(reversed(owners) if back else owners))


def moves():
    """All moves, by a short name."""
    tp2 = partial(workloads.zero3_to_tp, ranks=2, tp=2)
    rows = [name for name in LLAMA_LAYER if not workloads.CUT_BY_COLUMNS.search(f'.{name}.')]
    within = partial(within_one_process, llama(3), SLICES)
    gathering = {GATHERED: partial(GatherThenCut, everywhere=True), AT_ONE: partial(GatherThenCut, everywhere=False)}
    alone = {RAW: Raw, OURS: Executor, **gathering, PARTS: BroadcastParts}
    in_buckets = {
        RAW: Raw,
        PACKED: PackedRaw,
        OURS: Executor,
        **{
            label: partial(mover, bucket_bytes=BUCKET)
            for label, mover in gathering.items()
        }
    }
    multicast = {RAW: Raw, OURS: Executor, MULTICAST_OFF: partial(Executor, multicast='off'), 'broadcast': Broadcast}
    return {
        'llama': Move('3 Llama-3-8B layers, ZeRO-3 2 -> TP-2', partial(tp2, llama(3)), 4, alone),
        'rows': Move('matrices of 4 layers cut by rows, ZeRO-3 2 -> TP-2', partial(tp2, llama(4, rows, ())), 4, alone),
        'large': Move('291 of 1 to 64 MiB, ZeRO-3 2 -> TP-2', partial(tp2, large()), 4, alone),
        'small': Move('20,000 of 4 to 64 KiB, ZeRO-3 2 -> TP-2', partial(tp2, small()), 4, in_buckets),
        'replicas': Move(f'a Llama-3-8B layer, 1 -> {REPLICAS} replicas', partial(to_replicas, llama(1), REPLICAS),
                         1 + REPLICAS, multicast),
        'dtensor': Move('matrices of 3 layers, rows -> columns, same 4',
                        partial(rows_to_columns, llama(3, vectors=()), 4), 4,
                        {RAW: Raw, OURS: Executor, 'DTensor.redistribute': Redistribute}),
        'slices': Move(f'3 layers in one process, TP-1 -> {SLICES} ZeRO-3 slices', partial(within, back=False), 1,
                       {COPY: Copy, OURS: Executor}),
        'whole': Move(f'3 layers in one process, {SLICES} ZeRO-3 slices -> TP-1', partial(within, back=True), 1,
                      {COPY: Copy, OURS: Executor}),
    }  # yapf: disable
