"""Data in BEIR's and MTEB's folders, and TREC's qrels and runs.

A folder has corpus.jsonl and queries.jsonl (`_id` or `id`, `text`, perhaps `title`), and judgements
in qrels/SPLIT.tsv (BEIR), qrels/SPLIT.jsonl (MTEB) or qrels.txt (TREC). Candidates come from a run
in TREC's format, from top_ranked.jsonl (MTEB's reranking), or else are the judged documents. In the
place of NAME.jsonl there may be a folder NAME of Parquet files, as MTEB's newer data sets have it.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from gpuscore.errors import ConfigError
from gpuscore.measure.evaluation.data import Query, Ranked, files_of, lines, ranked, records_of

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
    judged = read_qrels(qrels) if qrels is not None else _qrels_of(folder, split)
    queries = {id: text for id, text, _ in _texts(folder, "queries") if id in judged}
    listed = files_of(folder, "top_ranked", split)
    first = read_run(run) if run is not None else None
    if first is not None:
        chosen = {query: _best(scores, depth) for query, scores in first.items()}
    elif listed:
        chosen = {id: ids[:depth] for id, ids in _top_ranked(folder, split)}
    else:
        chosen = {query: list(grades) for query, grades in judged.items()}
    wanted = {id for query in queries for id in chosen.get(query, ())}
    corpus = {
        id: f"{title}\n{text}".strip()
        for id, text, title in _texts(folder, "corpus")
        if id in wanted
    }
    if lost := sorted(wanted - corpus.keys()):
        raise ConfigError(f"--data {folder}: document {lost[0]} is not in its corpus")
    read = []
    for id, text in queries.items():
        ids = tuple(chosen.get(id, ()))
        texts = tuple(corpus[document] for document in ids)
        scores = None if first is None else tuple(first[id][document] for document in ids)
        read.append(Query(id, text, ids, texts, scores, judged[id]))
    return ranked(folder.name, read)


def read_qrels(path: Path) -> Qrels:
    """Read judgements: BEIR's table with a head, or TREC's four columns."""
    qrels: Qrels = {}
    for number, line in lines(path):
        cells = line.split("\t") if "\t" in line else line.split()
        if number == 1 and cells[0] in _QUERY:
            continue
        cells = [cells[0], *cells[2:4]] if len(cells) == 4 else cells
        _judge(qrels, cells, f"{path}: line {number}")
    return qrels


def read_run(path: Path) -> Run:
    """Read a run: query, Q0, document, rank, score, name."""
    run: Run = {}
    for number, line in lines(path):
        cells = line.split()
        try:
            query, _, document, _, score = cells[:5]
            run.setdefault(query, {})[document] = float(score)
        except ValueError:
            raise ConfigError(f"{path}: line {number} is none of a TREC run") from None
    return run


def _best(scores: Mapping[str, float], depth: int) -> list[str]:
    return sorted(scores, key=lambda id: (-scores[id], id))[:depth]


def _qrels_of(folder: Path, split: str) -> Qrels:
    for path in (folder / "qrels" / f"{split}.tsv", folder / "qrels.txt", folder / "qrels.tsv"):
        if path.is_file():
            return read_qrels(path)
    if not files_of(folder, "qrels", split):
        raise ConfigError(f"--data {folder} has no judgements in qrels/{split}.* or qrels.txt")
    qrels: Qrels = {}
    for place, row in records_of(folder, "qrels", split):
        grade = row.get("score", row.get("relevance", ""))
        cells = [_first(row, _QUERY), _first(row, _DOCUMENT), str(grade)]
        _judge(qrels, cells, f"{folder}/qrels: {place}")
    return qrels


def _judge(qrels: Qrels, cells: Sequence[str], place: str) -> None:
    try:
        query, document, grade = cells
        qrels.setdefault(query, {})[document] = int(float(grade))
    except ValueError:
        raise ConfigError(f"{place} is no judgement") from None


def _first(row: Mapping[str, object], names: Sequence[str]) -> str:
    return str(next((row[name] for name in names if name in row), ""))


def _top_ranked(folder: Path, split: str) -> Iterator[tuple[str, list[str]]]:
    for place, row in records_of(folder, "top_ranked", split):
        ids = next((row[name] for name in ("corpus-ids", "corpus_ids") if name in row), None)
        if not isinstance(ids, list):
            raise ConfigError(f"{folder}/top_ranked: {place} has no corpus-ids")
        yield _first(row, _QUERY), list(map(str, ids))


def _texts(folder: Path, name: str) -> Iterator[tuple[str, str, str]]:
    """Yield id, text and title of each record."""
    for place, row in records_of(folder, name):
        id, text = row.get("_id", row.get("id")), row.get("text")
        if id is None or not isinstance(text, str):
            raise ConfigError(f"{folder}/{name}: {place} needs _id and text")
        yield str(id), text, str(row.get("title") or "")
