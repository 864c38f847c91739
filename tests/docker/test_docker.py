"""Promise: the images' files hold what can be checked without building them. `make image-test`
builds and runs the images."""

import json
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import httpx
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from support import programs
from support.serving import serving

ROOT = Path(__file__).parents[2]
LOCKS = ROOT / "docker" / "locks"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Each Dockerfile with the locks that it installs and the extras of gpuscore that they must contain.
IMAGES = {
    "Dockerfile.cpu": (["torch-cpu", "cpu"], ["batch"]),
    "Dockerfile": (["cuda"], ["cuda", "batch"]),
    "Dockerfile.tpu": (["torch-cpu", "tpu"], ["jax", "batch"]),
}
LOCK_NAMES = ["build", "torch-cpu", "cpu", "cuda", "tpu"]
ENTRY = re.compile(r"^([A-Za-z0-9._-]+)==(\S+) \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)")


def entries(lock):
    """Return version by name; refuse anything but comments and pinned packages with hashes."""
    text = re.sub(r"^#.*\n", "", (LOCKS / f"{lock}.txt").read_text(), flags=re.MULTILINE)
    versions = {}
    while text:
        entry = ENTRY.match(text)
        assert entry, f"{lock}.txt: neither a pinned, hashed package nor a comment: {text[:200]}"
        assert canonicalize_name(entry[1]) not in versions
        versions[canonicalize_name(entry[1])] = entry[2]
        text = text[entry.end() :]
    return versions


def instructions(dockerfile):
    """Return the instructions of a Dockerfile, continuation lines joined and comments removed."""
    text = (ROOT / "docker" / dockerfile).read_text()
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)
    return [line for line in re.sub(r"\\\n", " ", text).splitlines() if line.strip()]


def last_stage(dockerfile):
    lines = instructions(dockerfile)
    return lines[max(i for i, line in enumerate(lines) if line.startswith("FROM")) :]


@pytest.mark.parametrize("lock", LOCK_NAMES)
def test_locks_pin_and_hash_and_name_no_place(lock):
    """Locks must hold anywhere: they name no index, address or path of the machine that wrote
    them."""
    assert entries(lock)
    text = (LOCKS / f"{lock}.txt").read_text()
    assert not re.search(r"://|^-|file:|/(home|root|tmp|opt|var|mnt)/", text, re.MULTILINE)


@pytest.mark.parametrize("dockerfile", IMAGES)
def test_locks_hold_what_pyproject_asks_for(dockerfile):
    """A dependency that was added or raised without `make locks` is found here."""
    locks, extras = IMAGES[dockerfile]
    locked = {name: version for lock in locks for name, version in entries(lock).items()}
    wanted = [*PROJECT["dependencies"]]
    for extra in ("serve", *extras):
        asked = PROJECT["optional-dependencies"][extra]
        wanted += [line for line in asked if line != "gpuscore[serve]"]
    for requirement in map(Requirement, wanted):
        version = locked.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement.name} is not locked; run make locks"
        assert requirement.specifier.contains(version), f"{requirement} but {version} is locked"


# Releases of triton on PyPI, of which `make check-kernels` has baselines for a few.
TRITONS = ("3.5.0", "3.5.1", "3.6.0", "3.7.0", "3.7.1", "3.8.0", "3.9.0")
CHECKED = {"cuda": ["3.7.1"], "dev": ["3.6.0"]}  # by extra


def test_no_triton_is_installed_whose_code_was_not_checked():
    allowed = {
        extra: [*requirement.specifier.filter(TRITONS)]
        for extra in CHECKED
        for requirement in map(Requirement, PROJECT["optional-dependencies"][extra])
        if requirement.name == "triton"
    }
    assert allowed == CHECKED
    assert [entries("cuda")["triton"]] == CHECKED["cuda"]
    assert not any("triton" in entries(lock) for lock in LOCK_NAMES if lock != "cuda")


def test_the_images_agree():
    """All images have the same version of a package, so that a result in one holds for the
    others."""
    seen = {}
    for lock in ("torch-cpu", "cpu", "cuda", "tpu"):
        for name, version in entries(lock).items():
            public = version.split("+")[0]
            assert seen.setdefault(name, public) == public, f"{name} in {lock}.txt"


LEFT_OUT = re.findall(r"^([^#;\n]+);", (LOCKS / "cuda-without.txt").read_text(), re.MULTILINE)


def test_what_the_cuda_image_leaves_out_is_not_locked():
    assert LEFT_OUT
    assert not set(map(canonicalize_name, LEFT_OUT)) & entries("cuda").keys()
    assert "--overrides docker/locks/cuda-without.txt" in (LOCKS / "update.sh").read_text()


@pytest.mark.parametrize("dockerfile", IMAGES)
def test_only_what_is_locked_is_installed(dockerfile):
    lines = instructions(dockerfile)
    commands = [part for line in lines for part in line.split("&&") if "/build/bin/pip" in part]
    installs = [command for command in commands if " install " in command]
    assert len(installs) == 3  # for the build, for the image, and gpuscore itself
    for command in installs:
        assert "--require-hashes" in command or "--no-index --no-deps" in command, command
    (wheel,) = (command for command in commands if " wheel " in command)
    assert "--no-index" in wheel  # otherwise pip would download the packages that build the wheel
    text = "\n".join(lines)
    for lock in IMAGES[dockerfile][0]:
        assert f"docker/locks/{lock}.txt" in text


def test_the_cpu_image_has_what_its_missing_compiler_would_make():
    lines = instructions("Dockerfile.cpu")
    (build,) = (line for line in lines if "-m gpuscore_kernels.row_functions" in line)
    assert build.index("--no-deps /wheels") < build.index("-m gpuscore_kernels.row_functions")
    assert not any("gcc" in line for line in last_stage("Dockerfile.cpu"))


@pytest.mark.parametrize("dockerfile", IMAGES)
def test_the_shipped_stage_is_confined_and_watched(dockerfile):
    stage = last_stage(dockerfile)
    kinds = [line.split()[0] for line in stage]
    assert stage[kinds.index("USER")].split()[1] == "10001:10001"
    assert kinds.index("USER") > max(i for i, kind in enumerate(kinds) if kind == "RUN")
    assert "VOLUME /cache" in stage
    environment = dict(
        pair.split("=", 1) for line in stage if line.startswith("ENV") for pair in line.split()[1:]
    )
    assert environment["PYTHONSAFEPATH"] == "1"
    caches = ["HOME", "HF_HOME"]
    if dockerfile == "Dockerfile.cpu":
        assert environment["GPUSCORE_DEVICE"] == "cpu"
    if dockerfile == "Dockerfile":
        caches += ["TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE", "CUDA_CACHE_PATH"]
        # Where GKE puts the driver. On a machine without a GPU the image says so.
        path = "/usr/local/nvidia/lib:/usr/local/nvidia/lib64"
        assert environment["LD_LIBRARY_PATH"] == path
        assert environment["GPUSCORE_DEVICE"] == "cuda"
    if dockerfile == "Dockerfile.tpu":
        caches += ["JAX_COMPILATION_CACHE_DIR"]
        assert environment["GPUSCORE_BACKEND"] == "jax"
    assert all(environment[name].startswith("/cache") for name in caches)
    health = stage[kinds.index("HEALTHCHECK")]
    assert 'CMD ["python"' in health
    assert "'/livez'" in health


# Prints its process id and arguments, in the place of gpuscore.
SHOWS = "#!/bin/sh\necho $$\nprintf '%s\\n' \"$@\"\n"


def command_of(dockerfile, folder, *arguments):
    """Return the words of gpuscore that `docker run IMAGE arguments` runs, and the image's
    settings. `exec` in the script keeps process 1 the one that signals reach."""
    lines = last_stage(dockerfile)
    chosen = {line.split()[0]: line for line in lines if line.startswith(("ENTRYPOINT", "CMD"))}
    entrypoint, command = (
        json.loads(chosen[kind].partition(" ")[2]) for kind in ("ENTRYPOINT", "CMD")
    )
    for line in lines:
        if line.startswith("COPY docker/"):
            _, source, target = line.split()
            assert Path(target).parent == Path("/opt/gpuscore/bin")  # which is on the image's PATH
            shutil.copy(ROOT / source, folder / Path(target).name)
            assert f"!{source}" in (ROOT / ".dockerignore").read_text().splitlines()
    (folder / "gpuscore").write_text(SHOWS)
    (folder / "gpuscore").chmod(0o755)
    words = [str(folder / entrypoint[0]), *entrypoint[1:], *(arguments or command)]
    path = {"PATH": f"{folder}:{os.environ['PATH']}"}
    with subprocess.Popen(words, env=path, stdout=subprocess.PIPE, text=True) as process:
        pid, *shown = process.stdout.read().splitlines()
    assert int(pid) == process.pid
    pairs = [
        pair.split("=", 1) for line in lines if line.startswith("ENV") for pair in line.split()[1:]
    ]
    return shown, {name: value for name, value in pairs if name.startswith("GPUSCORE_")}


@pytest.mark.parametrize("arguments", [("serve", "demo"), ("--model", "demo")])
@pytest.mark.parametrize("dockerfile", IMAGES)
def test_every_way_to_serve_binds_more_than_loopback(dockerfile, arguments, tmp_path):
    """Without a key, which the address needs, the server refuses to start."""
    command, variables = command_of(dockerfile, tmp_path, *arguments)
    done = programs.run(*command, **variables)
    assert done.returncode == 78, done
    assert "--host 0.0.0.0" in done.stderr
    assert "GPUSCORE_API_KEY" in done.stderr


@pytest.mark.parametrize(("arguments", "model"), [(("--model", "demo"), ""), ((), "demo")])
def test_a_model_by_option_or_by_variable_answers_on_all_addresses(tmp_path, arguments, model):
    """127.0.0.2 leads to this machine, too, but not to a server on 127.0.0.1."""
    (serve, *flags), variables = command_of("Dockerfile.cpu", tmp_path, *arguments)
    assert serve == "serve"
    variables |= {"GPUSCORE_API_KEY": "k" * 32, "GPUSCORE_PORT": "0", "GPUSCORE_MODEL": model}
    variables["GPUSCORE_MAX_BATCH_TOKENS"] = "512"
    with serving(*flags, port=(), environment=variables) as server:
        address, port = server.address
        assert address == "0.0.0.0"
        headers = {"X-API-Key": "k" * 32}
        answer = httpx.get(f"http://127.0.0.2:{port}/v1/models", headers=headers)
        assert answer.json()["data"][0]["id"] == "demo"
