"""`gpuscore parity check-server`: the conformance suite over HTTP, on one server or two."""

import argparse
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from pathlib import Path

import numpy as np

from gpuscore.config import API_KEY_VARIABLE, ModelConfig, ServerConfig
from gpuscore.config.sources import Settings
from gpuscore.errors import ConfigError
from gpuscore.measure.parity.conformance import checks_requests, checks_scores
from gpuscore.measure.parity.conformance.checks import (
    DEVIATIONS,
    FAILED,
    KNOWN,
    OK,
    SKIPPED,
    Outcome,
    run_checks,
)
from gpuscore.measure.parity.conformance.server import (
    FEWEST,
    CheckedServer,
    PlainClient,
    Reference,
    RequestRefused,
    meet,
)
from gpuscore.measure.parity.gates import (
    ALLOWED_FLOAT32,
    ALLOWED_HALF,
    FLOAT32,
    Comparison,
    Verdict,
    compare,
    order_verdicts,
)
from gpuscore.measure.parity.measures import differences
from gpuscore.measure.parity.report import (
    EXIT_FAILED,
    EXIT_OK,
    STATES,
    error_plots,
    heading,
    scores_table,
    speed,
    verdict_line,
)
from gpuscore.measure.parity.results import CaseResult, Run
from gpuscore.measure.parity.workload import Case, Workload, make_workload, read_tokenizer
from gpuscore.measure.reports import aligned, table, text_table, write_html
from gpuscore.models.hub import model_directory

SUITE = sorted(
    (*checks_scores.CHECKS, *checks_requests.CHECKS),
    key=lambda check: int(check.id[1:].split(".")[0]),
)
# The cases of the workload that every server with SGLang's core fields accepts.
COMPARED = ("short", "long", "500 items", "shared sub-prefixes", "item_first", "softmax")
COLUMNS = ("check", "", "promise", "what was found")
SMALLEST = 1e-300  # a probability of 0 has no logarithm


def check_server(values: argparse.Namespace, settings: Settings) -> int:
    """Run the suite; return 1 for a failure that is not known, or if two servers differ."""
    if values.tolerance <= 0 or values.timeout <= 0:
        raise ConfigError("--tolerance and --timeout must be over 0")
    if values.vocab_size is not None and values.vocab_size < FEWEST:
        raise ConfigError(f"--vocab-size must be at least {FEWEST}")
    key = _key(settings)
    reference = _reference(values.reference, settings) if values.reference is not None else None
    parts, failed, servers = [], False, []
    for url, kind in ((values.url, values.kind), (values.url2, values.kind2)):
        if url is None:
            continue
        client = PlainClient(url, key, values.timeout)
        try:
            server = meet(client, values.tolerance, values.vocab_size, reference, seed=0)
        except RequestRefused as reason:
            raise ConfigError(f"URL {client.url}: {reason}") from reason
        servers.append(server)
        print(f"{url} ({kind}): model {server.model}, {_known(server)}", flush=True)
        outcomes = []
        for outcome in run_checks(SUITE, server, DEVIATIONS[kind]):
            print(_line(outcome), flush=True)
            outcomes.append(outcome)
        print(_summary(outcomes))
        rows = [
            (outcome.check.id, outcome.state, outcome.check.promise, outcome.detail)
            for outcome in outcomes
        ]
        failed = failed or any(outcome.state == FAILED for outcome in outcomes)
        parts += [
            f"<h2>{escape(url)} ({kind})</h2>",
            text_table(("check", "", "promise", "what was found"), rows),
        ]
    if len(servers) == 2:
        verdicts, shown = _compare(servers[0], servers[1], values.tolerance)
        failed = failed or any(verdict.failed for verdict in verdicts)
        parts.append(shown)
    if values.report is not None:
        write_html(Path(values.report), "Conformance to the contract of /v1/score", parts)
    return EXIT_FAILED if failed else EXIT_OK


def _key(settings: Settings) -> str | None:
    """Return the API key of the environment or a file, or None.

    There is no flag for the key itself, because all users of a machine can read command lines.
    """
    path = settings.make(ServerConfig).api_key_file
    if key := os.environ.get(API_KEY_VARIABLE, "").strip():
        return key
    if path is None:
        return None
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file {path}: {error}") from error
    return lines[0].strip() or None


def _reference(model: str, settings: Settings) -> Reference:
    from gpuscore.measure.parity.oracle import Oracle, oracle_device

    directory = model_directory(model)
    device = oracle_device(settings.make(ModelConfig).device)
    print(f"oracle: transformers on {device}", flush=True)
    oracle = Oracle(directory, "float32", device)

    def probabilities(prompts: list[list[int]], labels: list[int]) -> np.ndarray:
        scores = oracle.score(Case("reference", [], prompts, [labels] * len(prompts)))
        return np.exp(scores.values)

    return Reference(read_tokenizer(directory), probabilities)


def _compare(
    first: CheckedServer, second: CheckedServer, tolerance: float
) -> tuple[list[Verdict], str]:
    """Compare two servers on one workload; return the verdicts and a part of the HTML page."""
    vocab = min(first.vocab, second.vocab)
    context = min(first.query_len, second.query_len) + 100
    made = make_workload("standard", 0, vocab, context, None)
    cases = tuple(case for case in made.cases if case.name in COMPARED)
    workload = replace(made, cases=cases)
    try:
        reference, got = _run(first, workload), _run(second, workload)
    except RequestRefused as reason:
        verdict = Verdict("both servers", "workload", False, str(reason))
        print(verdict_line(verdict))
        return [verdict], ""
    allowed = ALLOWED_FLOAT32 if tolerance <= FLOAT32 else ALLOWED_HALF
    comparison = compare(workload, reference, got, allowed)
    subject = f"{got.name} against {reference.name}"
    d_p = comparison.p
    passed = d_p.maximum <= tolerance and d_p.mean <= tolerance / 2
    detail = f"|d p| max {d_p.maximum:.1e} of {tolerance:g}, mean {d_p.mean:.1e} of half"
    verdicts = [Verdict(subject, "scores", passed, detail), *order_verdicts(comparison, subject)]
    print(f"\n{aligned(*scores_table([comparison]))}\n")
    for verdict in verdicts:
        print(verdict_line(verdict))
    return verdicts, _plots(workload, comparison, verdicts)


def _run(server: CheckedServer, workload: Workload) -> Run:
    """Score the workload, one request after the other, and say how fast that was."""
    results, started = {}, time.perf_counter()
    for case in workload.cases:
        scores = server.ask(
            case.query,
            case.items,
            case.label_ids[0],
            apply_softmax=case.apply_softmax,
            item_first=case.item_first,
        )
        results[case.name] = CaseResult(np.log(np.maximum(scores, SMALLEST)), None)
    seconds = time.perf_counter() - started
    run = Run(server.client.url, "unknown", results, workload.num_items / seconds)
    print(f"{run.name}: {speed(run)}")
    return run


def _plots(workload: Workload, comparison: Comparison, verdicts: Sequence[Verdict]) -> str:
    cells = [(escape(v.gate), STATES[v.passed], escape(v.detail)) for v in verdicts]
    return (
        heading(comparison)
        + text_table(*scores_table([comparison]))
        + table(("gate", "verdict", "what was found"), cells)
        + error_plots(
            workload, comparison, differences(workload, comparison.reference, comparison.got)[0]
        )
    )


def _known(server: CheckedServer) -> str:
    ids = f"{server.vocab} token ids" if server.vocab_known else "any token id as a label"
    texts = "text and ids" if server.texts else "ids only"
    return f"{ids}, {texts}, queries of {server.query_len} tokens"


def _line(outcome: Outcome) -> str:
    head = f"{outcome.state:<5} {outcome.check.id}: {outcome.check.promise}"
    return f"{head}\n      {outcome.detail}" if outcome.detail else head


def _summary(outcomes: Sequence[Outcome]) -> str:
    counts = Counter(outcome.state for outcome in outcomes)
    return (
        f"{counts[OK]} passed, {counts[FAILED]} failed, {counts[KNOWN]} known deviations, "
        f"{counts[SKIPPED]} skipped"
    )
