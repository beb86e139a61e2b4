# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Which file of a DeepSpeed checkpoint is whose, and whether all are there."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, Tuple

from deepspeed.checkpoint.affine.checks import listed
from deepspeed.checkpoint.affine_adapters.stored import CheckpointError
from deepspeed.checkpoint.affine_adapters.torch_files import load_mapped

_RANK_FILE = re.compile(r'(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_(model|optim)_states\.pt')
_MODEL_FILE = re.compile(r'mp_rank_(\d+)_model_states\.pt')
_EXPERT_FILE = re.compile(r'layer_(\d+)_expert_(\d+)_mp_rank_(\d+)_model_states\.pt')
# Files of pipeline stages, whose layouts are others than those read here.
_STAGE_FILE = re.compile(r'layer_\d+.*_states\.pt')


@dataclass(frozen=True)
class RankFiles:
    """Paths of model and optimizer states by (tensor-parallel rank, data-parallel rank), and of experts by (layer,
    expert).

    Where ZeRO does not cut the module, one model file serves all data-parallel ranks and is that of rank 0.
    """
    folder: Path
    model: Dict[Tuple[int, int], Path]
    optim: Dict[Tuple[int, int], Path]
    experts: Dict[Tuple[int, int], Path]

    @property
    def tensor_parallel(self) -> int:
        """Number of tensor-parallel ranks."""
        return 1 + max(rank for rank, _ in [*self.model, *self.optim])

    @property
    def cuts_module(self) -> bool:
        """Whether every data-parallel rank has model states of its own, as with ZeRO-3."""
        return all(_MODEL_FILE.fullmatch(path.name) is None for path in self.model.values())

    @property
    def has_optimizer(self) -> bool:
        """Whether ZeRO has cut anything: else the model states are all there is."""
        return bool(self.optim) or self.cuts_module

    def model_states(self, rank: int, data_rank: int) -> dict:
        """What the module of a rank has.

        Raises:
            CheckpointError: a file that is missing, or does not hold what DeepSpeed saves.
        """
        path = self.model_path(rank, data_rank)
        return _dict_of(load_mapped(path), path)

    def optimizer_states(self, rank: int, data_rank: int) -> dict:
        """What the optimizer of a rank has. Errors as for ``model_states``."""
        path = self.optimizer_path(rank, data_rank)
        return _dict_of(_dict_of(load_mapped(path), path).get('optimizer_state_dict'), path)

    def load_expert(self, layer: int, expert: int) -> dict:
        """The weights of one expert as the module has them. Errors as for ``model_states``."""
        if (layer, expert) not in self.experts:
            raise CheckpointError(f'{self.folder}: the file of expert {expert} of layer {layer} is missing; there are '
                                  f'{listed([path.name for path in self.experts.values()])}.')
        path = self.experts[layer, expert]
        return _dict_of(load_mapped(path), path)

    def model_path(self, rank: int, data_rank: int) -> Path:
        """Where a rank's model states are; CheckpointError: nowhere."""
        return self._found(self.model, 'model', rank, data_rank)

    def optimizer_path(self, rank: int, data_rank: int) -> Path:
        """Where a rank's optimizer states are; CheckpointError: nowhere."""
        return self._found(self.optim, 'optim', rank, data_rank)

    def _found(self, paths, what, rank, data_rank):
        if (rank, data_rank) not in paths:
            there = [path.name for path in paths.values()]
            raise CheckpointError(
                f'{self.folder}: the {what} states of data-parallel rank {data_rank}, tensor-parallel '
                f"rank {rank} are missing; there are {listed(there)}. Was every rank's file copied?")
        return paths[rank, data_rank]


def rank_files(folder) -> RankFiles:
    """Look at the names in the folder of one saved step.

    Raises:
        CheckpointError: it has no model states; or has some of pipeline stages, or of tensor-parallel experts.
    """
    folder = Path(folder)
    model, optim, experts = {}, {}, {}
    for path in sorted(folder.iterdir()):
        if (match := _EXPERT_FILE.fullmatch(path.name)) and int(match[3]) == 0:
            experts[int(match[1]), int(match[2])] = path
        elif _STAGE_FILE.fullmatch(path.name):
            raise CheckpointError(f'{path}: is of a pipeline stage, or of experts beside tensor parallelism. Convert '
                                  'the checkpoint with deepspeed.checkpoint.ds_to_universal and pass the universal '
                                  'one.')
        elif match := _RANK_FILE.fullmatch(path.name):
            (model if match[3] == 'model' else optim)[int(match[2]), int(match[1])] = path
        elif match := _MODEL_FILE.fullmatch(path.name):
            model[int(match[1]), 0] = path
    if not model:
        raise CheckpointError(f'{folder}: has no model states of DeepSpeed, such as mp_rank_00_model_states.pt.')
    return RankFiles(folder, model, optim, experts)


def _dict_of(content, path):
    if not isinstance(content, dict):
        raise CheckpointError(f'{path}: holds a {type(content).__name__} where DeepSpeed saves a dict.')
    return content
