# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The pieces of a map as numpy columns.

A map over thousands of ranks has thousands of pieces, and everything that looks at all of them at once (planning,
validation, union) does so over these arrays. Piece objects are made from them where somebody asks for one.
"""

from dataclasses import dataclass, fields, replace
from hashlib import blake2b
from itertools import chain

import numpy as np

from deepspeed.checkpoint.affine.checks import MAX_ELEMENTS


@dataclass(frozen=True, eq=False, repr=False)
class PieceColumns:
    """P pieces over R shards, as read-only arrays. Offsets and strides are in elements.

    Axes that a piece or a shard does not have are padded: sizes with 1, strides with 0.

    Attributes:
        location_ids: int64[L], location ids, each once; the first R have a shard here, the others are only named as
            holders.
        shard_ndim: int64[R], number of axes of each shard.
        shard_shape: int64[R, J], sizes of each shard.
        shard: int64[P], index into ``location_ids`` of the shard that lists the piece; ascending. Within a shard the
            pieces keep their order.
        ndim: int64[P], number of axes of each piece.
        shape: int64[P, K], sizes of each piece.
        source_offset: int64[P], first address in the flat parameter.
        source_strides: int64[P, K], steps in the flat parameter.
        dest_offset: int64[P], first address in the flat shard.
        dest_strides: int64[P, K], steps in the flat shard.
        holders: int64[P], index of the set of locations that hold the piece. Distinct sets have distinct indices.
        set_starts: int64[H + 1], where each set of holders starts in ``set_members``.
        set_members: int64[M], indices into ``location_ids``, ascending within a set.
        scale: float64[P], the factor by which the shard holds the piece.

    The arrays are trusted: ``columns_from_pieces`` and ``read_map`` check what they are given, the constructors of
    layouts check their arguments.
    """
    location_ids: np.ndarray
    shard_ndim: np.ndarray
    shard_shape: np.ndarray
    shard: np.ndarray
    ndim: np.ndarray
    shape: np.ndarray
    source_offset: np.ndarray
    source_strides: np.ndarray
    dest_offset: np.ndarray
    dest_strides: np.ndarray
    holders: np.ndarray
    set_starts: np.ndarray
    set_members: np.ndarray
    scale: np.ndarray

    def __post_init__(self):
        for field in fields(self):
            dtype = np.float64 if field.name == 'scale' else np.int64
            # A view, so that making it read-only does not lock the caller's own array.
            array = np.ascontiguousarray(getattr(self, field.name), dtype=dtype).view()
            array.flags.writeable = False
            object.__setattr__(self, field.name, array)

    def __reduce__(self):
        # Rebuilt through __init__, because numpy's own pickling forgets that an array is read-only.
        return PieceColumns, tuple(getattr(self, field.name) for field in fields(self))

    def __repr__(self):
        return f'PieceColumns(pieces={self.piece_count}, shards={self.shard_count})'

    @property
    def piece_count(self):
        """Number of pieces, P."""
        return len(self.shard)

    @property
    def shard_count(self):
        """Number of locations with a shard, R."""
        return len(self.shard_ndim)

    @property
    def shard_ids(self):
        """int64[R], ids of the locations with a shard."""
        return self.location_ids[:self.shard_count]

    @property
    def volume(self):
        """int64[P], number of elements of each piece."""
        return self.shape.prod(axis=1)

    @property
    def shard_numel(self):
        """int64[R], number of elements of each shard."""
        return self.shard_shape.prod(axis=1)

    @property
    def shard_starts(self):
        """int64[R + 1]: the pieces of shard ``r`` are those at ``shard_starts[r]:shard_starts[r + 1]``."""
        return np.searchsorted(self.shard, np.arange(self.shard_count + 1))

    def rank(self, piece):
        """Location id of the shard that lists the piece at index ``piece``."""
        return int(self.location_ids[self.shard[piece]])

    def position(self, piece):
        """Place of the piece at index ``piece`` in the list of its shard."""
        return piece - int(np.searchsorted(self.shard, self.shard[piece]))

    def rows(self, start=0, stop=None):
        """Pieces ``start`` to ``stop`` as plain values, without padding.

        Yields:
            ``(shape, source_offset, source_strides, dest_offset, dest_strides, holders, scale)``: lists for shape and
            strides, the index of a set for holders.
        """
        table = (self.ndim, self.shape, self.source_offset, self.source_strides, self.dest_offset, self.dest_strides,
                 self.holders, self.scale)
        rows = zip(*(column[start:stop].tolist() for column in table))
        for ndim, shape, source, source_strides, dest, dest_strides, holders, scale in rows:
            yield shape[:ndim], source, source_strides[:ndim], dest, dest_strides[:ndim], holders, scale

    def holder_ids(self, set_index):
        """Location ids of one set of holders, ascending by their index."""
        members = self.set_members[self.set_starts[set_index]:self.set_starts[set_index + 1]]
        return self.location_ids[members].tolist()

    def with_location_ids(self, location_ids):
        """The same pieces under other ids (int64[L], in the same order); all other arrays are shared."""
        relabelled = replace(self, location_ids=location_ids)
        # What is known of the pieces stays known, so that a thousand relabelled maps are looked at once.
        object.__setattr__(relabelled, '_pieces_digest', self.pieces_digest)
        return relabelled

    @property
    def pieces_digest(self):
        """16 bytes that are equal for equal columns, whatever their location ids; made once."""
        if not hasattr(self, '_pieces_digest'):
            digest = blake2b(digest_size=16)
            for field in fields(self)[1:]:
                array = getattr(self, field.name)
                digest.update(repr(array.shape).encode())
                digest.update(array.tobytes())
            object.__setattr__(self, '_pieces_digest', digest.digest())
        return self._pieces_digest


def columns_from_pieces(shard_shapes, pieces_by_rank):
    """Return ``PieceColumns`` of piece objects.

    Args:
        shard_shapes: mapping from location id to the tuple of sizes of its shard.
        pieces_by_rank: mapping from location id to its ``AffinePiece`` objects.

    Raises:
        ValueError: a piece with other numbers of strides than of sizes, a location with pieces but no shard shape, a
            negative size, numbers or addresses beyond 2**62.
    """
    unshaped = [rank for rank in pieces_by_rank if rank not in shard_shapes]
    if unshaped:
        raise ValueError(f'Rank {unshaped[0]} lists pieces but has no shard shape; give its shape in shard_shapes.')

    listed = [(index, rank, position, piece) for index, rank in enumerate(shard_shapes)
              for position, piece in enumerate(pieces_by_rank.get(rank, ()))]
    for _, rank, position, piece in listed:
        if not len(piece.shape) == len(piece.source_strides) == len(piece.dest_strides):
            raise ValueError(f'Rank {rank}, piece {position} has {len(piece.shape)} axes but '
                             f'{len(piece.source_strides)} source and {len(piece.dest_strides)} destination strides; '
                             'give one stride per axis on both sides.')
    pieces = [entry[3] for entry in listed]
    columns = assemble_columns(ranks=list(shard_shapes),
                               shard_shapes=list(shard_shapes.values()),
                               shard=[entry[0] for entry in listed],
                               shapes=[piece.shape for piece in pieces],
                               source_offsets=[piece.source_offset for piece in pieces],
                               source_strides=[piece.source_strides for piece in pieces],
                               dest_offsets=[piece.dest_offset for piece in pieces],
                               dest_strides=[piece.dest_strides for piece in pieces],
                               locations=[piece.locations for piece in pieces],
                               scales=[piece.scale for piece in pieces])
    _check_sizes(columns)
    _check_reach(columns)
    return columns


def assemble_columns(*, ranks, shard_shapes, shard, shapes, source_offsets, source_strides, dest_offsets, dest_strides,
                     locations, scales):
    """Return ``PieceColumns`` of plain Python values, one list entry per shard or per piece.

    ``ranks`` and ``shard_shapes`` have an entry per shard, the others one per piece: ``shard`` the index of the
    piece's shard, ascending; ``locations`` a frozenset of location ids; the rest as in ``AffinePiece``.

    Raises:
        ValueError: a number that does not fit into 64 bits.
    """
    location_ids, holders, set_starts, set_members = _intern_holders(ranks, locations)
    return PieceColumns(location_ids=int64_column(location_ids, 'a location id'),
                        shard_ndim=_lengths(shard_shapes),
                        shard_shape=_padded(shard_shapes, 1, 'a shard size'),
                        shard=int64_column(shard, 'a shard index'),
                        ndim=_lengths(shapes),
                        shape=_padded(shapes, 1, 'a piece size'),
                        source_offset=int64_column(source_offsets, 'a source offset'),
                        source_strides=_padded(source_strides, 0, 'a source stride'),
                        dest_offset=int64_column(dest_offsets, 'a destination offset'),
                        dest_strides=_padded(dest_strides, 0, 'a destination stride'),
                        holders=int64_column(holders, 'a holder set'),
                        set_starts=int64_column(set_starts, 'a holder set'),
                        set_members=int64_column(set_members, 'a holder'),
                        scale=np.array(scales, dtype=np.float64))


def reach(offset, shape, strides):
    """Return the lowest and highest address of each piece, int64[P] each; of an empty piece its offset, twice.

    Args:
        offset: int64[P]. shape, strides: int64[P, K].
    """
    steps = np.maximum(shape - 1, 0) * strides
    steps[(shape == 0).any(axis=1)] = 0
    return offset + np.minimum(steps, 0).sum(axis=1), offset + np.maximum(steps, 0).sum(axis=1)


def spans(shape):
    """float64[P], elements of each row of ``shape`` with empty axes counted as one; never wraps."""
    return np.maximum(shape, 1).astype(np.float64).prod(axis=1)


def float_reach(offset, shape, strides):
    """float64[P], a bound of the magnitude of every address of each piece; never wraps."""
    steps = np.maximum(shape - 1, 0).astype(np.float64) * np.abs(strides.astype(np.float64))
    return np.abs(offset.astype(np.float64)) + steps.sum(axis=1)


def int64_column(values, what):
    """Return ``values`` as int64; ``what`` names one of them in messages.

    Raises:
        ValueError: a number that does not fit into 64 bits.
    """
    try:
        return np.array(values, dtype=np.int64)
    except OverflowError:
        raise ValueError(f'The map has {what} that does not fit into 64 bits.') from None


def _check_sizes(columns):
    """Raise for negative sizes: two of them multiply to a volume that looks right."""
    negative = (columns.shard_shape < 0).any(axis=1)
    if negative.any():
        shard = int(np.argmax(negative))
        shape = tuple(columns.shard_shape[shard, :columns.shard_ndim[shard]].tolist())
        raise ValueError(
            f'Rank {columns.location_ids[shard]} has a shard of shape {shape}, which has a negative size; '
            'every size must be zero or more.')
    negative = (columns.shape < 0).any(axis=1)
    if negative.any():
        piece = int(np.argmax(negative))
        shape = tuple(columns.shape[piece, :columns.ndim[piece]].tolist())
        raise ValueError(f'Rank {columns.rank(piece)}, piece {columns.position(piece)} has shape {shape}, which has a '
                         'negative size; every size must be zero or more.')


def _check_reach(columns):
    if (spans(columns.shard_shape) > MAX_ELEMENTS).any():
        shard = int(np.argmax(spans(columns.shard_shape) > MAX_ELEMENTS))
        raise ValueError(f'Rank {columns.location_ids[shard]} has a shard of more than 2**62 elements.')
    far = spans(columns.shape) > MAX_ELEMENTS
    far |= float_reach(columns.source_offset, columns.shape, columns.source_strides) > MAX_ELEMENTS
    far |= float_reach(columns.dest_offset, columns.shape, columns.dest_strides) > MAX_ELEMENTS
    if far.any():
        piece = int(np.argmax(far))
        raise ValueError(f'Rank {columns.rank(piece)}, piece {columns.position(piece)} reaches beyond 2**62 elements.')


def _intern_holders(ranks, locations):
    """Give equal sets of holders one index: ids, index per piece, and the sets as starts and members."""
    distinct = {}
    holders = [distinct.setdefault(held_by, len(distinct)) for held_by in locations]
    index_of = {rank: index for index, rank in enumerate(ranks)}
    for rank in sorted(set(chain.from_iterable(distinct)).difference(index_of)):
        index_of[rank] = len(index_of)
    members = [sorted(index_of[rank] for rank in held_by) for held_by in distinct]
    starts = np.concatenate(([0], np.cumsum(_lengths(members))))
    return list(index_of), holders, starts, list(chain.from_iterable(members))


def _lengths(rows):
    return np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))


def _padded(rows, fill, what):
    """Rows of different lengths as one int64 matrix, filled up with ``fill``."""
    lengths = _lengths(rows)
    padded = np.full((len(rows), int(lengths.max(initial=0))), fill, dtype=np.int64)
    filled = np.arange(padded.shape[1]) < lengths[:, None]
    padded[filled] = int64_column(list(chain.from_iterable(rows)), what)
    return padded
