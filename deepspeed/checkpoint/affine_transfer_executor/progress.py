# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""A bar in the terminal for transfers that take a while."""

from contextlib import contextmanager
from typing import Callable, Iterator


@contextmanager
def progress_bar(description: str = 'transfer') -> Iterator[Callable[[int, int], None]]:
    """Draw a bar as long as the ``with`` statement lasts; every run of a program begins it anew.

    Args:
        description: stands before the bar.

    Yields:
        What ``compile_transfer`` takes as ``progress``.

    Raises:
        ImportError: the package ``rich`` is not installed.

    Example::

        with progress_bar('weights') as progress:
            compile_transfer(plan, sources, targets, endpoints, torch.bfloat16, progress=progress).run()
    """
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn('{task.description}'), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Progress(*columns) as bars:
        task = bars.add_task(description, total=None)

        def advance(done: int, total: int) -> None:
            if done < bars.tasks[task].completed:
                bars.reset(task)
            bars.update(task, completed=done, total=total)

        yield advance
