# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Ways to bring a model from its sources to its targets, as one process of a job does it.

A mover is made with a ``Job`` by all processes together, and called by all of them for every transfer. What it makes
beforehand serves every transfer.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from deepspeed.checkpoint.affine_transfer import ModelPlan, TransferEndpoints, plan_transfers
from deepspeed.checkpoint.affine_transfer_executor import compile_transfer

DTYPE = torch.bfloat16
RAW_MESSAGE = 64 << 20
# Elements between two tensors' starts: the alignment of torch's own allocations on the CPU.
ALIGNED = 64 // DTYPE.itemsize


@dataclass(frozen=True, eq=False)
class Job:
    """What one process has of a move.

    Attributes:
        rank: this process. device: where its buffers are.
        transfers, endpoints: as ``plan_transfers`` takes them.
        sources, targets: its buffers.
    """
    rank: int
    device: torch.device
    transfers: dict
    endpoints: TransferEndpoints
    sources: 'Buffers'
    targets: 'Buffers'

    @cached_property
    def plan(self) -> ModelPlan:
        return plan_transfers(self.transfers, endpoints=self.endpoints)

    @cached_property
    def trainers(self):
        return sorted(set(self.endpoints.source.values()))

    @cached_property
    def readers(self):
        return sorted(set(self.endpoints.target.values()))

    def links(self, mine, other):
        """Process at the end ``other`` -> bytes, of the links whose end ``mine`` (source or target) is here."""
        links = self.plan.link_bytes()
        chosen = (getattr(links, mine) == self.rank) & (links.source != links.target)
        return dict(zip(getattr(links, other)[chosen].tolist(), links.numbytes[chosen].tolist()))


class Buffers:
    """The shards of one side that are on one process, one behind the other in one allocation.

    Every parameter's value is another window of the same random bits.

    Attributes:
        of: name -> location -> flat tensor. memory: all of them, uint8.
    """

    def __init__(self, side, transfers, endpoints, rank, device):
        owners = getattr(endpoints, side)
        self._maps = {name: getattr(transfer, f'{side}_map') for name, transfer in transfers.items()}
        here = [(name, location, numel) for name, layout in self._maps.items()
                for location, numel in sizes(layout).items() if owners[location] == rank]  # yapf: disable
        total = sum(aligned(numel) for _, _, numel in here)
        # Written, so that no later time contains the first touch of a page.
        self.memory = torch.zeros(total * DTYPE.itemsize, dtype=torch.uint8, device=device)
        self.of, start = {name: {} for name in transfers}, 0
        for name, location, numel in here:
            self.of[name][location] = self.memory.view(DTYPE)[start:start + numel]
            start += aligned(numel)

    def fill(self, bits):
        """Write what belongs there; ``bits`` as from ``random_bits``."""
        for full, layout, location, buffer in self._shards(bits):
            cut(full, layout, location, buffer)

    def check(self, bits, what):
        """Stop unless every bit is what belongs there."""
        for full, layout, location, buffer in self._shards(bits):
            right = torch.empty_like(buffer)
            cut(full, layout, location, right)
            if not torch.equal(buffer.view(torch.int16), right.view(torch.int16)):
                raise AssertionError(f'{what} has brought wrong values')

    def _shards(self, bits):
        for index, (name, shards) in enumerate(self.of.items()):
            for location, buffer in shards.items():
                yield bits[index:].view(DTYPE), self._maps[name], location, buffer


def random_bits(transfers, device):
    """int16, the same on every process, enough for a window of every parameter."""
    most = max(torch.Size(transfer.target_map.logical_shape).numel() for transfer in transfers.values())
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-2**15, 2**15, (most + len(transfers), ), generator=generator, dtype=torch.int16)
    return bits.to(device)


def sizes(layout):
    """Elements of every shard of a map."""
    return {location: torch.Size(shape).numel() for location, shape in layout.shard_shapes.items()}


def aligned(numel):
    return -(-numel // ALIGNED) * ALIGNED


def cut(full, layout, location, shard):
    """Copy what a location holds out of the full parameter; both are flat."""
    for piece in layout.pieces_by_rank.get(location, ()):
        block = shard.as_strided(piece.shape, piece.dest_strides, shard.storage_offset() + piece.dest_offset)
        block.copy_(full.as_strided(piece.shape, piece.source_strides, full.storage_offset() + piece.source_offset))


class Raw:
    """What the network does: the bytes of every link in large messages, all links at the same time, nothing else."""

    def __init__(self, job):
        found = []
        for step, links, memory in ((dist.irecv, job.links('target', 'source'), job.targets.memory),
                                    (dist.isend, job.links('source', 'target'), job.sources.memory)):
            start = 0
            for peer, numbytes in links.items():
                # A process that sends the same to several peers has less memory than it sends.
                message = memory[min(start, memory.numel() - numbytes):][:numbytes]
                found += [(number, step, part, peer) for number, part in enumerate(message.split(RAW_MESSAGE))]
                start += numbytes
        self._messages = [message for _, *message in sorted(found, key=lambda message: message[0])]

    def __call__(self):
        exchange(self._messages)


class PackedRaw(Raw):
    """The least that it takes where pieces are scattered: that, and one plain copy of all bytes at each end."""

    def __init__(self, job):
        super().__init__(job)
        self._staged = [(step, torch.empty_like(part), peer) for step, part, peer in self._messages]

    def __call__(self):
        pairs = [(step, part, staged) for (step, part, _), (_, staged, _) in zip(self._messages, self._staged)]
        for step, part, staged in pairs:
            if step is dist.isend:
                staged.copy_(part)
        exchange(self._staged)
        for step, part, staged in pairs:
            if step is dist.irecv:
                part.copy_(staged)


def exchange(messages):
    """Send and receive ``(step, memory, peer)``, all at the same time."""
    for request in dist.batch_isend_irecv([dist.P2POp(*message) for message in messages]):
        request.wait()


class Copy:
    """One plain copy of all bytes, within a process."""

    def __init__(self, job):
        self._source, self._target = job.sources.memory, job.targets.memory

    def __call__(self):
        self._target.copy_(self._source)


class Executor:
    """This library; ``options`` are those of ``compile_transfer``."""

    def __init__(self, job, **options):
        self._program = compile_transfer(job.plan, job.sources.of, job.targets.of, job.endpoints, DTYPE, **options)
        self.stats = None

    def __call__(self):
        self.stats = self._program.run()


class GatherThenCut:
    """Gather full parameters at the trainers, broadcast them to all readers, and cut them there.

    Args:
        everywhere: whether every trainer gathers them, as those do that ask DeepSpeed or torch for full parameters;
            else only the one that broadcasts them.
        bucket_bytes: parameters travel together up to this size. Trainers then copy their shards of a bucket into one,
            and readers put each parameter together before they cut it. 0: each parameter travels alone.
    """

    def __init__(self, job, everywhere, bucket_bytes=0):
        self._job = job
        self._everywhere = everywhere
        self._trainers, self._readers = (dist.new_group(ranks) for ranks in
                                         (job.trainers, [job.trainers[0], *job.readers]))  # yapf: disable
        self._buckets = list(buckets(job.transfers, bucket_bytes))
        most = max(sum(numel for _, numel in bucket) for bucket in self._buckets)
        self._gathers = job.rank == job.trainers[0] or everywhere and job.rank in job.trainers
        # Memory is taken once, which is faster than anew for each parameter.
        self._full = self._empty(most if self._gathers or job.rank in job.readers else 0)
        packs = job.rank in job.trainers and any(len(bucket) > 1 for bucket in self._buckets)
        self._mine = self._empty(most // len(job.trainers) if packs else 0)

    def __call__(self):
        for bucket in self._buckets:
            full = self._full[:sum(numel for _, numel in bucket)]
            if self._job.rank in self._job.trainers:
                self._gather(bucket, full)
            if self._job.rank == self._job.trainers[0] or self._job.rank in self._job.readers:
                dist.broadcast(full, self._job.trainers[0], self._readers)
            if self._job.rank in self._job.readers:
                self._cut(bucket, full.view(len(self._job.trainers), -1))

    def _empty(self, numel):
        return torch.empty(numel, dtype=DTYPE, device=self._job.device)

    def _gather(self, bucket, full):
        shards = [shard for name, _ in bucket for shard in self._job.sources.of[name].values()]
        mine = shards[0]
        if len(shards) > 1:
            mine = torch.cat(shards, out=self._mine[:sum(map(len, shards))])
        parts = list(full.split(len(mine))) if self._gathers else None
        if self._everywhere:
            dist.all_gather(parts, mine, self._trainers)
        else:
            dist.gather(mine, parts, self._job.trainers[0], self._trainers)

    def _cut(self, bucket, parts):
        start = 0
        for name, numel in bucket:
            stop = start + numel // len(parts)
            full, start = parts[:, start:stop].reshape(-1), stop
            for location, target in self._job.targets.of[name].items():
                cut(full, self._job.transfers[name].target_map, location, target)


def buckets(transfers, limit):
    """Lists of ``(name, elements)`` of at most ``limit`` bytes, or of one parameter."""
    bucket, held = [], 0
    for name, transfer in transfers.items():
        numel = torch.Size(transfer.target_map.logical_shape).numel()
        if bucket and (held + numel) * DTYPE.itemsize > limit:
            yield bucket
            bucket, held = [], 0
        bucket.append((name, numel))
        held += numel
    yield bucket


class Broadcast:
    """The one trainer broadcasts every parameter straight into the readers' targets."""

    def __init__(self, job):
        self._tensors = [tensor for name in job.transfers for side in (job.sources, job.targets)
                         for tensor in side.of[name].values()]  # yapf: disable
        self._trainer, = job.trainers

    def __call__(self):
        for tensor in self._tensors:
            dist.broadcast(tensor, self._trainer)


class BroadcastParts:
    """Every trainer broadcasts its part of a parameter to all readers, which put it together and cut it."""

    def __init__(self, job):
        self._job = job
        self._groups = {trainer: dist.new_group([trainer, *job.readers]) for trainer in job.trainers}
        most = max(numel for (_, numel), in buckets(job.transfers, 0))
        self._full = torch.empty(most if job.rank in job.readers else 0, dtype=DTYPE, device=job.device)

    def __call__(self):
        for (name, numel), in buckets(self._job.transfers, 0):
            for shard in self._job.sources.of[name].values():
                dist.broadcast(shard, self._job.rank, self._groups[self._job.rank])
            if self._job.rank not in self._job.readers:
                continue
            full = self._full[:numel]
            for (trainer, group), part in zip(self._groups.items(), full.split(numel // len(self._groups))):
                dist.broadcast(part, trainer, group)
            for location, target in self._job.targets.of[name].items():
                cut(full, self._job.transfers[name].target_map, location, target)


class Redistribute:
    """torch's DTensor, from shards of rows to shards of columns among the same processes, one parameter at a time."""

    def __init__(self, job):
        self._job = job
        self._mesh = init_device_mesh(job.device.type, (dist.get_world_size(), ))
        self._shards = {}
        for name, transfer in job.transfers.items():
            (location, shard), = job.sources.of[name].items()
            local = shard.view(transfer.source_map.shard_shapes[location])
            self._shards[name] = DTensor.from_local(local, self._mesh, [Shard(0)], run_check=False)

    def __call__(self):
        for name, rows in self._shards.items():
            columns = rows.redistribute(self._mesh, [Shard(1)]).to_local()
            for target in self._job.targets.of[name].values():
                target.view(columns.shape).copy_(columns)
