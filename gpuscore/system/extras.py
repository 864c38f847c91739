"""The packages of the extra `serve`, and the commands that install what an extra lacks."""

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

    It names the packages themselves, not gpuscore: so it does not matter whether this package is a
    checkout, a wheel or part of an image.
    """
    try:
        lines = requires("gpuscore") or []
    except PackageNotFoundError:
        return f"install what the extra {extra} in pyproject.toml names"
    asked, served = (_of_extra(lines, name) for name in (extra, "serve"))
    added = asked if extra == "serve" else [package for package in asked if package not in served]
    return " ".join(["pip install", *(f"'{package}'" for package in added)])


def _of_extra(lines: list[str], extra: str) -> list[str]:
    """Return the requirements that a package's metadata has for this extra alone."""
    marked = (line.partition(";") for line in lines)
    return [package.strip() for package, _, mark in marked if mark.strip() == f"extra == '{extra}'"]
