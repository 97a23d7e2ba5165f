"""Reading checkpoints lazily: a rank touches only its slices of a file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from parallel.errors import CheckpointError
from parallel.formats.gguf_header import LFS, check_lfs_pointer
from parallel.formats.weight_headers import DTYPES, HEAD, dtype_error, weight_files

_DERIVED = "rotary_emb.inv_freq"  # may be left over: computed from the config


class Indexable(Protocol):
    """A tensor on disk; indexing with slices reads that part alone."""

    def __getitem__(self, index: Any) -> Tensor: ...


class Checkpoint(ABC):
    """A model's weights on disk, by the names that Hugging Face gives them.

    A kind of file notes the shapes when it is opened, and says how a tensor is read.
    """

    described_by = "config.json"  # what says of which shapes tensors are

    def __init__(self, path: Path):
        self.path = path
        self._shapes: dict[str, tuple[int, ...]] = {}  # by tensor name
        self._asked: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def tensor(self, name: str, shape: tuple[int, ...]) -> Indexable:
        """Return the tensor of this name, to be read in part.

        Raises CheckpointError when it is missing or its shape is not `shape`.
        """
        self.check_present(name)
        self._asked.add(name)
        stored = self._shapes[name]
        if stored != shape:
            raise CheckpointError(
                f"{self._file_of(name).name}: tensor {name} has shape {stored}, but "
                f"{self.described_by} implies {shape}."
            )
        return self._open_tensor(name)

    def check_present(self, name: str) -> None:
        """Raise CheckpointError when there is no tensor of this name."""
        if name not in self._shapes:
            raise CheckpointError(
                f"{self.path}: tensor {name} is missing; the checkpoint has {len(self._shapes)} "
                "tensors. Was the download interrupted? Fetch it again, or point at a complete "
                "model."
            )

    def check_unused(self, is_tied: bool = False) -> None:
        """Refuse tensors that nobody asked for: without them the text would be another.

        `is_tied`: the model's head is its embedding, of which the files may hold a copy; a head
        that differs would have made it another model (`config_file`). Raises CheckpointError.
        """
        unasked = self._shapes.keys() - self._asked - ({HEAD} if is_tied else set())
        leftovers = sorted(name for name in unasked if not name.endswith(_DERIVED))
        if leftovers:
            raise CheckpointError(
                f"{self.path}: {len(leftovers)} tensors have no place in the model that "
                f"{self.described_by} describes, first {leftovers[0]}. The config does not belong "
                "to these weights, or the architecture has parts that are not supported."
            )

    def check_sizes(self, layers: int, numbers: int) -> None:
        """Refuse a config that describes far more than is there, before memory is taken for it.

        `layers` and `numbers`, of one rank's weights, are the model's. Raises CheckpointError.
        """
        stored = sum(prod(shape) for shape in self._shapes.values())
        if layers > len(self._shapes) or numbers > 2 * stored:
            raise CheckpointError(
                f"{self.path}: {self.described_by} describes {layers} layers and at least "
                f"{numbers:,} weights, but the files hold {len(self._shapes)} tensors with "
                f"{stored:,} in all. They do not belong together: fetch both again."
            )

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Return the dtype to compute in where neither the user nor the config says one."""

    def set_dtype(self, dtype: torch.dtype) -> None:
        """Hear in which dtype tensors are used, for a kind of file that has to convert them."""

    @abstractmethod
    def _open_tensor(self, name: str) -> Indexable:
        """Return a tensor that is there."""

    @abstractmethod
    def _file_of(self, name: str) -> Path:
        """Return the file that holds a tensor."""


class TensorSlice:
    """A tensor on disk; indexing reads that part alone, and lets go of the file's pages at once."""

    def __init__(self, path: Path, name: str, shape: tuple[int, ...]):
        self.path, self.name, self.shape = path, name, shape

    def __getitem__(self, index: Any) -> Tensor:
        try:
            with safe_open(self.path, framework="pt") as file:
                return file.get_slice(self.name)[index]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{self.path.name}: tensor {self.name} cannot be read ({error}). Fetch the file "
                "again."
            ) from error


class SafetensorsCheckpoint(Checkpoint):
    """The safetensors files of a folder: one file, or several with an index."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.folder = folder
        # by tensor name
        self._paths: dict[str, Path] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        for path in weight_files(folder):
            self._scan(path)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that most tensors have."""
        return Counter(self._dtypes.values()).most_common(1)[0][0]

    def _open_tensor(self, name: str) -> TensorSlice:
        return TensorSlice(self._paths[name], name, self._shapes[name])

    def _file_of(self, name: str) -> Path:
        return self._paths[name]

    def _scan(self, path: Path) -> None:
        """Note each tensor of a file. Raises CheckpointError."""
        with self._open(path) as file:
            for name in file.keys():  # noqa: SIM118 - a safetensors file, not a dict
                if name in self._paths:
                    raise CheckpointError(
                        f"{self.folder}: tensor {name} is in {self._paths[name].name} and in "
                        f"{path.name}, and only one can be meant. Fetch the model again."
                    )
                tensor = file.get_slice(name)
                self._paths[name] = path
                self._shapes[name] = tuple(tensor.get_shape())
                kind = tensor.get_dtype()
                if kind not in DTYPES:
                    raise dtype_error(path, name, kind)
                self._dtypes[name] = getattr(torch, DTYPES[kind])

    def _open(self, path: Path) -> Any:
        try:
            with path.open("rb") as file:
                check_lfs_pointer(path, file.read(len(LFS)))
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
        try:
            return safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{path} is not a complete safetensors file ({error}). Was the download "
                "interrupted? Fetch it again."
            ) from error
