"""The reference page of the error codes, from the docstrings of `gpuscore.errors`."""

import inspect

from generate.markdown import block, code, page, table
from gpuscore.errors import GpuscoreError

REMEDY = "\n\nRemedy: "


def page_of_errors() -> str:
    rows = [
        (code(kind.code), str(kind.status), *explained(kind))
        for kind in sorted(
            GpuscoreError.__subclasses__(), key=lambda error: (error.status, error.code)
        )
    ]
    example = (
        '{"error": {\n  "message": "temperature needs apply_softmax",\n  "type": '
        '"invalid_request_error",\n  "param": "temperature",\n  "code": "invalid_request"}}'
    )
    return page(
        "Errors",
        "Every error is JSON and has an HTTP status, a `code` and a message with the numbers in "
        "it. `param` names the field that caused the error, if there is one. A message never "
        "repeats the text of a request.",
        block("json", example),
        "On the rerank routes the message is also in `detail` and `message`, which Jina's and "
        "Cohere's clients read. A body with `texts` gets TEI's `error` and `error_type`.",
        table(("code", "status", "meaning", "remedy"), rows),
        "Scoring changes nothing on the server, so any request may be sent again. 429 and 503 have "
        "a `Retry-After` header with a whole number of seconds.",
    )


def explained(kind: type[GpuscoreError]) -> tuple[str, str]:
    """Return the meaning of an error and its remedy, from its class's docstring."""
    what, mark, remedy = inspect.getdoc(kind).partition(REMEDY)  # type: ignore[union-attr]
    if not mark:
        raise ValueError(f"the docstring of {kind.__name__} has no line that begins with Remedy:")
    return " ".join(what.split()), " ".join(remedy.split())
