"""Files that all nodes reach: on a shared disk, or in an object store that Arrow knows by its
scheme, such as s3://bucket/folder."""

from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from uuid import uuid4

import msgspec
from pyarrow import ArrowException, fs

from gpuscore.commands.bulk.options import SUFFIXES
from gpuscore.errors import ConfigError


class InputFile(msgspec.Struct, frozen=True, order=True):
    """A file of the input: its path in its file system, and its state."""

    path: str
    size: int
    mtime_ns: int

    @property
    def format(self) -> str:
        return SUFFIXES[PurePosixPath(self.path).suffix]


def located(place: str) -> tuple[fs.FileSystem, str]:
    """Return the file system of a place and its path there; raise ConfigError for no such kind."""
    if "://" not in place:
        return fs.LocalFileSystem(), str(Path(place).absolute())
    try:
        system, path = fs.FileSystem.from_uri(place)
    except (ArrowException, OSError) as error:
        raise ConfigError(f"{place}: {error}") from error
    return system, path


def find_files(place: str) -> list[InputFile]:
    """Return a file, the files of a folder, or all that match a pattern such as data/*.jsonl; raise
    ConfigError if there are none, or they are not of one supported format."""
    system, path = located(place)
    folder, _, name = path.rpartition("/")
    if system.get_file_info(path).type == fs.FileType.Directory:
        folder, name = path, "*"
    listed = system.get_file_info(fs.FileSelector(folder, allow_not_found=True))
    inputs = [info for info in listed if info.is_file and info.base_name[0] not in "._"]
    inputs = [info for info in inputs if fnmatch(info.base_name, name) or info.base_name == name]
    formats = {SUFFIXES.get(PurePosixPath(info.path).suffix) for info in inputs}
    if len(formats) != 1 or None in formats:
        raise ConfigError(f"--input {place}: {len(inputs)} files; supported: {', '.join(SUFFIXES)}")
    return sorted(InputFile(info.path, info.size, info.mtime_ns) for info in inputs)


@contextmanager
def on_disk(system: fs.FileSystem, file: InputFile) -> Iterator[Path]:
    """Yield a file on this node's disk, where one of an object store is copied for that time;
    raise ConfigError if it has changed, or is not there."""
    now = system.get_file_info(file.path)
    if (now.size, now.mtime_ns) != (file.size, file.mtime_ns):
        raise ConfigError(f"--input {file.path} is missing on a node, or has changed")
    if isinstance(system, fs.LocalFileSystem):
        yield Path(file.path)
        return
    with TemporaryDirectory() as folder:
        copy = Path(folder, PurePosixPath(file.path).name)
        fs.copy_files(file.path, str(copy), system, fs.LocalFileSystem())
        yield copy


class Output:
    """The folder of a job's output, and what stands beside it. Names begin with what is added to
    the output's, as in .work/groups. Files are written whole, then renamed."""

    def __init__(self, place: str) -> None:
        self.place = place
        self._system, self._path = located(place)

    def names(self, folder: str) -> set[str]:
        """Return the names in a folder; none if it is missing."""
        selector = fs.FileSelector(self._path + folder, allow_not_found=True)
        return {info.base_name for info in self._system.get_file_info(selector)}

    def has(self, name: str) -> bool:
        return bool(self._system.get_file_info(self._path + name).type != fs.FileType.NotFound)

    def read(self, name: str) -> bytes:
        with self._system.open_input_stream(self._path + name) as file:
            return bytes(file.read())

    def write(self, name: str, content: bytes) -> None:
        new = f"{self._path}.work/new/{uuid4().hex}"
        for path in (new, self._path + name):
            self._system.create_dir(path.rpartition("/")[0])
        with self._system.open_output_stream(new) as file:
            file.write(content)
        self._system.move(new, self._path + name)

    def remove(self, folder: str) -> None:
        self._system.delete_dir(self._path + folder)
