"""System One's answers by transformers: whole prompts, one forward pass for each token of a label.

It writes the prompts again from the words of docs/reference's page, without a line of ours.
"""

import json
from string import ascii_uppercase, digits

import numpy as np
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from gpuscore.models.hub import model_directory
from support.models import reference_logprobs

STATES = {
    "text": "I ordered a red wooden lamp for the bedroom and got a blue chair.",
    "json": {"order": 17, "items": ["a red lamp", {"size": "small"}], "late": True, "note": None},
}
QUESTIONS = {
    "yes": {"type": "noul", "instructions": "Is the lamp red?"},
    "described": {
        "type": "noul",
        "criteria": {"true": "it is about furniture", "false": {"a": ["thing", 1]}},
    },
    "half": {"type": "noul", "criteria": {"true": "it is a chair", "false": None}},
    "both": {"type": "noul", "instructions": ["Is", "it?"], "criteria": {"false": "not at all"}},
    "few": {
        "type": "choice",
        "instructions": "What is it?",
        "criteria": {"a chair": "to sit on", "a lamp": None, "other": {"not": ["a", "b"]}},
    },
    "one": {"type": "choice", "criteria": {"only": None}},
    "all letters": {"type": "choice", "criteria": dict.fromkeys(f"thing {i}" for i in range(26))},
    "many": {
        "type": "choice",
        "instructions": {"which": "one"},
        "criteria": {f"thing {i}": "" if i % 3 else "blue" for i in range(60)},
    },
    "levels": {"type": "score", "instructions": "How?", "criteria": ["bad", "fair", {"so": "so"}]},
    "ten": {"type": "score", "criteria": [f"level {i}" for i in range(10)]},
    "letters": {"type": "score", "criteria": [f"level {i}" for i in range(26)]},
}


def text_of(content) -> str:
    return (
        content
        if isinstance(content, str)
        else json.dumps(content, separators=(",", ":"), ensure_ascii=False)
    )


def labels_of(question) -> list[str]:
    if question["type"] == "noul":
        return ["yes", "no"]
    count = len(question["criteria"])
    if question["type"] == "score" and count <= 10:
        return list(digits[:count])
    if count <= 26:
        return list(ascii_uppercase[:count])
    return [a + b for a in ascii_uppercase for b in ascii_uppercase][:count]


def asked(question) -> str:
    """Return the text of a question as the page describes it."""
    instructions, criteria = question.get("instructions"), question.get("criteria")
    lines = [] if instructions is None else [text_of(instructions)]
    if question["type"] == "noul":
        told = dict(criteria or {})
        if instructions is None:
            lines = ["Which of these applies?"]
            told = {
                k: "anything else" if told.get(k) is None else told[k] for k in ("true", "false")
            }
        for key, label in (("true", "yes"), ("false", "no")):
            if told.get(key) is not None:
                lines.append(f"{label}: {text_of(told[key])}")
        return "\n".join([*lines, 'Answer only "yes" or "no".'])
    lines = lines or ["Which of these fits best?"]
    labels = labels_of(question)
    pairs = criteria.items() if isinstance(criteria, dict) else ((text_of(c), "") for c in criteria)
    for label, (name, told) in zip(labels, pairs, strict=True):
        lines.append(f"{label}. {name}" + (f": {text_of(told)}" if told else ""))
    kind = "number" if labels[0] == "0" else "letter" if len(labels[0]) == 1 else "two letters"
    return "\n".join([*lines, f"Answer only with the {kind} of one of these."])


class Oracle:
    """The demo model in transformers."""

    def __init__(self) -> None:
        self.directory = model_directory("demo", None)
        self.model = AutoModelForCausalLM.from_pretrained(
            self.directory, attn_implementation="eager"
        ).eval()
        self.tokenizer = Tokenizer.from_file(str(self.directory / "tokenizer.json"))

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def logprobs(self, state, question) -> np.ndarray:
        """Return the log-probability of each label of a question."""
        return self.after(
            f"{text_of(state)}\n\n{asked(question)}\n\nAnswer:\n", labels_of(question)
        )

    def after(self, prompt: str, labels: list[str]) -> np.ndarray:
        before, said = self.ids(prompt), []
        for ids in map(self.ids, labels):
            rows = [before + ids[:n] for n in range(len(ids))]
            each = [reference_logprobs(self.model, [row])[0] for row in rows]
            said.append(sum(row[token] for row, token in zip(each, ids, strict=True)))
        return np.array(said)

    def greedy_is_label(self, state, question) -> bool:
        """Decode greedily as long as a label may still come."""
        labels = {tuple(self.ids(label)) for label in labels_of(question)}
        before = self.ids(f"{text_of(state)}\n\n{asked(question)}\n\nAnswer:\n")
        said: tuple[int, ...] = ()
        while any(label[: len(said)] == said and label != said for label in labels):
            rows = reference_logprobs(self.model, [[*before, *said]])
            said = (*said, int(rows[0].argmax()))
        return said in labels
