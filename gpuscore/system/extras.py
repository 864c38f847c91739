"""The packages of the extra `serve`, and the error for a package that is not installed."""

SERVE = {
    *("torch", "safetensors", "tokenizers", "huggingface_hub", "fastapi", "starlette", "uvicorn"),
    *("httptools", "jinja2", "backports", "tqdm", "prometheus_client"),
}


def remedy(error: ModuleNotFoundError) -> str | None:
    """Return the missing package and the command that installs it; None for a foreign package."""
    package = (error.name or "").split(".")[0]
    return f"{package}: pip install 'gpuscore[serve]'" if package in SERVE else None
