"""Broken model directories: the changes to a good one, and the words that the refusal must contain.

Plain data: name -> (the good directory, the change, words of the sentence, flags of serve).
"""

import json
import os
import shutil
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from support.models import make_model

CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LOGIT_SCORE = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_LogitScore", "type": "x.y.LogitScore"},
]
DEEP = 200_000
Break = Callable[[Path], object]


@dataclass(frozen=True)
class Case:
    """A broken directory; `base` is a name of `make_bases`, `words` are in the sentence."""

    base: str
    breaks: Break
    words: tuple[str, ...]
    flags: tuple[str, ...] = ()


def make_bases(directory: Path) -> dict[str, Path]:
    """Write the good directories and return them by name."""
    bases = {name: directory / name for name in ("plain", "llama", "moe", "classes", "sentence")}
    make_model(bases["plain"])
    make_model(bases["llama"], "llama")
    make_model(bases["moe"], "qwen3_moe")
    make_model(bases["classes"], "qwen3_classes")
    make_model(bases["sentence"])
    for base in bases.values():
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>"}
        (base / "tokenizer_config.json").write_text(json.dumps(config))
        (base / "special_tokens_map.json").write_text('{"eos_token": "<|end|>"}')
        (base / "chat_template.jinja").write_text(CHAT)
    (bases["sentence"] / "modules.json").write_text(json.dumps(LOGIT_SCORE))
    (bases["sentence"] / "1_LogitScore").mkdir()
    score = {"true_token_id": 0, "false_token_id": 7}
    (bases["sentence"] / "1_LogitScore" / "config.json").write_text(json.dumps(score))
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    (bases["sentence"] / "chat_template.jinja").write_text(template)
    return bases


def broken(case: Case, bases: Mapping[str, Path], directory: Path) -> Path:
    """Copy the good directory of a case and break the copy."""
    shutil.copytree(bases[case.base], directory)
    case.breaks(directory)
    return directory


def both(*changes: Break) -> Break:
    return lambda directory: [change(directory) for change in changes]


def text(name: str, content: str | bytes) -> Break:
    data = content.encode() if isinstance(content, str) else content
    return lambda directory: (directory / name).write_bytes(data)


def config(**fields: object) -> Break:
    return edited("config.json", **fields)


def edited(name: str, **fields: object) -> Break:
    def change(directory: Path) -> None:
        path = directory / name
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return change


def without(*names: str) -> Break:
    return lambda directory: [(directory / name).unlink() for name in names]


def link(name: str, target: str) -> Break:
    def change(directory: Path) -> None:
        (directory / name).unlink(missing_ok=True)
        (directory / name).symlink_to(target)

    return change


def pipe(name: str) -> Break:
    def change(directory: Path) -> None:
        (directory / name).unlink(missing_ok=True)
        os.mkfifo(directory / name)

    return change


def folder(name: str) -> Break:
    def change(directory: Path) -> None:
        (directory / name).unlink(missing_ok=True)
        (directory / name).mkdir()

    return change


def large(name: str, size: int) -> Break:
    """Extend a file to that size with a hole."""
    return lambda directory: os.truncate(directory / name, size)


def weights(change: Callable[[dict[str, Any]], object]) -> Break:
    def edit(directory: Path) -> None:
        tensors = load_file(directory / "model.safetensors")
        change(tensors)
        save_file(tensors, directory / "model.safetensors")

    return edit


def set_value(name: str, value: float) -> Break:
    def change(tensors: dict[str, Any]) -> None:
        tensors[name] = tensors[name].copy()
        tensors[name].flat[1] = value

    return weights(change)


def header(change: Callable[[dict[str, Any]], object]) -> Break:
    """Rewrite the header of the safetensors file and keep its data."""

    def edit(directory: Path) -> None:
        path = directory / "model.safetensors"
        data = path.read_bytes()
        start = 8 + struct.unpack("<Q", data[:8])[0]
        fields = json.loads(data[8:start])
        change(fields)
        made = json.dumps(fields).encode()
        path.write_bytes(struct.pack("<Q", len(made)) + made + data[start:])

    return edit


def cut(name: str, size: int) -> Break:
    return lambda d: (d / name).write_bytes((d / name).read_bytes()[:size])


def sharded(change: Callable[[Path, dict[str, Any]], object]) -> Break:
    """Write two shards and an index, which `change` then breaks."""

    def edit(directory: Path) -> None:
        tensors = load_file(directory / "model.safetensors")
        (directory / "model.safetensors").unlink()
        names = sorted(tensors)
        files = {name: f"{i % 2}.safetensors" for i, name in enumerate(names)}
        for file in ("0.safetensors", "1.safetensors"):
            save_file({n: tensors[n] for n in names if files[n] == file}, directory / file)
        index = {"metadata": {}, "weight_map": files}
        change(directory, index)
        path = directory / "model.safetensors.index.json"
        path.write_text(json.dumps(index))

    return edit


def template(source: str) -> Break:
    return text("chat_template.jinja", source)


NORM, EMBED = "model.norm.weight", "model.embed_tokens.weight"
QUERY = "model.layers.0.self_attn.q_proj.weight"
INSTRUCT = ("--family", "instruct")
LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
GROWS = (
    "{% set ns = namespace(a='a') %}{% for i in range(99) %}{% set ns.a = ns.a + ns.a %}"
    "{% endfor %}{{ ns.a }}"
)
NESTED = '{"a": ' * DEEP + "1" + "}" * DEEP
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


def _json_files() -> dict[str, Case]:
    """Return cases for every JSON file in every way in which it can fail to be a JSON object."""
    files = {
        "config.json": "plain",
        "tokenizer_config.json": "plain",
        "special_tokens_map.json": "plain",
        "added_tokens.json": "plain",
        "modules.json": "sentence",
        "1_LogitScore/config.json": "sentence",
        "sentence_bert_config.json": "sentence",
        "config_sentence_transformers.json": "sentence",
        "model.safetensors.index.json": "plain",
    }
    cases = {}
    for name, base in files.items():
        short = Path(name).name
        for how, content, words in (
            ("truncated", b'{"a": [1, ', "is not valid JSON"),
            ("not-utf-8", b'{"a": "\xff"}', "is not UTF-8"),
            ("nested", NESTED.encode(), "is nested deeper than"),
        ):
            broken_file = _in_place_of_weights(name, text(name, content))
            cases[f"{name}-{how}"] = Case(base, broken_file, (short, words))
    return cases


def _in_place_of_weights(name: str, change: Break) -> Break:
    """Remove the weights too for an index: it is read only if there is no single file."""

    def both(directory: Path) -> None:
        change(directory)
        if name == "model.safetensors.index.json":
            (directory / "model.safetensors").unlink()

    return both


def _not_files() -> dict[str, Case]:
    """Return cases for each file that is read, with something else in its place."""
    cases = {}
    for name, base in (
        ("config.json", "plain"),
        ("tokenizer.json", "plain"),
        ("tokenizer_config.json", "plain"),
        ("chat_template.jinja", "plain"),
        ("special_tokens_map.json", "plain"),
        ("modules.json", "sentence"),
        ("model.safetensors", "plain"),
        ("model.safetensors.index.json", "plain"),
    ):
        for how, change, words in (
            ("dangling", link(name, "nowhere"), "No such file"),
            ("loop", link(name, name), "symbolic links"),
            ("pipe", pipe(name), "is a pipe"),
            ("folder", folder(name), "is a directory"),
        ):
            changed = _in_place_of_weights(name, change)
            cases[f"{name}-{how}"] = Case(base, changed, (name, words))
    return cases


def _configs() -> dict[str, Case]:
    def case(*words: str, base: str = "plain", **fields: object) -> Case:
        return Case(base, config(**fields), ("config.json", *words))

    def raw(content: str, *words: str) -> Case:
        return Case("plain", text("config.json", content), ("config.json", *words))

    sizes = {
        "hidden_size": 10**9,
        "intermediate_size": 10**12,
        "num_hidden_layers": 10**7,
        "num_attention_heads": 10**6,
        "num_key_value_heads": 10**6,
        "head_dim": 10**6,
        "vocab_size": 2**31,
        "max_position_embeddings": 10**20,
    }
    huge = {f"huge-{name}": case(name, "at most", **{name: n}) for name, n in sizes.items()}
    return huge | {
        "config-missing": Case("plain", without("config.json"), ("has no config.json",)),
        "config-empty": raw("", "not valid JSON"),
        "config-list": raw("[]", "must be a JSON object"),
        "config-large": Case("plain", large("config.json", 2**26), ("bytes; supported: at most",)),
        "infinity": raw('{"rms_norm_eps": Infinity}', "Infinity", "finite"),
        "digits": raw('{"hidden_size": ' + "9" * 10_000 + "}", "not valid JSON", "digits"),
        "eps-large": case("rms_norm_eps is 1e+30; supported: 1e-15 to 1", rms_norm_eps=1e30),
        "theta-tiny": case(
            "rope_theta is 1e-300", rope_parameters={"rope_type": "default", "rope_theta": 1e-300}
        ),
        "sizes-text": case("num_hidden_layers must be a positive", num_hidden_layers="3"),
        "heads": case("must be a multiple of", num_key_value_heads=3),
        "architecture-unknown": case("architectures is", architectures=["GPT2LMHeadModel"]),
        "longrope": case("rope_type longrope", rope_scaling=YARN | {"rope_type": "longrope"}),
        "rope-list": case("rope_parameters must be one flat object", rope_parameters=[1]),
        "rope-key": case(
            "has 'mrope_section'",
            rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
        ),
        "llama3-factors": case(
            "high_freq_factor 1 must be over low_freq_factor 1",
            base="llama",
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 1.0,
                "original_max_position_embeddings": 64,
            },
        ),
        "unknown-key": case("'residual_gain' is 2.0, a key that Qwen3For", residual_gain=2.0),
        "per-layer": case("per_layer_config is a value", per_layer_config={"1": {"skip": ["mlp"]}}),
        "quantised": case("quantization_config", quantization_config={"bits": 4}),
        "other-weights": case("transformers_weights is 'x'", transformers_weights="x"),
        "activation": case("hidden_act is 'relu'", hidden_act="relu"),
        "layer-types": case("layer_types is", layer_types=[[], [], []]),
        "dtype": case("dtype is 'int8'", dtype="int8"),
        "experts-more": case("asks for [4096, 48]", "mlp.gate", base="moe", num_local_experts=4096),
        "classes-huge": case(
            "num_labels is 1000000000", base="classes", id2label=None, num_labels=10**9
        ),
        "classes-more": case(
            "score.weight has shape", base="classes", id2label={"0": "a", "1": "b"}
        ),
    }


def _checkpoints() -> dict[str, Case]:
    def case(change: Break, *words: str) -> Case:
        return Case("plain", change, words)

    def mapped(place: str) -> Break:
        return sharded(lambda _, index: index["weight_map"].update({NORM: place}))

    def twice(directory: Path, _: object) -> None:
        tensors = load_file(directory / "0.safetensors")
        save_file(tensors | load_file(directory / "1.safetensors"), directory / "1.safetensors")

    return {
        "weights-missing": case(without("model.safetensors"), "has neither model.safetensors"),
        "weights-empty": case(text("model.safetensors", b""), "cannot be read as safetensors"),
        "weights-truncated": case(cut("model.safetensors", 5000), "cannot be read as safetensors"),
        "header-absurd": case(
            text("model.safetensors", struct.pack("<Q", 2**62) + b"{}"), "as safetensors"
        ),
        "header-deep": case(
            text("model.safetensors", struct.pack("<Q", len(NESTED)) + NESTED.encode()),
            "as safetensors",
        ),
        "offsets-overlap": case(
            header(lambda h: h[NORM].update(data_offsets=[0, 192])), "as safetensors"
        ),
        "offsets-outside": case(
            header(lambda h: h[NORM].update(data_offsets=[10**15, 10**15 + 192])), "as safetensors"
        ),
        "shape-absurd": case(
            header(lambda h: h[NORM].update(shape=[2**62, 2**62])), "as safetensors"
        ),
        "tensor-nan": case(set_value(QUERY, np.nan), QUERY, "holds NaN or infinity"),
        "tensor-infinite": case(set_value(NORM, np.inf), NORM, "holds NaN or infinity"),
        "tensor-missing": case(weights(lambda t: t.pop(NORM)), "has no tensor", NORM),
        "tensor-left-over": case(
            weights(lambda t: t.update(more=np.ones(3, np.float32))), "does not use, such as more"
        ),
        "tensor-shape": case(
            weights(lambda t: t.update({NORM: np.ones(47, np.float32)})), NORM, "has shape [47]"
        ),
        "tensor-integers": case(
            weights(lambda t: t.update({QUERY: np.ones((64, 48), np.int32)})), QUERY, "is I32"
        ),
        "config-wider": case(config(hidden_size=4096), "has shape", "config.json asks for"),
        "config-deeper": case(config(num_hidden_layers=400, layer_types=None), "has no tensor"),
        "head-tied": case(config(tie_word_embeddings=True), "differs from", EMBED),
        "index-elsewhere": case(mapped("../x.safetensors"), "which is not a file of"),
        "index-nowhere": case(mapped("9.safetensors"), "which is not a file of"),
        "index-number": case(
            sharded(lambda _, index: index["weight_map"].update({NORM: 7})), "names 7, which"
        ),
        "index-list": case(sharded(lambda _, index: index.update(weight_map=[])), "weight_map"),
        "index-twice": case(sharded(twice), "two files of the checkpoint hold a tensor"),
    }


def _tokenizers() -> dict[str, Case]:
    def case(change: Break, *words: str) -> Case:
        return Case("plain", change, words)

    def state(**fields: object) -> Break:
        return edited("tokenizer.json", **fields)

    declared = {"content": "<s>", "lstrip": True, "rstrip": False, "single_word": False}
    return {
        "tokenizer-truncated": case(cut("tokenizer.json", 3000), "cannot be read as a tokenizer"),
        "tokenizer-nested": case(text("tokenizer.json", NESTED), "cannot be read as a tokenizer"),
        "tokenizer-model": case(state(model={"type": "?"}), "cannot be read as a tokenizer"),
        "tokenizer-regex": case(
            state(
                pre_tokenizer={
                    "type": "Split",
                    "pattern": {"Regex": "(" * 1000},
                    "behavior": "Isolated",
                    "invert": False,
                }
            ),
            "cannot be read as a tokenizer",
        ),
        "token-more": case(
            edited("tokenizer_config.json", eos_token="</s>"), "eos_token holds '</s>'"
        ),
        "token-other": case(
            edited("tokenizer_config.json", added_tokens_decoder={"0": declared}),
            "lstrip of '<s>' is True",
        ),
        "token-number": case(
            edited("tokenizer_config.json", additional_special_tokens=[7]), "which is not a token"
        ),
        "tokens-split": case(
            edited("tokenizer_config.json", split_special_tokens=True), "split_special_tokens is"
        ),
        "tokens-added": case(text("added_tokens.json", '{"[PAD]": 500}'), "holds '[PAD]'"),
    }


def _prompts() -> dict[str, Case]:
    def case(source: str, *words: str, flags: tuple[str, ...] = INSTRUCT) -> Case:
        return Case("plain", template(source), ("chat template", *words), flags)

    def sentence(change: Break, *words: str) -> Case:
        return Case("sentence", change, words)

    def score(**fields: object) -> Break:
        return edited("1_LogitScore/config.json", **fields)

    def module(**fields: object) -> Break:
        return text("modules.json", json.dumps([LOGIT_SCORE[1] | fields]))

    # It is ended after 2 seconds of CPU time, or on a busy machine after 10 of wall time.
    too_long = " seconds"
    return {
        "template-loops": case(LOOPS, too_long),
        "template-repeats": case("{{ 'a' * 10**10 }}", "MiB of memory"),
        "template-range": case("{{ range(10**9) }}", "ange"),
        "template-grows": case(GROWS, "MiB of memory"),
        "template-power": case("{{ 10 ** (10 ** 9) }}", too_long),
        "template-itself": case("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "calls itself"),
        "template-long": case("{{ 'a' * 10**6 }}", "makes 1,000,000 characters"),
        "template-brackets": case("{{ " + "(" * 50_000, "chat template"),
        "template-syntax": case("{% for %}", "cannot be rendered"),
        "template-escapes": case("{{ ''.__class__.__mro__ }}", "cannot be rendered"),
        "template-empty": case("", "0 times, not once"),
        "template-raises": case("{{ raise_exception('no') }}", "cannot be rendered: no"),
        "template-large": Case(
            "plain", large("chat_template.jinja", 2**24), ("bytes; supported: at most",), INSTRUCT
        ),
        "template-number": Case(
            "plain",
            lambda d: (
                without("chat_template.jinja")(d),
                edited("tokenizer_config.json", chat_template=7)(d),
            ),
            ("chat_template must be a text",),
        ),
        "modules-object": sentence(text("modules.json", "{}"), "modules.json must be a list"),
        "module-elsewhere": sentence(module(path="../x"), "path is '../x'"),
        "score-missing": sentence(without("1_LogitScore/config.json"), "config.json is missing"),
        "score-text": sentence(score(true_token_id="yes"), "true_token_id must be the id"),
        "score-negative": sentence(score(false_token_id=-1), "false_token_id must be the id"),
        "score-outside": sentence(score(true_token_id=500), "true_token_id must be the id", "500"),
        "two-families": sentence(
            config(classifier_from_token=["no", "yes"]),
            *("config.json has classifier_from_token ['no', 'yes']", "1_LogitScore/config.json"),
        ),
        "two-heads": sentence(
            config(architectures=["Qwen3ForSequenceClassification"]),
            "config.json has architectures",
        ),
        "prompts-list": sentence(
            text("config_sentence_transformers.json", '{"prompts": [1]}'), "prompts must be"
        ),
        "options-list": sentence(
            text("sentence_bert_config.json", '{"processing_kwargs": [1]}'),
            "processing_kwargs must",
        ),
        "guard-of-one-class": Case(
            "classes",
            both(
                config(id2label={"0": "x"}, num_labels=1),
                weights(lambda t: t.update({"score.weight": t["score.weight"][:1].copy()})),
            ),
            ("the model's head is one class",),
            ("--family", "qwen3guard-gen"),
        ),
    }


CASES: dict[str, Case] = (
    _json_files() | _not_files() | _configs() | _checkpoints() | _tokenizers() | _prompts()
)
