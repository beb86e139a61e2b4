# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""One run of a program: agree, move, verify, switch."""

import time
from collections import deque
from contextlib import contextmanager, nullcontext
from typing import Deque, Dict, Iterator, List, Sequence, Tuple

import torch

from deepspeed.checkpoint.affine_transfer_executor.agreement import (ROW, RUN, SWITCH, VERIFY, Position, agree,
                                                                     attempting, named, numbers, refuse_broken)
from deepspeed.checkpoint.affine_transfer_executor.channel import Pending, WaitFailed
from deepspeed.checkpoint.affine_transfer_executor.copies import Copies
from deepspeed.checkpoint.affine_transfer_executor.errors import AffineTransferExecutionError, Explained
from deepspeed.checkpoint.affine_transfer_executor.report import TransferStats
from deepspeed.checkpoint.affine_transfer_executor.rounds import IN_FLIGHT, SLOTS, BoundRound, Stage
from deepspeed.checkpoint.affine_transfer_executor.streams import beside
from deepspeed.checkpoint.affine_transfer_executor.verification import differences

NAMED = 3
ROW_BYTES = 8 * ROW
BROKE = 'the transfer broke while it ran, and targets may be partly written'
BROKE_STAGED = 'the transfer broke while it ran, and no target of this process has changed'
WRONG = 'the transfer was verified: targets do not have what was sent'
WRONG_STAGED = 'the transfer was verified and refused, no target has changed: not everything arrived as it was sent'


# Weights may have been made in inference mode, where only inference mode may write to them.
@torch.inference_mode()
def run_once(recipe, bound) -> TransferStats:
    """Run a program; ``recipe`` and ``bound`` are its Recipe and Bound."""
    run = _Run(recipe, bound)
    facts = run.agree()
    with run.ending():
        run.move()
        wrong = run.verify()
    run.conclude(wrong)
    with run.ending():
        run.switch()
    return run.stats(facts)


class _Run:
    """Clock and counters of one run."""

    def __init__(self, recipe, bound):
        self.recipe = recipe
        self.bound = bound
        self.channel = recipe.channel
        self.terms = {'programs': recipe.digest}
        self.rounds: List[BoundRound] = [item for stage in bound.stages for item in stage.rounds]
        self.seconds: Dict[str, float] = dict.fromkeys(
            ('agree', 'pack', 'post', 'local', 'wait', 'unpack', 'verify', 'switch'), 0.0)
        self.sent = self._bytes_of(lambda item: item.round.sends)
        self.received = self._bytes_of(lambda item: item.round.receives)
        self.local = sum(held.local.numbytes for stage in bound.stages for held in (stage, *stage.rounds))
        self.done = self.overhead = 0

    def agree(self) -> List[Tuple[int, ...]]:
        """Everybody's bytes sent, bytes received and rounds, once all are known to run the same program."""
        mine = self.sent, self.received, len(self.rounds)
        if self.channel is None:
            self.bound.bindings.check()
            return [mine]
        self.channel.check_process()
        with self.timed('agree'):
            refuse_broken(self.channel)
            with attempting(self.channel) as reasons:
                self.channel.check_open()
                self.bound.bindings.check()
            return self._agree(Position(RUN, None if reasons else self.terms, reasons, mine))

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Do what is inside on the program's stream; what it raises ends the group."""
        broke = BROKE_STAGED if self.bound.shadows else BROKE
        with nullcontext() if self.channel is None else self.channel.ending(broke):
            with beside(self.recipe.stream):
                yield

    def move(self) -> None:
        """Make all copies."""
        if self.bound.shadows:
            self.bound.shadows.begin()
        for stage in self.bound.stages:
            self._stage(stage)

    def verify(self) -> List[str]:
        """What did not arrive as it was sent."""
        if self.bound.verification is None:
            return []
        with self.timed('verify'):
            self.overhead += self.bound.verification.sent_bytes
            try:
                return differences(self.bound.verification, self.channel, self.recipe.options.timeout)
            except WaitFailed as failure:
                peers = named(failure.pending.peers)
                raise Explained(f'waited for {peers} (checksums, {failure.pending.action} '
                                f'{numbers(failure.pending.peers)}): {failure}') from failure

    def conclude(self, wrong: List[str]) -> None:
        """Hear whether all went well everywhere, where that was asked for."""
        staged, verified = self.bound.shadows is not None, self.bound.verification is not None
        refusal = WRONG_STAGED if staged else WRONG
        if self.channel is None:
            if wrong:
                raise AffineTransferExecutionError(f'{refusal}: {"; ".join(wrong[:NAMED])}')
        elif staged or verified:
            position = Position(VERIFY if verified else SWITCH,
                                None if wrong else self.terms,
                                wrong[:NAMED],
                                if_refused=refusal,
                                if_broken=BROKE_STAGED if staged else BROKE)
            with self.timed('agree'):
                self._agree(position)

    def switch(self) -> None:
        """Make what was staged the targets' values."""
        if self.bound.shadows is not None:
            with self.timed('switch'):
                self.bound.shadows.switch()

    def stats(self, facts: List[Tuple[int, ...]]) -> TransferStats:
        """What this process did; ``facts`` are those of the agreement."""
        stages = self.bound.stages
        senders, receivers = ([row[place] for row in facts] for place in (0, 1))
        return TransferStats(
            segments=len(self.bound.prepared.moves),
            chunks=sum(len(item.receives) + len(item.sends) for item in self.rounds),
            rounds=max(row[2] for row in facts),
            local_copy_bytes=self.local,
            sent_bytes=self.sent,
            received_bytes=self.received,
            in_place_bytes=sum(stage.in_place for stage in stages),
            peak_staging_bytes=self.bound.staging_bytes,
            packed_bytes=sum(item.staged for item in self.rounds),
            forwarded_bytes=self._bytes_of(lambda item: item.round.sends if item.round.key[0] else ()),
            overhead_bytes=self.overhead,
            shadow_bytes=self.bound.shadows.numbytes if self.bound.shadows else 0,
            busiest_sender=(senders.index(max(senders)), max(senders)),
            busiest_receiver=(receivers.index(max(receivers)), max(receivers)),
            seconds=self.seconds)

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Count the time of what is done inside."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - began

    def _bytes_of(self, messages) -> int:
        return sum(message.numbytes for item in self.rounds for message in messages(item))

    def _stage(self, stage: Stage) -> None:
        """Run rounds, some of them travelling while their neighbours are packed and unpacked."""
        travelling: Deque[Tuple[BoundRound, List[Pending]]] = deque()
        for item in stage.rounds:
            while travelling and not _may_join(item, [one for one, _ in travelling]):
                self._finish(*travelling.popleft())
            with self.timed('pack'):
                item.pack.run()
            with self.timed('post'):
                travelling.append((item, self._post(item)))
            self._copy(item.local)
        self._copy(stage.local)
        while travelling:
            self._finish(*travelling.popleft())

    def _copy(self, copies: Copies) -> None:
        if copies.numbytes:
            with self.timed('local'):
                copies.run()
            self._advance(copies.numbytes)

    def _post(self, item: BoundRound) -> List[Pending]:
        try:
            return self.channel.post(item.receives, item.sends)
        except WaitFailed as failure:
            raise Explained(self._account(item, failure)) from failure

    def _finish(self, item: BoundRound, pending: List[Pending]) -> None:
        deadline = time.monotonic() + self.recipe.options.timeout
        with self.timed('wait'):
            try:
                self.channel.wait(pending, deadline)
            except WaitFailed as failure:
                raise Explained(self._account(item, failure)) from failure
        with self.timed('unpack'):
            item.unpack.run()
        self._advance(sum(message.numbytes for message in item.round.receives + item.round.sends))

    def _advance(self, numbytes: int) -> None:
        self.done += numbytes
        if self.recipe.options.progress is not None:
            # What the caller makes there is to be of use elsewhere.
            with torch.inference_mode(False):
                self.recipe.options.progress(self.done, self.sent + self.received + self.local)

    def _account(self, item: BoundRound, failure: WaitFailed) -> str:
        """Whom this process waited for, and for what."""
        peers = failure.pending.peers
        messages = [message for message in item.round.receives + item.round.sends if message.peer in peers]
        touched = sorted(
            {request
             for message in messages
             for request in self.bound.prepared.moves.request[message.rows].tolist()})
        names = [self.bound.prepared.requests[index].name for index in touched[:NAMED]]
        if len(touched) > NAMED:
            names.append(f'{len(touched) - NAMED} more')
        return (f'waited for {named(peers)} ({failure.pending.action} {numbers(peers)}, round '
                f'{self.rounds.index(item) + 1} of {len(self.rounds)}, {", ".join(names)}): {failure}')

    def _agree(self, position: Position) -> List[Tuple[int, ...]]:
        self.overhead += ROW_BYTES * (self.channel.size - 1)
        return agree(self.channel, position, self.recipe.options.timeout)


def _may_join(item: BoundRound, travelling: Sequence[BoundRound]) -> bool:
    """Whether a round may be packed and posted: the memory that it stages in is nobody's, and not too much is open."""
    slots_taken = sum(one.staged > 0 for one in travelling)
    return len(travelling) < IN_FLIGHT and (not item.staged or slots_taken < SLOTS)
