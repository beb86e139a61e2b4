# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Peers that die, are late, come with something else or raise: an error on every survivor, in time, and no target by
halves. Each of it twenty times."""

import re

import pytest
import torch
import torch.distributed as dist

from affine_fault_processes import (BROKE, PAIR, SMALL, forgotten, freed_between_runs, interrupted, killed,
                                    late_for_ever, late_in_time, one_runs_and_one_compiles, outcome,
                                    promises_old_targets, raising, refused_over_and_over)
from affine_pool import PATIENCE, Pool
from affine_processes import run_processes
from affine_transfer_cases import everything
from deepspeed.checkpoint.affine_transfer_executor import join_transfer_group

TIMES = 20


@pytest.fixture(scope='module')
def pool():
    with Pool(3) as workers:
        yield workers


# Killed


def kill(pool, victim, moment, size=30, **options):
    """What the survivors hear."""
    words = pool.run(killed, victim, moment, size, options, may_die={victim})
    assert words[victim] is None
    survivors = [text for text in words if text is not None]
    assert len(survivors) == 2
    for text in survivors:
        # Whoever needs nothing more from the victim hears of it before the next run.
        assert 'the transfer broke' in text or 'the transfer was refused before it began' in text, text
        assert is_named(victim, text) or moment[0] == 'gather' and 'lost a connection' in text, text
        # Nobody waited for the timeout; hanging up is a wait of one millisecond.
        assert not re.search(r'Timed out waiting \d{3}', text) and 'nothing came' not in text, text
        assert not options.get('staged') or promises_old_targets(text), text
    return survivors


def is_named(victim, text):
    """Whether the words name a process; one that had come to an agreement before it died may not be told from others
    that have not come yet."""
    return re.search(rf'process(es)? ([012], )*{victim}\b', text)


def in_a_round(text, victim):
    """Whether the words name the round and the parameters for which somebody waited for the victim."""
    return re.search(rf"waited for process {victim} \((send to|receive from) {victim}, round \d+ of \d+, parameter '",
                     text)


@pytest.mark.parametrize('time', range(TIMES))
def test_a_peer_that_is_killed_before_a_round(pool, time):
    victim = time % 3
    survivors = kill(pool, victim, ('post', time // 3), budget=SMALL, staged=time % 2 == 0, verify=time % 4 < 2)
    assert any(in_a_round(text, victim) for text in survivors), survivors


@pytest.mark.parametrize('time', range(TIMES))
def test_a_peer_that_is_killed_during_a_round(pool, time):
    """With all of its operations posted, or the first of them; the messages of the last times take a while."""
    victim, large = time % 3, time > 15
    moment = ('post' if time % 4 < 2 else '_start', 0 if large else time // 3, 'after')
    options = {} if large else dict(budget=SMALL)
    survivors = kill(pool, victim, moment, 10_000 if large else 30, staged=time % 2 == 0, **options)
    # Where it was the last round, it may have sent all that it had to.
    assert large or any(in_a_round(text, victim) for text in survivors), survivors


@pytest.mark.parametrize('time', range(TIMES))
def test_a_peer_that_is_killed_after_a_round(pool, time):
    # The first operation that it waits for is the agreement.
    kill(pool, time % 3, ('wait', 1 + time, 'after'), budget=SMALL, staged=time % 2 == 0)


@pytest.mark.parametrize('time', range(TIMES))
def test_a_peer_that_is_killed_in_an_agreement(pool, time):
    """Before it has agreed to run, when it has, before it has agreed to switch, or when it has."""
    moment = (('gather', 0), ('gather', 0, 'after'), ('gather', 1), ('gather', 1, 'after'))[time % 4]
    survivors = kill(pool, time % 3, moment, budget=SMALL, staged=True, verify=time % 8 < 4)
    # Who has agreed to switch does, and hears of it in the next run.
    assert time % 4 == 1 or all(('before it began' in text) == (time % 4 in (0, 3)) for text in survivors), survivors


# Cut off


def test_a_process_whose_connection_forgets_an_operation_hears_of_the_end(pool):
    forgetful, other, _ = pool.run(forgotten, may_die={2}, timeout=60)
    assert 'the group broke elsewhere. It began elsewhere: process 1 waited for process 2' in forgetful
    assert is_named(2, other)


def test_who_waits_for_a_peer_can_be_interrupted():
    with Pool(2) as pair:
        impatient, words = pair.run(interrupted, timeout=60)
    assert impatient == ''
    assert 'It began elsewhere: process 0 KeyboardInterrupt' in words


# Late


def test_a_peer_that_is_late_but_in_time(pool):
    assert pool.run(late_in_time, TIMES) == [True] * 3


def test_a_peer_that_is_later_than_the_timeout_is_named():
    with Pool(6) as pairs:
        results = pairs.run(late_for_ever, 7, 2.0)
    assert sum(map(len, results[::2])) >= TIMES
    for waited, late in zip(results[::2], results[1::2]):
        for (method, words), (_, echo) in zip(waited, late):
            if method == 'a round':
                assert in_a_round(words, 1) and 'process 0 waited for process 1' in words
                assert 'the transfer broke while it ran' in words and promises_old_targets(words)
                assert 'process 0 waited for process 1' in echo and promises_old_targets(echo)
            else:
                assert 'process 0 waited 2 seconds for process 1 to begin the transfer, in vain' in words
                assert 'before it began' in words
                assert 'refused before it began: process 0 waited 2 seconds for process 1' in echo


# Something else


@pytest.mark.parametrize('kind, words', [
    ('plan', 'lists other segments'),
    ('shape', 'their plans differ'),
    ('dtype', 'their dtypes differ'),
    ('names', 'their names differ'),
    ('fewer', 'their names differ'),
    ('endpoints', 'their endpoints differ'),
    ('staged', 'their options differ'),
    ('verify', 'their options differ'),
    ('multicast', 'their options differ'),
    ('staging budget', 'their staging budget differ'),
    ('rounds', 'their staging budget differ'),
    ('version', "their versions of this library's protocol differ"),
    ('bad option', "rejected the transfer batch: staged is 'yes'"),
])
def test_a_process_that_comes_with_something_else_is_refused_by_all(pool, kind, words):
    for guilty in (0, 2):
        results = pool.run(refused_over_and_over, kind, guilty, TIMES // 2)
        (text, ), = {tuple(one) for one in results}
        assert words in text and 'before it began and no target has changed' in text
        others = ', '.join(str(rank) for rank in range(3) if rank != guilty)
        assert kind in ('plan', 'bad option') or f'(processes {others} against process {guilty})' in text
        assert kind != 'bad option' or f'process {guilty} rejected' in text


def test_a_process_that_does_something_else_is_refused_by_all(pool):
    (text, ), = {tuple(one) for one in pool.run(one_runs_and_one_compiles, TIMES)}
    assert 'process 0 is to compile a transfer, process 1 is to run a transfer' in text


def test_a_buffer_that_is_freed_or_grown_between_runs(pool):
    results = pool.run(freed_between_runs, TIMES)
    assert results == [results[0]] * 3 and len(results[0]) == TIMES
    locations = {(0, 'source'): 0, (1, 'source'): 1, (2, 'target'): 0, (0, 'target'): 1}
    for guilty, side, text in results[0]:
        where = f"parameter 'embed': {side} location {locations[guilty, side]}"
        assert f'process {guilty} rejected the transfer batch: {where}' in text
        assert 'before it began' in text and 'rebind' in text


# A callback


@pytest.mark.parametrize('kind', [RuntimeError, KeyboardInterrupt])
def test_a_callback_that_raises_ends_the_transfer_for_all(pool, kind):
    for time in range(TIMES):
        guilty = time % 3
        words = pool.run(raising, guilty, time // 3, kind, time % 2 == 0)
        began = f'process {guilty} {kind.__name__}: enough of this'
        for rank, text in enumerate(words):
            assert began in text or rank == guilty and kind is KeyboardInterrupt and not text, text


# Groups of the caller


def breaks_a_group_of_its_own(world):
    """Transfers break a group beside the default one, and one that the caller made; the default one still works."""
    world.init_default_group()
    mine = dist.new_group([0, 1])
    joint = join_transfer_group(world.store('joint'), world.rank, 2, timeout=PATIENCE)
    case = everything(PAIR)

    def fail(done, total):
        if world.rank == 1:
            raise RuntimeError('enough')

    for group in (mine, joint):
        targets = case.targets(world.rank)
        sources = case.sources(world.rank, 0)
        program = case.compile(world.rank, sources, targets, group, progress=fail, staged=True)
        assert outcome(program.run)[0] == BROKE
    total = torch.tensor([world.rank + 1])
    dist.all_reduce(total)
    # The caller's groups are still there, broken or not, for the caller to end.
    assert dist.get_process_group_ranks(mine) == [0, 1] and joint.size() == 2
    another = dist.new_group([0, 1])
    targets = case.targets(world.rank)
    case.compile(world.rank, case.sources(world.rank, 0), targets, another).run()
    joint.close()
    dist.destroy_process_group()
    return total.item(), case.wrong(targets, world.rank, 0)


def test_groups_of_the_caller_are_left_alone():
    assert run_processes(2, breaks_a_group_of_its_own) == [(3, [])] * 2
