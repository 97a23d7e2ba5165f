"""Writing a prompt's KV to disk in the background of decoding, and reading it back."""

from __future__ import annotations

import json
import os
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from itertools import islice
from pathlib import Path
from threading import Event, Thread, get_native_id
from typing import NamedTuple

from torch import Tensor

from decoding.prefix_cache.files import rank_file, write_synced
from offload.errors import CorruptCacheError, one_line
from offload.layout import KVLayout, Segment
from offload.regular_files import UnsuitableFileError, read_json
from offload.tiered.kv_file import HostReader, KVBlock, KVFile

_THREADS = 4  # reader threads
_READ_AHEAD = 8  # blocks of a layer that are read in advance
_NICENESS = 19  # the writer thread has the lowest priority
_UNFINISHED = "it was not finished"
_CHECKSUM_BYTES = 16  # in JSON: ten digits and a separator, or a layer's brackets


class WriteCancelled(Exception):
    """The write was cancelled."""


class BackgroundWriter:
    """Writes one rank's part of a prompt on a thread, while decoding goes on.

    `finish` is called on that thread at the end, with the reason of a failure, or None.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        lock: ExitStack,
        layers: Sequence[tuple[KVFile, HostReader]],
        tokens: int,
        finish: Callable[[BackgroundWriter, str | None], None] | None = None,
    ):
        """Start to write a prompt of `tokens`; `lock`, this rank's, is closed at the end."""
        self.tokens = tokens
        self._folder, self._rank, self._lock = folder, rank, lock
        self._layers, self._finish = list(layers), finish
        self._cancelled = Event()
        self._thread = Thread(target=self._run, name="prompt-cache-writer", daemon=True)
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        return self._thread.is_alive()

    @property
    def is_cancelled(self) -> bool:
        return self._cancelled.is_set()

    def wait(self) -> None:
        """Wait until all is written; an interrupt cancels it."""
        try:
            self._thread.join()
        except BaseException:
            self.cancel()  # before the memory that is being read is reused
            raise

    def cancel(self) -> None:
        """Stop writing, and return once no memory of the prompt is being read."""
        self._cancelled.set()
        self._thread.join()

    def _run(self) -> None:
        failure: str | None = _UNFINISHED
        with suppress(OSError, AttributeError):  # decoding has priority
            os.setpriority(os.PRIO_PROCESS, get_native_id(), _NICENESS)
        try:
            checksums = []
            while self._layers:  # frees each layer once it is written
                file, reader = self._layers.pop(0)
                checksums.append(file.write(self._cancellable(reader)))
            path = rank_file(self._folder, self._rank, "json")
            write_synced(path, json.dumps(checksums).encode())
            failure = None
        except WriteCancelled as error:
            failure = str(error)
            with suppress(OSError):  # before the lock is released, when rank 0 checks for it
                rank_file(self._folder, self._rank, "given-up").touch()
        except Exception as error:  # no error may end decoding
            failure = one_line(error)
        finally:
            self._layers.clear()
            try:
                if self._finish is not None:
                    self._finish(self, failure)
            finally:
                self._lock.close()

    def _cancellable(self, reader: HostReader) -> HostReader:
        """Return a reader that raises WriteCancelled after `cancel`."""

        def read(head: int, start: int, end: int) -> Tensor:
            if self.is_cancelled:
                raise WriteCancelled("it was cancelled")
            return reader(head, start, end)

        return HostReader(read)


class LayerFile(NamedTuple):
    """A file with a layer's KV, or with a segment of it."""

    layer: int
    segment: Segment
    file: KVFile


def files_of(
    folder: Path, rank: int, layout: KVLayout, tokens: int, digest: bytes
) -> list[LayerFile]:
    """Return the files of a rank's layers, in order: several of one with a window, or a state.

    Their checksums depend on `digest`, that of all that the KV depends on, tokens included, and on
    rank and layer: a file swapped for another one is detected.
    """

    files = []
    for layer in range(layout.layers):
        stem = f"rank-{rank}-layer-{layer}"
        for start, end in layout.segments(layer, tokens):
            name = f"{stem}.kv" if end == tokens else f"{stem}-{end}.kv"
            seed = zlib.crc32(digest + name.encode())
            file = KVFile(folder / name, layout.of(layer), end, seed, start)
            files.append(LayerFile(layer, Segment(start, end), file))
    return files


def load_saved(
    folder: Path, rank: int, files: Sequence[LayerFile], tokens: int
) -> Iterator[tuple[LayerFile, Iterator[KVBlock]]]:
    """Yield each file with the blocks of its tokens up to `tokens`; some blocks are read ahead.

    Raises CorruptCacheError if they do not match their checksums, and OSError.
    """
    checksums = _read_checksums(folder, rank, files)
    with ThreadPoolExecutor(_THREADS) as pool:
        for each, sums in zip(files, checksums, strict=True):
            yield each, _read_ahead(pool, each.file.readers(tokens, sums))


def _read_ahead(
    pool: ThreadPoolExecutor, readers: Iterator[Callable[[], KVBlock]]
) -> Iterator[KVBlock]:
    """Yield the readers' blocks in order; up to `_READ_AHEAD` readers run in advance."""
    pending = deque(pool.submit(reader) for reader in islice(readers, _READ_AHEAD))
    while pending:
        block = pending.popleft().result()
        pending.extend(pool.submit(reader) for reader in islice(readers, 1))
        yield block


def _read_checksums(folder: Path, rank: int, files: Sequence[LayerFile]) -> list[list[int]]:
    """Return a rank's checksums by file. Raises CorruptCacheError, OSError."""
    limit = _CHECKSUM_BYTES * sum(1 + each.file.blocks for each in files)
    try:
        raw = read_json(rank_file(folder, rank, "json"), limit)
        checksums = [list(map(int, each)) for each in raw]
    except UnsuitableFileError as error:
        raise CorruptCacheError(f"the checksums of rank {rank}: {error.strerror}") from error
    except (ValueError, TypeError, ArithmeticError) as error:
        raise CorruptCacheError(f"the checksums of rank {rank} are invalid") from error
    if len(checksums) != len(files):
        raise CorruptCacheError(
            f"the checksums of rank {rank} are those of {len(checksums)} files, not {len(files)}"
        )
    return checksums
