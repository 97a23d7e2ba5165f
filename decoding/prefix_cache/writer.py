"""A prompt's KV on its way to the disk, behind decoding, and back from there."""

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

from torch import Tensor

from decoding.prefix_cache.files import rank_file, write_synced
from offload.errors import CorruptCacheError, one_line
from offload.layout import KVLayout
from offload.regular_files import UnsuitableFileError, read_json
from offload.tiered.kv_file import HostReader, KVBlock, KVFile

_THREADS = 4  # that read
_AHEAD = 8  # pieces of a layer that are read before they are asked for
_NICENESS = 19  # of the thread that writes
_NOT_DONE = "it was not finished"
_CHECKSUM_BYTES = 16  # in JSON: ten digits and what parts them, or the brackets of a layer


class WriteCancelled(Exception):
    """Nobody waits for what is being written any more."""


class BackgroundWriter:
    """One rank's part of a prompt, which a thread writes while passes are made.

    `finish` is called on that thread behind it, with what went wrong, or None.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        lock: ExitStack,
        layers: Sequence[tuple[KVFile, HostReader]],
        finish: Callable[[BackgroundWriter, str | None], None] | None = None,
    ):
        """Begin to write; `lock` is this rank's in the folder, and is closed at the end."""
        self.tokens = layers[0][0].tokens
        self._folder, self._rank, self._lock = folder, rank, lock
        self._layers, self._finish = list(layers), finish
        self._is_given_up = Event()
        self._thread = Thread(target=self._run, name="prompt-cache-writer", daemon=True)
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        return self._thread.is_alive()

    @property
    def is_cancelled(self) -> bool:
        return self._is_given_up.is_set()

    def wait(self) -> None:
        """Wait until all is written; an interrupt gives it up."""
        try:
            self._thread.join()
        except BaseException:
            self.cancel()  # before others get the memory that is being read
            raise

    def cancel(self) -> None:
        """Leave it, and read none of its memory any more."""
        self._is_given_up.set()
        self._thread.join()

    def _run(self) -> None:
        trouble: str | None = _NOT_DONE
        with suppress(OSError, AttributeError):  # whoever decodes goes first
            os.setpriority(os.PRIO_PROCESS, get_native_id(), _NICENESS)
        try:
            checksums = []
            while self._layers:  # what is written is let go of
                file, excerpt = self._layers.pop(0)
                checksums.append(file.write(self._wanted(excerpt)))
            path = rank_file(self._folder, self._rank, "json")
            write_synced(path, json.dumps(checksums).encode())
            trouble = None
        except WriteCancelled as error:
            trouble = str(error)
            with suppress(OSError):  # before rank 0 asks
                rank_file(self._folder, self._rank, "given-up").touch()
        except Exception as error:  # whatever it is, the text goes on
            trouble = one_line(error)
        finally:
            self._layers.clear()
            try:
                if self._finish is not None:
                    self._finish(self, trouble)
            finally:
                self._lock.close()

    def _wanted(self, excerpt: HostReader) -> HostReader:
        """Return an excerpt that raises GivenUp once nobody waits for it."""

        def read(head: int, start: int, end: int) -> Tensor:
            if self.is_cancelled:
                raise WriteCancelled("it was given up")
            return excerpt(head, start, end)

        return read


def files_of(folder: Path, rank: int, layout: KVLayout, tokens: int, text: bytes) -> list[KVFile]:
    """Return the files of a rank's layers.

    Their checksums depend on `text`, the digest of all that the KV depends on, tokens included, and
    on rank and layer: a file that was put in another one's place is noticed.
    """

    def file_of(layer: int) -> KVFile:
        name = f"rank-{rank}-layer-{layer}.kv"
        return KVFile(folder / name, layout, tokens, zlib.crc32(text + name.encode()))

    return [file_of(layer) for layer in range(layout.layers)]


def load_saved(
    folder: Path, rank: int, files: Sequence[KVFile], tokens: int
) -> Iterator[tuple[int, Iterator[KVBlock]]]:
    """Yield each layer with the pieces of its first tokens; some are read ahead.

    Raises CorruptCacheError where they are not what was written, and OSError.
    """
    checksums = _read_checksums(folder, rank, files)
    with ThreadPoolExecutor(_THREADS) as pool:
        for layer, (file, sums) in enumerate(zip(files, checksums, strict=True)):
            yield layer, _ahead(pool, file.readers(tokens, sums))


def _ahead(pool: ThreadPoolExecutor, calls: Iterator[Callable[[], KVBlock]]) -> Iterator[KVBlock]:
    """Yield what calls return, in order, of which a few are made ahead."""
    waiting = deque(pool.submit(call) for call in islice(calls, _AHEAD))
    while waiting:
        done = waiting.popleft().result()
        waiting.extend(pool.submit(call) for call in islice(calls, 1))
        yield done


def _read_checksums(folder: Path, rank: int, files: Sequence[KVFile]) -> list[list[int]]:
    """Return a rank's checksums by layer. Raises CorruptCacheError, OSError."""
    limit = _CHECKSUM_BYTES * sum(1 + file.blocks for file in files)
    try:
        raw = read_json(rank_file(folder, rank, "json"), limit)
        checksums = [list(map(int, each)) for each in raw]
    except UnsuitableFileError as error:
        raise CorruptCacheError(f"the checksums of rank {rank}: {error.strerror}") from error
    except (ValueError, TypeError, ArithmeticError) as error:
        raise CorruptCacheError(f"the checksums of rank {rank} are none") from error
    if len(checksums) != len(files):
        raise CorruptCacheError(f"the checksums of rank {rank} are of {len(checksums)} layers")
    return checksums
