"""Images without a Docker daemon: built by buildah and run by runc, both as root.

All files are in one directory. The base and the locked wheels, which are slow to fetch, are kept
there for the next run; images and containers are removed when a `Workshop` is closed.
"""

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
LOCKS = REPOSITORY / "docker" / "locks"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
DEBIAN = "bookworm"  # its python3 is 3.11, which gpuscore supports
REFUSED = 78  # exit code of gpuscore when a setting is wrong
TOOLS = {"buildah": "buildah", "runc": "runc", "mmdebstrap": "mmdebstrap"}  # command: package


class Problem(Exception):
    """An error that ends the test: a check failed, or a requirement is missing."""


def expect(holds: bool, message: str) -> None:
    if not holds:
        raise Problem(message)


@contextmanager
def step(name: str) -> Iterator[None]:
    print(name, flush=True)
    start = time.monotonic()
    yield
    print(f"  ok, {time.monotonic() - start:.0f} s", flush=True)


def require_tools(own_base: bool) -> None:
    """Raise Problem, with the command that installs them, if tools are missing."""
    if os.geteuid() != 0:
        raise Problem("image-test mounts file systems and must be run as root")
    wanted = [tool for tool in TOOLS if own_base or tool != "mmdebstrap"]
    missing = [TOOLS[tool] for tool in wanted if shutil.which(tool) is None]
    if missing:
        raise Problem(
            "image-test needs " + ", ".join(missing) + "; on Debian: apt-get install "
            "--no-install-recommends " + " ".join(missing)
        )


def run(*command: str | Path) -> str:
    """Run a command and return its standard output; raises Problem with its output if it fails."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-40:])
        raise Problem(
            f"{' '.join(map(str, command[:4]))} ... ended with {done.returncode}:\n{tail}"
        )
    output: str = done.stdout
    return output


class Workshop:
    """Builds images. `base` names an image in a registry; None makes a Debian one, once."""

    def __init__(self, directory: Path, base: str | None) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._mine = (directory / "lock").open("w")
        try:
            fcntl.flock(self._mine, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise Problem(f"another image-test works in {directory}") from None
        self.runtime = directory / "runc"
        self._storage = directory / "storage"
        # vfs copies whole trees, but needs no kernel support, so it also works in a container.
        self._driver = os.environ.get("STORAGE_DRIVER", "vfs")
        self.close()  # removes the leftovers of a run that was killed
        self.base_is_foreign = base is not None
        self.base = base or self._debian_base()
        self.python = self._python_of_base()

    def close(self) -> None:
        """End containers; remove them, images and scratch files."""
        for name in run("runc", "--root", self.runtime, "list", "--quiet").split():
            run("runc", "--root", self.runtime, "delete", "--force", name)
        if self._storage.exists():
            self.buildah("rm", "--all")
            self.buildah("rmi", "--all", "--force")
        for path in (self._storage, self.runtime, self.directory / "scratch"):
            shutil.rmtree(path, ignore_errors=True)

    def buildah(self, *arguments: str | Path) -> str:
        where = [f"--root={self._storage}/root", f"--runroot={self._storage}/run"]
        return run("buildah", *where, f"--storage-driver={self._driver}", *arguments)

    def scratch(self, name: str) -> Path:
        path = self.directory / "scratch" / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def build(
        self, dockerfile: str, locks: Sequence[str], substitute: bool, arguments: dict[str, str]
    ) -> str:
        """Build an image of the working tree, as `docker build` does; return its name.

        `locks` names the files of docker/locks to install: the Dockerfile's own, or with
        `substitute` others instead. Their wheels are fetched here, with this machine's pip; the
        build itself has no access to an index.
        """
        wheels = self._wheels(["build", *locks])
        context = REPOSITORY
        if substitute:
            context = self._copy_of_sources(dockerfile, locks)
            arguments = {**arguments, "LOCK": "docker/locks/image.txt"}
        settings = self.scratch("pip") / "pip.conf"
        settings.write_text("[global]\nno-index = true\nfind-links = /mnt\n")
        name = f"localhost/gpuscore-test:{dockerfile.lower().replace('.', '-')}"
        self.buildah(
            *("build", "--format", "docker", "--isolation", "chroot"),
            *("--layers=false", "--build-arg", f"BASE={self.base}"),
            *(
                part
                for key, value in arguments.items()
                for part in ("--build-arg", f"{key}={value}")
            ),
            *("--secret", f"id=pip,src={settings}", "--volume", f"{wheels}:/mnt:ro"),
            *("--ignorefile", REPOSITORY / ".dockerignore", "--tag", name),
            *("--file", REPOSITORY / "docker" / dockerfile, context),
        )
        return name

    def root_of(self, image: str) -> Path:
        """Mount a container made from the image; return its root folder."""
        container = self.buildah("from", "--pull=never", image).strip()
        return Path(self.buildah("mount", container).strip())

    def configuration_of(self, image: str) -> dict[str, Any]:
        """Return the image's `config`: Env, User, Entrypoint, Healthcheck ..."""
        described: dict[str, Any] = json.loads(self.buildah("inspect", "--type", "image", image))
        config: dict[str, Any] = described["Docker"]["config"]
        return config

    def _wheels(self, locks: Sequence[str]) -> Path:
        """Return a folder with the wheels of the locks; a lock that changed is fetched again."""
        wheels = self.directory / f"wheels-{self.python}"
        for lock in (LOCKS / f"{name}.txt" for name in locks):
            state = hashlib.sha256(lock.read_bytes()).hexdigest()[:16]
            fetched = wheels / f"{lock.stem}-{state}.fetched"
            if fetched.exists():
                continue
            print(f"  fetching the wheels of {lock.name}", flush=True)
            try:
                run(*self._download(lock, wheels))
            except Problem:
                if lock.name != "torch-cpu.txt":
                    raise
                run(*self._download(lock, wheels), "--extra-index-url", TORCH_INDEX)
            fetched.touch()
        return wheels

    def _download(self, lock: Path, directory: Path) -> list[str | Path]:
        glibc = [f"manylinux_2_{minor}_x86_64" for minor in range(36, 4, -1)]
        platforms = [*glibc, "manylinux2014_x86_64", "manylinux2010_x86_64", "linux_x86_64"]
        return [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"),
            *("--only-binary", ":all:", "--implementation", "cp", "--python-version", self.python),
            *(part for platform in platforms for part in ("--platform", platform)),
            *("--dest", directory, "--requirement", lock),
        ]

    def _copy_of_sources(self, dockerfile: str, locks: Sequence[str]) -> Path:
        copy = self.scratch(f"context-{dockerfile}")
        for name in ("LICENSE", "README.md", "pyproject.toml", "hatch_build.py"):
            shutil.copy(REPOSITORY / name, copy)
        for name in ("gpuscore", "kernels", "docker/locks"):
            shutil.copytree(REPOSITORY / name, copy / name, dirs_exist_ok=True)
        text = "".join((LOCKS / f"{name}.txt").read_text() for name in locks)
        (copy / "docker" / "locks" / "image.txt").write_text(text)
        return copy

    def _debian_base(self) -> str:
        archive = self.directory / f"debian-{DEBIAN}.tar"
        if not archive.exists():
            print(f"  making a base of Debian {DEBIAN}, once: about two minutes", flush=True)
            partial = archive.with_suffix(".partial.tar")
            include = "--include=python3,python3-venv"
            run("mmdebstrap", "--variant=minbase", include, DEBIAN, partial)
            partial.rename(archive)
        container = self.buildah("from", "scratch").strip()
        self.buildah("add", container, archive, "/")
        name = "localhost/gpuscore-test:base"
        self.buildah("commit", "--format", "docker", "--rm", container, name)
        return name

    def _python_of_base(self) -> str:
        container = self.buildah("from", self.base).strip()
        script = "import sys; print('%d.%d' % sys.version_info[:2])"
        python = self.buildah("run", "--isolation", "chroot", container, "python3", "-c", script)
        self.buildah("rm", container)
        return python.strip()
