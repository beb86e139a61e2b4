# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Pieces and maps: addresses derived by hand, maps as values, rebuild and extract, and every refusal."""

import copy
import pickle

import numpy as np
import pytest
import torch

from deepspeed.checkpoint.affine import (SCALE_POWER_BY_STATE, AffinePiece, CoverageError, ParamAffineMap, _scaled,
                                         block_gather_map, contiguous_split_map, flat_partition_map, replicated_map,
                                         segmented_map, sub_param_map, zero3_partition_map)
from deepspeed.checkpoint.affine import views
from deepspeed.checkpoint.affine.blocks import NotABlockError, WrapsError, parameter_blocks
from deepspeed.checkpoint.affine.validation import check_shards
from deepspeed.checkpoint.affine_geometry.addresses import AddressLayoutError


def _vector_map(*runs, numel):
    """A map of a vector: one location per list of ``(start, stop)``, each of which is a piece of its shard."""
    shards, pieces = {}, {}
    for rank, blocks in enumerate(runs):
        at = np.cumsum([0] + [stop - start for start, stop in blocks]).tolist()
        pieces[rank] = [
            AffinePiece((stop - start, ), start, (1, ), dest, (1, ), _vector_holders(runs, start, stop))
            for (start, stop), dest in zip(blocks, at)
        ]
        shards[rank] = (at[-1], )
    return ParamAffineMap((numel, ), shards, pieces)


def _vector_holders(runs, start, stop):
    return {
        rank
        for rank, blocks in enumerate(runs)
        if set(range(start, stop)) <= {index
                                       for low, high in blocks
                                       for index in range(low, high)}
    }


def _shards(affine_map, full):
    return {rank: affine_map.extract(full, rank) for rank in affine_map.shard_shapes}


# ------------------------------------------------------------------------------------------- pieces


def test_a_piece_keeps_plain_numbers():
    piece = AffinePiece(torch.Size([2, 3]), np.int64(6), [np.int32(3), 1], 0, (3, 1), {4, 1}, 2)
    assert piece.shape == (2, 3) and type(piece.source_offset) is int and piece.source_strides == (3, 1)
    assert piece.locations == frozenset({1, 4}) and piece.scale == 2.0 and type(piece.scale) is float
    assert piece.numel == 6


def test_a_piece_is_a_value():
    piece = AffinePiece((2, 3), 6, (3, 1), 0, (3, 1), [1])
    same = AffinePiece(shape=[2, 3],
                       source_offset=6,
                       source_strides=[3, 1],
                       dest_offset=0,
                       dest_strides=[3, 1],
                       locations={1},
                       scale=1.0)
    assert piece == same and hash(piece) == hash(same)
    assert piece != AffinePiece((2, 3), 6, (3, 1), 0, (3, 1), [1], scale=0.5)
    assert pickle.loads(pickle.dumps(piece)) == piece and copy.deepcopy(piece) == piece
    with pytest.raises(AttributeError):
        piece.source_offset = 0


@pytest.mark.parametrize('scale', [0.0, -0.0, float('nan'), float('inf'), -float('inf'), 10**400, -10**400])
def test_a_scale_that_cannot_be_undone_is_refused(scale):
    with pytest.raises(ValueError, match='not invertible'):
        AffinePiece((2, ), 0, (1, ), 0, (1, ), [0], scale)


@pytest.mark.parametrize('arguments', [((1.5, ), 0, (1, ), 0, (1, ), [0]), ((2, ), '0', (1, ), 0, (1, ), [0]),
                                       ((2, ), 0, (1, ), 0, (1, ), [None]), (2, 0, (1, ), 0, (1, ), [0])])
def test_numbers_that_are_no_integers_are_refused(arguments):
    with pytest.raises(TypeError, match='integer'):
        AffinePiece(*arguments)


def test_source_offsets_by_hand():
    assert list(AffinePiece((2, 3), 6, (10, 2), 0, (3, 1), [0]).source_offsets()) == [6, 8, 10, 16, 18, 20]
    assert list(AffinePiece((), 5, (), 0, (), [0]).source_offsets()) == [5]
    assert list(AffinePiece((2, 0), 5, (1, 1), 0, (1, 1), [0]).source_offsets()) == []
    assert list(AffinePiece((2, 2), 5, (0, 1), 0, (2, 1), [0]).source_offsets()) == [5, 6, 5, 6]


def test_views_share_memory_with_any_flat_tensor():
    """A buffer of a larger allocation, with or without a step, is addressed from its own first element."""
    piece = AffinePiece((2, 2), 1, (3, 1), 0, (2, 1), [0])
    storage = torch.arange(40)
    for flat in (storage[:6], storage[7:13], storage[5:17:2]):
        view = piece.source_view(flat)
        assert view.tolist() == [[flat[1].item(), flat[2].item()], [flat[4].item(), flat[5].item()]]
        assert view.untyped_storage().data_ptr() == storage.untyped_storage().data_ptr()
    assert piece.dest_view(storage[3:7]).tolist() == [[3, 4], [5, 6]]
    with pytest.raises(ValueError, match='flat tensor'):
        piece.source_view(torch.zeros(3, 2).t())


# ---------------------------------------------------------------------------------- addresses by hand


def test_row_and_column_splits_by_hand():
    """Of a 4 x 6 parameter: rows start at multiples of 6; a column cut keeps that stride and starts in the row."""
    rows = contiguous_split_map((4, 6), [1, 3], 0)
    assert rows.shard_shapes == {0: (1, 6), 1: (3, 6)}
    assert rows.pieces_by_rank == {
        0: [AffinePiece((1, 6), 0, (6, 1), 0, (6, 1), {0})],
        1: [AffinePiece((3, 6), 6, (6, 1), 0, (6, 1), {1})]
    }
    columns = contiguous_split_map((4, 6), [4, 0, 2], -1)
    assert columns.pieces_by_rank == {
        0: [AffinePiece((4, 4), 0, (6, 1), 0, (4, 1), {0})],
        1: [AffinePiece((4, 0), 4, (6, 1), 0, (0, 1), {1})],
        2: [AffinePiece((4, 2), 4, (6, 1), 0, (2, 1), {2})]
    }


def test_fused_columns_by_hand():
    """Q of 4 columns and K of 2, two ranks: a shard's rows have 3 elements, K begins at its third."""
    fused = sub_param_map((2, 6), [4, 2], [[2, 2], [1, 1]], 1)
    assert fused.pieces_by_rank[1] == [
        AffinePiece((2, 2), 2, (6, 1), 0, (3, 1), {1}),
        AffinePiece((2, 1), 5, (6, 1), 2, (3, 1), {1})
    ]


def test_segments_by_hand():
    mixed = segmented_map((6, 2), [(4, False), (2, True)], 0, 2, [[3, 1]])
    assert mixed.shard_shapes == {0: (5, 2), 1: (3, 2)}
    assert mixed.pieces_by_rank[1] == [
        AffinePiece((1, 2), 6, (2, 1), 0, (2, 1), {1}),
        AffinePiece((2, 2), 8, (2, 1), 2, (2, 1), {0, 1})
    ]


def test_a_replicated_segment_of_a_single_rank_is_its_own():
    alone = segmented_map((4, ), [(2, True), (2, False)], 0, 1, [[2]])
    assert [piece.locations for piece in alone.pieces_by_rank[0]] == [{0}, {0}]
    assert alone == ParamAffineMap(alone.logical_shape, alone.shard_shapes, alone.pieces_by_rank)


def test_gathered_blocks_by_hand():
    gathered = block_gather_map((2, 8), {3: [0, 1, 3], 1: [2]}, 2, 1)
    assert list(gathered.shard_shapes) == [3, 1]
    assert gathered.pieces_by_rank[3] == [
        AffinePiece((2, 4), 0, (8, 1), 0, (6, 1), {3}),
        AffinePiece((2, 2), 6, (8, 1), 4, (6, 1), {3})
    ]


def test_zero3_of_a_vector_by_hand():
    """10 over 4: c = 3; the last rank holds the one element that is left."""
    vector = zero3_partition_map((10, ), 4)
    assert vector.shard_shapes == {0: (3, ), 1: (3, ), 2: (3, ), 3: (1, )}
    assert vector.pieces_by_rank == {
        0: [AffinePiece((3, ), 0, (1, ), 0, (1, ), {0})],
        1: [AffinePiece((3, ), 3, (1, ), 0, (1, ), {1})],
        2: [AffinePiece((3, ), 6, (1, ), 0, (1, ), {2})],
        3: [AffinePiece((1, ), 9, (1, ), 0, (1, ), {3})]
    }


def test_zero3_of_a_matrix_by_hand():
    """5 x 4 over 2: c = 10, the middle of row 2. Both runs are whole rows and a half one."""
    matrix = zero3_partition_map((5, 4), 2)
    assert matrix.pieces_by_rank == {
        0: [AffinePiece((2, 4), 0, (4, 1), 0, (4, 1), {0}),
            AffinePiece((1, 2), 8, (4, 1), 8, (4, 1), {0})],
        1: [AffinePiece((1, 2), 10, (4, 1), 0, (4, 1), {1}),
            AffinePiece((2, 4), 12, (4, 1), 2, (4, 1), {1})]
    }


def test_a_run_of_three_axes_climbs_up_and_down_by_hand():
    """[7, 44) of 4 x 3 x 4: the row's last element, a whole row, two planes, two rows, and no part of a row."""
    run = flat_partition_map((4, 3, 4), [(7, 44)])
    assert run.pieces_by_rank[0] == [
        AffinePiece((1, 1, 1), 7, (12, 4, 1), 0, (12, 4, 1), {0}),
        AffinePiece((1, 1, 4), 8, (12, 4, 1), 1, (12, 4, 1), {0}),
        AffinePiece((2, 3, 4), 12, (12, 4, 1), 5, (12, 4, 1), {0}),
        AffinePiece((1, 2, 4), 36, (12, 4, 1), 29, (12, 4, 1), {0})
    ]
    assert run.shard_shapes == {0: (37, )}


def test_zero3_ranks_without_elements():
    """2 elements over 5 ranks, one of them with a scalar, and a parameter that has none."""
    few = zero3_partition_map((2, ), 5)
    assert few.shard_shapes == {0: (1, ), 1: (1, ), 2: (0, ), 3: (0, ), 4: (0, )}
    assert few.pieces_by_rank[4] == [] and few.uncovered_offsets() == []
    scalar = zero3_partition_map((), 2)
    assert scalar.pieces_by_rank == {0: [AffinePiece((), 0, (), 0, (), {0})], 1: []}
    empty = zero3_partition_map((3, 0), 2)
    assert empty.shard_shapes == {0: (0, ), 1: (0, )} and empty.pieces_by_rank == {0: [], 1: []}
    for affine_map in (few, scalar, empty):
        affine_map.validate_coverage()


def test_replica_groups_by_hand():
    groups = zero3_partition_map((6, ), 2, locations=np.array([[10, 11], [20, 21]]))
    assert groups.pieces_by_rank[21] == [AffinePiece((3, ), 3, (1, ), 0, (1, ), {11, 21})]
    assert groups.pieces_by_rank[10] == [AffinePiece((3, ), 0, (1, ), 0, (1, ), {10, 20})]
    groups.validate_coverage()


def test_equal_flat_bounds_are_replicas_and_gaps_are_legal():
    part = flat_partition_map((3, 4), [(6, 9), (0, 2), (6, 9)], locations=[7, 5, 3])
    assert part.pieces_by_rank[7][0].locations == {3, 7} and part.pieces_by_rank[5][0].locations == {5}
    assert part.uncovered_offsets() == [2, 3, 4, 5, 9, 10, 11]
    part.validate()
    with pytest.raises(CoverageError, match='have no holder'):
        part.validate_coverage()


def test_addresses_beyond_32_bits():
    """Rank 3 of 4 of a 2**20 x 2**20 parameter starts at 3 * 2**38; its last element is the parameter's."""
    huge = zero3_partition_map((2**20, 2**20), 4)
    assert huge.numel == 2**40
    assert huge.pieces_by_rank[3] == [AffinePiece((2**18, 2**20), 3 * 2**38, (2**20, 1), 0, (2**20, 1), {3})]
    ragged = zero3_partition_map((2**20, 2**20 - 1), 3)
    chunk = (2**40 - 2**20 + 2) // 3
    first = ragged.pieces_by_rank[1][0]
    assert first.source_offset == chunk and first.shape == (1, -chunk % (2**20 - 1))
    ragged.validate_coverage()
    split = contiguous_split_map((2**20, 2**20), [2**19, 2**19], 1)
    assert split.pieces_by_rank[1] == [AffinePiece((2**20, 2**19), 2**19, (2**20, 1), 0, (2**19, 1), {1})]
    split.validate_coverage()


@pytest.mark.parametrize('make', [
    lambda: replicated_map((2**40, 2**40), 1),
    lambda: replicated_map((0, 2**40, 2**40), 1),
    lambda: zero3_partition_map((2**63, ), 2),
    lambda: contiguous_split_map((4, 2**40), [2**40], 0),
    lambda: contiguous_split_map((4, ), [2**62, 2**62], 0),
    lambda: sub_param_map((4, ), [2**62, 2**62], [[2**62], [2**62]], 0),
    lambda: sub_param_map((4, ), [2**61, 2**61], [[2**62], [2**62]], 0),
    lambda: block_gather_map((4, ), {0: [0, 0, 0, 0]}, 2**61, 0),
    lambda: block_gather_map((4, 2**20), {0: [2**50]}, 2, 0),
])
def test_sizes_that_no_address_reaches_are_refused(make):
    with pytest.raises(ValueError, match=r'2\*\*62'):
        make()


@pytest.mark.parametrize('make', [
    lambda: contiguous_split_map((4, 2), [2, 2], 2),
    lambda: contiguous_split_map((), [1], 0),
    lambda: sub_param_map((4, 2), [4], [[2, 2]], -3),
    lambda: segmented_map((4, 2), [(4, True)], 5, 2, []),
    lambda: block_gather_map((4, 2), {0: [0]}, 1, 2),
])
def test_an_axis_that_the_parameter_does_not_have_is_refused(make):
    with pytest.raises(IndexError, match='partition_dim'):
        make()


@pytest.mark.parametrize('make', [
    lambda: contiguous_split_map((4, ), [5, -1], 0),
    lambda: replicated_map((4, ), -1),
    lambda: replicated_map((-4, ), 1),
    lambda: block_gather_map((4, ), {0: [-1]}, 1, 0),
    lambda: zero3_partition_map((4, ), 0),
])
def test_negative_sizes_are_refused(make):
    with pytest.raises(ValueError):
        make()


def test_thousands_of_ranks_cost_no_objects(monkeypatch):
    """Building, validating, comparing and storing a map of many ranks works on its columns alone."""

    def no_objects(*arguments, **keywords):
        raise AssertionError('a piece object was made')

    monkeypatch.setattr(views, 'AffinePiece', no_objects)
    many = zero3_partition_map((16383, 8189), 16384)
    many.validate_coverage()
    assert many == zero3_partition_map((16383, 8189), 16384) and hash(many) == hash(many)
    assert ParamAffineMap.from_dict(many.to_dict()) == many
    assert many.columns.piece_count < 3 * 16384
    with pytest.raises(AssertionError, match='object'):
        many.pieces_by_rank[0][0]


# ----------------------------------------------------------------------------------- maps as values


def test_a_map_cannot_be_changed():
    affine_map = contiguous_split_map((4, ), [2, 2], 0)
    with pytest.raises(AttributeError, match='make a new map'):
        affine_map.logical_shape = (5, )
    with pytest.raises(AttributeError, match='make a new map'):
        del affine_map._columns
    with pytest.raises(TypeError):
        affine_map.shard_shapes[0] = (4, )
    with pytest.raises(TypeError):
        affine_map.pieces_by_rank[0] = []
    with pytest.raises(ValueError):
        affine_map.columns.shape[0, 0] = 9
    assert affine_map


def test_changing_what_a_map_was_made_from_does_not_change_it():
    piece = AffinePiece((2, ), 0, (1, ), 0, (1, ), [0])
    shapes, pieces = {0: [2]}, {0: [piece]}
    affine_map = ParamAffineMap([2], shapes, pieces)
    shapes[1], pieces[1] = (1, ), []
    pieces[0].append(piece)
    assert affine_map.shard_shapes == {0: (2, )} and affine_map.pieces_by_rank == {0: [piece]}
    array = np.array([1, 2])
    columns = contiguous_split_map((4, ), [2, 2], 0).columns.with_location_ids(array)
    array[0] = 9
    assert array.flags.writeable and columns.location_ids.flags.writeable is False


def test_objects_and_columns_are_the_same_map():
    """Two ways to the same pieces: equal maps with equal hashes, whatever the order of ranks and sets."""
    built = segmented_map((6, 2), [(4, False), (2, True)], 0, 2, [[3, 1]])
    listed = ParamAffineMap(built.logical_shape, dict(list(built.shard_shapes.items())[::-1]),
                            dict(built.pieces_by_rank))
    assert built == listed and hash(built) == hash(listed) and len({built, listed}) == 1
    assert list(listed.shard_shapes) == [1, 0] and list(listed.pieces_by_rank) == [0, 1]
    assert built.to_dict() == listed.to_dict() and list(listed.to_dict()['ranks']) == [0, 1]


@pytest.mark.parametrize('other', [
    contiguous_split_map((6, ), [2, 4], 0),
    contiguous_split_map((3, 2), [3, 0], 0),
    block_gather_map((6, ), {
        0: [0, 1, 2],
        2: [3, 4, 5]
    }, 1, 0),
    replicated_map((6, ), 2),
    ParamAffineMap((6, ), {
        0: (3, ),
        1: (3, )
    }, {
        0: [AffinePiece((3, ), 0, (1, ), 0, (1, ), {0})],
        1: [AffinePiece((3, ), 3, (1, ), 0, (1, ), {1}, 2.0)]
    }),
    ParamAffineMap((6, ), {
        0: (3, ),
        1: (3, )
    }, {
        0: [AffinePiece((3, ), 0, (1, ), 0, (1, ), {0, 7})],
        1: [AffinePiece((3, ), 3, (1, ), 0, (1, ), {1})]
    }),
    'no map',
])
def test_different_maps_are_different(other):
    assert contiguous_split_map((6, ), [3, 3], 0) != other


def test_pieces_in_another_order_are_another_map():
    """The order is stored and DeepSpeed compares what is stored."""
    pieces = [AffinePiece((1, ), index, (1, ), index, (1, ), {0}) for index in range(2)]
    ordered = ParamAffineMap((2, ), {0: (2, )}, {0: pieces})
    assert ordered != ParamAffineMap((2, ), {0: (2, )}, {0: pieces[::-1]})


@pytest.mark.parametrize('affine_map', [
    zero3_partition_map((5, 3), 4, locations=[9, 2, 5, 4]),
    ParamAffineMap((5, ), {
        1: (5, ),
        0: (0, )
    }, {1: [AffinePiece((5, ), 0, (1, ), 0, (1, ), {1}, 0.5)]}),
    ParamAffineMap((5, ), {1: (5, )}, {1: [AffinePiece((5, ), 0, (1, 2), 0, (1, ), {1})]}),
])
def test_pickles_and_copies_are_equal_and_complete(affine_map):
    affine_map.pieces_by_rank, hash(affine_map)
    for twin in (pickle.loads(pickle.dumps(affine_map)), copy.deepcopy(affine_map), copy.copy(affine_map)):
        assert type(twin) is ParamAffineMap and twin == affine_map and hash(twin) == hash(affine_map)
        assert twin.pieces_by_rank == affine_map.pieces_by_rank
        assert list(twin.shard_shapes.items()) == list(affine_map.shard_shapes.items())
    columns = pickle.loads(pickle.dumps(zero3_partition_map((5, ), 2).columns))
    assert not columns.shape.flags.writeable


def test_relabelled_columns_share_everything_else():
    columns = zero3_partition_map((5, 3), 2).columns
    moved = columns.with_location_ids([7, 8])
    assert moved.shape.base is columns.shape.base and np.shares_memory(moved.source_strides, columns.source_strides)
    assert ParamAffineMap.from_columns((5, 3), moved).pieces_by_rank[8][0].locations == {8}


def test_pieces_are_kept_as_given():
    """Empty pieces, their order and the order of ranks survive, as columns and when read back."""
    pieces = {
        4: [AffinePiece((0, ), 3, (1, ), 2, (1, ), {4}),
            AffinePiece((2, ), 0, (1, ), 0, (1, ), {4, 1})],
        1: [AffinePiece((2, ), 0, (1, ), 0, (1, ), {4, 1})]
    }
    affine_map = ParamAffineMap((2, ), {1: (2, ), 4: (2, )}, pieces)
    assert affine_map.pieces_by_rank == pieces and list(affine_map.pieces_by_rank) == [4, 1]
    assert affine_map.pieces_by_rank[4][::-1] == tuple(pieces[4][::-1])
    read = ParamAffineMap.from_dict(affine_map.to_dict())
    assert read.pieces_by_rank == pieces and read == affine_map
    assert affine_map.columns.piece_count == 3 and len(affine_map.columns.set_starts) == 3


def test_views_compare_and_print_as_what_they_are():
    pieces = contiguous_split_map((4, ), [2, 2], 0).pieces_by_rank
    assert pieces[0] == list(pieces[0]) and pieces[0] == tuple(pieces[0]) and pieces[0] != [] and pieces[0] != 5
    assert list(pieces[0])[0] in pieces[0] and repr(pieces[0]) == repr(list(pieces[0]))
    assert pieces == {0: list(pieces[0]), 1: list(pieces[1])} and 2 not in pieces and pieces.get(2) is None
    with pytest.raises(TypeError):
        hash(pieces[0])
    assert repr(contiguous_split_map((4, ), [2, 2], 0)) == 'ParamAffineMap(logical_shape=(4,), shards=2, pieces=2)'


def test_maps_that_cannot_be_columns_are_values_too():
    bad = [AffinePiece((2, 2), 0, (1, ), 0, (2, 1), {0})]
    affine_map = ParamAffineMap((4, ), {0: (4, )}, {0: bad})
    assert affine_map.pieces_by_rank == {0: bad}
    assert affine_map == ParamAffineMap((4, ), {0: (4, )}, {0: bad}) and len({affine_map}) == 1
    assert affine_map != ParamAffineMap((4, ), {0: (4, )}, {0: bad * 2})
    for use in (affine_map.validate, affine_map.to_dict, affine_map.holders, lambda: affine_map.columns):
        with pytest.raises(ValueError, match='Rank 0, piece 0 has 2 axes but 1 source and 2 destination strides'):
            use()


def test_pieces_without_a_shard_are_refused_where_they_are_used():
    orphan = ParamAffineMap((2, ), {}, {3: [AffinePiece((2, ), 0, (1, ), 0, (1, ), {3})]})
    with pytest.raises(ValueError, match='Rank 3 lists pieces but has no shard shape'):
        orphan.validate()


@pytest.mark.parametrize('piece, shard', [
    (AffinePiece((2, ), 2**63, (1, ), 0, (1, ), {0}), (2, )),
    (AffinePiece((2, ), 2**63 - 1, (1, ), 0, (1, ), {0}), (2, )),
    (AffinePiece((2, ), 0, (2**63 - 1, ), 0, (1, ), {0}), (2, )),
    (AffinePiece((2**40, 2**40), 0, (0, 0), 0, (0, 0), {0}), (2, )),
    (AffinePiece((2, ), 0, (1, ), 0, (1, ), {0}), (2**40, 2**40)),
    (AffinePiece((2, ), 0, (1, ), 0, (1, ), {2**64}), (2, )),
])
def test_numbers_beyond_64_bits_are_refused_where_they_are_used(piece, shard):
    with pytest.raises(ValueError, match='64 bits|beyond|more than'):
        ParamAffineMap((4, ), {0: shard}, {0: [piece]}).validate()


def test_arguments_of_a_map_are_checked():
    with pytest.raises(TypeError, match='AffinePiece'):
        ParamAffineMap((2, ), {0: (2, )}, {0: ['piece']})
    with pytest.raises(TypeError, match='shard_shapes'):
        ParamAffineMap((2, ), {'0': (2, )}, {})
    with pytest.raises(TypeError, match='logical_shape'):
        ParamAffineMap((2.0, ), {0: (2, )}, {})
    with pytest.raises(TypeError, match='shard_shapes must be a mapping'):
        ParamAffineMap((2, ), [(2, )], {})
    with pytest.raises(TypeError, match='pieces_by_rank must be a mapping'):
        ParamAffineMap((2, ), {0: (2, )}, None)


@pytest.mark.parametrize('shard, piece, message', [
    ((-2, -2), (4, ), r'Rank 0 has a shard of shape \(-2, -2\), which has a negative size'),
    ((4, ), (-2, -2), r'Rank 0, piece 0 has shape \(-2, -2\), which has a negative size'),
    ((0, -1), (0, -1), r'Rank 0 has a shard of shape \(0, -1\)'),
])
def test_negative_sizes_are_refused_where_they_are_used(shard, piece, message):
    """Two of them multiply to a number of elements that looks right."""
    strides = (1, ) * len(piece)
    affine_map = ParamAffineMap((4, ), {0: shard}, {0: [AffinePiece(piece, 0, strides, 0, strides, [0])]})
    for use in (affine_map.validate, affine_map.validate_coverage, affine_map.uncovered_offsets, affine_map.to_dict,
                lambda: affine_map.rebuild({0: torch.zeros(4)}), lambda: affine_map.extract(torch.zeros(4), 0)):
        with pytest.raises(ValueError, match=message):
            use()


# ------------------------------------------------------------------------------------------ checking


def test_shards_that_are_not_exact_are_refused():
    short = ParamAffineMap((4, ), {5: (3, )}, {5: [AffinePiece((2, ), 0, (1, ), 0, (1, ), {5})]})
    with pytest.raises(ValueError, match='Rank 5.*account for'):
        short.validate()
    beyond = ParamAffineMap((4, ), {5: (2, )}, {5: [AffinePiece((2, ), 0, (1, ), 1, (1, ), {5})]})
    with pytest.raises(ValueError, match='rank 5 piece 0'):
        beyond.validate()
    twice = ParamAffineMap(
        (4, ), {5: (4, )},
        {5: [AffinePiece(
            (2, ), 0, (1, ), 0,
            (1, ), {5}), AffinePiece((2, ), 2, (1, ), 1, (1, ), {5})]})
    with pytest.raises(ValueError, match='twice'):
        twice.validate()
    onto_itself = ParamAffineMap((4, ), {5: (4, )}, {5: [AffinePiece((2, 2), 0, (2, 1), 0, (1, 1), {5})]})
    with pytest.raises(ValueError, match='twice'):
        onto_itself.validate()
    unlisted = ParamAffineMap((4, ), {5: (4, ), 6: (2, )}, {5: [AffinePiece((4, ), 0, (1, ), 0, (1, ), {5})]})
    with pytest.raises(ValueError, match='Rank 6'):
        unlisted.validate()


def _interleaved(numel, second=(2, 2)):
    """One shard filled by steps of 3 and of 2, and from address 5 on by a dense run: no divisibility chain."""
    dests = [(2, 0, 3), (1, 1, 1), (2, *second), (numel - 5, 5, 1)]
    starts = np.cumsum([0] + [size for size, _, _ in dests]).tolist()
    pieces = [
        AffinePiece((size, ), start, (1, ), first, (step, ), {0}) for start, (size, first, step) in zip(starts, dests)
    ]
    return ParamAffineMap((numel, ), {0: (numel, )}, {0: pieces})


def test_shards_whose_strides_interleave_are_looked_at_address_by_address():
    affine_map = _interleaved(12)
    with pytest.raises(AddressLayoutError):
        check_shards(affine_map.columns)
    affine_map.validate()
    affine_map.validate_coverage()
    shard = affine_map.extract(torch.arange(12), 0)
    assert shard.tolist() == [0, 2, 3, 1, 4, 5, 6, 7, 8, 9, 10, 11]
    assert torch.equal(affine_map.rebuild({0: shard}), torch.arange(12))

    colliding = _interleaved(12, second=(1, 2))
    for use in (colliding.validate, colliding.validate_coverage, lambda: colliding.rebuild({0: torch.zeros(12)}),
                lambda: colliding.extract(torch.zeros(12), 0)):
        with pytest.raises(ValueError, match='Rank 0 has no piece at shard address 2,.*twice'):
            use()


def test_interleaved_pieces_of_several_axes_and_shards_are_told_apart():
    """The second shard is all steps of 3 and 2 on both sides; scalars and empty pieces stand between."""
    steps = [((4, ), 0, 3), ((3, ), 1, 3), ((2, ), 2, 3), ((2, ), 8, 2), ((), 11, 1), ((0, ), 12, 1)]
    interleaved = [
        AffinePiece(shape, at, (step, ) * len(shape), at, (step, ) * len(shape), {7}) for shape, at, step in steps
    ]
    whole = AffinePiece((3, 4), 0, (4, 1), 0, (1, 3), {3, 7})
    affine_map = ParamAffineMap((12, ), {3: (4, 3), 7: (12, )}, {3: [whole], 7: interleaved})
    affine_map.validate()
    full = torch.arange(12)
    assert affine_map.extract(full, 3).tolist() == full.view(3, 4).t().tolist()
    assert torch.equal(affine_map.rebuild(_shards(affine_map, full)), full)


def test_large_shards_whose_strides_interleave_stay_undecided():
    _interleaved(2**24).validate()
    with pytest.raises(AddressLayoutError, match='rank 0 piece'):
        _interleaved(2**24 + 1).validate()


def test_reports_about_each_of_too_many_elements_are_refused():
    with pytest.raises(ValueError, match=r'more than 2\*\*28 elements, .*columns'):
        replicated_map((2**20, 2**20), 2).holders()
    with pytest.raises(ValueError, match=r'more than 2\*\*28 elements .*validate_coverage'):
        ParamAffineMap((2**31, 2**31), {}, {}).uncovered_offsets()


def test_elements_that_nobody_holds_are_named():
    affine_map = _vector_map([(0, 2)], [(3, 5)], numel=6)
    assert affine_map.uncovered_offsets() == [2, 5]
    affine_map.validate()
    for kind in (AssertionError, ValueError):
        with pytest.raises(kind, match='2 elements .*have no holder.*flat offset 2'):
            affine_map.validate_coverage()


def test_holders_are_the_shards_that_list_an_element():
    affine_map = _vector_map([(0, 2)], [(1, 3)], numel=4)
    assert affine_map.holders() == {0: {0}, 1: {0, 1}, 2: {1}}
    assert replicated_map((2, ), 2).holders() == {0: {0, 1}, 1: {0, 1}}


@pytest.mark.parametrize('locations', [{0}, {0, 1, 2}, {1}, set()])
def test_pieces_that_name_other_holders_are_refused(locations):
    pieces = [AffinePiece((2, ), 0, (1, ), 0, (1, ), locations)]
    lying = ParamAffineMap((2, ), {0: (2, ), 1: (2, )}, {0: pieces, 1: pieces})
    lying.validate()
    for kind in (AssertionError, ValueError):
        with pytest.raises(kind):
            lying.validate_coverage()


def test_pieces_that_are_no_blocks_of_the_parameter():
    """A flat run over several rows and every second element are truthful pieces; they are looked at one by one."""
    flat = ParamAffineMap((2, 3), {0: (6, )}, {0: [AffinePiece((6, ), 0, (1, ), 0, (1, ), {0})]})
    strided = ParamAffineMap((2, 3), {
        0: (3, ),
        1: (3, )
    }, {rank: [AffinePiece((3, ), rank, (2, ), 0, (1, ), {rank})]
        for rank in (0, 1)})
    full = torch.arange(6).view(2, 3)
    for affine_map in (flat, strided):
        affine_map.validate_coverage()
        assert affine_map.uncovered_offsets() == []
        assert torch.equal(affine_map.rebuild(_shards(affine_map, full)), full)
    half = ParamAffineMap((2, 3), {0: (3, )}, {0: strided.pieces_by_rank[0]})
    assert half.uncovered_offsets() == [1, 3, 5]
    with pytest.raises(CoverageError, match='3 elements .*have no holder, the first of them flat offset 1'):
        half.validate_coverage()
    misnamed = ParamAffineMap((2, 3), {0: (6, )}, {0: [AffinePiece((6, ), 0, (1, ), 0, (1, ), {0, 4})]})
    with pytest.raises(CoverageError, match=r'claims \[0, 4\] for flat offset 0, whose true holders are \[0\]'):
        misnamed.validate_coverage()


@pytest.mark.parametrize('named, message', [
    (({0, 1}, {0, 1}), None),
    (({0}, {0, 1}), r'rank 0 .*claims \[0\] '),
    (({0, 1}, {1}), r'rank 1 .*claims \[1\] '),
    (({0, 5}, {0, 1}), r'rank 0 .*claims \[0, 5\] '),
    (({0, 1}, {1, 5}), r'rank 1 .*claims \[1, 5\] '),
    (({1}, {1}), r'rank 0 .*claims \[1\] '),
    ((set(), set()), r'no holder'),
])
def test_names_of_pieces_that_are_no_blocks(named, message):
    """Two locations hold all of a parameter as one flat run each."""
    runs = {rank: [AffinePiece((6, ), 0, (1, ), 0, (1, ), named[rank])] for rank in (0, 1)}
    affine_map = ParamAffineMap((2, 3), {0: (6, ), 1: (6, )}, runs)
    if message is None:
        affine_map.validate_coverage()
    else:
        with pytest.raises(CoverageError, match=message):
            affine_map.validate_coverage()
    assert affine_map.uncovered_offsets() == []


def _one_run(shape, numel, offset=0, stride=1):
    return ParamAffineMap(shape, {0: (numel, )}, {0: [AffinePiece((numel, ), offset, (stride, ), 0, (1, ), {0})]})


@pytest.mark.parametrize('run', [_one_run((2**19, 2**20), 2**20 + 1), _one_run((2**19, 2**20), 2, stride=3)])
def test_parameters_too_large_to_look_at_each_element_are_refused(run):
    for check in (run.validate_coverage, run.uncovered_offsets):
        with pytest.raises(ValueError, match=r'2\*\*28 elements.*flat_partition_map'):
            check()


@pytest.mark.parametrize('run', [
    _one_run((4, 3), 4, offset=9),
    _one_run((4, 3), 2, offset=12),
    _one_run((4, 3), 3, offset=3, stride=5),
    _one_run((2**19, 2**20), 2, offset=2**39 - 1),
])
def test_pieces_that_leave_the_parameter_are_refused_by_geometry(run):
    for check in (run.validate_coverage, run.uncovered_offsets):
        with pytest.raises(ValueError, match='rank 0 piece 0|Rank 0 has a piece') as refusal:
            check()
        assert not isinstance(refusal.value, CoverageError)


def test_blocks_that_wrap_are_told_from_blocks_that_leave_the_parameter():
    with pytest.raises(WrapsError, match='over the edge .*flat_partition_map'):
        parameter_blocks(_one_run((4, 3), 4).columns, (4, 3))
    with pytest.raises(ValueError, match='over the edge') as refusal:
        parameter_blocks(_one_run((4, 3), 4, offset=9).columns, (4, 3))
    assert not isinstance(refusal.value, NotABlockError)


# -------------------------------------------------------------------------------- rebuild and extract

_ALL_KINDS = [
    replicated_map((4, 6), 3),
    contiguous_split_map((4, 6), [1, 0, 3], 0),
    contiguous_split_map((4, 6), [1, 0, 5], 1),
    sub_param_map((6, 4), [4, 2], [[3, 1], [1, 1]], 0),
    sub_param_map((4, 6), [4, 2], [[3, 1], [1, 1]], 1),
    segmented_map((4, 6), [(4, False), (2, True)], 1, 2, [[3, 1]]),
    block_gather_map((4, 6), {
        7: [2, 0],
        3: [1]
    }, 2, 1),
    zero3_partition_map((4, 6), 5),
    zero3_partition_map((4, 3, 2), 5, locations=[[1, 2, 3, 4, 5], [6, 7, 8, 9, 0]]),
    flat_partition_map((4, 6), [(0, 11), (11, 11), (11, 24)]),
    zero3_partition_map((), 2),
    replicated_map((), 2),
    zero3_partition_map((0, 3), 2),
]


@pytest.mark.parametrize('affine_map', _ALL_KINDS)
@pytest.mark.parametrize(
    'dtype',
    [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.int64, torch.uint16, torch.bool])
def test_extract_and_rebuild_are_inverse(affine_map, dtype):
    full = torch.arange(affine_map.numel).to(dtype).view(affine_map.logical_shape)
    shards = _shards(affine_map, full)
    assert all(shards[rank].shape == affine_map.shard_shapes[rank] for rank in shards)
    rebuilt = affine_map.rebuild(shards)
    assert rebuilt.shape == affine_map.logical_shape and rebuilt.dtype == dtype
    assert torch.equal(rebuilt.reshape(-1).view(torch.uint8), full.reshape(-1).view(torch.uint8))


def test_shards_may_be_any_views():
    """Column slices, transposed tensors, steps and views into one buffer: read where they are, never changed."""
    affine_map = contiguous_split_map((4, 6), [2, 4], 1)
    full = torch.arange(24.).view(4, 6)
    stepped = torch.zeros(16)
    stepped[::2] = full[:, :2].reshape(-1)
    transposed = full[:, 2:].t().contiguous().t()
    before = stepped.clone(), transposed.clone()
    for shards in ({0: full[:, :2], 1: full[:, 2:]}, {0: stepped[::2], 1: transposed}):
        assert torch.equal(affine_map.rebuild(shards), full)
    assert torch.equal(stepped, before[0]) and torch.equal(transposed, before[1])
    wide = torch.arange(100.)
    assert torch.equal(affine_map.extract(wide[5:29], 1), wide[5:29].view(4, 6)[:, 2:])
    assert torch.equal(affine_map.extract(full.t().contiguous().t(), 0), full[:, :2])
    expanded = torch.ones(1).expand(24)
    assert torch.equal(affine_map.extract(expanded, 1), torch.ones(4, 4))


def test_results_are_copies_without_a_gradient():
    affine_map = contiguous_split_map((4, ), [2, 2], 0)
    parameter = torch.nn.Parameter(torch.ones(4))
    shard = affine_map.extract(parameter, 0)
    assert not shard.requires_grad and not affine_map.rebuild({0: shard, 1: parameter[2:]}).requires_grad
    shard.zero_()
    assert torch.equal(parameter.detach(), torch.ones(4))


def test_a_scale_is_multiplied_in_and_divided_out():
    affine_map = replicated_map((3, ), 2, scale=1 / 3)
    full = torch.tensor([1., 2., 5.])
    shard = affine_map.extract(full, 1)
    assert torch.equal(shard, full * (1 / 3))
    assert torch.equal(affine_map.rebuild({0: shard, 1: shard}), shard / (1 / 3))
    assert _scaled(shard, 1.0, -2) is shard
    assert torch.equal(_scaled(shard, 0.5, 1), shard / 0.5)


@pytest.mark.parametrize('state, power', [('exp_avg', -1), ('exp_avg_sq', -2)])
def test_optimizer_states_do_not_move_through_a_scale(state, power):
    assert SCALE_POWER_BY_STATE == {'fp32': 1, 'exp_avg': -1, 'exp_avg_sq': -2}
    assert SCALE_POWER_BY_STATE[state] == power
    scaled, plain = replicated_map((3, ), 2, scale=0.5), replicated_map((3, ), 2)
    shards = {0: torch.ones(3), 1: torch.ones(3)}
    with pytest.raises(NotImplementedError, match='source coordinate'):
        scaled.rebuild(shards, power)
    with pytest.raises(NotImplementedError, match='source coordinate'):
        scaled.extract(torch.ones(3), 0, power)
    assert torch.equal(plain.rebuild(shards, power), torch.ones(3))
    assert torch.equal(plain.extract(torch.ones(3), 0, power), torch.ones(3))


@pytest.mark.parametrize('dtype', [torch.int32, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2])
def test_dtypes_without_exact_division_do_not_move_through_a_scale(dtype):
    scaled = replicated_map((3, ), 1, scale=0.5)
    ones = torch.ones(3).to(dtype)
    with pytest.raises(ValueError, match='integers, booleans and eight-bit floats'):
        scaled.rebuild({0: ones})
    with pytest.raises(ValueError, match='integers, booleans and eight-bit floats'):
        scaled.extract(ones, 0)
    plain = replicated_map((3, ), 1)
    assert torch.equal(plain.rebuild({0: plain.extract(ones, 0)}).float(), torch.ones(3))


def test_ranks_with_empty_shards_may_be_left_out():
    """Also where such a rank lists an empty piece, or nothing at all."""
    split = contiguous_split_map((4, ), [4, 0], 0)
    assert len(split.pieces_by_rank[1]) == 1
    assert torch.equal(split.rebuild({0: torch.arange(4)}), torch.arange(4))
    assert split.extract(torch.arange(4), 1).shape == (0, )
    unlisted = ParamAffineMap((4, ), {0: (4, ), 1: (0, )}, {0: split.pieces_by_rank[0]})
    assert torch.equal(unlisted.rebuild({0: torch.arange(4)}), torch.arange(4))
    assert unlisted.extract(torch.arange(4), 1).shape == (0, )


def test_shards_that_the_map_does_not_describe_are_refused():
    affine_map = contiguous_split_map((4, ), [2, 2], 0)
    two = torch.ones(2)
    with pytest.raises(ValueError, match='rank 1 has 3 elements, but the map describes 2'):
        affine_map.rebuild({0: two, 1: torch.ones(3)})
    with pytest.raises(ValueError, match='rank 2, but the map describes'):
        affine_map.rebuild({0: two, 1: two, 2: two})
    with pytest.raises(ValueError, match=r'\[1\] are missing'):
        affine_map.rebuild({0: two})
    with pytest.raises(ValueError, match='one shard at least'):
        affine_map.rebuild({})
    with pytest.raises(ValueError, match='different dtypes'):
        affine_map.rebuild({0: two, 1: two.double()})
    with pytest.raises(ValueError, match='Rank 7 has no shard'):
        affine_map.extract(torch.ones(4), 7)
    with pytest.raises(ValueError, match='has 5 elements, but the map describes 4'):
        affine_map.extract(torch.ones(5), 0)


def test_what_is_no_tensor_is_refused():
    affine_map = replicated_map((4, ), 1)
    with pytest.raises(TypeError, match='The shard of rank 0 must be a torch.Tensor, but it is a value of type list'):
        affine_map.rebuild({0: [1, 2, 3, 4]})
    with pytest.raises(TypeError, match='The parameter must be a torch.Tensor'):
        affine_map.extract([1, 2, 3, 4], 0)
    with pytest.raises(TypeError, match='must be a torch.Tensor'):
        affine_map.pieces_by_rank[0][0].source_view([1, 2, 3, 4])


def test_an_incomplete_parameter_is_not_rebuilt():
    with pytest.raises(ValueError, match='leave 1 elements .*offset 2'):
        _vector_map([(0, 2)], [(3, 4)], numel=4).rebuild({0: torch.ones(2), 1: torch.ones(1)})


def test_lying_maps_move_nothing():
    """Pieces outside the shard, outside the parameter (where a larger storage goes on), or twice on one element."""
    inexact = ParamAffineMap((4, ), {0: (4, )}, {0: [AffinePiece((4, ), 0, (1, ), 1, (1, ), {0})]})
    beyond = ParamAffineMap((4, ), {0: (4, )}, {0: [AffinePiece((4, ), 1, (1, ), 0, (1, ), {0})]})
    negative = ParamAffineMap((4, ), {0: (4, )}, {0: [AffinePiece((4, ), -1, (1, ), 0, (1, ), {0})]})
    wide = torch.arange(9.)
    for affine_map in (inexact, beyond, negative):
        with pytest.raises(ValueError):
            affine_map.extract(wide[2:6], 0)
        with pytest.raises(ValueError):
            affine_map.rebuild({0: wide[2:6]})
    repeated = ParamAffineMap((2, ), {0: (4, )}, {0: [AffinePiece((2, 2), 0, (0, 1), 0, (2, 1), {0})]})
    assert repeated.extract(torch.tensor([3, 4]), 0).tolist() == [3, 4, 3, 4]
    with pytest.raises(ValueError, match='more than once'):
        repeated.rebuild({0: torch.zeros(4)})
    entangled = ParamAffineMap((3, ), {0: (4, )}, {0: [AffinePiece((2, 2), 0, (1, 1), 0, (2, 1), {0})]})
    with pytest.raises(ValueError, match='flat offset 1 more than once'):
        entangled.rebuild({0: torch.zeros(4)})


# ------------------------------------------------------------------------------------------ replicas


def test_replicas_that_differ_are_refused():
    affine_map = replicated_map((2, 3), 3)
    full = torch.arange(6.).view(2, 3)
    shards = {rank: full.clone() for rank in range(3)}
    assert torch.equal(affine_map.rebuild(shards), full)
    shards[2][1, 1] += 1
    with pytest.raises(ValueError, match=r'\[0, 1, 2\] hold different data'):
        affine_map.rebuild(shards)


@pytest.mark.parametrize('runs', [
    ([(0, 4)], [(0, 2), (2, 4)]),
    ([(0, 2), (2, 4)], [(0, 4)]),
    ([(0, 3), (3, 4)], [(0, 1), (1, 4)], [(0, 4)]),
])
def test_replicas_with_other_boundaries_are_compared(runs):
    affine_map = _vector_map(*runs, numel=4)
    full = torch.tensor([1., 2., 3., 4.])
    shards = {rank: full.clone() for rank in range(len(runs))}
    assert torch.equal(affine_map.rebuild(shards), full)
    for rank in shards:
        for index in range(4):
            damaged = {key: value.clone() for key, value in shards.items()}
            damaged[rank][index] = 9
            with pytest.raises(ValueError, match='different data'):
                affine_map.rebuild(damaged)


@pytest.mark.parametrize('shape, strides', [
    ((6, ), (1, )),
    ((6, 1), (1, 0)),
    ((6, 1), (1, 5)),
    ((1, 6), (9, 1)),
    ((2, 3), (3, 1)),
    ((3, 2), (1, 3)),
])
def test_replicas_that_list_other_axes_are_compared(shape, strides):
    """The same six elements, given with another number of axes, in another order, or with other idle strides."""
    plain = AffinePiece((6, ), 0, (1, ), 0, (1, ), {0, 1})
    other = AffinePiece(shape, 0, strides, 0, strides, {0, 1})
    for pieces in ({0: [plain], 1: [other]}, {0: [other], 1: [plain]}):
        affine_map = ParamAffineMap((6, ), {0: (6, ), 1: (6, )}, pieces)
        full = torch.arange(6.)
        assert torch.equal(affine_map.rebuild({0: full, 1: full}), full)
        damaged = full.clone()
        damaged[4] = 9
        for shards in ({0: full, 1: damaged}, {0: damaged, 1: full}):
            with pytest.raises(ValueError, match='different data'):
                affine_map.rebuild(shards)


def test_pieces_are_numbered_by_their_shards_and_not_by_the_order_given():
    first, second = (AffinePiece((2, ), 2 * rank, (1, ), 0, (1, ), {rank}) for rank in (0, 1))
    affine_map = ParamAffineMap((4, ), {0: (2, ), 1: (2, )}, {1: [second], 0: [first]})
    assert affine_map.rebuild({1: torch.ones(2), 0: torch.zeros(2)}).tolist() == [0, 0, 1, 1]


def test_replicas_that_overlap_in_part_are_compared():
    """Element 1 is held twice; only there do the two shards have to agree."""
    affine_map = _vector_map([(0, 2)], [(1, 3)], numel=3)
    assert affine_map.rebuild({0: torch.tensor([1, 2]), 1: torch.tensor([2, 3])}).tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match='different data'):
        affine_map.rebuild({0: torch.tensor([1, 2]), 1: torch.tensor([5, 3])})


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float8_e5m2, torch.complex64])
@pytest.mark.parametrize('runs', [([(0, 3)], [(0, 3)]), ([(0, 3)], [(0, 1), (1, 3)])])
def test_equal_bits_and_equal_values_agree(dtype, runs):
    affine_map = _vector_map(*runs, numel=3)
    ours = torch.tensor([float('nan'), 0.0, 1.0]).to(dtype)
    theirs = torch.tensor([float('nan'), -0.0, 1.0]).to(dtype)
    assert torch.isnan(affine_map.rebuild({0: ours, 1: theirs})[0].to(torch.complex64)).item()
    other = torch.tensor([float('nan'), 0.0, 2.0]).to(dtype)
    with pytest.raises(ValueError, match='different data'):
        affine_map.rebuild({0: ours, 1: other})
    with pytest.raises(ValueError, match='different data'):
        affine_map.rebuild({0: ours, 1: torch.tensor([1.0, 0.0, 1.0]).to(dtype)})
