"""Tokenizers of every kind whose control tokens a text can spell: not special, or entries of the
model's own vocabulary."""

from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from support.families import qwen_like
from support.tokenizers import BYTES

START, END, INST, EOS, TAG = "<|im_start|>", "<|im_end|>", "[/INST]", "</s>", "<think>"
MARKERS = (START, END, INST, EOS, TAG, "<start_of_turn>", "<\uff5cUser\uff5c>", "<|eot|>")
KEPT = ("\n\n", "<b>")  # added tokens that are none
CHARACTERS = sorted({*"".join(MARKERS), *"<b>abcdefghijklmnopqrstuvwxyz .:\u2581\n", "\u00e9"})
WORDS = ("a", "the", "user", "b", "ab")
PARTS = (START, "user\n{query} {document}", END)


def _chain(text: str) -> tuple[list[str], list[tuple[str, str]]]:
    """Return the entries and merges by which BPE reads a text as one entry."""
    steps = [text[: i + 1] for i in range(1, len(text))]
    return steps, [(text[: i + 1], text[i + 1]) for i in range(len(text) - 1)]


def _bpe(symbols: list[str], whole: tuple[str, ...], **options: bool | str) -> Tokenizer:
    entries, merges = list(symbols), []
    for text in whole:
        made, steps = _chain(text)
        entries += made
        merges += [] if options.get("ignore_merges") else steps
    vocab = {entry: id for id, entry in enumerate(dict.fromkeys(entries))}
    return Tokenizer(models.BPE(vocab=vocab, merges=list(dict.fromkeys(merges)), **options))


def byte_level() -> Tokenizer:
    """Return Qwen's layout with markers that are added, but not special."""
    made = qwen_like()
    made.add_tokens([AddedToken(t, normalized=False) for t in (*MARKERS, *KEPT)])
    return made


def ignored_merges() -> Tokenizer:
    """Return byte-level BPE that looks up whole words in a vocabulary with markers."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    mapped = [
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(t)[0][0]
        for t in MARKERS
    ]
    made = _bpe(alphabet, tuple(mapped + [f"\u0120{END}"]), ignore_merges=True)
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(" ", "merged_with_next"),
            pre_tokenizers.Split("\n", "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return made


def merged() -> Tokenizer:
    """Return SentencePiece's BPE, with bytes and a prefix, whose merges lead to markers."""
    options = {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True}
    made = _bpe(["<unk>", *BYTES, *CHARACTERS], (*MARKERS, *WORDS), **options)
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    made.add_tokens([AddedToken(t, normalized=False) for t in KEPT])
    return made


def unigram() -> Tokenizer:
    pieces = [("<unk>", 0.0), *((c, -9.0) for c in CHARACTERS)]
    pieces += [(w, -3.0) for w in (*WORDS, *MARKERS, f"\u2581{END}") if len(w) > 1]
    made = Tokenizer(models.Unigram(pieces, 0))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    made.add_tokens([AddedToken(t, normalized=False) for t in KEPT])
    return made


def word_piece() -> Tokenizer:
    entries = ["[UNK]", *CHARACTERS, *(f"##{c}" for c in CHARACTERS), *MARKERS, "##<|im_end|>"]
    vocab = {entry: id for id, entry in enumerate(dict.fromkeys((*entries, *WORDS)))}
    made = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_tokens([AddedToken(t, normalized=False) for t in KEPT])
    return made


def word_level() -> Tokenizer:
    vocab = {entry: id for id, entry in enumerate(("?", *MARKERS, *WORDS))}
    made = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_tokens([AddedToken(t, normalized=False) for t in KEPT])
    return made


def normalized() -> Tokenizer:
    """Return a tokenizer whose normalizer makes markers of text that has none."""
    made = qwen_like()
    made.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace("\u200b", "")])
    made.add_tokens([AddedToken(t, normalized=True) for t in (*MARKERS, *KEPT)])
    return made


KINDS = {
    "byte-level BPE": byte_level,
    "BPE that ignores merges": ignored_merges,
    "BPE with bytes and a prefix": merged,
    "Unigram": unigram,
    "WordPiece": word_piece,
    "WordLevel": word_level,
    "normalized": normalized,
}


def ids_of_markers(tokenizer: Tokenizer) -> set[int]:
    """Return the ids of all entries that read like a marker."""
    markers = set()
    for entry, id in tokenizer.get_vocab().items():
        mapped = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        plain = entry.removeprefix("##").strip("\u2581\u0120")
        if plain in {*MARKERS, *(mapped.pre_tokenize_str(t)[0][0] for t in MARKERS)}:
            markers.add(id)
    return markers
