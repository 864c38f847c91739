"""A model's own prompts: their description in its directory, and their builders once it is loaded.

The server, the batch command and `Scorer` all begin here.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from gpuscore.config import RequestLimits
from gpuscore.errors import InvalidRequest
from gpuscore.prompts.chat import ChatTemplate
from gpuscore.prompts.discovery import (
    ClassifierHead,
    find_family,
    find_step_token,
    read_classifier_head,
)
from gpuscore.prompts.documents import FamilyPrompts
from gpuscore.prompts.family import PromptFamily
from gpuscore.prompts.registry import names_of
from gpuscore.text.joining import PromptBuilder
from gpuscore.text.tokenizer import TextEncoder
from gpuscore.types.batch import BackendLimits

NO_RERANKER = (
    "this model belongs to no known family of rerankers: name its family (--family; family= in "
    f"Python: {names_of(ranks=True)}), or score query, items and labels (/v1/score; Scorer.score "
    "in Python)"
)


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The contents of a model's directory from which prompts are made."""

    encoder: TextEncoder | None
    head: ClassifierHead | None
    template: ChatTemplate | None
    family: PromptFamily | None
    step_token: int | None = None

    @classmethod
    def read(cls, directory: Path, family: str, names: Iterable[str]) -> "ModelFiles":
        """Read the files.

        Args:
            directory: the model's.
            family: "auto", "none", "prm", or a name of the registry.
            names: the names of the model, the best one first.

        Raises:
            ConfigError: a file is damaged or has unsupported content.
        """
        head = read_classifier_head(directory)
        template = ChatTemplate.read(directory)
        encoder = TextEncoder.read(directory, "" if template is None else template.text)
        specials = [] if encoder is None else encoder.markers
        chosen = find_family(family, directory, names, specials, head=head)
        step_token = find_step_token(family, directory, encoder)
        return cls(encoder, head, template, family=chosen, step_token=step_token)

    def prompts(self, backend: BackendLimits, limits: RequestLimits) -> "ModelPrompts":
        """Return the builders for a loaded model; raises ConfigError if the family does not fit."""
        builder = PromptBuilder(self.encoder, backend, limits)
        family = None if self.family is None else FamilyPrompts(self.family, builder)
        return ModelPrompts(builder, family, self.head, self.step_token)


@dataclass(frozen=True, slots=True)
class ModelPrompts:
    """The builders of one loaded model's requests.

    Args:
        builder: makes requests of prompts that callers write.
        family: makes requests of the family's prompts; None if the model belongs to none.
        head: the classifier head; None for a language model.
        step_token: the id of the token after which a process reward model scores each step of an
            item, unless a request names another one; None for other models.
    """

    builder: PromptBuilder
    family: FamilyPrompts | None = None
    head: ClassifierHead | None = None
    step_token: int | None = None

    @property
    def reranker(self) -> FamilyPrompts:
        """The family's prompts; raises InvalidRequest unless it is known and ranks."""
        if self.family is None:
            raise InvalidRequest(NO_RERANKER)
        if not self.family.family.ranks:
            raise InvalidRequest(
                f"{self.family.family.name} is a guard and ranks nothing: classify its texts "
                "(/v1/classify; Scorer.classify in Python)"
            )
        return self.family
