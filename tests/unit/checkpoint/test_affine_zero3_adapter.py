# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What the ZeRO-3 adapter refuses and cuts off, on stand-ins for partitioned parameters."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from deepspeed.checkpoint.affine_adapters import zero3_parameter


@pytest.fixture
def partitioned(monkeypatch):
    """Build a parameter as ZeRO-3 leaves it on one of world_size ranks."""
    group = object()

    def build(shape, partition, world_size=2, rank=0):
        monkeypatch.setattr(dist, "get_world_size", lambda asked: world_size if asked is group else -1)
        monkeypatch.setattr(dist, "get_rank", lambda asked: rank if asked is group else -1)
        return SimpleNamespace(shape=(0, ),
                               ds_shape=torch.Size(shape),
                               ds_numel=torch.Size(shape).numel(),
                               ds_tensor=partition,
                               ds_process_group=group)

    return build


def test_padding_is_cut_off(partitioned):
    layout, buffers = zero3_parameter(partitioned((7, ), torch.arange(4.), rank=1))
    assert dict(layout.shard_shapes) == {0: (4, ), 1: (3, )}
    assert list(buffers) == [1]
    assert buffers[1].tolist() == [0., 1., 2.]


def test_rank_with_padding_only_gets_an_empty_buffer(partitioned):
    layout, buffers = zero3_parameter(partitioned((1, ), torch.arange(1.), world_size=4, rank=3))
    assert layout.shard_shapes[3] == (0, )
    assert buffers[3].shape == (0, )


def test_buffer_is_a_view_at_the_partitions_offset(partitioned):
    flat = torch.arange(10.)
    layout, buffers = zero3_parameter(partitioned((2, 3), flat.narrow(0, 4, 3)), locations=[8, 5])
    assert buffers[8].tolist() == [4., 5., 6.]
    flat.zero_()
    assert buffers[8].tolist() == [0., 0., 0.]


def test_partition_that_wants_gradients_comes_without_them(partitioned):
    _, buffers = zero3_parameter(partitioned((4, ), torch.ones(2, requires_grad=True)))
    assert not buffers[0].requires_grad


def test_plain_parameter_is_refused():
    with pytest.raises(ValueError, match=r"shape \(2, 3\) has no ds_shape: it is not partitioned by ZeRO stage 3"):
        zero3_parameter(torch.nn.Parameter(torch.ones(2, 3)))


@pytest.mark.parametrize("partition", [torch.ones(1), torch.ones(4), torch.ones(3, 1)])
def test_partition_of_another_size_is_refused(partitioned, partition):
    with pytest.raises(ValueError, match=r"has shape .*; ZeRO-3 over 2 ranks holds \(3,\)"):
        zero3_parameter(partitioned((2, 3), partition))


def test_wrong_number_of_locations_is_refused(partitioned):
    with pytest.raises(ValueError, match="locations"):
        zero3_parameter(partitioned((4, ), torch.ones(2)), locations=[0, 1, 2])
