"""Promise: the same data is read from JSON lines, BEIR's and MTEB's folders and TREC's files, and
what cannot be read is refused with its place."""

import json

import pytest
from pyarrow import Table, parquet

from gpuscore.errors import ConfigError
from gpuscore.measure.evaluation.command import DEMO
from gpuscore.measure.evaluation.data import Labelled, fingerprint, read_lines
from gpuscore.measure.evaluation.folders import read_folder, read_qrels, read_run

CORPUS = {"d1": ("Lamps", "A red lamp."), "d2": ("", "A blue chair."), "d3": ("", "A scarf.")}
QUERIES = {"q1": "a lamp", "q2": "a chair", "unjudged": "x"}
GRADES = {"q1": {"d1": 2, "d3": 0}, "q2": {"d2": 1}}
RUN = {"q1": {"d1": 3.5, "d2": 7.25, "d3": 1.0}, "q2": {"d2": 1.0, "d1": 0.5}}


def write(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows)
    path.write_text(text + "\n", encoding="utf-8")
    return path


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "scifact"
    corpus = [{"_id": id, "title": t, "text": text} for id, (t, text) in CORPUS.items()]
    write(made / "corpus.jsonl", *corpus)
    write(made / "queries.jsonl", *({"_id": id, "text": text} for id, text in QUERIES.items()))
    pairs = [(q, d, g) for q, grades in GRADES.items() for d, g in grades.items()]
    write(
        made / "qrels" / "test.tsv",
        "query-id\tcorpus-id\tscore",
        *(f"{q}\t{d}\t{g}" for q, d, g in pairs),
    )
    write(
        made / "qrels" / "mteb.jsonl",
        *({"query-id": q, "corpus-id": d, "score": g} for q, d, g in pairs),
    )
    write(tmp_path / "qrels.trec", *(f"{q} 0 {d} {g}" for q, d, g in pairs))
    lines = [(q, d, s) for q, scores in RUN.items() for d, s in scores.items()]
    write(tmp_path / "run.trec", *(f"{q} Q0 {d} 1 {s} bm25" for q, d, s in lines))
    return made


def test_a_folder_with_a_run(folder, tmp_path):
    data = read_folder(folder, "test", None, tmp_path / "run.trec", 2)
    first, second = data.queries
    assert (first.id, first.text) == ("q1", "a lamp")
    assert first.documents == ("d2", "d1")  # the best two of the run
    assert first.texts == ("A blue chair.", "Lamps\nA red lamp.")
    assert first.first_stage == (7.25, 3.5)
    assert first.grades == GRADES["q1"]
    assert second.documents == ("d2", "d1")
    assert data.pairs == 4


def test_every_layout_has_the_same_data(folder, tmp_path):
    run = tmp_path / "run.trec"
    expected = read_folder(folder, "test", None, run, 100)
    assert read_folder(folder, "mteb", None, run, 100) == expected
    assert read_folder(folder, "none", tmp_path / "qrels.trec", run, 100) == expected
    lines = [
        {
            "id": query.id,
            "query": query.text,
            "documents": [
                {"id": id, "text": text}
                for id, text in zip(query.documents, query.texts, strict=True)
            ],
            "grades": [query.grades.get(id, 0) for id in query.documents],
            "first_stage": query.first_stage,
        }
        for query in expected.queries
    ]
    read = read_lines(write(tmp_path / "same.jsonl", *lines))
    for query, other in zip(read.queries, expected.queries, strict=True):
        assert query.texts == other.texts
        assert query.first_stage == other.first_stage
        assert {k: v for k, v in query.grades.items() if v} == {
            k: v for k, v in other.grades.items() if v
        }


def test_folders_of_parquet(folder, tmp_path):
    """MTEB's newer data sets are stored so; here one of them is in two files."""
    made = tmp_path / "parquet"
    corpus = [{"id": id, "title": t, "text": text} for id, (t, text) in CORPUS.items()]
    tables = {
        "corpus/corpus-00000-of-00002": corpus[:2],
        "corpus/corpus-00001-of-00002": corpus[2:],
        "queries/test-00000-of-00001": [{"id": id, "text": text} for id, text in QUERIES.items()],
        "qrels/test-00000-of-00001": [
            {"query-id": q, "corpus-id": d, "score": g}
            for q, grades in GRADES.items()
            for d, g in grades.items()
        ],
        "top_ranked/test-00000-of-00001": [
            {"query-id": q, "corpus-ids": list(grades)} for q, grades in GRADES.items()
        ],
    }
    for name, rows in tables.items():
        path = made / f"{name}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(Table.from_pylist(rows), path)
    read, expected = (read_folder(data, "test", None, None, 100) for data in (made, folder))
    assert read.queries == expected.queries


def test_candidates_without_a_run(folder):
    data = read_folder(folder, "test", None, None, 100)
    assert data.queries[0].documents == ("d1", "d3")
    assert data.queries[0].first_stage is None
    write(folder / "top_ranked.jsonl", {"query-id": "q1", "corpus-ids": ["d3", "d1", "d2"]})
    (only,) = read_folder(folder, "test", None, None, 2).queries
    assert only.documents == ("d3", "d1")


def test_queries_without_a_relevant_document_are_counted(tmp_path):
    rows = [{"query": "a", "documents": ["x", "y"], "grades": [g, 0]} for g in (1, 0, 0)]
    data = read_lines(write(tmp_path / "a.jsonl", *rows))
    assert (len(data.queries), data.left_out) == (1, 2)
    with pytest.raises(ConfigError, match="no query with candidates and a relevant document"):
        read_lines(write(tmp_path / "a.jsonl", *rows[1:]))


def test_labelled_texts(tmp_path):
    rows = [{"text": f"t{i}", "label": "ab"[i % 2]} for i in range(130)]
    data = read_lines(write(tmp_path / "a.jsonl", *rows))
    assert isinstance(data, Labelled)
    assert [unit.id for unit in data.units] == ["rows 1 to 64", "rows 65 to 128", "rows 129 to 130"]
    assert data.labels == tuple("ab" * 65)


def test_a_change_of_the_data_is_seen(tmp_path):
    row = {"query": "a", "documents": ["x", "y"], "grades": [1, 0], "first_stage": [1, 2]}
    changes = [{"query": "b"}, {"documents": ["x", "z"]}, {"grades": [2, 0]}]
    changes += [{"first_stage": [1, 3]}, {"id": "other"}, {}]
    paths = [write(tmp_path / f"{i}.jsonl", row | change) for i, change in enumerate(changes)]
    fingerprints = {fingerprint(read_lines(path)) for path in paths}
    assert len(fingerprints) == len(changes)


GOOD = {"query": "a", "documents": ["x"], "grades": [1]}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "line 2 is not JSON"),
        ("[]", "line 2 is no JSON object"),
        ({"query": "a"}, "line 2: needs query"),
        (GOOD | {"grades": [1, 2]}, "line 2: has 1 documents and 2 grades"),
        (GOOD | {"grades": [0.5]}, "line 2: grades must be integers"),
        (GOOD | {"documents": [7]}, "line 2: documents must be texts"),
        (GOOD | {"first_stage": ["x"]}, "line 2: first_stage must be a number"),
        (GOOD | {"id": "line 1"}, "query line 1 is there twice"),
    ],
)
def test_bad_lines(tmp_path, row, message):
    with pytest.raises(ConfigError, match=message):
        read_lines(write(tmp_path / "a.jsonl", GOOD, row))


def test_bad_folders(folder, tmp_path):
    with pytest.raises(ConfigError, match="has no judgements in qrels/dev"):
        read_folder(folder, "dev", None, None, 100)
    with pytest.raises(ConfigError, match="line 1 is none of a TREC run"):
        read_run(write(tmp_path / "bad", "q1 d1 3"))
    with pytest.raises(ConfigError, match="line 1 is no judgement"):
        read_qrels(write(tmp_path / "bad", "q1 0 d1 high"))
    write(tmp_path / "lost", "q1 Q0 d9 1 2.0 x")
    with pytest.raises(ConfigError, match="document d9 is not in its corpus"):
        read_folder(folder, "test", None, tmp_path / "lost", 100)


def test_the_demos_data_is_made_by_its_script():
    from demo.ranking import rows

    lines = [json.loads(line) for line in DEMO.read_text(encoding="utf-8").splitlines()]
    assert lines == list(rows())
