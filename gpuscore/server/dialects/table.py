"""All dialects that POST a body and are answered by the engine."""

from typing import Any

from gpuscore.server.dialects.classify import CLASSIFY
from gpuscore.server.dialects.completions import COMPLETIONS
from gpuscore.server.dialects.decisions import DECISIONS
from gpuscore.server.dialects.dialect import Dialect
from gpuscore.server.dialects.refused import GENERATING
from gpuscore.server.dialects.rerank import RERANK
from gpuscore.server.dialects.score import SCORE
from gpuscore.server.dialects.tokens import DETOKENIZE, TOKENIZE_TEXT

DIALECTS: tuple[Dialect[Any], ...] = (
    SCORE,
    RERANK,
    CLASSIFY,
    DECISIONS,
    COMPLETIONS,
    TOKENIZE_TEXT,
    DETOKENIZE,
    GENERATING,
)
DIALECT_OF = {path: dialect for dialect in DIALECTS for path in dialect.paths}
