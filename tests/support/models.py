"""Tiny random models written by transformers, with outputs far from uniform.

Weights are scaled so that logits have a standard deviation over 1, norm weights lie away from 1 and
biases away from 0: near-uniform outputs would hide errors.
"""

from collections.abc import Sequence
from pathlib import Path
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma2ForSequenceClassification,
    Gemma2ForTokenClassification,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    MistralConfig,
    MistralForCausalLM,
    MistralForSequenceClassification,
    MistralForTokenClassification,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
    Qwen2ForTokenClassification,
    Qwen2Model,
    Qwen2PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3_5TextForSequenceClassification,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
    Qwen3ForTokenClassification,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.modeling_outputs import TokenClassifierOutput
from transformers.utils import logging

from support import kept
from support.token_ids import VOCAB as VOCAB
from support.token_ids import random_ids as random_ids

logging.disable_progress_bar()

COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 20}
GEMMA3 = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
MIXTURE = {
    "head_dim": 16,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
}
# Another number of key heads than of value heads, in other sizes; a quarter of a head is rotated.
HYBRID = {
    "num_hidden_layers": 5,
    "layer_types": [*["linear_attention"] * 2, "full_attention", "linear_attention"]
    + ["full_attention"],
    "head_dim": 16,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
}
MULTIPLIERS = {
    **{"embedding_multiplier": 6.0, "residual_multiplier": 0.22, "logits_scaling": 2.0},
    **{"attention_multiplier": 0.4, "tie_word_embeddings": True},
}
FAMILIES = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16, "rope_theta": 1e6}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "llama": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": LLAMA3_ROPE, "mlp_bias": True}),
    "mistral": (MistralConfig, MistralForCausalLM, {"head_dim": 24, "sliding_window": None}),
    "granite": (GraniteConfig, GraniteForCausalLM, MULTIPLIERS),
    "gemma": (GemmaConfig, GemmaForCausalLM, {"head_dim": 16}),
    "gemma2": (
        Gemma2Config,
        Gemma2ForCausalLM,
        GEMMA | {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 6.0},
    ),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM, GEMMA | GEMMA3),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM, MIXTURE),
    "qwen3_5": (Qwen3_5TextConfig, Qwen3_5ForCausalLM, HYBRID),
}
CLASSES = {"id2label": {0: "good", 1: "not good", 2: "no idea"}}
CLASSIFIERS = {  # beside FAMILIES; a head over classes has no use for a tied embedding
    f"{family}_classes": (FAMILIES[family][0], model, FAMILIES[family][2] | CLASSES)
    for family, model in (
        ("gemma2", Gemma2ForSequenceClassification),
        ("llama", LlamaForSequenceClassification),
        ("mistral", MistralForSequenceClassification),
        ("qwen2", Qwen2ForSequenceClassification),
        ("qwen3", Qwen3ForSequenceClassification),
        ("qwen3_5", Qwen3_5TextForSequenceClassification),
    )
}
TOKENS = {  # a head over classes with a bias, read at any token
    f"{family}_tokens": (FAMILIES[family][0], model, FAMILIES[family][2] | CLASSES)
    for family, model in (
        ("gemma2", Gemma2ForTokenClassification),
        ("llama", LlamaForTokenClassification),
        ("mistral", MistralForTokenClassification),
        ("qwen2", Qwen2ForTokenClassification),
        ("qwen3", Qwen3ForTokenClassification),
    )
}


class Qwen2ForProcessRewardModel(Qwen2PreTrainedModel):
    """The head of Qwen2.5-Math-PRM, as its model card's code has it."""

    def __init__(self, config: Qwen2Config) -> None:
        super().__init__(config)
        self.model = Qwen2Model(config)
        size = config.hidden_size
        self.score = nn.Sequential(nn.Linear(size, size), nn.ReLU(), nn.Linear(size, 2))
        self.post_init()

    def forward(self, input_ids: torch.Tensor) -> TokenClassifierOutput:
        return TokenClassifierOutput(logits=self.score(self.model(input_ids).last_hidden_state))


TOKENS["qwen2_prm"] = (Qwen2Config, Qwen2ForProcessRewardModel, {})
WITH_BOS = ("gemma", "gemma2", "gemma3", "llama", "mistral")
CORPUS = (
    "query: a blue wooden chair for the garden item: The chair is made of wood. yes no maybe",
    "a query and an item are joined, and merges may cross the boundary of the two: yesyes nono",
    "Ein Satz über Bäume, 3.14159 and 2026; naïve café, snow ☃ and tab\tnewline\n done",
)


def make_model(
    directory: Path, family: str = "qwen3", *, seed: int = 0, **overrides: object
) -> PreTrainedModel:
    """Write a model and its tokenizer; return the float32 transformers model."""
    config_class, model_class, special = (FAMILIES | CLASSIFIERS | TOKENS)[family]
    torch.manual_seed(seed)
    model = model_class(config_class(**(COMMON | special | overrides))).float().eval()
    model.set_attn_implementation("eager")  # other implementations ignore Gemma 2's soft cap
    random_weights(model, family)
    model.save_pretrained(directory)
    make_tokenizer(bos=family.partition("_")[0] in WITH_BOS).save(str(directory / "tokenizer.json"))
    return model


def random_weights(model: PreTrainedModel, family: str) -> None:
    """Fill a model with weights whose outputs are far from uniform."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            if name.endswith("A_log"):  # decays from 0.9 to 0.1 for a step of 1
                parameter.copy_((0.1 + 2.2 * torch.rand_like(parameter)).log())
            elif name.endswith("bias"):
                parameter.copy_(0.3 * noise + 0.2)
            elif parameter.ndim == 1:
                # Gemma and Qwen3.5 store most weights less 1. Without a cap on logits, with weights
                # of about 2 they would be so large that transformers' own float32 is off by 1e-4.
                less_1 = family == "gemma" or (
                    family.startswith("qwen3_5") and "linear_attn" not in name
                )
                parameter.copy_((0 if less_1 else 1) + 0.4 * noise)
            elif name == "score.0.weight":  # a second layer of the head multiplies rounding
                parameter.copy_(0.14 * noise)
            else:
                parameter.copy_(noise * (0.25 if "embed" not in name else 0.5))


def make_tokenizer(*, bos: bool) -> Tokenizer:
    """Return a byte-level BPE tokenizer with real merges; with `bos` its post-processor adds
    <s>."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+"), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        CORPUS * 3,
        trainers.BpeTrainer(
            vocab_size=VOCAB - 8,
            special_tokens=["<s>", "<|end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    return tokenizer


# A cache: many tests need the same prompts, cut and packed in different ways.
_known: WeakKeyDictionary[PreTrainedModel, dict[tuple[int, ...], NDArray[np.float64]]]
_known = WeakKeyDictionary()


def reference_logprobs(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]]
) -> NDArray[np.float64]:
    """Return transformers' log-probabilities [N, V] after each prompt, every prompt run alone."""
    known, keys = _known.setdefault(model, {}), [tuple(map(int, prompt)) for prompt in prompts]
    for key in keys:
        if key not in known:
            known[key] = logprobs_of_one_length(model, [key])[0]
    return np.stack([known[key] for key in keys])


def logprobs_of_one_length(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]]
) -> NDArray[np.float64]:
    """Return transformers' log-probabilities [N, V] after prompts of one length, in one batch."""

    def compute() -> NDArray[np.float64]:
        with torch.no_grad():
            logits = model(torch.tensor(ids), logits_to_keep=1).logits[:, -1]
        return torch.log_softmax(logits.double(), dim=-1).numpy()

    ids = [list(map(int, prompt)) for prompt in prompts]
    return kept.scores_of(model, "log-probabilities", ids, compute)


def reference_logits(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]]
) -> NDArray[np.float64]:
    """Return transformers' class logits [N, classes] after each prompt, every prompt run alone."""

    def compute() -> NDArray[np.float64]:
        with torch.no_grad():
            rows = [model(torch.tensor([prompt])).logits[0].double().numpy() for prompt in ids]
        return np.stack(rows)

    ids = [list(map(int, prompt)) for prompt in prompts]
    return kept.scores_of(model, "class logits", ids, compute)
