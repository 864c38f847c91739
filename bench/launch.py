"""The server under load, as a process of its own.

    python bench/launch.py '{"server": {...}, "engine": {...}, "fake": {...}}'

serves the backend of bench/fake.py; everything else is as in `gpuscore serve`. `serving` starts and
stops either this or the real command.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from spent import family


@dataclass(frozen=True)
class Target:
    address: tuple[str, int]
    pid: int

    def cpu_seconds(self) -> float:
        """Return the CPU-seconds of the server and its descendants."""
        return sum(map(sum, family(self.pid).values()))

    def cpu_by_kind(self) -> dict[str, float]:
        """Return the same for the engine's process, and for all others, which serve HTTP."""
        used = {"engine": 0.0, "http": 0.0}
        for pid, times in family(self.pid).items():
            used["engine" if _is_engine(pid) else "http"] += sum(times)
        return used

    def memory_mib(self) -> float:
        pages = (Path(f"/proc/{pid}/statm").read_text().split()[1] for pid in family(self.pid))
        return sum(map(int, pages)) * os.sysconf("SC_PAGE_SIZE") / 2**20


@contextmanager
def serving(arguments: Sequence[str]) -> Iterator[Target]:
    """Run this Python with the arguments; enter the block once the server is ready; stop it."""
    process = subprocess.Popen(
        [sys.executable, "-P", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={k: v for k, v in os.environ.items() if not k.startswith("GPUSCORE_")},
    )
    try:
        yield Target(_address(process), process.pid)
        process.send_signal(signal.SIGTERM)
        if process.wait(timeout=60):
            raise RuntimeError(f"the server ended with {process.returncode}")
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def fake_server(**configs: dict[str, Any]) -> list[str]:
    """Return arguments for `serving`.

    Args:
        configs: fields of ServerConfig, EngineConfig and FakeBackend, as `server`, `engine` and
            `fake`.
    """
    return [__file__, json.dumps(configs)]


def real_server(model: Path, *flags: str) -> list[str]:
    return ["-m", "gpuscore", "serve", str(model), "--port", "0", *flags]


def _address(process: "subprocess.Popen[str]") -> tuple[str, int]:
    assert process.stdout is not None
    for line in process.stdout:
        if "ready on http://" in line:
            host, port = line.split("ready on http://")[1].split(" ")[0].rsplit(":", 1)
            return host, int(port)
    raise RuntimeError(f"the server ended with {process.wait()} before it was ready")


def engine_of(pid: int) -> int:
    """Return the process id of a server's engine."""
    return next(filter(_is_engine, family(pid)))


def _is_engine(pid: int) -> bool:
    return b"gpuscore.processes.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()


def main(configs: dict[str, dict[str, Any]]) -> int:
    """Serve as gpuscore/processes/serving.py does, with another backend."""
    from gpuscore.config import EngineConfig, ModelConfig, ServerConfig
    from gpuscore.dialects.served import ServedModel
    from gpuscore.processes.replicas.start import start_replicas
    from gpuscore.server.http.auth import ApiKeys
    from gpuscore.server.run import serve

    # The engine's process makes the backend and reads both.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    os.environ["BENCH_FAKE"] = json.dumps(configs.get("fake", {}))
    engine = EngineConfig(**configs.get("engine", {}))
    model = ModelConfig(kv_cache_size=2**20)  # replicas on CPUs need it; the fake has no cache
    make = partial(start_replicas, Path("/nowhere"), model, engine, "fake:prepare")
    server = ServerConfig(**{"port": 0, "log_requests": False} | configs.get("server", {}))
    with closing(make()) as replicas:
        models = [(ServedModel("fake"), partial(_load, replicas))]
        return serve(models, server, ApiKeys([]), _announce)


def _load(replicas: Any) -> Any:
    from gpuscore.config import RequestLimits
    from gpuscore.dialects.served import LoadedModel
    from gpuscore.prompts.model import ModelPrompts
    from gpuscore.text.joining import PromptBuilder

    builder = PromptBuilder(None, replicas.wait_ready(), RequestLimits())
    return LoadedModel(replicas, ModelPrompts(builder), replicas.wait_ended)


def _announce(address: str) -> None:
    print(f"ready on http://{address} ", flush=True)


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
