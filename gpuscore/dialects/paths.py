"""Paths of the server's routes."""

SCORE_PATHS = ("/v1/score", "/score")
JINA_RERANK_PATH = "/v1/rerank"
RERANK_PATHS = ("/rerank", JINA_RERANK_PATH, "/v2/rerank", "/reranking", "/v1/reranking")
COMPLETIONS_PATH = "/v1/completions"
TOKENIZE_PATH = "/tokenize"
DETOKENIZE_PATH = "/detokenize"
TOKENIZER_INFO_PATH = "/tokenizer_info"
# Routes that generate text or make embeddings elsewhere: answered 400 with an explanation, not 404.
GENERATING_PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/embeddings")
# Infinity's clients want returned documents as text; all others want objects.
INFINITY_RERANK_PATH = "/infinity/rerank"
TEXT_RANKING_PATH = "/pipeline/text-ranking"
CLASSIFY_PATHS = ("/classify", "/v1/classify")
MODELS_PATH = "/v1/models"
# Pages for people; without --no-ui, the first two are served.
PLAYGROUND_PATH = "/"
STATUS_PATH = "/status"
DOCS_PATH = "/docs"
UI_PATHS = (PLAYGROUND_PATH, STATUS_PATH)
# Routes of other servers, and ours for the same requests.
ELSEWHERE = {"/generative_scoring": SCORE_PATHS[0], "/predict": CLASSIFY_PATHS[1]}
PROBE_PATHS = ("/livez", "/health", "/ready")
# Routes that need no key, besides the files that pages load: probes, and pages that are the same
# for everyone.
OPEN_PATHS = (*PROBE_PATHS, *UI_PATHS, DOCS_PATH, "/openapi.json")
# The routes of /docs by what they do, in its order. Routes that are not named here are aliases.
ALIASES = "Aliases"
REFUSED = "Always refused"
GROUPS = {
    "Score": SCORE_PATHS[:1],
    "Rank": (JINA_RERANK_PATH, TEXT_RANKING_PATH),
    "Classify": (CLASSIFY_PATHS[1],),
    "Tokens": (COMPLETIONS_PATH, TOKENIZE_PATH, DETOKENIZE_PATH, TOKENIZER_INFO_PATH),
    "Models": (MODELS_PATH, "/info"),
    "Operation": (*PROBE_PATHS, "/metrics"),
    ALIASES: (),
    REFUSED: GENERATING_PATHS,
}


def no_such_path(path: str) -> str:
    """Return the message for a path that no route has; it never holds the path itself."""
    ours = ELSEWHERE.get(path)
    return "no such path" if ours is None else f"no such path; send such requests to {ours}"
