# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""How one parameter lies in the shards that hold it."""

from deepspeed.checkpoint.affine import tensors
from deepspeed.checkpoint.affine.checks import integer, integers, mapping, shown, sizes
from deepspeed.checkpoint.affine.columns import columns_from_pieces
from deepspeed.checkpoint.affine.elements import (check_exact_shards, check_whole_map, element_holders,
                                                  uncovered_elements)
from deepspeed.checkpoint.affine.identity import geometry_digest
from deepspeed.checkpoint.affine.piece import AffinePiece
from deepspeed.checkpoint.affine.serialization import map_to_dict, read_map
from deepspeed.checkpoint.affine.views import PieceSequence, ReadOnlyMapping, pieces_view, shard_shapes_view
from deepspeed.checkpoint.affine_geometry.strides import product


class ParamAffineMap:
    """A parameter's layout: for every location the shape of its shard and the pieces that the shard consists of.

    A map is a value. Nobody changes it after it is made, equal maps have equal hashes, and pickles carry it whole. It
    keeps pieces, their order and empty pieces as they were given. A map that contradicts itself or leaves a part of
    the parameter out can be made: it may describe what survived of a layout. ``validate`` and ``validate_coverage``
    check it, and so does everything that moves data.

    Args:
        logical_shape: shape of the whole parameter.
        shard_shapes: mapping from location id to the shape of its shard.
        pieces_by_rank: mapping from location id to a sequence of ``AffinePiece``.

    Example: a vector of four elements whose halves lie with locations 0 and 1::

        >>> halves = {rank: [AffinePiece((2, ), 2 * rank, (1, ), 0, (1, ), [rank])] for rank in (0, 1)}
        >>> ParamAffineMap((4, ), {0: (2, ), 1: (2, )}, halves).uncovered_offsets()
        []
    """

    __slots__ = ('_logical_shape', '_shard_shapes', '_pieces_by_rank', '_columns', '_digest', '_given')

    def __init__(self, logical_shape, shard_shapes, pieces_by_rank):
        shapes = {
            integer(rank, 'a rank of shard_shapes'): integers(shape, f'shard_shapes[{rank}]')
            for rank, shape in mapping(shard_shapes, 'shard_shapes').items()
        }
        pieces = {
            integer(rank, 'a rank of pieces_by_rank'): _checked_pieces(rank, pieces)
            for rank, pieces in mapping(pieces_by_rank, 'pieces_by_rank').items()
        }
        self._fill(integers(logical_shape, 'logical_shape'), given=(shapes, pieces))

    @classmethod
    def from_columns(cls, logical_shape, columns):
        """Return the map of ``PieceColumns``; ``logical_shape`` is the shape of the whole parameter.

        The columns are trusted and shared, not copied. Piece objects are made only where somebody asks for them.
        """
        affine_map = cls.__new__(cls)
        affine_map._fill(integers(logical_shape, 'logical_shape'), columns=columns)
        return affine_map

    def _fill(self, logical_shape, given=None, columns=None):
        for name, value in (('_logical_shape', logical_shape), ('_given', given), ('_columns', columns),
                            ('_shard_shapes', None), ('_pieces_by_rank', None), ('_digest', None)):
            object.__setattr__(self, name, value)

    def _cached(self, name, value):
        object.__setattr__(self, name, value)
        return value

    def __setattr__(self, name, value):
        raise AttributeError(f'A ParamAffineMap cannot be changed, so {name!r} cannot be set; make a new map.')

    def __delattr__(self, name):
        raise AttributeError(f'A ParamAffineMap cannot be changed, so {name!r} cannot be deleted; make a new map.')

    def __reduce__(self):
        if self._given is not None:
            return type(self), (self._logical_shape, *self._given)
        return type(self).from_columns, (self._logical_shape, self._columns)

    @property
    def logical_shape(self):
        """Shape of the whole parameter, a tuple."""
        return self._logical_shape

    @property
    def numel(self):
        """Number of elements of the whole parameter."""
        return product(self._logical_shape)

    @property
    def shard_shapes(self):
        """Read-only mapping from location id to the shape of its shard, a tuple."""
        if self._shard_shapes is not None:
            return self._shard_shapes
        if self._given is not None:
            return self._cached('_shard_shapes', ReadOnlyMapping(self._given[0]))
        return self._cached('_shard_shapes', shard_shapes_view(self._columns))

    @property
    def pieces_by_rank(self):
        """Read-only mapping from location id to a sequence of its ``AffinePiece`` objects."""
        if self._pieces_by_rank is not None:
            return self._pieces_by_rank
        if self._given is not None:
            views = {
                rank: PieceSequence(len(pieces), lambda pieces=pieces: pieces)
                for rank, pieces in self._given[1].items()
            }
            return self._cached('_pieces_by_rank', ReadOnlyMapping(views))
        return self._cached('_pieces_by_rank', pieces_view(self._columns))

    @property
    def columns(self):
        """The same pieces as ``PieceColumns``.

        Raises:
            ValueError: pieces that cannot be columns: strides of another number than sizes, a location with pieces
                but no shard shape, a negative size, numbers or addresses beyond 2**62.
        """
        if self._columns is None:
            sizes(self._logical_shape, 'logical_shape')
            self._cached('_columns', columns_from_pieces(*self._given))
        return self._columns

    def validate(self):
        """Raise unless the pieces of every shard fill its addresses once and only once.

        Raises:
            ValueError: too few or too many elements, an address outside the shard or used twice, shards of more than
                2**24 elements whose strides interleave.
        """
        check_exact_shards(self.columns)

    def validate_coverage(self):
        """Raise unless the shards are exact, hold the whole parameter, and every piece names its true holders.

        Raises:
            ValueError: a shard that ``validate`` refuses, a piece that leaves the parameter, a map that is too large
                to look at the elements of pieces that are no blocks.
            CoverageError: elements that no shard holds, holders that are not the ones named. It is a ``ValueError``
                and an ``AssertionError``.
        """
        check_whole_map(self)

    def uncovered_offsets(self):
        """Return the addresses in the flat parameter that no location holds, a sorted list.

        Raises:
            ValueError: a piece that leaves the parameter or its shard, a map that is too large to look at the elements
                of pieces that are no blocks, more than 2**28 such addresses.
        """
        return uncovered_elements(self).tolist()

    def holders(self):
        """Return a dict from each held address of the flat parameter to the set of locations whose shards hold it.

        Raises:
            ValueError: shards of more than 2**28 elements in all.
        """
        return element_holders(self.columns)

    def rebuild(self, shards, scale_power=1):
        """Return the whole parameter, put together from its shards.

        Args:
            shards: mapping from location id to its tensor, of any shape and strides. Locations whose shard is empty
                may be left out.
            scale_power: the tensors hold ``full * scale ** scale_power``: 1 for a parameter, for optimizer states see
                ``SCALE_POWER_BY_STATE``.

        Replicas must agree: where several locations hold an element they must hold the same value.

        Raises:
            TypeError: a shard that is no tensor.
            ValueError: shards that the map does not describe, replicas that differ, a map that is not exact or leaves
                a part of the parameter out, integers or eight-bit floats through a scale.
            NotImplementedError: optimizer states through a scale.

        Example::

            >>> contiguous_split_map((4, ), [2, 2], 0).rebuild({0: torch.zeros(2), 1: torch.ones(2)})
            tensor([0., 0., 1., 1.])
        """
        return tensors.rebuild(self, shards, scale_power)

    def extract(self, full_param, rank, scale_power=1):
        """Return the shard of one location, cut out of the whole parameter.

        Args:
            full_param: tensor with the elements of the parameter in row-major order, of any shape and strides.
            rank: location id.
            scale_power: as for ``rebuild``.

        Raises:
            TypeError: a parameter that is no tensor.
            ValueError: an unknown location, another number of elements, a shard that is not exact, integers or
                eight-bit floats through a scale.
            NotImplementedError: optimizer states through a scale.
        """
        return tensors.extract(self, full_param, rank, scale_power)

    def to_dict(self):
        """Return the map as plain lists, dicts and numbers, in format version 1, ranks ascending."""
        return map_to_dict(self._logical_shape, self.columns)

    @classmethod
    def from_dict(cls, entry):
        """Return the map that ``to_dict`` wrote, here or in DeepSpeed.

        Rank keys may be ints or, as JSON writes them, decimal strings. The input is not trusted. Whether the shards
        hold the whole parameter is left to ``validate_coverage``.

        Raises:
            ValueError: anything but a map whose shards are exact and whose pieces lie inside the parameter; the
                message says where.
        """
        logical_shape, columns = read_map(entry)
        check_exact_shards(columns)
        return cls.from_columns(logical_shape, columns)

    def __eq__(self, other):
        if not isinstance(other, ParamAffineMap):
            return NotImplemented
        return self is other or self._identity() == other._identity()

    def __hash__(self):
        return hash(self._identity())

    def _identity(self):
        """What equal maps have in common: a digest, or the pieces themselves where they cannot be columns."""
        if self._digest is None:
            try:
                self._cached('_digest', geometry_digest(self._logical_shape, self.columns))
            except ValueError:
                shapes, pieces = self._given
                listed = frozenset((rank, pieces[rank]) for rank in pieces if pieces[rank])
                self._cached('_digest', (self._logical_shape, frozenset(shapes.items()), listed))
        return self._digest

    def __repr__(self):
        pieces = sum(len(pieces) for pieces in self._given[1].values()) if self._given else self._columns.piece_count
        shards = len(self._given[0]) if self._given else self._columns.shard_count
        return f'ParamAffineMap(logical_shape={self._logical_shape}, shards={shards}, pieces={pieces})'


def as_map(value, what):
    """Return ``value``, a ``ParamAffineMap``; ``what`` names it in messages.

    Raises:
        TypeError: anything else.
    """
    if not isinstance(value, ParamAffineMap):
        raise TypeError(f'{what} must be a ParamAffineMap, but it is {shown(value)}.')
    return value


def _checked_pieces(rank, pieces):
    pieces = tuple(pieces)
    for position, piece in enumerate(pieces):
        if not isinstance(piece, AffinePiece):
            raise TypeError(f'pieces_by_rank[{rank}][{position}] must be an AffinePiece, but it is a '
                            f'{type(piece).__name__}.')
    return pieces
