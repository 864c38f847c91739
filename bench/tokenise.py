"""Tokenising 500 items on one query: encoding the query once against encoding every joined string.

    make bench-tokenise
    .venv/bin/python -P bench/tokenise.py --items 100 --repeat 3

Tokenizers in the layouts of well-known models are first trained on generated words. The two ways
are timed only if they give the same ids. Every round has fresh random text; the two ways take
turns, and medians are printed. Then requests are built in a thread, as in the server, while an
event loop ticks every millisecond: the largest gap between two ticks is the longest time that other
requests would wait.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

sys.path.insert(0, str(Path(__file__).parent))
from report import keep, machine, table

from gpuscore.config import RequestLimits
from gpuscore.text.joining import PromptBuilder
from gpuscore.text.score_input import ScoreInput
from gpuscore.text.tokenizer import TextEncoder
from gpuscore.types.limits import BackendLimits

VOCAB = 8000
TICK = 0.001
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LIMITS = RequestLimits(max_request_tokens=1 << 30)


def main() -> None:
    options = arguments()
    words = Words(random.Random(options.seed))
    rows = [measure(name, make(words), words, options) for name, make in LAYOUTS.items()]
    shape = f"{options.items} x ({options.query} + {options.item} characters)"
    print(f"\n{shape}, {options.repeat} rounds; {machine()}\n")
    print(table(rows))
    print()
    keep(
        "tokenise",
        {"bench": "tokenise", "shape": shape, "repeat": options.repeat, "rows": rows},
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--items", type=int, default=500)
    parser.add_argument("--query", type=int, default=8000, help="characters of the query")
    parser.add_argument("--item", type=int, default=80, help="characters of an item")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=5, help="of each gap measurement")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


# ---- text and tokenizers ----


class Words:
    """English-like text of 30,000 made-up words; frequent words are short."""

    def __init__(self, rng: random.Random) -> None:
        syllables = [c + v + e for c in "bdfgklmnprstvw" for v in "aeiou" for e in ("", "n", "s")]
        self.rng = rng
        self.words = ["".join(rng.choices(syllables, k=1 + n // 8000)) for n in range(30000)]
        self.weights = [1 / (rank + 20) for rank in range(len(self.words))]

    def text(self, characters: int) -> str:
        count = characters // 3 + 1
        words = self.rng.choices(self.words, self.weights, k=count)
        ends = self.rng.choices(
            (" ", ", ", ". ", "? ", "\n", " 2024 "), (80, 6, 6, 1, 2, 2), k=count
        )
        return "".join(w + e for w, e in zip(words, ends, strict=True))[:characters]

    def request(self, options: argparse.Namespace, item_first: bool = False) -> ScoreInput:
        items = [self.text(options.item) for _ in range(options.items)]
        query = self.text(options.query)
        return ScoreInput(query, items, label_token_ids=[1], item_first=item_first)


def byte_level(words: Words, pattern: str, *, nfc: bool = False, bos: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=bos))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    train(
        tokenizer, words, trainers.BpeTrainer, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 1)]
        )
    return tokenizer


def metaspace(words: Words, model: Any, trainer: Any, **options: Any) -> Tokenizer:
    """Train a tokenizer on words, as SentencePiece does by default."""
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    train(tokenizer, words, trainer, **options)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def llama2(words: Words) -> Tokenizer:
    """Make a tokenizer without pre-tokenizer: merges run over the whole text."""
    trained = metaspace(words, models.BPE(unk_token="<unk>", fuse_unk=True), trainers.BpeTrainer)
    trained.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    return Tokenizer.from_str(json.dumps(json.loads(trained.to_str()) | {"pre_tokenizer": None}))


def unigram(words: Words) -> Tokenizer:
    return metaspace(words, models.Unigram(), trainers.UnigramTrainer, unk_token="<unk>")


def train(tokenizer: Tokenizer, words: Words, trainer: Any, **options: Any) -> None:
    tokenizer.train_from_iterator(
        [words.text(2000) for _ in range(500)],
        trainer(
            vocab_size=VOCAB,
            special_tokens=["<unk>", "<s>", "<|im_start|>", "<|im_end|>"],
            show_progress=False,
            **options,
        ),
    )


LAYOUTS: dict[str, Callable[[Words], Tokenizer]] = {
    "Qwen2 (byte-level BPE, NFC)": lambda w: byte_level(w, SPLIT % r"\p{N}", nfc=True),
    "Llama 3 (byte-level BPE, <s>)": lambda w: byte_level(w, SPLIT % r"\p{N}{1,3}", bos=True),
    "Llama 2 (SentencePiece BPE, <s>)": llama2,
    "Unigram, Metaspace, <s>": unigram,
}


# ---- figures ----


def measure(
    name: str, tokenizer: Tokenizer, words: Words, options: argparse.Namespace
) -> dict[str, Any]:
    ours, plain = builder(tokenizer), builder(tokenizer, whole=True)
    for item_first in (False, True):
        check(ours, plain, words.request(options, item_first))
    times: dict[str, list[float]] = {"plain": [], "ours": [], "items first": []}
    for _ in range(options.repeat):
        for key, made, first in (
            ("plain", plain, False),
            ("ours", ours, False),
            ("items first", ours, True),
        ):
            given = words.request(options, first)
            start = time.perf_counter()
            made.build(given)
            times[key].append(time.perf_counter() - start)
    ratio = statistics.median(p / o for p, o in zip(times["plain"], times["ours"], strict=True))
    idle, busy, whole = asyncio.run(gaps(ours, plain, words, options))
    row = {
        "tokenizer": name,
        "whole strings, ms": round(1e3 * statistics.median(times["plain"]), 1),
        "ours, ms": round(1e3 * statistics.median(times["ours"]), 1),
        "faster by": round(ratio, 1),
        "item_first, ms": round(1e3 * statistics.median(times["items first"]), 1),
        "largest gap, ms": busy,
        "gap with whole strings, ms": whole,
        "gap of an idle loop, ms": idle,
    }
    print(row, flush=True)
    return row


def builder(tokenizer: Tokenizer, whole: bool = False) -> PromptBuilder:
    """Make a builder with its own copy of the tokenizer, so that no cache of words is shared."""
    encoder = TextEncoder(Tokenizer.from_str(tokenizer.to_str()))
    if whole:
        encoder._boundaries = None
    return PromptBuilder(encoder, BackendLimits(1 << 20, 16, 1 << 20, 1 << 20, VOCAB), LIMITS)


def check(ours: PromptBuilder, plain: PromptBuilder, given: ScoreInput) -> None:
    made, wanted = ours.build(given), plain.build(given)
    assert made is not None
    assert wanted is not None
    same = (made.query_ids == wanted.query_ids).all() and all(
        len(a) == len(b) and (a == b).all()
        for a, b in zip(made.item_ids, wanted.item_ids, strict=True)
    )
    if not same:
        raise SystemExit("the two ways give different ids: nothing is timed")


async def gaps(
    ours: PromptBuilder, plain: PromptBuilder, words: Words, options: argparse.Namespace
) -> tuple[float, float, float]:
    """Return the largest gaps between ticks in ms: idle, building our way, building plainly."""
    loop = asyncio.get_running_loop()
    given = [words.request(options) for _ in range(3)]
    with ThreadPoolExecutor(2) as threads:  # as in server/service.py

        async def build(made: PromptBuilder) -> None:
            end = time.perf_counter() + options.seconds
            while time.perf_counter() < end:
                for one in given:
                    await loop.run_in_executor(threads, made.build, one)

        idle = await largest_gap(asyncio.sleep(options.seconds))
        return idle, await largest_gap(build(ours)), await largest_gap(build(plain))


async def largest_gap(work: Awaitable[None]) -> float:
    """Return the largest time in ms by which a tick is late while `work` runs."""
    task, largest, last = asyncio.ensure_future(work), 0.0, time.perf_counter()
    while not task.done():
        await asyncio.sleep(TICK)
        now = time.perf_counter()
        largest, last = max(largest, now - last - TICK), now
    await task
    return round(1e3 * largest, 1)


if __name__ == "__main__":
    main()
