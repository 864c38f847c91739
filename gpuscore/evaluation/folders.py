"""Data in BEIR's and MTEB's folders, and TREC's qrels and runs.

A folder has corpus.jsonl and queries.jsonl (`_id`, `text`, perhaps `title`), and judgements in
qrels/SPLIT.tsv (BEIR), qrels/SPLIT.jsonl (MTEB) or qrels.txt (TREC). Candidates come from a run in
TREC's format, from top_ranked.jsonl (MTEB's reranking), or else are the judged documents.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from gpuscore.errors import ConfigError
from gpuscore.evaluation.data import Query, Ranked, objects, ranked

Qrels: TypeAlias = dict[str, dict[str, int]]
Run: TypeAlias = dict[str, dict[str, float]]
_QUERY, _DOCUMENT = ("query-id", "query_id", "qid"), ("corpus-id", "corpus_id", "docid")


def read_folder(
    folder: Path, split: str, qrels: Path | None, run: Path | None, depth: int
) -> Ranked:
    """Read a folder; each query gets its `depth` best candidates of the run.

    Raises:
        ConfigError: a file is missing or not as described, or a document is not in the corpus.
    """
    judged = read_qrels(qrels or _qrels_of(folder, split))
    queries = {id: text for id, text, _ in _texts(folder / "queries.jsonl") if id in judged}
    listed = folder / "top_ranked.jsonl"
    first = read_run(run) if run is not None else None
    if first is not None:
        chosen = {query: _best(scores, depth) for query, scores in first.items()}
    elif listed.is_file():
        chosen = {id: ids[:depth] for id, ids in _top_ranked(listed)}
    else:
        chosen = {query: list(grades) for query, grades in judged.items()}
    wanted = {id for query in queries for id in chosen.get(query, ())}
    corpus = {
        id: f"{title}\n{text}".strip()
        for id, text, title in _texts(folder / "corpus.jsonl")
        if id in wanted
    }
    if lost := sorted(wanted - corpus.keys()):
        raise ConfigError(f"--data {folder}: document {lost[0]} is not in corpus.jsonl")
    found = [
        _query(id, text, chosen.get(id, ()), corpus, first, judged[id])
        for id, text in queries.items()
    ]
    return ranked(folder.name, found)


def read_qrels(path: Path) -> Qrels:
    """Read judgements: BEIR's table with a head, MTEB's JSON lines, or TREC's four columns."""
    found: Qrels = {}
    for number, cells in _judgements(path):
        try:
            found.setdefault(cells[0], {})[cells[1]] = int(float(cells[2]))
        except (IndexError, ValueError):
            raise ConfigError(f"{path}: line {number} is no judgement") from None
    return found


def read_run(path: Path) -> Run:
    """Read a run: query, Q0, document, rank, score, name."""
    found: Run = {}
    for number, line in _lines(path):
        cells = line.split()
        try:
            query, _, document, _, score = cells[:5]
            found.setdefault(query, {})[document] = float(score)
        except ValueError:
            raise ConfigError(f"{path}: line {number} is none of a TREC run") from None
    return found


def _query(
    id: str,
    text: str,
    documents: Sequence[str],
    corpus: Mapping[str, str],
    first: Run | None,
    grades: Mapping[str, int],
) -> Query:
    scores = None if first is None else tuple(first[id][one] for one in documents)
    texts = tuple(corpus[one] for one in documents)
    return Query(id, text, tuple(documents), texts, scores, grades)


def _best(scores: Mapping[str, float], depth: int) -> list[str]:
    return sorted(scores, key=lambda id: (-scores[id], id))[:depth]


def _qrels_of(folder: Path, split: str) -> Path:
    places = [folder / "qrels" / f"{split}.tsv", folder / "qrels" / f"{split}.jsonl"]
    places += [folder / "qrels.txt", folder / "qrels.tsv", folder / "qrels.jsonl"]
    for path in places:
        if path.is_file():
            return path
    raise ConfigError(f"--data {folder} has none of {', '.join(map(str, places))}")


def _judgements(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield query, document and grade of each line."""
    if path.suffix == ".jsonl":
        for number, row in objects(path):
            grade = row.get("score", row.get("relevance", ""))
            yield number, [_first(row, _QUERY), _first(row, _DOCUMENT), str(grade)]
        return
    for number, line in _lines(path):
        cells = line.split("\t") if "\t" in line else line.split()
        if number == 1 and cells[0] in _QUERY:
            continue
        yield number, [cells[0], *cells[2:4]] if len(cells) == 4 else cells


def _first(row: Mapping[str, object], names: Sequence[str]) -> str:
    return str(next((row[name] for name in names if name in row), ""))


def _top_ranked(path: Path) -> Iterator[tuple[str, list[str]]]:
    for number, row in objects(path):
        ids = next((row[name] for name in ("corpus-ids", "corpus_ids") if name in row), None)
        if not isinstance(ids, list):
            raise ConfigError(f"{path}: line {number} has no corpus-ids")
        yield _first(row, _QUERY), list(map(str, ids))


def _texts(path: Path) -> Iterator[tuple[str, str, str]]:
    """Yield id, text and title of each line."""
    for number, row in objects(path):
        id, text = row.get("_id", row.get("id")), row.get("text")
        if id is None or not isinstance(text, str):
            raise ConfigError(f"{path}: line {number} needs _id and text")
        yield str(id), text, str(row.get("title") or "")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line.strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
