"""`gpuscore convert`: a directory that `serve` takes, or nothing."""

import argparse
import os
import secrets
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from transformers.utils import logging

from gpuscore.backends.common.architectures import read_architecture
from gpuscore.backends.common.checkpoint import required_tensors
from gpuscore.backends.common.hf_config import RawConfig
from gpuscore.backends.common.plan import mebibytes
from gpuscore.commands.convert.bin_source import BinSource
from gpuscore.commands.convert.checks import check_directory
from gpuscore.commands.convert.gguf_source import GgufSource
from gpuscore.commands.convert.source import Source
from gpuscore.errors import ConfigError, UsageError
from gpuscore.measure.progress import progress

EXIT_SIGNAL = 128  # plus the signal's number


def convert(values: argparse.Namespace) -> int:
    """Convert SOURCE into DIRECTORY and say what was made; return 0.

    The directory is written beside its place under another name, checked, and then renamed.

    Raises:
        UsageError: SOURCE cannot be converted, or DIRECTORY is there. Nothing was written.
    """
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    directory = Path(values.directory)
    _refuse_existing(directory)
    try:
        source = read_source(Path(values.source))
        dtype = values.written_dtype or source.suggested
        with _beside(directory) as made:
            source.write(made, dtype)
            count = _check(made, source, dtype)
            size = sum(path.stat().st_size for path in made.iterdir())
            _put(made, directory)
    except UsageError:
        raise
    except ConfigError as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        raise UsageError(f"SOURCE {values.source} cannot be read: {error.strerror}") from error
    why = "as asked" if values.written_dtype else source.why
    print(f"{directory}: {count} tensors in {dtype} ({why}), {mebibytes(size)}; ", end="")
    print(f"compared with {source.path}. Next: gpuscore serve {directory}")
    return 0


def read_source(path: Path) -> Source:
    """Return the source at a path: a GGUF file, or a directory with a GGUF file or .bin files.

    Raises:
        UsageError: there is no source, or it cannot be converted.
    """
    if path.is_file():
        return GgufSource(path)
    if not path.is_dir():
        raise UsageError(f"SOURCE {path} is not there; supported: {_SUPPORTED}")
    if any(path.glob("*.safetensors")):
        raise UsageError(
            f"SOURCE {path} has its weights in safetensors: gpuscore serve takes it as it is"
        )
    if any(path.glob("pytorch_model*.bin*")):
        return BinSource(path)
    files = sorted(path.glob("*.gguf"))
    if len(files) != 1:
        names = ", ".join(file.name for file in files) or "none"
        raise UsageError(f"SOURCE {path}: GGUF files there: {names}; supported: {_SUPPORTED}")
    return GgufSource(files[0])


_SUPPORTED = "a GGUF file, a directory with one, or a model directory with pytorch_model.bin"


def _check(made: Path, source: Source, dtype: str) -> int:
    total = sum(1 for _ in required_tensors(read_architecture(RawConfig.read(made))))
    with progress(total, "tensor") as begin:
        check_directory(made, source, dtype, begin("comparing"))
    return total


def _refuse_existing(directory: Path) -> None:
    if directory.is_dir() and not any(directory.iterdir()):
        return
    if os.path.lexists(directory):
        raise UsageError(f"DIRECTORY {directory} is there already, and is not an empty directory")


@contextmanager
def _beside(directory: Path) -> Iterator[Path]:
    """Make a directory beside the requested directory; remove it if it was not renamed.

    Signals that end the process raise SystemExit meanwhile.
    """
    made = directory.absolute().with_name(f".{directory.absolute().name}.{secrets.token_hex(4)}")
    before = {number: signal.signal(number, _end) for number in _ENDING}
    try:
        made.mkdir(0o700)
        yield made
    except OSError as error:
        reason = f"{error.strerror} ({error.filename})" if error.filename else str(error)
        raise UsageError(f"DIRECTORY {directory} cannot be written: {reason}") from error
    finally:
        shutil.rmtree(made, ignore_errors=True)
        for number, handler in before.items():
            signal.signal(number, handler)


_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(EXIT_SIGNAL + number)


def _put(made: Path, directory: Path) -> None:
    """Give files and directory the rights that this user's umask leaves, and rename it."""
    umask = os.umask(0)
    os.umask(umask)
    for path in made.iterdir():
        path.chmod(0o666 & ~umask)
    made.chmod(0o777 & ~umask)
    try:
        made.rename(directory)  # onto an empty directory, too
    except OSError as error:
        raise UsageError(f"DIRECTORY {directory} cannot be made: {error.strerror}") from error
