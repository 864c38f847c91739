"""A small tokenizer like Qwen's, and helpers for the tests of families."""

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from gpuscore.prompts.rerank_input import Rerank

QWEN_SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# Like Qwen's: single digits, words with the character before them, line ends together.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def qwen_like() -> Tokenizer:
    """Return a tokenizer with bytes, a few merges and Qwen's special tokens, two of them not
    special ("<think>")."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merged = ["ye", "yes", "no", "Ye", "Yes", "No", "th", "the", "Ġth", "Ġthe", "er", "do", ":Ċ"]
    merged += ["ĠS", "ĠU", "ĠC"]
    merges = [("y", "e"), ("ye", "s"), ("n", "o"), ("Y", "e"), ("Ye", "s"), ("N", "o")]
    merges += [
        ("t", "h"),
        ("th", "e"),
        ("Ġ", "th"),
        ("Ġth", "e"),
        ("e", "r"),
        ("d", "o"),
        (":", "Ċ"),
        *(("Ġ", letter) for letter in "SUC"),
    ]
    vocab = {token: i for i, token in enumerate(dict.fromkeys(alphabet + merged))}
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(QWEN_SPECIALS)
    made.add_tokens([AddedToken(t, normalized=False) for t in ("<think>", "</think>")])
    return made


def ids_of(rerank: Rerank) -> list[list[int]]:
    """Return the prompts' ids."""
    request = rerank.request
    return [[*request.query_ids.tolist(), *item.tolist()] for item in request.item_ids]
