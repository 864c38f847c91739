"""The command line of `gpuscore convert`."""

import argparse
from typing import Any

from gpuscore.config.examples import EXAMPLES
from gpuscore.config.flags import CommandParser, HelpFormatter, refuse_api_key
from gpuscore.config.sources import Settings
from gpuscore.errors import ConfigError
from gpuscore.system.extras import install

DTYPES = ("bfloat16", "float16", "float32")
_EXTRA = ("transformers", "gguf", "accelerate")


def add_convert(commands: Any) -> None:
    """Add `convert` to the parser's commands."""
    parser: CommandParser = commands.add_parser(
        "convert",
        usage="gpuscore convert SOURCE DIRECTORY [OPTIONS]",
        description="Convert a GGUF file or pytorch_model.bin into a directory that serve takes.",
        help="convert GGUF or pytorch_model.bin into a directory that serve takes",
        epilog=EXAMPLES["convert"],
        formatter_class=HelpFormatter,
    )
    parser.set_defaults(command=_convert)
    refuse_api_key(parser)
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="a GGUF file, a directory with one, or a model directory with pytorch_model*.bin",
    )
    parser.add_argument("directory", metavar="DIRECTORY", help="to make; must not be there")
    parser.add_argument(
        "--dtype",
        dest="written_dtype",
        choices=DTYPES,
        help="number format of the tensors (default: SOURCE's, and bfloat16 if quantised)",
    )


def _convert(values: argparse.Namespace, settings: Settings) -> int:
    try:
        import accelerate  # noqa: F401  (transformers reads GGUF only where it is installed)

        from gpuscore.commands.convert.command import convert
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRA:
            raise
        needed = f"gpuscore convert needs {package}: {install('convert')}"
        raise ConfigError(needed) from error
    return convert(values)
