"""Fields of other servers' bodies that have no meaning here.

Values that change nothing are accepted. Any other value is refused by the field's name, with the
reason, because an answer that ignored it would not be what the caller asked for.
"""

from collections.abc import Callable
from typing import Annotated, NamedTuple, TypeVar, cast

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from gpuscore.errors import InvalidRequest

StructT = TypeVar("StructT", bound=msgspec.Struct)

REFUSED = "x-refused"
SCORES_ONLY = "this server scores only and generates nothing"
SHORT = 64  # bytes: longer values are none of those that change nothing


class Other(NamedTuple):
    """A field of other servers: why it is refused, and the values besides null that are not.

    Any value is accepted if `neutral` is None.
    """

    reason: str
    neutral: tuple[object, ...] | None = ()

    @property
    def meta(self) -> Meta:
        if self.neutral is None:
            return Meta(description="Accepted and ignored.")
        shown = " or ".join(f"`{_json(value)}`" for value in self.neutral)
        words = f"Accepted as {shown} only" if shown else "Refused unless it is null"
        extra = {REFUSED: True, "deprecated": True}
        return Meta(description=f"{words}: {self.reason}.", extra_json_schema=extra)

    def check(self, name: str, raw: Raw) -> None:
        """Raise InvalidRequest for a value that would change something."""
        given = bytes(raw)
        if self.neutral is None:
            given.decode()  # refuse what is not UTF-8
            return
        if len(given) <= SHORT:
            value = msgspec.json.decode(given)
            # 0 == False, but 0 may be a token id.
            same = [value == one for one in self.neutral if _is_flag(value) == _is_flag(one)]
            if value is None or any(same):
                return
        accepted = " or ".join(["null", *map(_json, self.neutral)])
        raise InvalidRequest(f"{name} must be {accepted}: {self.reason}", param=name)


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _others(reason: str, names: str, *neutral: object) -> dict[str, Other]:
    return dict.fromkeys(names.split(), Other(reason, neutral))


_IGNORED = dict.fromkeys(("user", "request_id"), Other("", None))
_TEXT_ONLY = _others("only text is read", "mm_processor_kwargs", {})
_CHAT = _others("no chat is rendered; send its text", "messages chat_template")
_CHAT |= _others("no chat is rendered", "chat_template_kwargs media_io_kwargs", {})
_CHAT |= _others("no chat is rendered", "add_generation_prompt continue_final_message", False)
SCORE = {
    **_others("send return_label_logprobs instead", "return_token_logprobs", False),
    **_others("hidden states are not returned", "return_pooled_hidden_states", False),
    **_others("scores are read at a prompt's last token", "score_extraction_token"),
    **_others(
        "prompts are texts or token ids",
        "embed_override_token_id query_embed_overrides item_embed_overrides",
    ),
}
POOLING = {
    **_IGNORED,
    **_TEXT_ONLY,
    **_others("scores are JSON numbers", "encoding_format", "float"),
    **_others("prompts are not padded", "padding", "do_not_pad"),
    **_others("texts are cut at their end only", "truncation_side", "right"),
}
RANKING = {
    **POOLING,
    **_others(
        "the prompt is the model family's; send instruction for its instruction",
        "chat_template_kwargs",
        {},
    ),
    **_others("queries are not cut", "max_tokens_per_query", 0),
}
RERANK = {
    **RANKING,
    **_others("texts are cut at their end only", "truncation_direction", "right", "Right", "RIGHT"),
    **_others("a document is one chunk", "max_chunks_per_doc", 1),
    **_others("a document is one chunk", "overlap_tokens", 0),
    **_others("a score belongs to a whole document", "relevant_spans", {"mode": "disabled"}),
}
CLASSIFY = {
    **POOLING,
    "rid": Other("", None),
    **_CHAT,
    **_others("write special tokens into the texts", "add_special_tokens", False),
    **_others("only a guard's texts are cut, with truncate", "truncate_prompt_tokens"),
    **_others("classes are the model's or those of labels", "classifier_id"),
    **_others("send input instead", "text input_ids"),
    **_others("prompts are texts", "input_embeds image_data video_data audio_data modalities"),
    **_others("prompts are texts", "embed_override_token_id embed_overrides"),
    **_others("nothing is generated or embedded", "sampling_params", {}),
    **_others("nothing is generated or embedded", "dimensions"),
    **_others("hidden states are not returned", "return_pooled_hidden_states", False),
    **_others("/tokenize gives ids", "return_prompt_token_ids", False),
    **_others("the server has one set of weights", "lora_path"),
}
COMPLETION = {
    **_IGNORED,
    **_TEXT_ONLY,
    **dict.fromkeys(("rid", "seed", "session_id"), Other("", None)),
    **_others(SCORES_ONLY, "top_p n best_of repetition_penalty length_penalty", 1),
    **_others(SCORES_ONLY, "frequency_penalty presence_penalty min_p min_tokens", 0),
    **_others(SCORES_ONLY, "top_k", -1, 0),
    **_others(
        SCORES_ONLY,
        "stream use_beam_search ignore_eos include_stop_str_in_output no_stop_trim watermarking "
        "return_hidden_states return_routed_experts return_weight_versions",
        False,
    ),
    **_others(SCORES_ONLY, "stop stop_regex", "", []),
    **_others(SCORES_ONLY, "suffix", ""),
    **_others(SCORES_ONLY, "stop_token_ids bad_words", []),
    **_others(SCORES_ONLY, "logit_bias vllm_xargs custom_params", {}),
    **_others(
        SCORES_ONLY,
        "stream_options stream_interval structured_outputs json_schema regex ebnf watermark "
        "repetition_detection thinking_token_budget custom_logit_processor allowed_token_ids "
        "logprob_token_ids",
    ),
    **_others(SCORES_ONLY, "response_format", {"type": "text"}),
    **_others(SCORES_ONLY, "routed_experts_prompt_start routed_experts_start_len", 0),
    **_others("control tokens are shown", "skip_special_tokens", False),
    **_others("tokens are shown one by one", "spaces_between_special_tokens", True),
    **_others("send echo and logprobs instead", "prompt_logprobs"),
    **_others(
        "the answer has texts of tokens; /tokenize gives ids",
        "return_token_ids return_tokens_as_token_ids return_token_offsets",
        False,
    ),
    **_others("usage has cached_tokens", "return_cached_tokens_details", False),
    **_others("nothing is speculated", "return_spec_tokens_details", False),
    **_others("prompts are not cut", "truncate_prompt_tokens"),
    **_others("prompts are not cut", "truncation_side", "right"),
    **_others("prompts are texts or token ids", "prompt_embeds images_config return_mm_kwargs"),
    **_others("only text is read", "mm_payload", "tensors"),
    **_others("the server has one set of weights", "lora_path"),
    **_others("sessions are not kept", "session_params"),
    **_others("cache_salt separates caches", "extra_key"),
    **_others("metrics have no labels of callers", "custom_labels", {}),
    **_others(
        "the server chooses where a request runs",
        "kv_transfer_params ec_transfer_params bootstrap_host bootstrap_port bootstrap_room "
        "routed_dp_rank disagg_prefill_dp_rank data_parallel_rank",
    ),
}
TOKENIZE = {
    **_CHAT,
    **_TEXT_ONLY,
    **_others("no chat is rendered", "tools tool_choice reasoning_effort"),
    **_others("send one text as prompt", "inputs"),
    **_others("prompts have no names here", "prompt_name"),
}
DETOKENIZE = _others("control tokens are shown", "skip_special_tokens", False)

_OF: dict[type, dict[str, Other]] = {}


def accepting(others: dict[str, Other]) -> Callable[[type[StructT]], type[StructT]]:
    """Return a decorator that adds these fields to a body's struct; `check_others` checks them."""

    def added(body: type[StructT]) -> type[StructT]:
        fields = [
            (name, Annotated[Raw | UnsetType, other.meta], UNSET) for name, other in others.items()
        ]
        made = msgspec.defstruct(
            body.__name__,
            fields,
            bases=(body,),
            namespace={"__doc__": body.__doc__},
            module=body.__module__,
            forbid_unknown_fields=True,
            kw_only=True,
        )
        _OF[made] = others
        return cast("type[StructT]", made)

    return added


def others_of(body: type[msgspec.Struct]) -> dict[str, Other]:
    return _OF.get(body, {})


def check_others(body: msgspec.Struct) -> None:
    """Raise InvalidRequest for the first field of other servers whose value is not neutral.

    Forget the values, which would keep the whole body in memory.
    """
    for name, other in others_of(type(body)).items():
        raw = getattr(body, name)
        if raw is not UNSET:
            setattr(body, name, UNSET)
            other.check(name, raw)
