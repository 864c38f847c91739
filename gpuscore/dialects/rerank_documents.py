"""Documents of /rerank: as the model reads them, and as the answer shows them."""

from collections.abc import Sequence
from typing import Any, TypeAlias

from gpuscore.dialects.ranking import present_texts
from gpuscore.errors import InvalidRequest
from gpuscore.types.item_errors import ItemErrors

Document: TypeAlias = str | dict[str, Any]


def texts_of(
    documents: Sequence[Document | None], fields: list[str] | None, refused: ItemErrors
) -> list[str]:
    """Return the documents as text, an empty one for each that is refused. An object gives its
    `text`, or its `rank_fields` as lines like YAML's, as Cohere does it."""
    texts: list[str | None] = []
    for index, document in enumerate(documents):
        if isinstance(document, dict):
            texts.append(_object_text(document, fields, index, refused))
        else:
            texts.append(document)
    return present_texts(texts, "documents", refused)


def _object_text(
    document: dict[str, Any], fields: list[str] | None, index: int, refused: ItemErrors
) -> str:
    names = fields if fields else ["text"]
    values = [document.get(name) for name in names]
    if not all(isinstance(value, str) for value in values):
        param = f"documents[{index}]"
        wanted = "the text field" if names == ["text"] else "every field of rank_fields"
        refused.add(index, InvalidRequest(f"{param} must have {wanted}, as text", param=param))
        return ""
    if names == ["text"]:
        return str(values[0])
    return "\n".join(f"{name}: {value}" for name, value in zip(names, values, strict=True))


def shown(document: Document | None) -> dict[str, Any] | None:
    """Return a document as the answer shows it to most clients."""
    return {"text": document} if isinstance(document, str) else document
