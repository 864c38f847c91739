"""Builds what a release publishes, and tries it: `make release`, or for some extras only
`make release ARGS='--extras serve batch'`.

In dist/ afterwards: the source distribution and the wheel, built twice from clones of HEAD with the
same bytes; notes.md, from CHANGELOG.md; and sbom.cdx.json, of what serving installs. Every extra is
installed from that wheel into an environment of its own, and used.
"""

import argparse
import filecmp
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
CLIENT = """
import sys
from gpuscore.client import Client
heavy = {"torch", "fastapi", "tokenizers"} & set(sys.modules)
sys.exit(f"the client imports {heavy}" if heavy else 0)
"""
SCORE = """
from gpuscore import Scorer
with Scorer("demo", device="cpu"{more}) as scorer:
    result = scorer.score("query: a chair\\nitem: ", ["A chair.", "A lamp."], labels=["yes", "no"])
    assert result.scores[0][0] > result.scores[1][0], result.scores
"""
SERVE = """
import subprocess, sys
from pathlib import Path
from gpuscore.client import Client
command = [Path(sys.executable).with_name("gpuscore"), "serve", "demo", "--device", "cpu"]
server = subprocess.Popen([*command, "--port", "0"], stdout=subprocess.PIPE, text=True)
try:
    line = next(line for line in server.stdout if "ready on" in line)
    with Client(line.split("ready on ")[1].split(" ")[0]) as client:
        ranked = client.rerank("a blue chair", ["A red lamp.", "A chair in blue."])
        assert [result.index for result in ranked.results] == [1, 0], ranked
finally:
    server.terminate()
    server.wait()
"""
PARQUET = """
import subprocess, sys
from pathlib import Path
import pyarrow as pa, pyarrow.parquet as pq
pq.write_table(pa.table({"query": ["q: "], "item": ["x"]}), "in.parquet")
gpuscore = Path(sys.executable).with_name("gpuscore")
subprocess.run([gpuscore, "batch", "demo", "--device", "cpu", "--input", "in.parquet",
                "--output", "out.parquet", "--labels", "yes,no"], check=True)
assert pq.read_table("out.parquet").num_rows == 1
"""
PARITY = """
import subprocess, sys
from pathlib import Path
gpuscore = Path(sys.executable).with_name("gpuscore")
subprocess.run([gpuscore, "parity", "run", "demo", "--device", "cpu", "--dtype",
                "float32", "--workload", "quick"], check=True)
"""
TRACES = """
from gpuscore.server.observe.tracing import read_tracer
assert read_tracer({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}) is not None
"""
# How each extra is used. `cuda` needs a GPU.
SMOKE = {
    "": CLIENT,
    "serve": SCORE.format(more="") + SERVE,
    "jax": SCORE.format(more=', backend="jax"'),
    "batch": PARQUET,
    "parity": PARITY,
    "ray": "import gpuscore.ray; gpuscore.ray.app",
    "otel": TRACES,
}
BESIDE_SERVE = ("otel",)  # extras that do not bring `serve`, which their use needs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--extras", nargs="*", metavar="EXTRA", default=[*filter(None, SMOKE)])
    parser.add_argument("--torch", default="torch==2.13.0", help="requirement of the CPU build")
    parser.add_argument("--torch-index", default="", metavar="URL", help="where else it may be")
    arguments = parser.parse_args()
    if changed := output("git", "status", "--porcelain"):
        sys.exit(f"a release is built from a commit, and these files are not in one:\n{changed}")
    shutil.rmtree(DIST, ignore_errors=True)
    wheel = build()
    notes(wheel.name.split("-")[1])
    run(sys.executable, "-m", "twine", "check", "--strict", *DIST.glob("gpuscore-*"))
    for extra in ("", *arguments.extras):
        with environment(wheel, extra, arguments) as python:
            print(f"trying {extra or 'the client alone'}", flush=True)
            run(python, "-P", "-c", SMOKE[extra], cwd=python.parents[1])
            if extra == "serve":
                sbom(python)
    print(f"\nin {DIST}: {', '.join(sorted(path.name for path in DIST.iterdir()))}")
    return 0


def run(*command: str | Path, cwd: Path = ROOT, **variables: str) -> None:
    """Run a command; end this script if it fails. No checkout is on the path."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=clean | variables, check=False)
    if done.returncode:
        sys.exit(f"failed with {done.returncode}: {' '.join(map(str, command))[:200]}")


def output(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def build() -> Path:
    """Build twice, each time from a clone of its own, and compare; return the wheel."""
    epoch = output("git", "log", "-1", "--format=%ct").strip()
    with TemporaryDirectory() as scratch:
        made = [Path(scratch) / name for name in ("first", "second")]
        for folder in made:
            run("git", "clone", "--quiet", ROOT, folder / "source")
            target = ("--outdir", folder / "dist", folder / "source")
            run(sys.executable, "-m", "build", *target, SOURCE_DATE_EPOCH=epoch)
        first, second = (folder / "dist" for folder in made)
        names = sorted(path.name for path in first.iterdir())
        if filecmp.cmpfiles(first, second, names, shallow=False)[0] != names:
            sys.exit(f"two builds of {', '.join(names)} differ")
        shutil.copytree(first, DIST)
    print(f"two builds have the same bytes: {', '.join(names)}", flush=True)
    (wheel,) = DIST.glob("*.whl")
    return wheel


def notes(version: str) -> None:
    """Write the notes: of this version if HEAD has its tag, otherwise of what is not released."""
    tags = output("git", "tag", "--points-at", "HEAD", "v*").split()
    if tags not in ([], [f"v{version}"]):
        sys.exit(f"HEAD has the tag {', '.join(tags)}, and the version is {version}")
    wanted = version if tags else "Unreleased"
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    section = re.search(rf"^## \[{re.escape(wanted)}\][^\n]*\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    if section is None:
        sys.exit(f"CHANGELOG.md has no section [{wanted}]")
    images = "\n".join(f"- `gpuscore:{version}-{device}`" for device in ("cpu", "cuda", "tpu"))
    commit = output("git", "rev-parse", "HEAD").strip()
    head = f"# gpuscore {version}\n\nCommit {commit}. Images:\n\n{images}\n"
    (DIST / "notes.md").write_text(f"{head}\n{section[1].strip()}\n", encoding="utf-8")


@contextmanager
def environment(wheel: Path, extra: str, arguments: argparse.Namespace) -> Iterator[Path]:
    """Install the wheel with an extra as docs/install.md says; yield the new Python."""
    extras = ",".join(filter(None, (extra, "serve" if extra in BESIDE_SERVE else "")))
    with TemporaryDirectory() as folder:
        run(sys.executable, "-m", "venv", folder)
        python = Path(folder) / "bin" / "python"
        pip = (python, "-m", "pip", "install", "--quiet", "--no-compile")
        if extra:
            torch(pip, arguments)
        run(*pip, f"./{wheel.name}[{extras}]" if extras else f"./{wheel.name}", cwd=DIST)
        yield python


def torch(pip: tuple[str | Path, ...], arguments: argparse.Namespace) -> None:
    """Install PyTorch's CPU build, from where pip looks or from its index."""
    if subprocess.run([*pip, arguments.torch], check=False).returncode:
        run(*pip, "--extra-index-url", arguments.torch_index, arguments.torch)


def sbom(python: Path) -> None:
    """Write the bill of materials of an environment, which cyclonedx-py validates."""
    file = DIST / "sbom.cdx.json"
    tool = (sys.executable, "-m", "cyclonedx_py", "environment", "--output-reproducible")
    run(*tool, "--output-format", "JSON", "--output-file", file, python)
    names = {component["name"] for component in json.loads(file.read_text())["components"]}
    if not {"gpuscore", "torch"} <= names:
        sys.exit(f"{file} names neither gpuscore nor torch")


if __name__ == "__main__":
    sys.exit(main())
