# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What the adapters of ZeRO engines refuse and cut off, on stand-ins for partitioned parameters."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from deepspeed.checkpoint.affine_adapters.replicated import replicated_maps
from deepspeed.checkpoint.affine_adapters.zero12 import zero12_master_maps
from deepspeed.checkpoint.affine_adapters.zero3 import zero3_maps, zero3_parameter
from deepspeed.checkpoint.affine_adapters.zero3_master import zero3_master_maps
from deepspeed.checkpoint.affine_adapters.zero3_secondary import zero3_secondary_maps


@pytest.fixture
def job(monkeypatch):
    """Let this process be one rank of a job whose parameters are cut over all ranks; returns their process group."""
    group = object()

    def start(world_size=2, rank=0):
        members = {None: (world_size, rank), group: (world_size, rank)}
        monkeypatch.setattr(dist, "get_world_size", lambda asked=None: members[asked][0])
        monkeypatch.setattr(dist, "get_rank", lambda asked=None: members[asked][1])
        monkeypatch.setattr(dist, "get_process_group_ranks", lambda asked: list(range(members[asked][0])))
        return group

    return start


@pytest.fixture
def partitioned(job):
    """Build a parameter as ZeRO-3 leaves it on one of world_size ranks."""

    def build(shape, partition, world_size=2, rank=0):
        param = torch.nn.Parameter(torch.empty(0))
        partition.ds_numel = partition.numel()
        for name, value in (("ds_shape", torch.Size(shape)), ("ds_numel", torch.Size(shape).numel()),
                            ("ds_tensor", partition), ("ds_id", id(param)), ("ds_secondary_tensor", None),
                            ("ds_process_group", job(world_size, rank))):
            setattr(param, name, value)
        return param

    return build


def model_of(**parameters):
    module = torch.nn.Module()
    for name, parameter in parameters.items():
        setattr(module, name, parameter)
    return module


def engine_of(module, **optimizer):
    return SimpleNamespace(module=module, optimizer=SimpleNamespace(**optimizer), zero_optimization_stage=lambda: 3)


def test_padding_is_cut_off(partitioned):
    layout, buffers = zero3_parameter(partitioned((7, ), torch.arange(4.), rank=1))
    assert dict(layout.shard_shapes) == {0: (4, ), 1: (3, )}
    assert list(buffers) == [1]
    assert buffers[1].tolist() == [0., 1., 2.]


def test_rank_with_padding_only_gets_an_empty_buffer(partitioned):
    layout, buffers = zero3_parameter(partitioned((1, ), torch.arange(1.), world_size=4, rank=3))
    assert layout.shard_shapes[3] == (0, )
    assert buffers[3].shape == (0, )


def test_empty_parameter_has_a_map(partitioned):
    held = zero3_maps(model_of(empty=partitioned((0, 3), torch.empty(0))))["empty"]
    assert dict(held.layout.shard_shapes) == {0: (0, ), 1: (0, )}
    assert held.buffers[0].shape == (0, )


def test_buffer_is_a_view_at_the_partitions_offset(partitioned):
    flat = torch.arange(10.)
    layout, buffers = zero3_parameter(partitioned((2, 3), flat.narrow(0, 4, 3)), locations=[8, 5])
    assert buffers[8].tolist() == [4., 5., 6.]
    flat.zero_()
    assert buffers[8].tolist() == [0., 0., 0.]


def test_partition_that_wants_gradients_comes_without_them(partitioned):
    _, buffers = zero3_parameter(partitioned((4, ), torch.ones(2, requires_grad=True)))
    assert not buffers[0].requires_grad


def test_parameters_of_one_shape_share_a_map(partitioned):
    """A planner looks at every distinct map once."""
    held = zero3_maps(model_of(one=partitioned((4, ), torch.ones(2)), other=partitioned((4, ), torch.zeros(2))))
    assert held["one"].layout is held["other"].layout
    assert held["other"].tied_to is None


def test_relabelled_changes_map_and_buffers(partitioned):
    held = zero3_maps(model_of(one=partitioned((4, ), torch.ones(2), rank=1)))["one"].relabelled({1: 7})
    assert sorted(held.layout.shard_shapes) == [0, 7]
    assert list(held.buffers) == [7]


def test_plain_parameter_is_refused():
    with pytest.raises(ValueError, match=r"shape \(2, 3\) has no ds_shape: it is not partitioned by ZeRO stage 3"):
        zero3_parameter(torch.nn.Parameter(torch.ones(2, 3)))


@pytest.mark.parametrize("adapter", [zero3_maps, zero3_secondary_maps])
def test_model_with_a_plain_parameter_is_refused(partitioned, adapter):
    model = model_of(one=partitioned((4, ), torch.ones(2)), inner=torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="Parameter 'inner.weight' has no ds_shape"):
        adapter(model)


@pytest.mark.parametrize("partition", [torch.ones(1), torch.ones(4), torch.ones(3, 1)])
def test_partition_of_another_size_is_refused(partitioned, partition):
    with pytest.raises(ValueError, match=r"\(2, 3\) has a partition of shape .*; expected shape \(3,\)"):
        zero3_parameter(partitioned((2, 3), partition))


def test_partition_that_was_swapped_out_is_refused(partitioned):
    # Of one element, as what DeepSpeed leaves in place of a partition on a disk.
    param = partitioned((2, ), torch.ones(1))
    param.ds_tensor.status = SimpleNamespace(name="NOT_AVAILABLE")
    with pytest.raises(ValueError, match="'one' has a partition .* NOT_AVAILABLE; .* bring it back into memory"):
        zero3_maps(model_of(one=param))


def test_quantised_partition_is_refused(partitioned):
    param = partitioned((2, ), torch.ones(1))
    param.ds_tensor.ds_quant_scale = torch.ones(1)
    with pytest.raises(ValueError, match="Parameter 'one' is quantised"):
        zero3_maps(model_of(one=param))


def test_wrong_number_of_locations_is_refused(partitioned):
    with pytest.raises(ValueError, match="locations"):
        zero3_parameter(partitioned((4, ), torch.ones(2)), locations=[0, 1, 2])


def test_replica_groups_without_the_parameters_own_are_refused(partitioned):
    with pytest.raises(ValueError, match=r"Parameter 'one' is cut over the ranks \[0, 1\], but replica_groups are"):
        zero3_maps(model_of(one=partitioned((4, ), torch.ones(2))), replica_groups=[[0, 2], [1, 3]])


def test_master_weights_that_were_swapped_out_are_refused(partitioned):
    param = partitioned((4, ), torch.ones(2))
    engine = engine_of(model_of(one=param), fp16_groups=[[param]], fp32_partitioned_groups_flat=[torch.empty(0)])
    with pytest.raises(ValueError, match="sub-group 0 have 0 elements; the partitions of its 1 parameters have 2"):
        zero3_master_maps(engine)


@pytest.mark.parametrize("adapter, stage", [(zero3_master_maps, "stage 3"), (zero12_master_maps, "stage 1 or 2")])
def test_optimizer_without_master_weights_is_refused(partitioned, adapter, stage):
    with pytest.raises(ValueError, match=f"SimpleNamespace without .*no master weights of ZeRO {stage}"):
        adapter(engine_of(model_of(one=partitioned((4, ), torch.ones(2)))))


def test_partitioned_parameter_is_not_replicated(partitioned):
    with pytest.raises(ValueError, match="Parameter 'one' is partitioned by ZeRO stage 3"):
        replicated_maps(model_of(one=partitioned((4, ), torch.ones(2))))


def test_ranks_without_this_process_are_refused(job):
    job(world_size=4, rank=3)
    with pytest.raises(ValueError, match=r"has rank 3, which is not among the ranks \[0, 2\]"):
        replicated_maps(torch.nn.Linear(2, 2), ranks=[0, 2])


@pytest.mark.parametrize("data", [torch.ones(4), torch.ones(4, dtype=torch.bfloat16)])
def test_parameter_outside_the_flat_buffer_is_refused(job, data):
    """As after offload_states, and after somebody gave a parameter other storage."""
    group, parameter, whole = job(), torch.nn.Parameter(data), torch.ones(4)
    engine = engine_of(model_of(one=parameter),
                       bit16_groups=[[parameter]],
                       bit16_groups_flat=[whole],
                       single_partition_of_fp32_groups=[torch.ones(2)],
                       real_dp_process_group=[group])
    with pytest.raises(ValueError, match=r"Parameter 'one' of shape \(4,\) and torch.* is no dense view"):
        zero12_master_maps(engine)


def test_partition_that_is_no_equal_part_is_refused(job):
    group, whole = job(), torch.ones(4)
    parameter = torch.nn.Parameter(whole)
    engine = engine_of(model_of(one=parameter),
                       bit16_groups=[[parameter]],
                       bit16_groups_flat=[whole],
                       single_partition_of_fp32_groups=[torch.ones(3)],
                       real_dp_process_group=[group])
    with pytest.raises(ValueError,
                       match="flat buffer of 4 elements over 2 ranks, but the master partition of this one has 3"):
        zero12_master_maps(engine)
