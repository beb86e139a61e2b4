# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Stand-ins for a process of the demo, for the tests of its launcher."""

import os
import threading


def all_finish(assignment, connection):
    connection.send(("done", [assignment.label]))


def one_fails(assignment, connection):
    """Rollout 1 reports a failure; everybody else waits for ever."""
    if assignment.label == "rollout 1":
        connection.send(("failed", "Traceback: the shard of rollout 1 is lost"))
    _wait_for_ever()


def one_dies(assignment, connection):
    """Trainer 0 ends without a word but with an exit code and a last line of output."""
    if assignment.label == "trainer 0":
        with open(assignment.log, "w") as log:
            log.write("the last line of trainer 0\n")
        os._exit(7)
    _wait_for_ever()


def one_never_finishes(assignment, connection):
    if assignment.label == "trainer 1":
        _wait_for_ever()
    connection.send(("done", []))


def _wait_for_ever():
    threading.Event().wait()
