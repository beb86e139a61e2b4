# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What running a plan can raise."""


class AffineTransferExecutionError(ValueError):
    """A transfer that was refused before it began, or that broke while it ran; the message says which.

    Refused: every process of the group raises it, no target has changed and the group can be used again.
    Broken (a peer died or was late): targets may be partly written, and the group cannot be used again.
    """
