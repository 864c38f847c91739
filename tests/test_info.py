"""Promise: `gpuscore info` says what settings come to, and plans for a device that is not here."""

import json
import re

import pytest
from tokenizers import Tokenizer

from gpuscore.backends.common.architectures import read_architecture
from gpuscore.backends.common.estimate import estimate_batch
from gpuscore.backends.common.raw_config import RawConfig
from gpuscore.commands.cli import main
from support.family_models import NO, YES, make_directory
from support.model_configs import LLAMA_8B, MIXTURE, QWEN3_06B

QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}


@pytest.fixture
def large(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    return str(tmp_path)


def values_in(shown: str) -> dict[str, str]:
    """Return the values of the table of settings."""
    rows = re.findall(r"^[ *] (\w+) +(.*?)  +(?:default|command line|environment)", shown, re.M)
    return dict(rows)


def test_resolved_values_stand_beside_given_ones(capsys):
    assert main(["info", "demo", "--device", "cpu", "--max-model-len", "2048"]) == 0
    shown = capsys.readouterr().out
    for part in ("Qwen3ForCausalLM", "2,048 tokens", "tokenizer.json", "cpu, float32", "MiB"):
        assert part in shown
    values = values_in(shown)
    assert values["device"] == "cpu", "given, so nothing is added"
    assert values["dtype"] == "auto -> float32"
    assert values["attention"] == "auto -> torch"
    assert values["kernels"] == "auto -> torch"
    assert values["max_batch_tokens"] == "not set -> 2048"
    assert values["max_model_len"] == "2048"
    assert values["memory_fraction"] == "not set -> 0.7"
    assert values["family"] == "auto -> demo"


def test_the_prompt_and_its_formula(tmp_path, capsys):
    """The ids are those of the tokenizer; ROLES begins with 3 tokens and an instruction."""
    directory = make_directory(tmp_path / "model", "sentence-transformers")
    assert main(["info", str(directory), "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    fixed = len(tokenizer.encode("<|im_start|>", add_special_tokens=False).ids)
    for row in (
        r"prompt family +sentence-transformers model",
        rf"prompt from +{directory}/modules\.json",
        rf"formula +logit\({YES}\) - logit\({NO}\)",
        rf"label ids +{YES}, {NO}",
        rf"shared by a query's prompts +{fixed} tokens and the query",
    ):
        assert re.search(row, shown), (row, shown)
    late = make_directory(tmp_path / "late", "sentence-transformers-late")
    assert main(["info", str(late), "--device", "cpu"]) == 0
    assert re.search(r"shared by a query's prompts +1 tokens\n", capsys.readouterr().out)


def test_ranks_share_the_weights(large, capsys):
    plans = []
    for ranks in ("1", "4"):
        main(["info", large, "--device-memory", "80GiB", "--tensor-parallel", ranks])
        shown = capsys.readouterr().out
        assert ("tensor parallel" in shown) == (ranks == "4")
        (weights,) = re.findall(r"memory for weights +([\d,.]+) MiB", shown)
        plans.append(float(weights.replace(",", "")))
    assert plans[1] == pytest.approx(plans[0] / 4, rel=0.01), "norms are not divided"


def test_a_plan_for_a_device_that_is_not_here(large, capsys):
    assert main(["info", large, "--device-memory", "32GiB"]) == 0
    shown = capsys.readouterr().out
    values = values_in(shown)
    assert values["device"] == "auto -> cuda"
    assert values["dtype"] == "auto -> bfloat16"
    assert values["attention"] == "auto -> triton"
    assert values["max_batch_tokens"] == "not set -> 16384"
    numbers = re.findall(r"^memory for .*?  ([\d,.]+) MiB", shown, re.M)
    context, weights, batch, cache = (float(number.replace(",", "")) for number in numbers)
    assert weights == pytest.approx(2 * 8_190_735_360 / 2**20, abs=0.1)
    rest = 32 * 1024 - context - weights - batch
    assert 0.9 * rest - 9 <= cache <= 0.9 * rest


@pytest.mark.parametrize(
    ("fields", "gigabytes"), [(QWEN3_06B, 0.859), (LLAMA_8B, 3.015), (MIXTURE, 1.757)]
)
def test_the_largest_batch_is_predicted_as_check_graphs_measures_it(fields, gigabytes):
    """The numbers are those of a device that is not there, of batches of 16,384 tokens."""
    config = read_architecture(RawConfig(fields)).config
    assert estimate_batch(config, 16384, 2) == pytest.approx(1e9 * gigabytes, rel=0.05)


def test_a_model_that_does_not_fit_comes_with_a_setting_that_does(large, capsys):
    assert main(["info", large, "--device-memory", "20GiB"]) == 78
    shown = capsys.readouterr()
    assert "a prompt of --max-model-len 40960 needs" in shown.err
    assert "max_model_len" in shown.out, "the settings are shown all the same"
    (fits,) = re.findall(r"--max-model-len (\d+) would fit", shown.err)
    assert main(["info", large, "--device-memory", "20GiB", "--max-model-len", fits]) == 0
    more = str(int(fits) + 64)
    assert main(["info", large, "--device-memory", "20GiB", "--max-model-len", more]) == 78
    capsys.readouterr()
    assert main(["info", large, "--device-memory", "8GiB"]) == 78
    assert "the weights that config.json describes take 15,622.6 MiB" in capsys.readouterr().err


@pytest.mark.parametrize("other", [("--device", "cpu"), ("--backend", "jax")])
def test_what_cannot_be_planned(large, other, capsys):
    assert main(["info", large, "--device-memory", "24GiB", *other]) == 78
    assert "plans for --device cuda" in capsys.readouterr().err
