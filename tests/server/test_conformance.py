"""Promise: `gpuscore parity check-server` passes on our own server, without known deviations."""

from gpuscore.commands.cli import main


def test_our_own_server_conforms(server, model, capsys):
    flags = ["--reference", str(model[0]), "--tolerance", "1e-5", "--kind", "gpuscore"]
    assert main(["parity", "check-server", server.url, *flags]) == 0, capsys.readouterr().out
    shown = capsys.readouterr().out
    assert shown.startswith("oracle: transformers on cpu\n")
    assert "model tiny, 400 token ids, text and ids, queries of 250 tokens" in shown
    skipped = [line for line in shown.splitlines() if line.startswith("skip ")]
    assert [line.split()[1] for line in skipped] == ["C6.text:", "C20.california:"], "of hub models"
