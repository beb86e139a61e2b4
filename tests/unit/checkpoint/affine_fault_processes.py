# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Workers of transfers in which something goes wrong. They import little, as the killed ones must be replaced."""

import re
import signal
import threading
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from unittest.mock import patch

import torch

from affine_fault_points import acting, counted_operations, die, forgotten_operations
from affine_pool import PATIENCE, standing_group
from affine_transfer_cases import copied, differing, everything, only
from deepspeed.checkpoint.affine import contiguous_split_map, relabel
from deepspeed.checkpoint.affine_transfer import TransferEndpoints
from deepspeed.checkpoint.affine_transfer_executor import (AffineTransferExecutionError, StagingBudget,
                                                           TransferBrokenError, agreement, join_transfer_group)

# Process 0 has a source and a target, 1 a source, 2 a target.
ENDS = TransferEndpoints({0: 0, 1: 1}, {0: 2, 1: 0})
PAIR = TransferEndpoints({0: 0, 1: 1}, {0: 1, 1: 0})
# Many rounds of small messages.
SMALL = StagingBudget(bytes_per_peer=512, direct_bytes=200)
# How a run ended.
WENT_WELL, REFUSED, BROKE = 'went well', 'refused', 'broke'


def outcome(run):
    """How a run ended, and its words."""
    try:
        run()
    except TransferBrokenError as error:
        return BROKE, str(error)
    except AffineTransferExecutionError as error:
        return REFUSED, str(error)
    return WENT_WELL, ''


def promises_old_targets(words):
    """Whether an error says that targets are as they were: everywhere, or on the process that raises it."""
    return re.search(r'no target (of this process )?has changed', words) or 'refused before it began' in words


def heard(case, program, sources, targets, me, staged):
    """Run until it breaks; the words, after checking that targets are what the words and options promise."""
    for seed in range(1, 4):
        case.refill(sources, me, seed)
        how, words = outcome(program.run)
        if how == BROKE:
            if staged or promises_old_targets(words):
                assert case.wrong(targets, me, seed - 1) == [], words
            return words
        assert how == WENT_WELL, words
        assert case.wrong(targets, me, seed) == []
    raise AssertionError('nothing broke')


def unusable(case, program, group, me):
    """Neither program nor group can be used again, and both say so."""
    how, words = outcome(program.run)
    assert how == BROKE and 'this program cannot be used any more' in words, words
    how, words = outcome(lambda: case.compile(me, case.sources(me, 0), case.targets(me), group))
    assert how == BROKE and 'this group cannot be used any more' in words and 'Join a new group' in words, words


def go_on(store, me, survivors, endpoints):
    """A new group of the survivors, and a transfer in it."""
    case, rank = everything(endpoints), survivors.index(me)
    targets = case.targets(rank)
    with join_transfer_group(store, rank, len(survivors), timeout=PATIENCE) as group:
        case.compile(rank, case.sources(rank, 5), targets, group, verify=True).run()
    assert case.wrong(targets, rank, 5) == []


def killed(world, turn, victim, moment, size, options):
    """Process ``victim`` is killed at a moment of the second run; what the others hear, and that they go on."""
    case, me = everything(ENDS, size), world.rank
    if size > 1000:
        case = only(case, 'embed')
    sources, targets = case.sources(me, 0), case.targets(me)
    with join_transfer_group(world.store(turn), me, world.size, timeout=PATIENCE) as group:
        program = case.compile(me, sources, targets, group, **options)
        program.run()
        assert case.wrong(targets, me, 0) == []
        with acting(*moment[:2], die, after=moment[2:] == ('after', )) if me == victim else nullcontext():
            words = heard(case, program, sources, targets, me, options.get('staged', False))
        assert me != victim, 'the moment never came'
        unusable(case, program, group, me)
    go_on(world.store(f'{turn}, survivors'), me, [rank for rank in range(world.size) if rank != victim], PAIR)
    return words


def raising(world, turn, guilty, number, kind, staged):
    """A callback raises in one process, after so many steps of the second run."""
    case, me, steps = everything(ENDS, 30), world.rank, []

    def callback(done, total):
        steps.append(done)
        if me == guilty and len(steps) > number >= 0:
            raise kind('enough of this')

    sources, targets = case.sources(me, 0), case.targets(me)
    words = ''
    with join_transfer_group(world.store(turn), me, world.size, timeout=PATIENCE) as group:
        program = case.compile(me, sources, targets, group, staged=staged, progress=callback, budget=SMALL)
        limit, number = number, -1
        program.run()
        steps.clear()
        number = limit
        try:
            words = heard(case, program, sources, targets, me, staged)
        except KeyboardInterrupt as error:
            assert me == guilty and kind is KeyboardInterrupt and str(error) == 'enough of this'
            assert not staged or case.wrong(targets, me, 0) == []
        unusable(case, program, group, me)
    go_on(world.store(f'{turn}, again'), me, [0, 1, 2], ENDS)
    return words


# Cut off


def forgotten(world, turn):
    """Process 2 is killed, and gloo does not tell process 0 that its round came to nothing."""
    case, me = everything(ENDS), world.rank
    with join_transfer_group(world.store(turn), me, world.size, timeout=PATIENCE) as group:
        targets = case.targets(me)
        program = case.compile(me, case.sources(me, 0), targets, group, staged=True)
        with (forgotten_operations(), nullcontext(), acting('post', 0, die))[me]:
            how, words = outcome(program.run)
        assert how == BROKE
    go_on(world.store(f'{turn}, survivors'), me, [0, 1], PAIR)
    return words


def interrupted(world, turn):
    """Somebody at the keyboard of process 0 loses patience while process 1 is late, which then hears of it."""
    case, me, store = everything(PAIR), world.rank, world.store(turn)
    targets = case.targets(me)
    with join_transfer_group(store, me, world.size, timeout=PATIENCE) as group:
        program = case.compile(me, case.sources(me, 0), targets, group, staged=True)
        if me:
            with acting('post', 0, lambda: store.wait(['interrupted'])):
                how, words = outcome(program.run)
            assert how == BROKE
        else:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            with acting('wait', 1, lambda: threading.Timer(0.5, signal.raise_signal, [signal.SIGINT]).start()):
                try:
                    words = f'it ended by itself: {outcome(program.run)}'
                except KeyboardInterrupt:
                    words = ''
            store.set('interrupted', 'yes')
        unusable(case, program, group, me)
    return words


# Late


@contextmanager
def first_the_others(store, key, method, late):
    """The late process comes to its first call of ``method`` when another one has come to its own."""
    if late:
        with acting(method, 0, lambda: store.wait([key])):
            yield
    else:
        with acting(method, 0, lambda: store.set(key, 'here'), after=method == 'post'):
            yield


def late_in_time(world, turn, repetitions):
    """Somebody is late in every run, and within the timeout."""
    case, me, store = everything(ENDS, 30), world.rank, world.store(turn)
    sources, targets = case.sources(me, 0), case.targets(me)
    program = case.compile(me, sources, targets, standing_group(world), staged=True, budget=SMALL)
    for seed in range(repetitions):
        late, other = seed % 3, (seed + 1) % 3
        case.refill(sources, me, seed)
        with ExitStack() as stack:
            if me in (late, other):
                method = ('post', 'gather')[seed // 3 % 2]
                stack.enter_context(first_the_others(store, f'{seed}', method, me == late))
            program.run()
        assert case.wrong(targets, me, seed) == []
    return True


def late_for_ever(world, turn, repetitions, timeout):
    """Pairs of processes, of which the second does not come before the first gave up; the words of each."""
    me, pair = world.rank % 2, world.rank // 2
    case, found = everything(PAIR), []
    for repetition in range(repetitions):
        store = world.store(f'{turn} {pair} {repetition}')
        sources, targets = case.sources(me, 0), case.targets(me)
        with join_transfer_group(store, me, 2, timeout=PATIENCE) as group:
            program = case.compile(me, sources, targets, group, staged=True, timeout=timeout)
            before = copied(targets)
            late_for = ('a round', 'the agreement')[repetition % 2]
            with acting('post', 0, lambda store=store: store.wait(['gave up'])) if me else nullcontext():
                if me and late_for == 'the agreement':
                    store.wait(['gave up'])
                how, words = outcome(program.run)
            assert how == BROKE and differing(targets, before) == []
            store.set('gave up', 'yes')
            unusable(case, program, group, me)
        found.append((late_for, words))
    return found


# Refused


def refused_over_and_over(world, turn, kind, guilty, repetitions):
    """One process comes with something else; the words of each refusal. The group works all the while."""
    me, odd = world.rank, world.rank == guilty
    words = set()
    for seed in range(repetitions):
        case = odd_case(kind) if odd else everything(ENDS)
        sources, targets = case.sources(me, seed), case.targets(me)
        before = copied(targets)
        version = patch.object(agreement, 'PROTOCOL_VERSION', agreement.PROTOCOL_VERSION + 1)
        with version if odd and kind == 'version' else nullcontext(), counted_operations() as operations:
            how, text = outcome(lambda: case.compile(me, sources, targets, standing_group(world),
                                                     **(ODD_OPTIONS.get(kind, {}) if odd else {})))
        assert how == REFUSED and operations == [] and differing(targets, before) == []
        words.add(text)
    case, targets = everything(ENDS), everything(ENDS).targets(me)
    case.compile(me, case.sources(me, 0), targets, standing_group(world)).run()
    assert case.wrong(targets, me, 0) == []
    return sorted(words)


ODD_OPTIONS = {
    'staged': dict(staged=True),
    'verify': dict(verify=True),
    'multicast': dict(multicast='off'),
    'staging budget': dict(budget=StagingBudget(bytes_per_peer=4096)),
    'rounds': dict(budget=StagingBudget(operations=4)),
    'bad option': dict(staged='yes'),
}


def odd_case(kind):
    """The case as the odd one has it."""
    case = everything(ENDS, 2) if kind == 'shape' else everything(ENDS)
    if kind == 'dtype':
        entry = case.transfers['layers.0.w']
        case.transfers['layers.0.w'] = replace(entry, source_dtype=torch.float16)
    elif kind == 'plan':
        entry, (source, target) = case.transfers['embed'], case.contents['embed']
        halves = relabel(contiguous_split_map((10, 6), [3, 3], 1), {0: 1, 1: 0})
        case.transfers['embed'] = replace(entry, target_map=halves)
        case.contents['embed'] = source, {0: target[1], 1: target[0]}
    elif kind == 'names':
        case.transfers['new'], case.contents['new'] = case.transfers.pop('norm'), case.contents.pop('norm')
    elif kind == 'fewer':
        del case.transfers['norm'], case.contents['norm']
    elif kind == 'endpoints':
        case = replace(case, endpoints=TransferEndpoints({0: 0, 1: 1}, {0: 2, 1: 0, 9: 1}))
    return case


def one_runs_and_one_compiles(world, turn, repetitions):
    """Some are to run a program, others to compile one."""
    case, me, words = everything(ENDS), world.rank, set()
    sources, targets = case.sources(me, 0), case.targets(me)
    group = standing_group(world)
    program = case.compile(me, sources, targets, group)
    for _ in range(repetitions):
        how, text = outcome(program.run if me == 1 else lambda: case.compile(me, sources, targets, group))
        assert how == REFUSED
        words.add(text)
    program.run()
    assert case.wrong(targets, me, 0) == []
    return sorted(words)


def freed_between_runs(world, turn, repetitions):
    """A buffer of one process is freed or grown between runs and then given anew, over and over."""
    case, me, words = everything(ENDS), world.rank, []
    sources, targets = case.sources(me, 0), case.targets(me)
    program = case.compile(me, sources, targets, standing_group(world), staged=True)
    for seed in range(repetitions):
        guilty, side = ((0, 'source'), (1, 'source'), (2, 'target'), (0, 'target'))[seed % 4]
        buffers = sources if side == 'source' else targets
        location, = buffers['embed'] if me == guilty else (None, )
        kept = {name: dict(held) for name, held in targets.items()}
        if me == guilty:
            storage = buffers['embed'][location].untyped_storage()
            storage.resize_(0 if seed % 8 < 4 else 2 * storage.nbytes())
            if side == 'target':
                del kept['embed']
        before = copied(kept)
        how, text = outcome(program.run)
        assert how == REFUSED and differing(targets, before) == []
        words.append((guilty, side, text))
        if me == guilty:
            sources, targets = case.sources(me, seed), case.targets(me)
            program.rebind(sources, targets)
        case.refill(sources, me, seed + 1)
        program.run()
        assert case.wrong(targets, me, seed + 1) == []
    return words
