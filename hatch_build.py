"""Hatchling's hook that puts the commit into a wheel and a source distribution, for
`gpuscore --version`. A build outside git adds nothing; a source distribution keeps its file."""

import shutil
import subprocess
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

COMMIT = "gpuscore/commit.txt"  # gpuscore/system/machine.py reads it


class CommitHook(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        self._folder = Path(mkdtemp())
        if version == "editable" or not (Path(self.root) / ".git").exists():
            return
        command = ["git", "-C", self.root, "describe", "--always", "--dirty", "--exclude=*"]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
        file = self._folder / "commit.txt"
        file.write_bytes(done.stdout)
        file.chmod(0o644)
        build_data["force_include"][str(file)] = COMMIT

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        shutil.rmtree(self._folder)
