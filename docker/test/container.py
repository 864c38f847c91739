"""A container of an image, run by runc with as few rights as the image's documentation allows.

Its root is read-only, it has no capabilities and gets no new privileges, and its network has only
loopback. So requests are sent from inside, with the image's own Python.
"""

import json
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from workshop import Problem, Workshop

NAMESPACES = ("pid", "network", "ipc", "uts", "mount")
CAPABILITIES = ("bounding", "effective", "inheritable", "permitted", "ambient")


class Container:
    """One container per image; may be started several times. `/cache` is kept, like a volume."""

    def __init__(self, workshop: Workshop, image: str, temporary: bool) -> None:
        """Prepare the container; `temporary` mounts a writable /tmp."""
        self.config = workshop.configuration_of(image)
        self.root = workshop.root_of(image)
        self.log = b""
        self._runc = ["runc", "--root", str(workshop.runtime)]
        self._name = image.rsplit(":", 1)[1]
        self._bundle = workshop.scratch(f"bundle-{self._name}")
        self.cache = workshop.scratch(f"cache-{self._name}")
        user, group = map(int, self.config["User"].split(":"))
        self.cache.chmod(0o700)
        subprocess.run(["chown", f"{user}:{group}", self.cache], check=True)
        self._user = {"uid": user, "gid": group}
        self._temporary = temporary
        self._process: subprocess.Popen[bytes] | None = None
        self._output = workshop.scratch("logs") / f"{self._name}.log"

    def start(self, *arguments: str, **environment: str) -> None:
        """Start as `docker run --read-only --cap-drop ALL --network none IMAGE arguments...`."""
        command = [*self.config["Entrypoint"], *(arguments or self.config["Cmd"])]
        self._start(command, environment)

    def run_instead(self, *command: str, seconds: float) -> str:
        """Run a command in place of the entry point and return its output; raises Problem if it
        fails."""
        self._start(command, {})
        code = self.wait(seconds)
        if code:
            raise Problem(f"{' '.join(command[:4])} ... ended with {code}:\n{self.output()}")
        return self.output()

    def wait(self, seconds: float) -> int:
        """Wait for the end and return the exit code; raises Problem if it takes longer."""
        try:
            return self._started().wait(seconds)
        except subprocess.TimeoutExpired:
            raise Problem(f"the container still ran after {seconds} s:\n{self.output()}") from None

    def run(self, *arguments: str, **environment: str) -> str:
        """Run a command to its end and return its output; raises Problem if it fails."""
        self.start(*arguments, **environment)
        code = self.wait(120)
        if code:
            raise Problem(f"gpuscore {' '.join(arguments)} ended with {code}:\n{self.output()}")
        return self.output()

    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def execute(self, *command: str, seconds: float = 60) -> subprocess.CompletedProcess[str]:
        """Run a command as `docker exec` does, as the image's user."""
        return subprocess.run(
            [*self._runc, "exec", self._name, *command],
            capture_output=True,
            text=True,
            timeout=seconds,
        )

    def background(self, *command: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*self._runc, "exec", self._name, *command], stdout=subprocess.PIPE, text=True
        )

    def healthy(self) -> bool:
        """Run the image's own health check once; True if it passes."""
        test = self.config["Healthcheck"]["Test"]
        if test[0] != "CMD":
            raise Problem(f"the health check is not a command without a shell: {test}")
        return self.execute(*test[1:]).returncode == 0

    def until_healthy(self, seconds: float) -> float:
        """Wait until the container is healthy; return the seconds that it took."""
        start = time.monotonic()
        while time.monotonic() - start < seconds:
            if self._started().poll() is not None:
                raise Problem(f"ended with {self._started().returncode}:\n{self.output()}")
            if self.healthy():
                return time.monotonic() - start
            time.sleep(0.2)
        raise Problem(f"not healthy within {seconds} s:\n{self.output()}")

    def signal(self, number: signal.Signals) -> None:
        subprocess.run([*self._runc, "kill", self._name, str(int(number))], check=True)

    def stop(self) -> None:
        """Kill the container if it still runs."""
        if self._process is not None and self._process.poll() is None:
            self.signal(signal.SIGKILL)
            self._process.wait(30)

    def _start(self, command: Sequence[str], environment: dict[str, str]) -> None:
        text = json.dumps(self._specification(command, environment))
        (self._bundle / "config.json").write_text(text)
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                [*self._runc, "run", "--bundle", str(self._bundle), self._name],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise Problem("the container was not started")
        return self._process

    def _specification(self, command: Sequence[str], environment: dict[str, str]) -> dict[str, Any]:
        """Return runc's config.json."""
        mounts: list[dict[str, Any]] = [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {
                "destination": "/sys",
                "type": "sysfs",
                "source": "sysfs",
                "options": ["nosuid", "noexec", "nodev", "ro"],
            },
            _tmpfs("/dev", "strictatime", "mode=755"),
            _tmpfs("/dev/shm", "mode=1777"),
            {"destination": "/cache", "source": str(self.cache), "options": ["bind", "rw"]},
        ]
        if self._temporary:
            mounts.append(_tmpfs("/tmp", "mode=1777"))
        variables = [f"{key}={value}" for key, value in environment.items()]
        return {
            "ociVersion": "1.0.2",
            "process": {
                "user": self._user,
                "args": list(command),
                "env": [*self.config["Env"], *variables],
                "cwd": "/",
                "noNewPrivileges": True,
                "capabilities": {kind: [] for kind in CAPABILITIES},
            },
            "root": {"path": str(self.root), "readonly": True},
            "mounts": mounts,
            "linux": {"namespaces": [{"type": kind} for kind in NAMESPACES]},
        }


def _tmpfs(destination: str, *options: str) -> dict[str, Any]:
    return {
        "destination": destination,
        "type": "tmpfs",
        "source": "tmpfs",
        "options": ["nosuid", *options],
    }


def size_of(root: Path) -> int:
    """Size of a folder in bytes on disk."""
    done = subprocess.run(["du", "-sxB1", root], capture_output=True, text=True, check=True)
    return int(done.stdout.split()[0])
