"""Promise: typed questions become prompts that the model can answer, and models that cannot answer
them are refused."""

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from gpuscore.config import RequestLimits
from gpuscore.errors import ConfigError
from gpuscore.prompts.chat import ChatTemplate
from gpuscore.prompts.decision_texts import choice, level, predicate
from gpuscore.prompts.decisions import DecisionInput, DecisionPrompts
from gpuscore.text.joining import PromptBuilder
from gpuscore.text.tokenizer import TextEncoder
from gpuscore.types.batch import BackendLimits
from support.families import QWEN_SPECIALS, qwen_like

LIMITS = BackendLimits(512, 16, 400, 700, 2000)
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ASKED = [
    predicate("It rains."),
    choice("What is it?", [("rain", "wet"), ("sun", "")]),
    level("How much?", [("none", ""), ("some", ""), ("all", "of it")]),
]
TEXTS = [
    'Is this statement true?\nIt rains.\nAnswer only "yes" or "no".',
    "What is it?\nA. rain: wet\nB. sun\nAnswer only with the letter of one of these.",
    "How much?\n0. none\n1. some\n2. all: of it\nAnswer only with the number of one of these.",
]
LABELS = [["yes", "no"], ["A", "B"], ["0", "1", "2"]]


def builder(tokenizer, limits=LIMITS):
    return PromptBuilder(TextEncoder(tokenizer), limits, RequestLimits())


def test_questions_are_the_users_turn():
    tokenizer = qwen_like()
    prompts = DecisionPrompts(ChatTemplate(CHAT, {}), QWEN_SPECIALS, builder(tokenizer))
    request = prompts.build(DecisionInput("so wet", ASKED, priority=3)).request
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=CHAT)
    for item, text in zip(request.item_ids, TEXTS, strict=True):
        messages = [{"role": "user", "content": f"so wet\n\n{text}"}]
        rendered = fast.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        expected = tokenizer.encode(rendered, add_special_tokens=False).ids
        assert [*request.query_ids.tolist(), *item.tolist()] == expected
    labels = [[tokenizer.token_to_id(label) for label in some] for some in LABELS]
    assert [ids.tolist() for ids in request.label_ids] == labels
    assert request.need_lse
    assert request.priority == 3
    assert len(request.query_ids) >= 5, "the input is shared"


def test_without_a_template_it_is_plain_text():
    tokenizer, asked = qwen_like(), DecisionInput("so wet", ASKED)
    request = DecisionPrompts(None, QWEN_SPECIALS, builder(tokenizer)).build(asked).request
    for item, text in zip(request.item_ids, TEXTS, strict=True):
        expected = tokenizer.encode(f"so wet\n\n{text}\n\nAnswer:\n", add_special_tokens=False).ids
        assert [*request.query_ids.tolist(), *item.tolist()] == expected


def test_models_that_cannot_answer():
    small = Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    with pytest.raises(ConfigError, match="begin with the same token"):
        DecisionPrompts(None, [], builder(small))
    letters = Tokenizer(models.BPE(vocab={"y": 0, "e": 1, "s": 2}, merges=[]))
    with pytest.raises(ConfigError, match="answer 'yes' .* must be one token"):
        DecisionPrompts(None, [], builder(letters))
    classes = BackendLimits(512, 16, 400, 700, 2000, classes=("a", "b"))
    with pytest.raises(ConfigError, match="need a language model"):
        DecisionPrompts(None, [], builder(qwen_like(), classes))
