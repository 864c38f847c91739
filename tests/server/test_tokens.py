"""Promise: /tokenize, /detokenize and /tokenizer_info agree with the model's own files."""

import json

import pytest
from transformers import AutoTokenizer

from gpuscore.errors import ConfigError
from gpuscore.text.tokenizer import TextEncoder
from gpuscore.text.tokenizer_info import read_tokenizer_info
from support.connections import MARKER, check_error
from support.models import make_tokenizer

TEXT = "query: Ein Satz über Bäume ☃\n yesyes"


def names(model, ids):
    """Return what transformers' convert_ids_to_tokens returns."""
    return AutoTokenizer.from_pretrained(model[0]).convert_ids_to_tokens(ids)


def test_detokenize_inverts_tokenize(client, encode, model):
    answer = client.post("/tokenize", json={"prompt": TEXT}).json()
    assert answer == {"count": len(encode(TEXT)), "max_model_len": 512, "tokens": encode(TEXT)}
    bare = client.post("/tokenize", json={"prompt": TEXT, "add_special_tokens": False}).json()
    assert bare["tokens"] == encode(TEXT)[1:]
    assert client.post("/detokenize", json={"tokens": bare["tokens"]}).json() == {"prompt": TEXT}
    back = client.post("/detokenize", json={"tokens": answer["tokens"], "model": "tiny"}).json()
    assert back == {"prompt": f"<s>{TEXT}"}
    assert client.post("/tokenize", json={"prompt": "", "model": None}).json()["tokens"] == [0]
    named = client.post("/tokenize", json={"prompt": TEXT, "return_token_strs": True}).json()
    assert named == answer | {"token_strs": names(model, answer["tokens"])}
    assert client.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "code", "param"),
    [
        ("/tokenize", {}, "invalid_request", None),
        ("/tokenize", {"prompt": 3}, "invalid_request", "prompt"),
        ("/tokenize", {"prompt": MARKER, MARKER: 1}, "invalid_request", None),
        ("/detokenize", {"tokens": [1, "x"]}, "invalid_request", "tokens[1]"),
        ("/detokenize", {"tokens": [400]}, "token_id_out_of_range", "tokens"),
        ("/detokenize", {"tokens": [-1]}, "token_id_out_of_range", "tokens"),
        ("/detokenize", {"tokens": [1] * (2**20 + 1)}, "too_many_tokens", "tokens"),
    ],
)
def test_errors(client, unharmed, path, body, code, param):
    check_error(client.post(path, json=body), 400, code, param)


def test_half_a_character(client, unharmed):
    for path in ("/tokenize", "/v1/completions"):
        body = b'{"prompt": "\\ud800"%s}' % (b"" if path == "/tokenize" else b', "max_tokens": 1')
        headers = {"content-type": "application/json"}
        check_error(client.post(path, content=body, headers=headers), 400, "invalid_request")


def test_info(client):
    info = client.get("/tokenizer_info").json()
    assert info["bos_token"] == "<|end|>", "config.json has its id"
    assert set(info) == {
        *("tokenizer_class", "chat_template", "model_max_length"),
        *("bos_token", "eos_token", "pad_token", "unk_token"),
    }


def read(directory, **files):
    make_tokenizer(bos=False).save(str(directory / "tokenizer.json"))
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (directory / f"{name}.json").write_text(text)
    encoder = TextEncoder.read(directory)
    assert encoder is not None
    return read_tokenizer_info(directory, encoder, "{{ messages }}")


def test_info_is_that_of_the_files(tmp_path):
    info = read(
        tmp_path,
        tokenizer_config={
            "bos_token": {"content": "<s>", "lstrip": False},
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": 10**30,
            "pad_token": None,
        },
        special_tokens_map={"bos_token": "other", "unk_token": "<|end|>"},
        config={"eos_token_id": [1, 0], "pad_token_id": 0, "bos_token_id": 1},
    )
    assert (info.bos_token, info.eos_token, info.unk_token) == ("<s>", "<|end|>", "<|end|>")
    assert (info.pad_token, info.tokenizer_class) == ("<s>", "PreTrainedTokenizerFast")
    assert (info.chat_template, info.model_max_length) == ("{{ messages }}", None)


def test_fields_are_null_without_their_files(tmp_path):
    info = read(tmp_path, tokenizer_config={"model_max_length": 77})
    assert (info.bos_token, info.eos_token, info.tokenizer_class) == (None, None, None)
    assert info.model_max_length == 77


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_damaged_file(tmp_path, content):
    with pytest.raises(ConfigError, match="tokenizer_config.json"):
        read(tmp_path, tokenizer_config=content)
