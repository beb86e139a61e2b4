# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What the tests of the affine packages share: one Hypothesis profile, and which files need DeepSpeed."""

import importlib.metadata

from hypothesis import HealthCheck, settings

# The same cases on every machine and no clock in any verdict. Layouts are built from many small draws, some of
# which are large for Hypothesis' taste and slow on a loaded machine: neither is a fault of the code under test.
settings.register_profile('affine',
                          deadline=None,
                          derandomize=True,
                          database=None,
                          print_blob=True,
                          suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
settings.load_profile('affine')


def _deepspeed_is_installed():
    # Our own packages make ``deepspeed`` importable, so only its metadata tells.
    try:
        importlib.metadata.distribution('deepspeed')
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


# These compare with DeepSpeed or run it; without it there is nothing that they could say.
collect_ignore_glob = [] if _deepspeed_is_installed() else ['test_affine_deepspeed_*.py']
