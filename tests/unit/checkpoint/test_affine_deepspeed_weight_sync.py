# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""A real ZeRO-3 trainer sends its weights to a tensor-parallel server after every optimizer step.

The server compares its shards with what a weight loader, written with plain torch, cuts from the parameters that
DeepSpeed itself gathers. The trainers watch their memory.
"""

import pytest

import affine_weight_sync_processes as ranks
from affine_processes import run_processes

# Embedding, last norm and head; in a layer two norms, qkv and gate_up, and two that follow them.
PARAMETERS = 3 + 6 * ranks.MODEL.num_hidden_layers


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """What every rank saw, trainers first."""
    folder = tmp_path_factory.mktemp("weights")
    return run_processes(ranks.PROCESSES, ranks.run, str(folder), timeout=500)


@pytest.fixture(scope="module")
def trainers(reports):
    return reports[:ranks.TRAINERS]


@pytest.fixture(scope="module")
def servers(reports):
    return reports[ranks.TRAINERS:]


@pytest.mark.parametrize("case", ranks.CASES)
def test_every_shard_is_cut_from_the_gathered_parameters(servers, case):
    """Bit for bit, padding untouched, after every step."""
    for seen in servers:
        assert len(seen[case]) == len(ranks.CASES[case].steps)
        assert [after["compared"] for after in seen[case]] == [PARAMETERS] * len(seen[case])
        assert [after["differ"] for after in seen[case]] == [[]] * len(seen[case])


def test_every_step_changes_the_parameters(servers):
    """Or shards that were not sent again would pass."""
    for seen in servers:
        for after in seen["planned for all"]:
            assert not after["unchanged"]


@pytest.mark.parametrize("case", ranks.CASES)
def test_sync_adds_no_more_than_the_staging_cap(trainers, case):
    """Resident memory: planning, compilation and all runs together add at most the cap and a tenth of it.

    The peaks are added up, as if nothing were used twice.
    """
    for report in trainers:
        compiled, *runs = report["added"][case]
        assert len(runs) == len(ranks.CASES[case].steps)
        assert compiled + sum(runs) <= 1.1 * ranks.STAGING_CAP, report["added"][case]


@pytest.mark.parametrize("case", ranks.CASES)
def test_model_is_many_times_the_staging_cap(trainers, case):
    """So the bound above means something, and staging memory is used."""
    for first, second in zip(*(report["stats"][case] for report in trainers)):
        assert first.sent_bytes + second.sent_bytes >= 8 * ranks.STAGING_CAP
        for stats in (first, second):
            assert ranks.STAGING_CAP / 4 <= stats.peak_staging_bytes <= ranks.STAGING_CAP
            assert stats.packed_bytes >= stats.peak_staging_bytes
