"""Promise: the order of options, calibration and a model's own files change typed questions as they
say, conversations get their variables and instructions, and unknown ways to ask are refused."""

import json

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from gpuscore import Choice, Noul, Rating, Scorer
from gpuscore.config import RequestLimits
from gpuscore.errors import ConfigError, InvalidRequest, PromptTooLong, TooManyTokens
from gpuscore.prompts import chat
from gpuscore.prompts.calibration import KINDS, Calibration, Scaling, same_temperature
from gpuscore.prompts.chat import ChatTemplate
from gpuscore.prompts.decision_texts import choice, level, predicate
from gpuscore.prompts.decisions import (
    DecisionInput,
    DecisionPrompts,
    DecisionSettings,
    read_decision_settings,
)
from gpuscore.text.joining import PromptBuilder
from gpuscore.text.tokenizer import TextEncoder
from gpuscore.types.batch import BackendLimits
from support.families import QWEN_SPECIALS, qwen_like

LIMITS = BackendLimits(512, 16, 400, 700, 2000)
CHAT = (
    "{% if deny and messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{{ tone }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{{ last }}{% endif %}"
)
NAMES = [f"thing {i}" for i in range(30)]
STATE = "a red wooden lamp"


def builder(limits=LIMITS, **own):
    return PromptBuilder(TextEncoder(qwen_like()), limits, RequestLimits(**own))


def prompts(template=CHAT, settings=None, made=None):
    chat = None if template is None else ChatTemplate(template, {})
    return DecisionPrompts(chat, QWEN_SPECIALS, made or builder(), settings)


def whole(made) -> list[list[int]]:
    query = made.request.query_ids.tolist()
    return [[*query, *made.request.item_ids[read.row].tolist()] for read in made.reads.reads]


def rendered(messages, **variables):
    fast = PreTrainedTokenizerFast(tokenizer_object=qwen_like(), chat_template=CHAT)
    text = fast.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False, **variables
    )
    return qwen_like().encode(text, add_special_tokens=False).ids


def test_instructions_are_the_systems_turn_and_variables_reach_the_template():
    asked, user = [predicate("It rains.")], {"role": "user"}
    question = f"so wet\n\n{asked[0].text}"
    system = {"role": "system", "content": "Be fair."}
    both = [system, user | {"content": question}]
    ours = prompts()
    for options, variables, expected in (
        ({}, {}, [both[1]]),
        ({"instructions": "Be fair."}, {}, both),
        ({}, {"tone": "Well: "}, [both[1]]),
        ({"instructions": "Be fair."}, {"tone": "x"}, both),
        (
            {"instructions": "Be fair."},
            {"deny": True},
            [user | {"content": f"Be fair.\n\n{question}"}],
        ),
    ):
        made = ours.build(DecisionInput("so wet", asked, chat=variables, **options))
        assert whole(made) == [rendered(expected, **variables)]


def test_renderings_are_kept_and_forgotten(monkeypatch):
    monkeypatch.setattr(chat, "KEPT", 2)
    ours, count = prompts(), []
    sound = ChatTemplate.marked
    monkeypatch.setattr(
        ChatTemplate,
        "marked",
        lambda *arguments: count.append(1) or sound(*arguments[:1], *arguments[1:]),
    )
    for tone in (0, 1, 2, 2, 0):
        ours.build(DecisionInput("x", [predicate("y")], chat={"tone": str(tone)}))
    assert len(count) == 4, "the last one was kept, the first one forgotten"


@pytest.mark.parametrize(
    ("chat", "words"),
    [
        ({"enable_thinking": True}, "enable_thinking must be false"),
        ({"messages": []}, "messages is set by the server"),
        ({"add_generation_prompt": False}, "add_generation_prompt is set"),
        ({"tone": "x" * 5000}, "the limit is 4096"),
        ({"tone": "<|im_end|>"}, "special tokens are for the server"),
        ({"tone": "{{"}, None),
    ],
)
def test_variables_that_no_request_may_have(chat, words):
    inputs = DecisionInput("x", [predicate("y")], chat=chat)
    if words is None:
        assert whole(prompts().build(inputs)) == [
            rendered([{"role": "user", "content": f"x\n\n{predicate('y').text}"}], **chat)
        ]
        return
    with pytest.raises(InvalidRequest, match=words) as caught:
        prompts().build(inputs)
    assert caught.value.param == "chat_template_kwargs"


def test_a_template_that_fails_with_a_request_s_variables_is_the_request_s_error():
    failing = prompts("{% if tone %}{{ raise_exception('no') }}{% endif %}" + CHAT)
    with pytest.raises(InvalidRequest, match="cannot be rendered"):
        failing.build(DecisionInput("x", [predicate("y")], chat={"tone": "x"}))


def test_a_rendering_that_ends_otherwise_is_refused():
    with pytest.raises(InvalidRequest, match="the prompt would end otherwise"):
        prompts().build(DecisionInput("x", [predicate("y")], chat={"last": "Well, "}))


def test_balanced_choices_are_read_in_both_orders():
    asked = [choice("?", [("a", ""), ("b", "x")]), level("?", [("l", ""), ("m", "")])]
    built = prompts(settings=DecisionSettings(order="balanced")).build(DecisionInput("i", asked))
    assert [(read.question, read.turned) for read in built.reads.reads] == [
        (0, False),
        (1, False),
        (0, True),
    ]
    assert "A. b: x\nB. a" in asked[0].turned
    assert "A. a\nB. b: x" in asked[0].text
    assert not asked[1].turned


def test_balanced_answers_do_not_depend_on_the_order_and_are_the_mean_of_both():
    with Scorer("demo", threads=1, decision_order="balanced") as both, Scorer("demo") as fixed:

        def shares(scorer, names):
            return scorer.system_one(STATE, {"q": Choice("Which?", names)})["q"].probabilities

        for names in (["red", "green", "blue"], NAMES):
            usual_order, turned = (shares(both, order) for order in (names, names[::-1]))
            each = [shares(fixed, order) for order in (names, names[::-1])]
            for name in names:
                assert usual_order[name] == pytest.approx(turned[name], abs=1e-5)
                mean = (each[0][name] + each[1][name]) / 2
                assert usual_order[name] == pytest.approx(mean, abs=1e-5)
            assert max(abs(each[0][name] - each[1][name]) for name in names) > 1e-3


@pytest.mark.parametrize("flags", [{"deterministic": True}, {"max_batch_tokens": 64}])
def test_labels_of_several_tokens_where_families_do_not_fit(flags):
    questions = {
        "a": Choice(" ".join(["Which?"] * 40), NAMES),
        "b": Noul("Is it red?"),
        "c": Rating("How?", NAMES[:26]),
    }
    with Scorer("demo", threads=1) as usual, Scorer("demo", threads=1, **flags) as other:
        expected, got = (scorer.system_one(STATE, questions) for scorer in (usual, other))
    for name, answer in expected.items():
        read = got[name]
        assert read.argmax_is_label == answer.argmax_is_label
        assert read.label_mass == pytest.approx(answer.label_mass, rel=1e-4)
        assert read.probabilities == pytest.approx(answer.probabilities, abs=1e-5)


def test_calibration_divides_and_shifts(tmp_path):
    made = Calibration({"choice": Scaling(2.0, (0.5, -0.25)), "noul": Scaling(0.5)}, {"model": "m"})
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps(made.as_json()))
    assert Calibration.read(path) == made
    names, logs = ["red", "green", "blue"], []
    with Scorer("demo", threads=1) as plain, Scorer("demo", calibration=str(path)) as scaled:
        for scorer in (plain, scaled):
            answers = scorer.system_one(
                STATE,
                {"c": Choice("?", names), "n": Noul("Red?"), "r": Rating("?", ["a", "b"])},
            )
            logs.append(
                {k: np.log(list(read.probabilities.values())) for k, read in answers.items()}
            )
    expected = logs[0]["c"] / 2 + [0.5, -0.25, 0]
    np.testing.assert_allclose(logs[1]["c"], expected - np.log(np.exp(expected).sum()), atol=1e-4)
    expected = logs[0]["n"] / 0.5
    np.testing.assert_allclose(logs[1]["n"], expected - np.log(np.exp(expected).sum()), atol=1e-4)
    np.testing.assert_allclose(logs[1]["r"], logs[0]["r"], atol=1e-5)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[]", "object"),
        ('{"version": 2}', "version must be 1"),
        ('{"version": 1}', "types: Expected `object`, got `null`"),
        ('{"version": 1, "types": {"box": {}}}', "Invalid enum value 'box'"),
        ('{"version": 1, "types": {"noul": 1}}', "Expected `object`, got `int`"),
        ('{"version": 1, "types": {"noul": {"temperature": 0}}}', "Expected `float` > 0"),
        ('{"version": 1, "types": {"noul": {"temperature": true}}}', "got `bool`"),
        ('{"version": 1, "types": {"noul": {"bias": [51]}}}', "Expected `float` <= 50"),
        ('{"version": 1, "types": {"noul": {"bias": ["a"]}}}', "Expected `float`, got `str`"),
    ],
)
def test_calibrations_that_are_none(tmp_path, content, words):
    path = tmp_path / "calibration.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=words):
        Calibration.read(path)
    with pytest.raises(ConfigError, match="no such file"):
        Calibration.read(tmp_path / "other.json")


def test_what_a_model_s_files_say(tmp_path):
    def read(asked=None, **config):
        (tmp_path / "config.json").write_text(json.dumps(config))
        return read_decision_settings(tmp_path, asked or DecisionSettings())

    assert read() == DecisionSettings()
    settings = read(decision_temperature=1.5, decision_state_format="json")
    assert settings == DecisionSettings(calibration=same_temperature(1.5), json_state=True)
    assert {settings.calibration.of(kind).temperature for kind in KINDS} == {1.5}
    own = Calibration({"noul": Scaling(3.0)})
    assert read(DecisionSettings("balanced", own), decision_temperature=2).calibration == own
    assert "decision_strategy" in read(decision_strategy="winnow").refused
    for wrong in ({"decision_temperature": -1}, {"decision_state_format": "xml"}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            read(**wrong)
    (tmp_path / "decision_template.jinja").write_text("x")
    refused = read().refused
    assert "decision_template.jinja" in refused
    with pytest.raises(ConfigError, match=r"decision_template\.jinja"):
        prompts(settings=DecisionSettings(refused=refused))


def test_a_state_in_json_is_quoted_unless_it_is_json():
    ours = prompts(None, DecisionSettings(json_state=True))
    (quoted,) = whole(ours.build(DecisionInput('a "b"', [predicate("y")])))
    (inputs,) = whole(ours.build(DecisionInput('"a \\"b\\""', [predicate("y")], is_json=True)))
    assert quoted == inputs


def test_prompt_and_label_must_fit():
    inputs = DecisionInput("x", [choice("?", [(name, "") for name in NAMES])])
    (prompt,) = whole(prompts(None).build(inputs))

    def build(longest):
        limits = BackendLimits(512, 16, 400, longest, 2000)
        return prompts(None, made=builder(limits)).build(inputs)

    assert whole(build(len(prompt) + 1)) == [prompt]
    with pytest.raises(PromptTooLong, match=f"{len(prompt) + 1} tokens with a label"):
        build(len(prompt))
    limited = prompts(None, made=builder(max_request_tokens=len(prompt) + 1))
    with pytest.raises(TooManyTokens, match=f"the limit is {len(prompt) + 1}"):
        limited.build(inputs)
