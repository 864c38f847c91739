"""Promise: an unsupported or damaged checkpoint is refused at start, in one sentence that names the
field."""

import json
import platform
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from gpuscore import Scorer
from gpuscore.backends import create_backend, plan_backend
from gpuscore.backends.torch import plan
from gpuscore.backends.torch.linear import DenseLinear, LinearParts, Products, pack
from gpuscore.backends.torch.loader import WeightFormat, load_weights
from gpuscore.config import ModelConfig
from gpuscore.config.options import checked
from gpuscore.errors import ConfigError
from support.models import LLAMA3_ROPE, random_ids, reference_logprobs

SLIDING = ["sliding_attention"] * 3


@pytest.fixture
def copy(tiny_model, tmp_path):
    """copy("llama") -> the directory of a copy of the model, for a test to damage."""

    def make(family="qwen3", **overrides):
        target = tmp_path / f"{family}{len(list(tmp_path.iterdir()))}"
        shutil.copytree(tiny_model(family, **overrides)[0], target)
        return target

    return make


def edit_config(directory, drop=(), **fields):
    path = directory / "config.json"
    config = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({k: v for k, v in config.items() if k not in drop}))


def edit_weights(directory, change):
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def load(directory, **options):
    create_backend(plan_backend(directory, ModelConfig(**options))).close()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": None}, "architectures is None; supported"),
        (
            {"auto_map": {"AutoModel": "x"}, "model_type": None},
            "auto_map is a value; supported: re",
        ),
        ({"is_causal": False}, "is_causal is False; supported: causal"),
        (
            {
                **{"architectures": ["GraniteForCausalLM"], "model_type": "granite"},
                **{"logits_scaling": 6.0, "use_sliding_window": None, "max_window_layers": None},
            },
            "logits_scaling is 6; supported: powers of two",
        ),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
            "factor must be a positive",
        ),
        (
            {"rope_parameters": None, "rope_scaling": {"type": "su", "factor": 2}},
            "rope_type is 'su'",
        ),
        (
            {"use_sliding_window": True, "sliding_window": None, "layer_types": SLIDING},
            "_window mu",
        ),
        ({"layer_types": SLIDING, "sliding_window": 64}, "use_sliding_window is false"),
        ({"layer_types": ["linear_attention"] * 3}, "layer_types is .*linear_attention"),
        ({"layer_types": ["full_attention"] * 2}, "layer_types is .*; supported: 3 entries"),
        ({"use_sliding_window": True, "max_window_layers": "1", "layer_types": None}, "found '1'"),
        ({"hidden_size": None}, "hidden_size must be a positive integer, found None"),
        ({"rms_norm_eps": True}, "rms_norm_eps must be a positive number"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false"),
    ],
)
def test_config_refusals(copy, fields, message):
    directory = copy()
    edit_config(directory, **fields)
    with pytest.raises(ConfigError, match=message):
        plan_backend(directory, ModelConfig())


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("gemma", {"hidden_act": "silu"}, "hidden_act is 'silu'; supported: gelu_pytorch_tanh"),
        ("gemma", {"hidden_activation": "gelu"}, "hidden_activation is 'gelu'; supported: gelu_"),
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation is 'gelu'; supported: gelu_"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0; supported"),
        ("gemma3", {"rope_parameters": {"rope_type": "default"}}, "object in full_attention"),
        ("qwen3_moe", {"num_experts_per_tok": 7}, "num_experts_per_tok is 7; supported: at most"),
        ("qwen3_moe", {"moe_intermediate_size": 0}, "moe_intermediate_size must be a positive"),
    ],
)
def test_config_refusals_of_one_family(copy, family, fields, message):
    directory = copy(family)
    edit_config(directory, **fields)
    with pytest.raises(ConfigError, match=message):
        plan_backend(directory, ModelConfig())


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_gemma_in_float16_is_refused(copy, family):
    directory = copy(family)
    with pytest.raises(ConfigError, match="float16, in which Gemma.*; supported: bfloat16, float"):
        plan_backend(directory, ModelConfig(dtype="float16"))
    edit_config(directory, dtype="float16")
    with pytest.raises(ConfigError, match="--dtype auto is float16"):
        plan_backend(directory, ModelConfig())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": 513}, "over the model's max_position_embeddings 512"),
        ({"kv_cache_size": "200KiB"}, "512 needs 528 tokens of KV cache, 0.4 MiB, 256 are availab"),
        ({"kv_cache_size": 2**20, "memory_fraction": 0.5}, "both size the KV cache; set one"),
    ],
)
def test_option_refusals(copy, options, message):
    with pytest.raises(ConfigError, match=message):
        plan_backend(copy(), checked(ModelConfig(**options)))


def test_weights_that_overflow_in_the_chosen_dtype_are_refused(copy):
    directory = copy()
    edit_weights(directory, lambda t: t["model.norm.weight"].fill_(1e6))
    load(directory)
    with pytest.raises(ConfigError, match="infinity in torch.float16"):
        load(directory, dtype="float16")


def test_shards_and_the_hubs_older_rope_fields(copy, tiny_model):
    """A sharded checkpoint with `rope_theta` and `rope_scaling` gives exactly the same scores."""
    directory, (_, model) = copy("llama"), tiny_model("llama")
    tensors = load_file(directory / "model.safetensors")
    names = sorted(tensors)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, some in files.items():
        save_file({name: tensors[name] for name in some}, directory / file)
    index = {"weight_map": {name: file for file, some in files.items() for name in some}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "model.safetensors").unlink()
    scaling = {k: v for k, v in LLAMA3_ROPE.items() if k != "rope_theta"}
    edit_config(
        directory,
        drop=("rope_parameters", "dtype"),
        rope_theta=LLAMA3_ROPE["rope_theta"],
        rope_scaling=scaling,
        torch_dtype="float32",
    )
    prompt = random_ids(np.random.default_rng(0), 100)
    with Scorer(str(directory), max_batch_tokens=512) as scorer:
        result = scorer.score(prompt[:90], [prompt[90:]], label_token_ids=[3], logprobs=True)
    assert result.logprobs[0, 0] == pytest.approx(
        reference_logprobs(model, [prompt])[0, 3], abs=1e-4
    )


OLDER_FILES = {  # fields of files on the hub, and the transformers 5 fields they stand for
    "gemma": (
        {"rope_theta": 1e4, "hidden_act": "gelu", "hidden_activation": None},
        ("rope_parameters", "tie_word_embeddings"),
        {"tie_word_embeddings": True},
    ),
    "gemma2": (
        {"rope_theta": 1e4},
        ("rope_parameters", "layer_types", "attn_logit_softcapping", "tie_word_embeddings"),
        {"attn_logit_softcapping": 50.0, "tie_word_embeddings": True},
    ),
    "gemma3": (
        {
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "rope_scaling": {"rope_type": "linear", "factor": 2.0},
            "sliding_window_pattern": 2,
        },
        ("rope_parameters", "layer_types"),
        {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "qwen3_moe": (
        {"num_experts": 6, "rope_theta": 1e4},
        ("num_local_experts", "rope_parameters"),
        {},
    ),
}


@pytest.mark.parametrize("family", OLDER_FILES)
def test_the_hubs_older_fields(copy, tiny_model, family):
    fields, without, overrides = OLDER_FILES[family]
    _, model = tiny_model(family, **overrides)
    directory = copy(family, **overrides)
    edit_config(directory, drop=without, **fields)
    prompt = random_ids(np.random.default_rng(0), 100)
    with Scorer(str(directory), max_batch_tokens=512) as scorer:
        result = scorer.score(prompt[:90], [prompt[90:]], label_token_ids=[3], logprobs=True)
    assert result.logprobs[0, 0] == pytest.approx(
        reference_logprobs(model, [prompt])[0, 3], abs=1e-4
    )


def test_a_tied_model_may_store_its_head_too(copy):
    directory = copy("qwen2")
    edit_weights(
        directory,
        lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}),
    )
    load(directory)


@pytest.mark.parametrize(("native", "expected"), [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_dtype_is_the_checkpoints_where_the_cpu_has_it(copy, monkeypatch, native, expected):
    directory = copy()
    edit_config(directory, dtype="bfloat16")
    monkeypatch.setattr(plan, "computes_natively", lambda dtype: native)
    assert plan_backend(directory, ModelConfig()).dtype == expected
    assert plan_backend(directory, ModelConfig(dtype="bfloat16")).dtype == torch.bfloat16
    assert plan_backend(directory, ModelConfig(dtype="float32")).dtype == torch.float32


@pytest.mark.skipif(platform.machine() != "x86_64", reason="needs an x86 CPU")
@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="needs Linux")
@pytest.mark.parametrize(
    ("dtype", "flags"),
    [("bfloat16", {"avx512_bf16", "amx_bf16"}), ("float16", {"avx512_fp16", "amx_fp16"})],
)
def test_a_cpu_computes_what_it_has_instructions_for(dtype, flags):
    """oneDNN emulates bfloat16 on every CPU with AVX-512, at over twice the time of float32."""
    (line, *_) = (x for x in Path("/proc/cpuinfo").read_text().splitlines() if "flags\t" in x)
    assert plan.computes_natively(dtype) is bool(flags & set(line.split()))
    assert plan.computes_natively("float32")


in_bfloat16 = pytest.mark.skipif(
    platform.machine() != "x86_64" or not plan.computes_natively("bfloat16"),
    reason="needs an x86 CPU with products in bfloat16",
)


@in_bfloat16
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("rows", "width", "outputs"), [(1, 1, 1), (7, 65, 3), (128, 300, 130)])
def test_reordered_weights_have_the_same_products(rows, width, outputs, biased):
    generator = torch.Generator().manual_seed(rows)
    x, weight = (torch.randn(n, width, generator=generator).bfloat16() for n in (rows, outputs))
    bias = torch.randn(outputs, generator=generator).bfloat16() if biased else None
    reordered, products = pack(DenseLinear(weight, bias)), Products()
    assert reordered.weight.is_mkldnn
    exact = x.double() @ weight.double().T + (bias.double() if biased else 0)
    got = products(reordered, x)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), exact, rtol=2**-8, atol=1e-2)
    wide = products(reordered, x.float())  # as the check at start has it
    torch.testing.assert_close(wide.double(), exact, rtol=1e-5, atol=1e-4)
    assert products(reordered, x[:0]).shape == (0, outputs)
    order = torch.randperm(rows, generator=generator)
    assert torch.equal(products(reordered, x[order]), got[order]), "--deterministic needs that"


@in_bfloat16
def test_every_product_of_a_layer_has_reordered_weights(tiny_model):
    made = plan_backend(tiny_model()[0], ModelConfig(device="cpu", dtype="bfloat16"))
    form = WeightFormat(made.dtype, made.device, made.precision)
    weights = load_weights(Path(made.directory), made.architecture, form)
    for layer in weights.layers:
        for linear in (
            layer.qkv_proj,
            layer.o_proj,
            layer.mlp.gate_up_proj,
            layer.mlp.down_proj,
        ):
            parts = linear.parts if isinstance(linear, LinearParts) else (linear,)
            assert all(part.weight.is_mkldnn for part in parts)
    assert not weights.lm_head.is_mkldnn, "tokens are read from it"


def test_a_single_file_goes_before_an_index(copy):
    """transformers also reads the single file where both exist."""
    directory = copy()
    index = {"weight_map": {"model.norm.weight": "nowhere.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    load(directory)
