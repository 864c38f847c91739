"""Promise: every --help has examples that parse, is short, and a misspelt flag gets the closest."""

import re
import shlex
import subprocess
import sys

import pytest

from gpuscore.commands.cli import main, make_parser
from gpuscore.config import FileConfig
from gpuscore.config.flags import other_flags
from gpuscore.config.options import options
from gpuscore.config.sources import OPTIONS, read_settings


def commands(parser):
    """Yield the parsers of all commands that can run."""
    below = [action for action in parser._actions if hasattr(action.choices, "values")]
    for action in below:
        for child in action.choices.values():
            yield from commands(child)
    if parser.get_default("command") is not None:
        yield parser


ALL = {parser.prog: parser for parser in commands(make_parser())}


def examples(parser) -> list[str]:
    text = (parser.epilog or "").replace("\\\n", " ")
    return [line.strip() for line in text.splitlines() if line.startswith("  gpuscore ")]


@pytest.mark.parametrize("name", ["gpuscore", *ALL])
def test_every_help_has_examples_that_parse(name):
    commands = examples(ALL.get(name) or make_parser())
    assert commands
    for example in commands:
        words = shlex.split(example)[1:]
        if words[-1] == "--help":
            with pytest.raises(SystemExit, match="0"):
                main(words)
            continue
        assert name in example
        values = make_parser().parse_args(words)
        settings = {k: v for k, v in vars(values).items() if k != "config"}
        read_settings(settings, {})


def flags_of(option) -> str:
    return f"\n  {option.flag}"


@pytest.mark.parametrize("name", ["gpuscore serve", "gpuscore batch", "gpuscore info"])
def test_rare_settings_are_shown_on_request_only(name, capsys):
    for flag, every in (("--help", False), ("--help-all", True)):
        with pytest.raises(SystemExit, match="0"):
            main([*name.split()[1:], flag])
        shown = capsys.readouterr().out
        for option in OPTIONS.values():
            if not option.common:
                known = any(action.dest == option.name for action in ALL[name]._actions)
                assert (flags_of(option) in shown) == (every and known), option.flag
        assert "\n  --max-model-len" in shown
    common = [option for option in OPTIONS.values() if option.common]
    assert 18 <= len(common) <= 22
    assert len(OPTIONS) + len(list(options(FileConfig))) <= 50


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["serve", "--prot", "1"], "there is no --prot; did you mean --port? `gpuscore serve --h"),
        (["serve", "--max-modle-len=9"], "no --max-modle-len; did you mean --max-model-len?"),
        (["batch", "--input", "a", "--output", "b", "--dtyp", "c"], "--dtype?"),
        (["parity", "compare", "a", "b", "--rport", "c"], "did you mean --report?"),
        (["batch", "--inptu", "a", "--input", "b", "--output", "c"], "did you mean --input?"),
        (["serve", "demo", "--xyzzy"], "there is no --xyzzy; `gpuscore serve --help-all` shows"),
        (["serve", "demo", "other"], "other is one too many"),
        (["serve", "demo", "--api-kye", "s3cret"], "there is no --api-kye; "),
        (["serve", "demo", "--trace-modules", "1"], "no --trace-modules; `gpuscore serve"),
    ],
)
def test_a_misspelt_flag_gets_the_closest(words, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(words)
    error = capsys.readouterr().err
    assert message in error
    assert "s3cret" not in error


def test_help_and_version_are_quick_because_they_import_little():
    heavy = "{'torch', 'numpy', 'fastapi', 'tokenizers', 'transformers'} & set(sys.modules)"
    for flag in ("--version", "--help"):
        code = (
            "import sys; from gpuscore.commands.cli import main\n"
            f"try: main(['{flag}'])\nfinally: print('imported:', {heavy})"
        )
        done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
        assert "imported: set()" in done.stdout, done


@pytest.mark.parametrize("flag", [*other_flags(), "--hf_overrides", "--max-num-seqs=4"])
def test_flags_of_other_servers_get_their_meaning_here(flag, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["serve", "demo", flag, *["s3cret"] * ("=" not in flag)])
    name = flag.partition("=")[0]
    error = capsys.readouterr().err
    assert f"error: {name} {other_flags()[name.replace('_', '-')]}" in error
    assert "did you mean" not in error
    assert "s3cret" not in error


def test_what_other_flags_are_called_here_exists():
    known = {name for action in ALL["gpuscore serve"]._actions for name in action.option_strings}
    assert not known & other_flags().keys() - {"--api-key"}
    for meaning in other_flags().values():
        assert set(re.findall(r"--[a-z-]+", meaning)) <= known, meaning
