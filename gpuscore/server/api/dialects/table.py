"""The table of all dialects, by path."""

from typing import Any

from gpuscore.server.api.dialects.classify import CLASSIFY
from gpuscore.server.api.dialects.completions import COMPLETIONS
from gpuscore.server.api.dialects.decisions import DECISIONS
from gpuscore.server.api.dialects.dialect import Dialect
from gpuscore.server.api.dialects.refused import GENERATING
from gpuscore.server.api.dialects.rerank import RERANK
from gpuscore.server.api.dialects.score import SCORE
from gpuscore.server.api.dialects.system_one import SYSTEM_ONE
from gpuscore.server.api.dialects.tokens import DETOKENIZE, TOKENIZE_TEXT

DIALECTS: tuple[Dialect[Any], ...] = (
    SCORE,
    RERANK,
    CLASSIFY,
    DECISIONS,
    SYSTEM_ONE,
    COMPLETIONS,
    TOKENIZE_TEXT,
    DETOKENIZE,
    GENERATING,
)
DIALECT_OF = {path: dialect for dialect in DIALECTS for path in dialect.paths}
