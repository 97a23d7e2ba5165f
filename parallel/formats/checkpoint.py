"""Lazy reading of checkpoints: a rank reads only its slices of a file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from parallel.errors import CheckpointError
from parallel.formats.expert_headers import ExpertHeader, expert_headers
from parallel.formats.expert_tensors import open_expert
from parallel.formats.gguf.header import LFS, check_lfs_pointer
from parallel.formats.tensor_names import file_name
from parallel.formats.tensors import Indexable, SafetensorsReader, TensorSlice
from parallel.formats.weight_headers import (
    DTYPES,
    HEAD,
    PREDICTION,
    TensorHeader,
    check_floats,
    is_vision,
    text_tensor,
    weight_files,
    without_unsupported_predictor,
)

_DERIVED = "rotary_emb.inv_freq"  # suffix of tensors that are ignored: the config determines them


class Checkpoint(ABC):
    """A model's weights on disk, under their Hugging Face names.

    A subclass fills in the shapes when it opens its files, and implements reading of a tensor.
    """

    described_by = "config.json"  # source of the expected shapes, for messages
    # Whether tensors are as llama.cpp's converter leaves them: norms of models that add 1 to them,
    # such as Gemma, have it, and delta nets have rates of decay and matrices for convolutions.
    is_converted = False

    def __init__(self, path: Path):
        self.path = path
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._used: set[str] = set()  # names of the tensors requested so far
        self._vision: list[str] = []  # names of those of a part for images
        self._target_dtype = torch.float32
        self._keeps_blocks = False

    def __contains__(self, name: object) -> bool:
        return name in self._shapes

    def tensor(self, name: str, shape: tuple[int, ...]) -> Indexable:
        """Return the tensor `name`, without reading it.

        Raises CheckpointError if it is missing or its shape is not `shape`.
        """
        self.check_present(name)
        self._used.add(name)
        stored = self._shapes[name]
        if stored != shape:
            raise CheckpointError(
                f"{self._file_of(name).name}: tensor {self._name_in_file(name)} has shape "
                f"{stored}, but {self.described_by} implies {shape}."
            )
        return self._open_tensor(name)

    def check_present(self, name: str) -> None:
        """Raise CheckpointError if there is no tensor `name`."""
        if name not in self._shapes:
            raise CheckpointError(
                f"{self.path}: tensor {self._name_in_file(name)} is missing; the checkpoint has "
                f"{len(self._shapes)} tensors. Was the download interrupted? Fetch it again, or "
                "point at a complete model."
            )

    def check_unused(
        self, is_tied: bool = False, is_text: bool = False, others: tuple[str, ...] = ()
    ) -> None:
        """Raise CheckpointError if tensors are unused: the model's output would depend on them.

        It does not on a multi-token-prediction block.

        Args:
            is_tied: the head is tied to the embedding, of which the files may hold a copy; with a
                head that differs the model would not be tied (`config_file`).
            is_text: the model is the text model of a larger one.
            others: prefixes of tensors that are no part of it.
        """
        unused = self._shapes.keys() - self._used - ({HEAD} if is_tied else set())
        unused |= set() if is_text else set(self._vision)
        leftovers = sorted(
            name
            for name in unused
            if not name.endswith(_DERIVED) and not name.startswith((PREDICTION, *others))
        )
        if leftovers:
            first = self._name_in_file(leftovers[0])
            raise CheckpointError(
                f"{self.path}: {len(leftovers)} tensors are not part of the model that "
                f"{self.described_by} describes, first {first}. The config does not belong "
                "to these weights, or the architecture has parts that are not supported."
            )

    def check_sizes(self, layers: int, parameters: int) -> None:
        """Raise CheckpointError if a config describes a far larger model than the files hold.

        Called before memory is allocated. `layers` is the model's number of layers, `parameters`
        that of one rank's weights.
        """
        stored = sum(prod(shape) for shape in self._shapes.values())
        if layers > len(self._shapes) or parameters > 2 * stored:
            raise CheckpointError(
                f"{self.path}: {self.described_by} describes {layers} layers and at least "
                f"{parameters:,} weights, but the files hold {len(self._shapes)} tensors with "
                f"{stored:,} in all. They do not belong together: fetch both again."
            )

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Return the dtype to compute in if neither the user nor the config specifies one."""

    def set_dtype(self, dtype: torch.dtype) -> None:
        """Set the dtype of quantised tensors that are read as numbers."""
        self._target_dtype = dtype

    def keep_blocks(self) -> None:
        """Let quantised tensors be kept as they are."""
        self._keeps_blocks = True

    @abstractmethod
    def _open_tensor(self, name: str) -> Indexable:
        """Return a tensor that exists."""

    @abstractmethod
    def _file_of(self, name: str) -> Path:
        """Return the file that holds a tensor."""

    def _name_in_file(self, name: str) -> str:
        """Return the name that a tensor has in the files, or would have."""
        return name


class SafetensorsCheckpoint(Checkpoint):
    """The safetensors files of a folder: one file, or several with an index."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.folder = folder
        self._reader = SafetensorsReader()
        self._headers: dict[str, TensorHeader] = {}
        self._experts: dict[str, ExpertHeader] = {}  # matrices and biases in stacks of experts
        for path in weight_files(folder):
            self._scan(path)
        self._headers = without_unsupported_predictor(self._headers)
        self._experts, stacks = expert_headers(self._headers)
        for name in stacks:
            del self._headers[name]
        self._index()
        self._shapes |= {name: each.shape for name, each in self._experts.items()}

    @property
    def dtype(self) -> torch.dtype:
        """The most common dtype of the tensors."""
        kinds = Counter(header.dtype for header in self._headers.values())
        return getattr(torch, DTYPES[kinds.most_common(1)[0][0]])

    def _index(self) -> None:
        """Set the shapes of the model's tensors. Raises CheckpointError for their types."""
        check_floats(self._headers.values())
        self._shapes = {name: header.shape for name, header in self._headers.items()}

    def _open_tensor(self, name: str) -> Indexable:
        if (expert := self._experts.get(name)) is not None:
            return open_expert(self._reader, expert, self._target_dtype, self._keeps_blocks)
        return TensorSlice(self._reader, self._headers[name])

    def _file_of(self, name: str) -> Path:
        expert = self._experts.get(name)
        return self._headers[name].path if expert is None else expert.stack.path

    def _name_in_file(self, name: str) -> str:
        return file_name(name, [header.name for header in self._headers.values()])

    def _scan(self, path: Path) -> None:
        """Record the tensors of a file. Raises CheckpointError."""
        with self._open(path) as file:
            for stored_name in file.keys():  # noqa: SIM118 - a safetensors file, not a dict
                name = text_tensor(stored_name)
                if name is None:
                    self._vision += [stored_name] if is_vision(stored_name) else []
                    continue
                if name in self._headers:
                    before = self._headers[name].path.name
                    raise CheckpointError(
                        f"{self.folder}: tensor {stored_name} is in {before} and in {path.name}, "
                        "which is ambiguous. Fetch the model again."
                    )
                tensor = file.get_slice(stored_name)
                shape = tuple(tensor.get_shape())
                self._headers[name] = TensorHeader(path, stored_name, tensor.get_dtype(), shape)

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
