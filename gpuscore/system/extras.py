"""The packages of the extra `serve`, and the commands that install missing packages."""

from importlib.metadata import PackageNotFoundError, requires

SERVE = {
    *("torch", "safetensors", "tokenizers", "huggingface_hub", "fastapi", "starlette", "uvicorn"),
    *("httptools", "jinja2", "backports", "prometheus_client"),
}


def remedy(error: ModuleNotFoundError) -> str | None:
    """Return the missing package and the command that installs it; None for a foreign package."""
    package = (error.name or "").split(".")[0]
    return f"{package}: {install('serve')}" if package in SERVE else None


def install(extra: str) -> str:
    """Return the command that installs what an extra adds to `serve`.

    It names the packages, not gpuscore, so it works in a checkout, from a wheel and in an image.
    """
    try:
        lines = requires("gpuscore") or []
    except PackageNotFoundError:
        return f"install what the extra {extra} in pyproject.toml names"
    packages = _requirements(lines, extra)
    served = _requirements(lines, "serve")
    added = packages if extra == "serve" else [name for name in packages if name not in served]
    return " ".join(["pip install", *(f"'{package}'" for package in added)])


def _requirements(lines: list[str], extra: str) -> list[str]:
    """Return the requirements that the package's metadata lists for an extra."""
    marked = (line.partition(";") for line in lines)
    return [package.strip() for package, _, mark in marked if mark.strip() == f"extra == '{extra}'"]
