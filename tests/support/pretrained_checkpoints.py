"""Tiny Marian, Pegasus, BART, mBART, M2M100, NLLB and T5 checkpoints, saved like the real ones."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import AddedToken

from heedful_lab.korean_english.pairs import korean_english_pairs
from helpers import change_json, shake
from memorised import saved_in

SIZES = {
    **{"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "max_position_embeddings": 64, "dropout": 0.0},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64},
}
PAIRS = list(korean_english_pairs("train", 200))
KOREAN, ENGLISH = [pair["ko"] for pair in PAIRS], [pair["en"] for pair in PAIRS]
# Marian takes a run of characters that sentencepiece does not know for the token of that name, be it "</s>"; every
# real corpus has these.
LETTERS = " ".join("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.,'?!")
FAIRSEQ = ("<s>", "<pad>", "</s>", "<unk>")


def train_pieces(path: Path, texts: list[str], kind: str = "unigram") -> list[str]:
    """Train a sentencepiece model, write it to `path`, and return its pieces without the control ones."""
    sentencepiece = pytest.importorskip("sentencepiece")
    with path.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            **{"sentence_iterator": iter(texts), "model_writer": file, "vocab_size": 900, "model_type": kind},
            **{"hard_vocab_limit": kind == "bpe", "character_coverage": 1.0, "minloglevel": 2, "num_threads": 1},
        )
    processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
    return [processor.id_to_piece(id_) for id_ in range(3, processor.get_piece_size())]


def randomized(model):
    """Draw all weights anew, final bias included, but keep the sinusoids."""
    kept = {name: value.clone() for name, value in model.state_dict().items() if "embed_positions" in name}
    shake(model)
    if model.config.model_type in ("marian", "pegasus"):
        model.load_state_dict(kept, strict=False)
    is_t5 = hasattr(model, "shared")
    for name, weight in model.named_parameters():  # T5 divides queries when it begins, and not when it runs
        weight.data.mul_(model.config.d_kv**-0.5 if is_t5 and name.endswith(".q.weight") else 1)
    for embeddings in {model.get_input_embeddings(), model.get_decoder().get_input_embeddings()}:
        torch.nn.init.normal_(embeddings.weight, std=1.0 if is_t5 else model.config.d_model**-0.5)
    if hasattr(model, "final_logits_bias"):
        torch.nn.init.normal_(model.final_logits_bias, std=0.5)
    # Untrained models like one token best; its successors depend on all that is read.
    model.generation_config.no_repeat_ngram_size = 1
    return model.eval()


def saved(folder: Path, model, tokenizer, **settings) -> Path:
    """Save a model with random weights, and its tokenizer."""
    torch.manual_seed(0)
    randomized(model).generation_config.update(max_length=16, num_beams=4, **settings)
    return saved_in(folder, model, tokenizer)


def built(folder: Path, kind: str, tokenizer, vocab_size: int | None = None, options=None, **settings) -> Path:
    """Save a model of a kind, with the tokenizer's vocabulary unless another is given, and the tokenizer."""
    sizes = {**SIZES, "vocab_size": vocab_size or len(tokenizer), **(options or {})}
    model = transformers.AutoModelForSeq2SeqLM.from_config(transformers.AutoConfig.for_model(kind, **sizes))
    return saved(folder, model, tokenizer, **settings)


def make(folder: Path) -> None:
    """Make the folder of a checkpoint; a relative one would stay wherever the tests were begun."""
    if not folder.is_absolute():
        raise ValueError(f"`folder` must be an absolute path, but is {folder} instead.")
    folder.mkdir()


def marian(folder: Path, separate: bool = False) -> Path:
    """Like Helsinki-NLP/opus-mt-en-de: padding is the last token of one vocabulary, or of two that are separate."""
    make(folder)
    source = train_pieces(folder / "source.spm", [*KOREAN, LETTERS])
    target = train_pieces(folder / "target.spm", [*ENGLISH, LETTERS])
    names = {"source_spm": str(folder / "source.spm"), "target_spm": str(folder / "target.spm")}
    names["vocab"] = str(folder / "vocab.json")
    if separate:
        names["target_vocab_file"] = str(folder / "target_vocab.json")
        size = max(len(source), len(target))
        for name, pieces in {"vocab": source, "target_vocab": target}.items():
            others = [f"madeup{number}" for number in range(size - len(pieces))]
            write_vocabulary(folder / f"{name}.json", ["</s>", "<unk>", *pieces, *others, "<pad>"])
        sizes = dict.fromkeys(("vocab_size", "decoder_vocab_size"), size + 3) | {"pad_token_id": size + 2}
    else:
        # Marian counts what it has seen: pieces may be missing, and each side knows pieces the other does not.
        union = list(dict.fromkeys([*source[:-20], *target]))
        write_vocabulary(folder / "vocab.json", ["</s>", "<unk>", *union, "<pad>"])
        sizes = {"vocab_size": len(union) + 3, "pad_token_id": len(union) + 2}
    options = {**sizes, "activation_function": "swish", "scale_embedding": True, "eos_token_id": 0, "bos_token_id": 0}
    options |= {"decoder_start_token_id": sizes["pad_token_id"], "share_encoder_decoder_embeddings": not separate}
    settings = {"bad_words_ids": [[sizes["pad_token_id"]]], "forced_eos_token_id": 0}
    tokenizer = transformers.MarianTokenizer(**names, separate_vocabs=separate)
    return built(folder, "marian", tokenizer, options=options, **settings)


def pegasus(folder: Path) -> Path:
    """Like google/pegasus-xsum: the decoder starts with padding, and the first tokens are those of its pretraining."""
    make(folder)
    special = ["<pad>", "</s>", "<mask_1>", "<mask_2>", *(f"<unk_{number}>" for number in range(2, 103)), "<unk>"]
    pieces = [(token, 0.0) for token in special] + [each for each in unigram_pieces(folder) if each[0] not in special]
    tokenizer = transformers.PegasusTokenizer(vocab=pieces)
    return built(folder, "pegasus", tokenizer, forced_eos_token_id=1)


def bart(folder: Path) -> Path:
    """Like facebook/bart-base: byte-level BPE, learned positions, the decoder starts with the end token."""
    from tokenizers import ByteLevelBPETokenizer

    bytes_ = ByteLevelBPETokenizer()
    bytes_.train_from_iterator(KOREAN + ENGLISH, 400, special_tokens=[*FAIRSEQ, "<mask>"])
    make(folder)
    bytes_.save_model(str(folder))
    tokenizer = transformers.BartTokenizer.from_pretrained(folder)
    return built(folder, "bart", tokenizer, forced_bos_token_id=0, forced_eos_token_id=2)


def mbart(folder: Path, fifty: bool = True) -> Path:
    """Like facebook/mbart-large-50, or like mbart-large-en-ro, whose decoder starts with the language."""
    make(folder)
    kind = transformers.MBart50Tokenizer if fifty else transformers.MBartTokenizer
    pieces = [(token, 0.0) for token in FAIRSEQ[: 3 if fifty else 4]] + unigram_pieces(folder)
    tokenizer = kind(vocab=pieces, src_lang="ko_KR", tgt_lang="en_XX")
    start = 2 if fifty else tokenizer.convert_tokens_to_ids("en_XX")
    options = {"scale_embedding": True, "decoder_start_token_id": start}
    return built(folder, "mbart", tokenizer, options=options, forced_eos_token_id=2)


def nllb(folder: Path) -> Path:
    """Like facebook/nllb-200-distilled-600M: M2M100 with BPE, and two more embeddings than tokens."""
    from tokenizers import SentencePieceBPETokenizer

    make(folder)
    pieces = SentencePieceBPETokenizer()
    pieces.train_from_iterator(KOREAN + ENGLISH, 500, special_tokens=list(FAIRSEQ))
    state = json.loads(pieces._tokenizer.to_str())["model"]
    learned = {"vocab": state["vocab"], "merges": [tuple(merge) for merge in state["merges"]]}
    tokenizer = transformers.NllbTokenizer(**learned, src_lang="kor_Hang", tgt_lang="eng_Latn")
    return built(folder, "m2m_100", tokenizer, len(tokenizer) + 2, {"attention_dropout": 0.0})


def m2m100(folder: Path, counted: bool = True) -> Path:
    """Like facebook/m2m100_418M: sentencepiece with a vocabulary of its own, eight more embeddings than tokens."""
    make(folder)
    pieces = train_pieces(folder / "sentencepiece.bpe.model", KOREAN + ENGLISH, "bpe")
    write_vocabulary(folder / "vocab.json", [*FAIRSEQ, *pieces])
    files = {"vocab_file": str(folder / "vocab.json"), "spm_file": str(folder / "sentencepiece.bpe.model")}
    files |= {"src_lang": "ko", "tgt_lang": "en"}
    tokenizer = transformers.M2M100Tokenizer(**files)
    languages = list(tokenizer.lang_token_to_id)
    if counted:  # as the published files have them
        tokenizer = transformers.M2M100Tokenizer(**files, additional_special_tokens=languages)
        assert tokenizer.convert_tokens_to_ids("__en__") == tokenizer.lang_token_to_id["__en__"]
    rows = tokenizer.encoder_size + len(languages) + 8
    return built(folder, "m2m_100", tokenizer, rows, {"attention_dropout": 0.0})


T5_SIZES = {"d_model": 32, "d_kv": 12, "d_ff": 64, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 4}
T5_START = {"decoder_start_token_id": 0, "pad_token_id": 0}


def t5(folder: Path, kind: str = "t5", sentinels: int = 100, tags=(), is_first: bool = False) -> Path:
    """Like google-t5/t5-small: rows of the embeddings by the multiple of 128, and sentinels as the last tokens."""
    make(folder)
    special = ["<pad>", "</s>", "<unk>"]
    pieces = [(token, 0.0) for token in (*special, *tags)]
    pieces += [each for each in unigram_pieces(folder) if each[0] not in special]
    pieces += [(f"<extra_id_{number}>", 0.0) for number in reversed(range(sentinels))]
    tokenizer = transformers.T5Tokenizer(vocab=pieces, extra_ids=sentinels)
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in tags])  # which sentencepiece finds anywhere
    return t5_saved(folder, tokenizer, kind, is_first)


def byt5(folder: Path) -> Path:
    """Like google/byt5-small: tokens are bytes."""
    make(folder)
    return t5_saved(folder, transformers.ByT5Tokenizer())


def t5_saved(folder: Path, tokenizer, kind: str = "t5", is_first: bool = False) -> Path:
    """Save a model; all but the first T5s have gated networks and an output of its own, which their configs say."""
    gate = "relu" if is_first else "gated-gelu"
    rows = -(-len(tokenizer) // 128) * 128
    config = transformers.AutoConfig.for_model(
        kind, **T5_SIZES, **T5_START, vocab_size=rows, feed_forward_proj=gate, tie_word_embeddings=is_first
    )
    model = transformers.AutoModelForSeq2SeqLM.from_config(config)
    if not is_first:
        model.lm_head.weight = torch.nn.Parameter(torch.empty(rows, config.d_model))
    saved(folder, model, tokenizer)
    change_json(folder / "config.json", tie_word_embeddings=is_first)
    return folder


def unigram_pieces(folder: Path) -> list[tuple[str, float]]:
    sentencepiece = pytest.importorskip("sentencepiece")
    path = folder / "pieces.model"
    train_pieces(path, KOREAN + ENGLISH)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
    path.unlink()
    first = {"<unk>": 0.0}
    scores = {processor.id_to_piece(id_): processor.get_score(id_) for id_ in range(3, processor.get_piece_size())}
    return list((first | scores).items()) if folder.name.startswith("mbart50") else list(scores.items())


def write_vocabulary(path: Path, tokens: list[str]) -> None:
    path.write_text(json.dumps({token: id_ for id_, token in enumerate(tokens)}), encoding="utf-8")


BUILDERS = {
    "marian": marian,
    "marian_separate": lambda folder: marian(folder, separate=True),
    "pegasus": pegasus,
    "bart": bart,
    "mbart50": mbart,
    "mbart": lambda folder: mbart(folder, fifty=False),
    "nllb": nllb,
    "m2m100": m2m100,
    "t5": lambda folder: t5(folder, is_first=True),
    "flan_t5": t5,
    "mt5": lambda folder: t5(folder, "mt5", sentinels=0),
    "umt5": lambda folder: t5(folder, "umt5", sentinels=300),
    "byt5": byt5,
    "madlad": lambda folder: t5(folder, tags=("<2en>", "<2ko>", "<2de>"), sentinels=0),
}
