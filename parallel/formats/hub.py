"""Downloads from the Hugging Face hub, with a short timeout for an unresponsive network.

Its client is imported only when a name is looked up: local folders do not need it.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO, NamedTuple

from offload.errors import one_line
from parallel.errors import CheckpointError
from parallel.formats.gguf.header import (
    MAX_HEADER,
    GgufHeader,
    part_paths,
    read_header,
    read_part,
)
from parallel.formats.gguf.metadata import ROPE_FACTORS
from parallel.formats.quantisation import FILES
from parallel.formats.weight_headers import (
    TensorHeader,
    text_tensor,
    without_unsupported_predictor,
)

_TIMEOUT_S = 10.0  # time limit for a response of the hub in seconds
_GGUF_NAME = re.compile(r"([\w.-]+/[\w.-]+)(?::([\w.-]+)|/([\w./-]+\.gguf))", re.IGNORECASE)
_FIRST_READ = 8 << 20  # bytes of a GGUF file that are read first, to plan with it
_FACTORS_BYTES = 1 << 16  # more than those of any model's RoPE factors


class NotFound(Exception):
    """A model is neither on the hub nor in the local cache; the message says why."""


def fetch_config(name: str) -> Path:
    """Return the path of model `name`'s config.json, with what says how it is quantised beside it.

    Raises NotFound.
    """
    from huggingface_hub import snapshot_download

    path = _fetch(snapshot_download, name, allow_patterns=["config.json", *FILES]) / "config.json"
    if not path.is_file():
        raise NotFound("it has no config.json")
    return path


def fetch_headers(name: str) -> dict[str, TensorHeader]:
    """Return the headers of model `name`'s safetensors files, keyed by tensor.

    Raises NotFound.
    """
    from huggingface_hub import HfApi

    try:
        files = HfApi().get_safetensors_metadata(name).files_metadata
        tensors = {
            own_name: TensorHeader(Path(name, file), tensor, info.dtype, tuple(info.shape))
            for file, metadata in files.items()
            for tensor, info in metadata.tensors.items()
            if (own_name := text_tensor(tensor)) is not None
        }
    except Exception as error:  # the hub client's errors share no base class
        raise NotFound(one_line(error)) from error
    return without_unsupported_predictor(tensors)


def fetch_model(name: str, patterns: Sequence[str]) -> Path:
    """Return the folder of model `name` with its files matching `patterns`. Raises NotFound."""
    from huggingface_hub import snapshot_download

    # Some repositories have the weights in other formats as well, in folders or beside them.
    others = ["original/*", "metal/*", "onnx/*", "consolidated*"]
    return _fetch(snapshot_download, name, allow_patterns=list(patterns), ignore_patterns=others)


class GgufName(NamedTuple):
    """A GGUF file of a repository on the hub."""

    repo: str
    tag: str | None  # such as Q4_K_M, at the end of the file's name
    file: str | None  # its path, if that is given

    @classmethod
    def parse(cls, name: str) -> GgufName | None:
        """Return what `owner/repo:Q4_K_M` or `owner/repo/file.gguf` refers to; None for others."""
        match = _GGUF_NAME.fullmatch(name)
        return None if match is None else cls(*match.groups())

    def fetch(self) -> Path:
        """Return the path of the file, which is downloaded; of a split model, all of its parts.

        Raises NotFound, CheckpointError.
        """
        from huggingface_hub import hf_hub_download

        names = self._names()

        def download(repo: str, **options: Any) -> str:
            paths = [hf_hub_download(repo, filename=name, **options) for name in names]
            return paths[0]

        return _fetch(download, self.repo)

    @contextmanager
    def header(self) -> Iterator[GgufHeader]:
        """Open the file's header, and download little more than it.

        Its path has the size of the file, with zeros in place of what was not downloaded. Raises
        NotFound, CheckpointError.
        """
        from huggingface_hub import HfFileSystem, try_to_load_from_cache

        names = self._names()
        cached = [try_to_load_from_cache(self.repo, name) for name in names]
        if all(isinstance(each, str) for each in cached):
            yield read_header(Path(str(cached[0])))
            return
        with TemporaryDirectory() as folder:
            paths = [Path(folder, Path(name).name) for name in names]
            try:
                for name, path in zip(names, paths, strict=True):
                    with HfFileSystem().open(f"{self.repo}/{name}", "rb") as remote:
                        _copy_header(remote, path)
            except CheckpointError:
                raise
            except Exception as error:  # the hub client's errors share no base class
                raise NotFound(one_line(error)) from error
            yield read_header(paths[0])

    def _names(self) -> list[str]:
        """Return the file's path in the repository; of a split model, those of all parts."""
        return [path.as_posix() for path in part_paths(Path(self.file or self._find()))]

    def _find(self) -> str:
        """Return the one file with this tag. Raises NotFound, and CheckpointError without one."""
        from huggingface_hub import HfApi

        try:
            HfApi().model_info(self.repo, timeout=_TIMEOUT_S)
            names = HfApi().list_repo_files(self.repo)
        except Exception as hub_error:
            names = _cached_files(self.repo)
            if not names:
                raise NotFound(one_line(hub_error)) from hub_error
        files = sorted(name for name in names if name.lower().endswith(".gguf"))
        assert self.tag is not None
        tail = re.compile(rf"(?:^|[-._/]){re.escape(self.tag)}(?:-\d{{5}}-of-\d{{5}})?\.gguf", re.I)
        found = [name for name in files if tail.search(name) and "mmproj" not in name]
        first = [name for name in found if Path(name) == part_paths(Path(name))[0]]
        if len(first) != 1:
            what = f"{len(first)} files of {self.tag}" if first else f"no file of {self.tag}"
            raise CheckpointError(
                f"{self.repo} has {what}: name a file, {self.repo}/FILE.gguf, of "
                f"{', '.join(first or files)[:400] or 'which it has none'}."
            )
        return first[0]


def _copy_header(remote: Any, path: Path) -> None:
    """Copy the header of a file, and the RoPE factors, which are part of a config.

    Raises CheckpointError.
    """
    size = remote.size
    end, header = 0, None
    with path.open("wb") as local:
        while header is None:
            start, end = end, min(size, max(_FIRST_READ, 4 * end))
            _copy(remote, local, start, end)
            try:
                header = read_part(path)
            except CheckpointError as error:
                is_cut = isinstance(error.__cause__, EOFError | struct.error)
                if not is_cut or end >= min(size, MAX_HEADER):
                    raise
        local.truncate(size)
        for name in ROPE_FACTORS.keys() & header.tensors.keys():
            start = header.tensors[name].start
            if start + _FACTORS_BYTES > end:
                _copy(remote, local, start, min(size, start + _FACTORS_BYTES))


def _copy(remote: Any, local: BinaryIO, start: int, end: int) -> None:
    """Copy the bytes from `start` to `end`."""
    remote.seek(start)
    local.seek(start)
    local.write(remote.read(end - start))
    local.flush()


def _cached_files(repo: str) -> list[str]:
    """Return the paths of a repository's files that were downloaded."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        return []
    revisions = [each for known in repos if known.repo_id == repo for each in known.revisions]
    return [
        str(file.file_path.relative_to(each.snapshot_path))
        for each in revisions
        for file in each.files
    ]


def _fetch(download: Callable[..., str], name: str, **options: Any) -> Path:
    """Return the result of a download function, from the local cache if the hub fails."""
    from huggingface_hub import HfApi

    hub_error = None
    try:
        # a download would retry an unresponsive network many times
        HfApi().model_info(name, timeout=_TIMEOUT_S)
    except Exception as error:  # the hub client's errors share no base class
        hub_error = error
    try:
        return Path(download(name, **options, local_files_only=hub_error is not None))
    except Exception as error:
        raise NotFound(one_line(hub_error or error)) from error
