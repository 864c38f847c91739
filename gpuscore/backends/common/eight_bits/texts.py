"""Texts that decide how a model is quantised and that judge it, as prompts of token ids.

Every third of them decides which products stay in 16 bits; the others are held out, for the
verdict.
"""

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from gpuscore.errors import ConfigError

FEWEST = 300  # texts, so that 200 are held out
LONGEST = 128  # tokens of a text
RANDOM = 24  # most tokens of a prompt of random ids
PROMPT = "{}\nIs this good news? Answer yes or no:"
# The labels are the first of these pairs whose texts are one token each.
LABELS = ((" Yes", " No"), ("Yes", "No"), (" yes", " no"), ("yes", "no"), ("1", "0"), ("A", "B"))

Prompts = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Questions:
    """Prompts that end with a question, and the ids of its answers.

    Args:
        scaled: prompts that decide which products stay in 16 bits.
        held_out: prompts of the verdict, all different from `scaled`.
        labels: the two answers.
    """

    scaled: Prompts
    held_out: Prompts
    labels: tuple[int, ...]

    def __post_init__(self) -> None:
        """Check that no prompt is in both parts.

        Raises:
            ConfigError: one is.
        """
        if both := len({*self.scaled} & {*self.held_out}):
            raise ConfigError(
                f"{both} prompts of the verdict on eight bits also decide its form; they have to "
                "be different texts"
            )


def read_texts(path: str | None) -> list[str]:
    """Return the different lines of a file; None = the texts that are included.

    Raises:
        ConfigError: the file cannot be read, or has too few lines.
    """
    try:
        text = (
            files(__package__).joinpath("texts.txt").read_text(encoding="utf-8")
            if path is None
            else Path(path).read_text(encoding="utf-8")
        )
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--quantization-texts: {path} cannot be read: {error}") from error
    lines = [*dict.fromkeys(line.strip() for line in text.splitlines() if line.strip())]
    if len(lines) < FEWEST:
        raise ConfigError(
            f"--quantization-texts: {path} has {len(lines)} different lines; needed: {FEWEST}, a "
            "text each"
        )
    return lines


def ask(directory: Path, texts: list[str], longest: int, classes: int | None) -> Questions | None:
    """Return the prompts of texts; None for a model without tokenizer.json, or without labels.

    Args:
        directory: of the model.
        texts: one of each prompt.
        longest: most tokens of a prompt; longer texts are cut.
        classes: of a classification model, whose labels they are.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        return None
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    labels = _labels(tokenizer) if classes is None else tuple(range(min(2, classes)))
    if labels is None:
        return None
    before, after = PROMPT.split("{}")
    end = tokenizer.encode(after, add_special_tokens=False).ids
    most = min(LONGEST, longest - len(end))
    if most < 1:
        return None
    prompts = [(*tokenizer.encode(before + text).ids[:most], *end) for text in texts]
    return _questions(prompts, labels)


def ask_at_random(vocabulary: int, longest: int, classes: int | None) -> Questions:
    """Return prompts of random ids and two random labels, for a model that `ask` has none for.

    Args:
        vocabulary: number of token ids.
        longest: most tokens of a prompt.
        classes: of a classification model, whose labels they are.
    """
    draw = np.random.default_rng(0)
    lengths = draw.integers(1, min(RANDOM, longest) + 1, FEWEST)
    prompts = [tuple(draw.integers(vocabulary, size=length).tolist()) for length in lengths]
    labels = draw.choice(vocabulary, min(2, vocabulary), replace=False).tolist()
    return _questions(prompts, tuple(labels if classes is None else range(min(2, classes))))


def _questions(prompts: list[tuple[int, ...]], labels: tuple[int, ...]) -> Questions:
    scaled = dict.fromkeys(prompts[::3])
    held_out = (
        prompt for index, prompt in enumerate(prompts) if index % 3 and prompt not in scaled
    )
    return Questions(tuple(scaled), tuple(dict.fromkeys(held_out)), labels)


def _labels(tokenizer: Tokenizer) -> tuple[int, ...] | None:
    for pair in LABELS:
        ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in pair]
        if all(len(tokens) == 1 for tokens in ids) and ids[0] != ids[1]:
            return tuple(tokens[0] for tokens in ids)
    return None
