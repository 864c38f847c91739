"""The source of a conversion: a model in a format that `serve` does not take."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, TypeAlias

from torch import Tensor

from gpuscore.errors import ConfigError, UsageError
from gpuscore.models.files import SHOWN

# Called with the number of tensors that are done.
Counted: TypeAlias = Callable[[int], None]


class Source(Protocol):
    """A model that can be converted.

    Attributes:
        path: of its file or directory.
        why: names the precision of its weights in a few words.
        suggested: the dtype that this precision suggests.
    """

    path: Path
    why: str
    suggested: str

    def write(self, directory: Path, dtype: str) -> None:
        """Write weights in `dtype`, configuration, tokenizer and chat template.

        Raises:
            ConfigError: the source is damaged, or has content that `serve` does not take.
        """
        ...

    def tensor(self, name: str) -> Tensor | None:
        """Return the source's tensor that belongs to this tensor of the written directory."""
        ...

    def check_texts(self, directory: Path) -> None:
        """Raise ConfigError unless tokenizer and chat template equal the source's."""
        ...


@contextmanager
def refusing(path: Path) -> Iterator[None]:
    """Turn any exception that a library raises while it reads an untrusted file into a refusal.

    Raises:
        UsageError: with the path, and the first line of the library's error.
    """
    try:
        yield
    except (ConfigError, MemoryError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:  # of the disk, not of the file
            raise
        reason = " ".join(str(error).split())[:SHOWN]
        raise UsageError(f"{path} cannot be read: {type(error).__name__}: {reason}") from error
