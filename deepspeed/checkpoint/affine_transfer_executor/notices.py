# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Notes that processes leave for one another in their group's store.

The store is not the way the data goes, so it still answers when a connection is broken: it tells who has
not come, and where a failure began. All of it is best effort; a transfer is correct without it.
"""

from typing import Any, Callable, List, Optional

from deepspeed.checkpoint.affine_transfer_executor.patience import Silent, within

# A store that does not answer within this many seconds is taken to be gone.
PATIENCE = 5.0
BROKEN = 'broken'


class NoticeBoard:
    """The notes of one group.

    Args:
        store: a torch.distributed Store which only this group's notes are in, or None: then nothing is noted.
        rank: this process in the group.
    """

    def __init__(self, store: Any, rank: int):
        self.store = store
        self.rank = rank
        self._silent = False

    def arrive(self) -> None:
        """Count one more transfer that this process has begun."""
        self._ask(lambda: self.store.add(f'begun/{self.rank}', 1))

    def missing(self, size: int) -> List[int]:
        """The processes that have begun fewer transfers than this one."""

        def compare() -> List[int]:
            begun = [self.store.add(f'begun/{rank}', 0) for rank in range(size)]
            return [rank for rank in range(size) if begun[rank] < begun[self.rank]]

        return self._ask(compare) or []

    def report(self, text: str) -> None:
        """Say that the group broke here. The first report stays."""
        self._ask(lambda: self.store.compare_set(BROKEN, '', text))

    def broken(self) -> Optional[str]:
        """The first report, or None while nobody has made one."""
        return self._ask(lambda: self.store.get(BROKEN).decode(errors='replace')
                         if self.store.check([BROKEN]) else None)

    def _ask(self, question: Callable[[], Any]) -> Any:
        """The answer, or None if the store fails or is silent: a stopped server must not stop us too."""
        if self.store is None or self._silent:
            return None
        try:
            return within(PATIENCE, question)
        except Silent:
            # Nobody waits for it again: the data goes another way, and may go well.
            self._silent = True
        except Exception:
            # The process that keeps the store may be the one that died.
            return None
        return None
