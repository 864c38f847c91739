"""Promise: each model directory is recognised as the right family, with the right formula."""

import json
import shutil
from dataclasses import fields

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from gpuscore import Scorer
from gpuscore.config import RequestLimits, ServerConfig
from gpuscore.errors import ConfigError
from gpuscore.prompts import registry
from gpuscore.prompts.discovery import find_family, read_classifier_head
from gpuscore.prompts.documents import FamilyPrompts
from gpuscore.prompts.rerank_input import RerankInput
from gpuscore.text.joining import PromptBuilder
from gpuscore.text.tokenizer import TextEncoder
from gpuscore.types.batch import BackendLimits
from support.families import QWEN_SPECIALS, ids_of, qwen_like

LIMITS = BackendLimits(512, 16, 400, 700, 2000)


@pytest.fixture(scope="module")
def tokenizer():
    return qwen_like()


@pytest.fixture
def prompts_of(tokenizer):
    builder = PromptBuilder(TextEncoder(tokenizer), LIMITS, RequestLimits())
    return lambda family: FamilyPrompts(family, builder)


@pytest.mark.parametrize(
    ("name", "architecture", "family"),
    [
        ("Qwen/Qwen3-Reranker-0.6B", "Qwen3ForCausalLM", registry.QWEN3_RERANKER),
        ("/models/Qwen3-Reranker-8B/", "Qwen3ForCausalLM", registry.QWEN3_RERANKER),
        ("mixedbread-ai/mxbai-rerank-large-v2", "Qwen2ForCausalLM", registry.MXBAI_RERANK_V2),
        ("zeroentropy/zerank-2-reranker", "Qwen3ForCausalLM", registry.ZERANK),
        ("zeroentropy/zerank-1-small", "Qwen3ForCausalLM", registry.ZERANK),
        ("zeroentropy/zerank-1-smaller", "Qwen3ForCausalLM", None),
        ("BAAI/bge-reranker-v2-gemma", "GemmaForCausalLM", registry.BGE_RERANKER_V2_GEMMA),
        ("demo", "Qwen3ForCausalLM", registry.DEMO),
        ("Qwen/Qwen3-0.6B", "Qwen3ForCausalLM", None),
        ("someone/demolition", "Qwen3ForCausalLM", None),
        ("mixedbread-ai/mxbai-rerank-large-v1", "Qwen2ForCausalLM", None),
        ("mixedbread-ai/mxbai-rerank-large-v2", "LlamaForCausalLM", None),
        ("Qwen3-Reranker-0.6B/checkpoint", "Qwen3ForCausalLM", None),
        ("Qwen/Qwen3-Reranker-0.6B", "Qwen3VLForConditionalGeneration", None),
    ],
)
def test_names(tmp_path, name, architecture, family):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    assert find_family("auto", tmp_path, [name], QWEN_SPECIALS) is family
    assert find_family("none", tmp_path, [name], QWEN_SPECIALS) is None
    assert find_family("zerank", tmp_path, [name], QWEN_SPECIALS) is registry.ZERANK


def test_choices_are_those_of_the_registry():
    (field,) = [field for field in fields(ServerConfig) if field.name == "family"]
    assert field.metadata["option"].choices == ("auto", "none", *registry.FAMILIES, registry.PRM)


def write(directory, files):
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))


MODULES = [
    {"idx": 0, "path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"},
    {
        "idx": 1,
        "path": "1_LogitScore",
        "type": "sentence_transformers.cross_encoder.modules.logit_score.LogitScore",
    },
]
TEMPLATE = (
    "{% set system = messages | selectattr('role', 'eq', 'system') | first %}"
    "<|im_start|>system\n{{ system.content }}<|im_end|>\n<|im_start|>user\nQ: "
    "{{ (messages | selectattr('role', 'eq', 'query') | first).content }}\nD: "
    "{{ (messages | selectattr('role', 'eq', 'document') | first).content | trim }}<|im_end|>\n"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def sentence_transformers(directory, template=TEMPLATE, **score):
    files = {
        "config.json": {"architectures": ["Qwen3ForCausalLM"]},
        "modules.json": MODULES,
        "chat_template.jinja": template,
        "config_sentence_transformers.json": {
            "prompts": {"web": "Judge {it}."},
            "default_prompt_name": "web",
        },
        "sentence_bert_config.json": {
            "processing_kwargs": {"chat_template": {"add_generation_prompt": True}}
        },
        "1_LogitScore/config.json": {"true_token_id": 7, **score},
    }
    write(directory, files)


def test_files_of_sentence_transformers_come_first(tmp_path, prompts_of, tokenizer):
    """They decide although the name says otherwise; the prompt is the one that transformers
    renders."""
    sentence_transformers(tmp_path, false_token_id=9)
    family = find_family("auto", tmp_path, ["Qwen/Qwen3-Reranker-0.6B"], QWEN_SPECIALS)
    assert family.instruction == "Judge {it}."
    prompts = prompts_of(family)
    assert prompts.label_ids == [7, 9]
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE)
    documents = ["the best of 34", "", "x\ny"]
    got = ids_of(prompts.build(RerankInput("what is", documents)))
    for ids, document in zip(got, documents, strict=True):
        pairs = [("system", "Judge {it}."), ("query", "what is"), ("document", document)]
        messages = [{"role": role, "content": text} for role, text in pairs]
        text = fast.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert ids == tokenizer.encode(text, add_special_tokens=False).ids
    alone = tmp_path / "alone"
    alone.mkdir()
    sentence_transformers(alone, false_token_id=None)
    assert find_family("auto", alone, [], QWEN_SPECIALS).labels == (7,)


IDENTITY, SIGMOID = "torch.nn.modules.linear.Identity", "torch.nn.modules.activation.Sigmoid"
NAME = "zeroentropy/zerank-2-reranker"
QWEN = "Qwen/Qwen3-Reranker-0.6B"


@pytest.mark.parametrize(
    ("name", "file", "content", "formula", "said"),
    [
        (None, "config_sentence_transformers.json", {"activation_fn": SIGMOID}, "sigmoid 1", ""),
        (None, "config_sentence_transformers.json", {"activation_fn": IDENTITY}, "none 1", ""),
        (None, "config_sentence_transformers.json", {}, "sigmoid 1", ""),
        (None, "config.json", {"sentence_transformers": {"activation_fn": IDENTITY}}, "none 1", ""),
        (None, "config.json", {"sbert_ce_default_activation_function": IDENTITY}, "none 1", ""),
        (
            NAME,
            "config_sentence_transformers.json",
            {"activation_fn": IDENTITY},
            "sigmoid 5",
            "raw",
        ),
        (NAME, "config_sentence_transformers.json", {}, "sigmoid 5", "sigmoid(raw)"),
        (QWEN, "config_sentence_transformers.json", {"activation_fn": SIGMOID}, "sigmoid 1", ""),
        (
            QWEN,
            "config_sentence_transformers.json",
            {"activation_fn": IDENTITY},
            "sigmoid 1",
            "raw",
        ),
    ],
)
def test_the_formula_beside_files_of_sentence_transformers(
    tmp_path, caplog, name, file, content, formula, said
):
    """A family's name gives it, else the files do; start-up says both where they differ."""
    sentence_transformers(tmp_path, "{% for m in messages %}{{ m.content }};{% endfor %}")
    own = {"architectures": ["Qwen3ForCausalLM"]}
    write(tmp_path, {"config.json": own, "config_sentence_transformers.json": {}})
    write(tmp_path, {file: own | content})
    family = find_family("auto", tmp_path, [name] if name else [], QWEN_SPECIALS)
    assert family.parts == ("{query};{document};",)
    assert f"{family.activation} {family.scale:g}" == formula
    holds = "sigmoid(raw / 5)" if name == NAME else "sigmoid(raw)"
    wanted = f"give relevance as {said}, and the family {name and name.split('/')[1][:6].lower()}"
    assert [wanted in caplog.text, f"as {holds}, which holds" in caplog.text] == [bool(said)] * 2


def test_an_activation_of_unknown_kind_is_refused(tmp_path):
    sentence_transformers(tmp_path)
    write(tmp_path, {"config_sentence_transformers.json": {"activation_fn": "torch.nn.Tanh"}})
    write(tmp_path, {"chat_template.jinja": "{{ messages[0].content }}{{ messages[1].content }}"})
    with pytest.raises(ConfigError, match=r"activation_fn is 'torch.nn.Tanh'; .*--family"):
        find_family("auto", tmp_path, [], QWEN_SPECIALS)


def test_token_0_is_a_token_like_others(tmp_path, prompts_of):
    """Token id 0 is not mistaken for the class of a head that has one."""
    sentence_transformers(tmp_path)
    write(tmp_path, {"1_LogitScore/config.json": {"true_token_id": 0, "false_token_id": 3}})
    family = find_family("auto", tmp_path, [], QWEN_SPECIALS)
    assert family.labels == (0, 3)
    assert prompts_of(family).label_ids == [0, 3]


def test_a_token_that_the_model_does_not_have(tmp_path, prompts_of):
    sentence_transformers(tmp_path, true_token_id=10**6)
    family = find_family("auto", tmp_path, [], QWEN_SPECIALS)
    with pytest.raises(ConfigError, match=r"reads the logit of 1000000; the model has 0 to"):
        prompts_of(family)
    write(tmp_path, {"config.json": {"text_config": {"vocab_size": 10**6}}})
    with pytest.raises(ConfigError, match=r"config.json: true_token_id .* 0 to 999999, found"):
        find_family("auto", tmp_path, [], QWEN_SPECIALS)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ messages[1].content }}", "has the instruction 0 times"),
        ("{{ messages | map(attribute='content') | join }}{{ messages[2].content }}", "document 2"),
        ("{{ messages[0].content }}{{ messages[2].content }}", "has the query 0 times"),
        ("{{ messages[0].content }}{{ messages[1].content }}", "has the document 0 times"),
        (
            "{% set q = messages[1].content %}{{ messages[0].content }} {{ messages[2].content }} "
            "{{ q }}: {{ q | trim }}",
            "drops white space around one query and keeps it around another",
        ),
    ],
)
def test_unusable_templates_are_refused(tmp_path, template, reason):
    sentence_transformers(tmp_path, template)
    with pytest.raises(ConfigError, match=reason):
        find_family("auto", tmp_path, [], QWEN_SPECIALS)


SYSTEM = "{{ messages[0].content }}"
QUERY, DOCUMENT = "{{ messages[1].content }}", "{{ messages[2].content }}"


@pytest.mark.parametrize(
    ("template", "shares"),
    [
        (f"{SYSTEM}<|im_end|>\nD: {DOCUMENT}\nQ: {QUERY}<|im_end|>\n", False),
        (f"D: {DOCUMENT}<|im_end|>Q: {QUERY}<|im_end|>{SYSTEM}", False),
        (f"{DOCUMENT}\n{{{{ messages[1].content | trim }}}} {SYSTEM}", False),
        (f"{SYSTEM} {QUERY}<|im_end|>{DOCUMENT}<|im_end|>again: {QUERY}?<|im_end|>", False),
        (f"{QUERY}: {SYSTEM}: {QUERY}<|im_end|>\n{DOCUMENT}<|im_end|>", True),
        (f"{{{{ '{{query}} {{0}}' }}}} {SYSTEM}\n{QUERY}\n{DOCUMENT}", True),
        (f"{SYSTEM}\n{QUERY} {{{{ messages[2].content | trim }}}}", True),
    ],
)
def test_a_template_may_have_its_texts_in_any_order(
    tmp_path, prompts_of, tokenizer, template, shares
):
    """The prompts are those that transformers renders; documents share what is before them."""
    sentence_transformers(tmp_path, template, false_token_id=9)
    family = find_family("auto", tmp_path, [], QWEN_SPECIALS)
    assert family.shares_query is shares
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template)
    documents = ["the best of 34", "", " x\ny\n", "{document}"]
    built = prompts_of(family).build(RerankInput(" what is\n", documents))
    for ids, document in zip(ids_of(built), documents, strict=True):
        pairs = [("system", "Judge {it}."), ("query", " what is\n"), ("document", document)]
        messages = [{"role": role, "content": text} for role, text in pairs]
        text = fast.apply_chat_template(
            messages, tokenize=False, processing_kwargs={}, add_generation_prompt=True
        )
        assert ids == tokenizer.encode(text, add_special_tokens=False).ids
    shared = tokenizer.decode(built.request.query_ids, skip_special_tokens=False)
    assert ("what is" in shared) is (shares or "again" in template)


def test_half_of_the_files(tmp_path):
    write(tmp_path, {"modules.json": MODULES})
    with pytest.raises(ConfigError, match=r"1_LogitScore/config\.json is missing"):
        find_family("auto", tmp_path, [], QWEN_SPECIALS)
    write(tmp_path, {"1_LogitScore/config.json": {"true_token_id": 1}})
    with pytest.raises(ConfigError, match="no chat template"):
        find_family("auto", tmp_path, [], QWEN_SPECIALS)
    write(tmp_path, {"modules.json": MODULES[:1]})
    assert find_family("auto", tmp_path, [], QWEN_SPECIALS) is None
    write(tmp_path, {"modules.json": "{"})
    with pytest.raises(ConfigError, match=r"modules\.json is not valid JSON"):
        find_family("auto", tmp_path, [], QWEN_SPECIALS)


@pytest.mark.parametrize(
    ("name", "fields", "family"),
    [
        ("mine", {"is_original_qwen3_reranker": True}, registry.QWEN3_RERANKER),
        ("Qwen3-Reranker-4B", {"method": "from_2_way_softmax"}, registry.QWEN3_RERANKER),
        ("zerank-2", {"tokens": ["Yes"], "method": "no_post_processing"}, registry.ZERANK),
        ("Qwen3-Reranker-4B", {"tokens": ["yes", "no"]}, None),
        ("Qwen3-Reranker-4B", {"method": "no_post_processing"}, None),
        ("zerank-2", {"tokens": ["no", "yes"], "method": "from_2_way_softmax"}, None),
    ],
)
def test_a_classifier_that_vllm_makes_of_the_causal_head(
    tmp_path, tiny_model, name, fields, family
):
    """config.json names a classifier, and the weights have the head of a language model."""
    directory, model = tiny_model("qwen3")
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    own = {key: value for key, value in fields.items() if key != "tokens"}
    config = json.loads((tmp_path / "config.json").read_text()) | own
    config |= {"architectures": ["Qwen3ForSequenceClassification"], "num_labels": 1}
    config |= {"classifier_from_token": fields.get("tokens", ["no", "yes"])}
    write(tmp_path, {"config.json": config})
    head = read_classifier_head(tmp_path)
    assert head is None
    if family is None:
        with pytest.raises(ConfigError, match="classifier_from_token is .* and method"):
            find_family("auto", tmp_path, [name], QWEN_SPECIALS, head)
        return
    assert find_family("auto", tmp_path, [name], QWEN_SPECIALS, head) is family
    with Scorer(str(tmp_path), dtype="float32", family="none", max_batch_tokens=64) as scorer:
        answer = scorer.score([], [[5, 9, 3]], label_token_ids=[7, 8], logits=True)
    expected = model(torch.tensor([[5, 9, 3]])).logits[0, -1, [7, 8]].detach().numpy()
    np.testing.assert_allclose(answer.logits[0], expected, atol=1e-4)
