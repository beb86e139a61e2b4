# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Receivers that pass on what others need too: every byte still arrives once, and leaves its source once."""

from collections import Counter
from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import affine_strategies
from affine_oracle import replicated_contents, split_contents, zero3_contents
from affine_plans import DTYPES, same_bits, values
from affine_pool import PATIENCE, Pool, standing_group
from affine_transfer_cases import Case, differing
from deepspeed.checkpoint.affine import contiguous_split_map, relabel, replicated_map, zero3_partition_map
from deepspeed.checkpoint.affine_transfer import ParameterTransfer, TransferEndpoints, plan_transfer
from deepspeed.checkpoint.affine_transfer_executor import AffineTransferExecutionError, StagingBudget, compile_transfer
from deepspeed.checkpoint.affine_transfer_executor.moves import DOUBLES, FIRST_HOP, SECOND_HOP, Moves
from deepspeed.checkpoint.affine_transfer_executor.multicast import pass_on

# Moves, row by row


def moves_of(plans, endpoints, widths):
    """The moves of plans of several parameters, made without the library's own table."""
    rows = []
    axes = max((len(segment.shape) for plan in plans for segment in plan.segments), default=0)
    for request, (plan, width) in enumerate(zip(plans, widths)):
        for item in plan.segments:
            if 0 in item.shape:
                continue
            more = (0, ) * (axes - len(item.shape))
            rows.append(
                (FIRST_HOP, request, width, endpoints.source[item.source_rank], endpoints.target[item.target_rank],
                 item.source_rank, item.source_offset, (*more, *item.source_strides), item.target_rank,
                 item.target_offset, (*more, *item.target_strides), ((1, ) * len(more) + tuple(item.shape)),
                 item.source_scale, item.target_scale))
    columns = zip(*rows) if rows else [[]] * len(fields(Moves))
    made = []
    for field, column in zip(fields(Moves), columns):
        kind = np.float64 if field.name.endswith('scale') else np.int64
        matrix = field.name in ('source_strides', 'target_strides', 'shape')
        made.append(np.array(column, kind).reshape((len(rows), axes) if matrix else (len(rows), )))
    return Moves(*made)


def rows_of(moves):
    """The moves as dicts of Python numbers."""
    columns = {field.name: getattr(moves, field.name).tolist() for field in fields(Moves)}
    return [dict(zip(columns, row)) for row in zip(*columns.values())]


def walk(shape, offset, strides):
    """The addresses of a strided block, one by one."""
    if not shape:
        return [offset]
    return [
        address for index in range(shape[0]) for address in walk(shape[1:], offset + index * strides[0], strides[1:])
    ]


def simulate(moves, endpoints):
    """What arrives at each target address: ``(request, location, address) -> (source, address, scales)``.

    A row reads what rows of earlier stages have written, in the process where it was written.
    """
    arrived = {}
    for stage in (FIRST_HOP, SECOND_HOP, DOUBLES):
        written = {}
        for row in rows_of(moves):
            if row['stage'] != stage:
                continue
            reads = walk(row['shape'], row['source_offset'], row['source_strides'])
            writes = walk(row['shape'], row['target_offset'], row['target_strides'])
            sender, receiver = row['source_process'], row['target_process']
            owner = endpoints.source if stage == FIRST_HOP else endpoints.target
            assert owner[row['source_rank']] == sender and endpoints.target[row['target_rank']] == receiver
            assert stage != DOUBLES or sender == receiver
            assert stage == FIRST_HOP or (row['source_scale'], row['target_scale']) == (1.0, 1.0)
            for read, write in zip(reads, writes):
                place = row['request'], row['target_rank'], write
                assert place not in arrived and place not in written, f'{place} is written twice'
                written[place] = (row['source_rank'], read, row['source_scale'], row['target_scale']) \
                    if stage == FIRST_HOP else arrived[row['request'], row['source_rank'], read]
        arrived.update(written)
    return arrived


def bytes_sent(moves):
    """Bytes that each process sends to others."""
    sent = Counter()
    for row in rows_of(moves):
        if row['source_process'] != row['target_process']:
            sent[row['source_process']] += int(np.prod(row['shape'])) * row['width']
    return sent


def departures(moves, nodes):
    """How often each source element leaves its node, one count for each way of scaling it."""
    count = Counter()
    for row in rows_of(moves):
        if nodes(row['source_process']) != nodes(row['target_process']) and row['stage'] == FIRST_HOP:
            key = row['request'], row['source_rank'], row['source_scale'], row['target_scale']
            count.update((*key, read) for read in walk(row['shape'], row['source_offset'], row['source_strides']))
    return count


def blocks_that_leave(moves, nodes):
    """How many different blocks with each source element some other node needs: for each it must leave once."""
    blocks = {(row['request'], row['source_rank'], row['source_scale'], row['target_scale'], row['source_offset'],
               tuple(row['source_strides']), tuple(row['shape']))
              for row in rows_of(moves) if nodes(row['source_process']) != nodes(row['target_process'])}
    return Counter((*block[:4], read) for block in blocks for read in walk(block[6], block[4], block[5]))


@st.composite
def models(draw):
    """Plans of up to three parameters with replicated targets, and where their locations are."""
    plans, locations = [], (set(), set())
    for _ in range(draw(st.integers(1, 3))):
        shape = draw(affine_strategies.shapes(min_axes=1, max_axes=3))
        source = draw(affine_strategies.layouts(shape))
        # Replicas of one layout, or of several at once.
        members = [draw(affine_strategies.simple_layouts(shape))] * draw(st.integers(1, 3))
        members += [draw(affine_strategies.simple_layouts(shape))] * draw(st.integers(0, 1))
        targets = draw(affine_strategies.apart(members))
        segments = []
        for target in targets:
            segments += plan_transfer(target.map, source.map).segments
            locations[1].update(target.contents)
        locations[0].update(source.contents)
        plans.append(Segments(segments))
    ends = [dict(zip(sorted(those), processes(draw, len(those)))) for those in locations]
    return plans, TransferEndpoints(*ends)


class Segments:
    """What ``moves_of`` reads of a plan, for targets of several layouts."""

    def __init__(self, segments):
        self.segments = segments


def processes(draw, count):
    """Processes of locations: few or many to a process."""
    most = draw(st.integers(0, 7))
    return np.random.RandomState(draw(st.integers(0, 2**16))).randint(0, most + 1, count).tolist()


NODES = {
    'none': None,
    'pairs': lambda process: process // 2,
    'thirds': lambda process: process % 3,
    'one': lambda _: 0
}


@settings(max_examples=120)
@given(models(), st.sampled_from(sorted(NODES)), st.sampled_from([(1, 1, 1), (2, 4, 8), (16, 1, 2)]))
def test_whoever_passes_on_every_element_arrives_once_and_the_busiest_sender_is_relieved(model, how, widths):
    plans, endpoints = model
    plain = moves_of(plans, endpoints, widths)
    nodes = NODES[how]
    forwarded = pass_on(plain, nodes and {process: nodes(process) for process in range(8)})
    assert simulate(forwarded, endpoints) == simulate(plain, endpoints)
    before, after = (max(bytes_sent(moves).values(), default=0) for moves in (plain, forwarded))
    assert after <= before
    if (forwarded.stage == FIRST_HOP).all():
        # Whatever could be passed on would not have helped.
        assert rows_of(forwarded) == rows_of(plain)
        return
    assert after < before
    node = nodes or (lambda process: process)
    assert departures(forwarded, node) == blocks_that_leave(plain, node)


def one_to_many(replicas, numel=1000, parts=1, width=2):
    """One trainer, and replicas of so many equal parts on processes of their own."""
    source = replicated_map((numel, ), 1)
    target = contiguous_split_map((numel, ), [numel // parts] * parts, 0)
    segments = []
    for replica in range(replicas):
        ids = {part: replica * parts + part for part in range(parts)}
        segments += plan_transfer(relabel(target, ids), source).segments
    count = replicas * parts
    endpoints = TransferEndpoints({0: 0}, {location: location + 1 for location in range(count)})
    return moves_of([Segments(segments)], endpoints, [width]), endpoints


@pytest.mark.parametrize('parts', [1, 2, 4])
@pytest.mark.parametrize('replicas', [2, 3, 4, 7])
def test_a_trainer_sends_its_model_once_however_many_replicas_there_are(replicas, parts):
    moves, endpoints = one_to_many(replicas, 4 * 7 * 3 * 8, parts)
    forwarded = pass_on(moves)
    sent = bytes_sent(forwarded)
    size = 4 * 7 * 3 * 8 * 2
    assert sent[0] == size
    # The replicas share evenly what is left.
    assert max(sent[process] for process in endpoints.target.values()) <= size * (replicas - 1) // replicas + 8
    assert sum(sent.values()) == replicas * size
    assert simulate(forwarded, endpoints) == simulate(moves, endpoints)


def test_a_process_with_several_replicas_receives_once():
    moves, endpoints = one_to_many(3)
    endpoints = TransferEndpoints({0: 0}, {0: 1, 1: 1, 2: 1})
    moves = Moves(
        *(np.minimum(getattr(moves, field.name), 1) if field.name == 'target_process' else getattr(moves, field.name)
          for field in fields(Moves)))
    forwarded = pass_on(moves)
    assert bytes_sent(forwarded) == {0: 2000} and bytes_sent(moves) == {0: 6000}
    assert sorted(row['stage'] for row in rows_of(forwarded)) == [FIRST_HOP, DOUBLES, DOUBLES]
    assert simulate(forwarded, endpoints) == simulate(moves, endpoints)


def test_with_nodes_each_byte_leaves_the_trainers_node_once():
    moves, endpoints = one_to_many(6)
    nodes = {0: 0, 1: 0, 2: 0, 3: 1, 4: 1, 5: 2, 6: 2}
    forwarded = pass_on(moves, nodes)
    assert set(departures(forwarded, nodes.get).values()) == {1}
    # Its neighbours read from it, twice the model, and the others once.
    assert bytes_sent(forwarded)[0] == 3 * 2000
    assert simulate(forwarded, endpoints) == simulate(moves, endpoints)


def test_where_all_are_on_one_node_nothing_is_passed_on():
    moves, _ = one_to_many(3)
    assert rows_of(pass_on(moves, dict.fromkeys(range(4), 0))) == rows_of(moves)


def test_nothing_is_passed_on_where_that_would_not_relieve_the_busiest():
    # The trainer sends one byte to each of two others, which have much to send themselves.
    moves, endpoints = one_to_many(2, 2, 1, 1)
    busy = moves_of([Segments(plan_transfer(replicated_map((100, ), 1), replicated_map((100, ), 1)).segments)],
                    TransferEndpoints({0: 1}, {0: 2}), [1])
    busy = Moves(*(getattr(busy, field.name) + (field.name == 'request') for field in fields(Moves)))
    assert (pass_on(moves.joined(busy)).stage == FIRST_HOP).all()
    assert not (pass_on(moves).stage == FIRST_HOP).all()


def test_no_moves_at_all():
    assert len(pass_on(moves_of([], TransferEndpoints({}, {}), []))) == 0


# Real processes


def trainer_and_replicas(dtype, target_dtype=None):
    """One trainer on process 0, three replicas on the others; each has its model whole."""
    shape, split, twice = (12, 10), (7, 9), (3, 11)
    transfers, contents = {}, {}

    def add(name, target, found, source, held):
        transfers[name] = ParameterTransfer(target, source, dtype, target_dtype)
        contents[name] = held, found

    add('whole', replicated_map(shape, 3), replicated_contents(shape, 3), zero3_partition_map(shape, 1),
        zero3_contents(shape, 1))
    # Locations 10 up are second ones of the same processes; process 3 needs only the rows of location 2.
    add('rows', contiguous_split_map(split, [4, 1, 2], 0), split_contents(split, [4, 1, 2], 0),
        replicated_map(split, 1), replicated_contents(split, 1))
    ids = {0: 0, 1: 10, 2: 1, 3: 11, 4: 2}
    add('twice', relabel(replicated_map(twice, 5), ids), {
        ids[old]: held
        for old, held in replicated_contents(twice, 5).items()
    }, replicated_map(twice, 1), replicated_contents(twice, 1))
    return Case(transfers, contents, TransferEndpoints({0: 0}, {0: 1, 1: 2, 2: 3, 10: 1, 11: 2}))


def to_replicas(world, turn, dtypes, options):
    """Two runs for every dtype; the stats of the last."""
    me, stats = world.rank, []
    for dtype, target_dtype in dtypes:
        case = trainer_and_replicas(dtype, target_dtype)
        sources, targets = case.sources(me, 0), case.targets(me)
        program = case.compile(me, sources, targets, standing_group(world), **options)
        for seed in range(2):
            case.refill(sources, me, seed)
            one = program.run()
            assert case.wrong(targets, me, seed) == [], (dtype, target_dtype)
        stats.append(one)
    return stats


@pytest.fixture(scope='module')
def pool():
    with Pool(4) as workers:
        yield workers


CASTS = ((torch.float32, torch.bfloat16), (torch.float64, torch.float16), (torch.bfloat16, torch.float32),
         (torch.float32, torch.float8_e4m3fn))


@pytest.mark.parametrize('options', [{},
                                     dict(staged=True),
                                     dict(verify=True),
                                     dict(budget=StagingBudget(48, operations=2, direct_bytes=16)),
                                     dict(nodes={
                                         0: 0,
                                         1: 1,
                                         2: 1,
                                         3: 2
                                     }),
                                     dict(multicast='off')])
def test_three_replicas_get_every_dtype_exactly(pool, options):
    dtypes = [(dtype, None) for dtype in DTYPES] + list(CASTS)
    for each in zip(dtypes, *pool.run(to_replicas, dtypes, options)):
        (dtype, target_dtype), trainer, *replicas = each
        width = (target_dtype or dtype).itemsize
        size, all_bytes = (120 + 63 + 33) * width, (3 * 120 + 63 + 5 * 33) * width
        if options.get('multicast') == 'off':
            assert trainer.sent_bytes == all_bytes
            assert all(one.sent_bytes == one.forwarded_bytes == 0 for one in replicas)
            continue
        assert trainer.sent_bytes <= 1.05 * size and trainer.forwarded_bytes == 0
        assert all(one.sent_bytes == one.forwarded_bytes for one in replicas)
        # The second locations of a process are filled there.
        assert sum(one.local_copy_bytes for one in replicas) == 2 * 33 * width
        assert trainer.busiest_sender == (0, trainer.sent_bytes)


def four_replicas(world, turn, multicast):
    me, numel = world.rank, 100_000
    full = values(numel, torch.bfloat16)
    endpoints = TransferEndpoints({0: 0}, {replica: replica + 1 for replica in range(4)})
    plan = plan_transfer(replicated_map((numel, ), 4), replicated_map((numel, ), 1))
    target = torch.zeros(numel, dtype=torch.bfloat16)
    program = compile_transfer(plan, {0: full} if me == 0 else {}, {me - 1: target} if me else {},
                               endpoints,
                               torch.bfloat16,
                               group=standing_group(world),
                               timeout=PATIENCE,
                               multicast=multicast)
    stats = program.run()
    assert me == 0 or same_bits(target, full)
    return stats.sent_bytes, stats.received_bytes


def test_one_trainer_and_four_replicas():
    with Pool(5) as five:
        together, apart = (five.run(four_replicas, multicast) for multicast in ('auto', 'off'))
    assert together[0][0] <= 1.05 * 200_000 and apart[0][0] == 4 * 200_000
    assert [received for _, received in together] == [received for _, received in apart] == [0] + [200_000] * 4


def nodes_that_miss_a_process(world, turn, nodes):
    case, me = trainer_and_replicas(torch.float32), world.rank
    targets = case.targets(me)
    before = {name: {location: held.clone() for location, held in those.items()} for name, those in targets.items()}
    with pytest.raises(AffineTransferExecutionError) as found:
        case.compile(me, case.sources(me, 0), targets, standing_group(world), nodes=nodes[me])
    assert differing(targets, before) == []
    return str(found.value)


@pytest.mark.parametrize('nodes, expected', [
    ([{
        0: 0,
        1: 1,
        2: 1
    }] * 4, 'nodes give process 3 the node None; expected an int for every process'),
    ([None, None, None, {
        0: 0,
        1: 1,
        2: 1,
        3: 1
    }], 'their options differ (processes 0, 1, 2 against process 3)'),
    ([{
        0: 'a',
        1: 1,
        2: 1,
        3: 1
    }] * 4, "nodes give process 0 the node 'a'"),
])
def test_all_must_know_the_same_nodes(pool, nodes, expected):
    words, = set(pool.run(nodes_that_miss_a_process, nodes))
    assert expected in words and 'before it began' in words
