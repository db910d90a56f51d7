"""The decoding strategies in the plainest form: one sentence, lists, no cache, all from scratch."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import transformers

from helpers import ENDS, PAD, START, padded, shake, tiny_model

VOCABULARY = 99
# Of the sources in tokens, and of what is generated.
LENGTHS, LIMIT = (9, 2, 6), 8
SIZES = {
    **{"vocab_size": VOCABULARY, "d_model": 16, "encoder_layers": 1, "decoder_layers": 2, "dropout": 0.0},
    **{"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24},
    **{"max_position_embeddings": 40, "pad_token_id": PAD, "bos_token_id": START, "eos_token_id": 2},
    **{"decoder_start_token_id": START, "forced_eos_token_id": None},
}
T5_SIZES = {
    **{"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2},
    **{"dropout_rate": 0.0, "pad_token_id": PAD, "eos_token_id": 2, "decoder_start_token_id": START},
}
KINDS = {
    "heed": lambda: tiny_model(attention="eager"),
    "marian": lambda: transformers.MarianMTModel(transformers.MarianConfig(**SIZES)),
    "bart": lambda: transformers.BartForConditionalGeneration(transformers.BartConfig(**SIZES)),
    "t5": lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**T5_SIZES)),
    "recurrent": lambda: tiny_model(family="recurrent"),
}


def model_of(kind, seed=0):
    """Return a tiny model of a class whose outputs depend on what it reads, end at several tokens, repeat none."""
    torch.manual_seed(seed)
    model = KINDS[kind]()
    if kind not in ("heed", "recurrent"):
        shake(model)
    model.generation_config.update(
        **{"eos_token_id": ENDS, "no_repeat_ngram_size": 1, "forced_eos_token_id": None, "bos_token_id": START},
        **{"pad_token_id": PAD, "decoder_start_token_id": START},
    )
    return model.eval()


def without_padding(rows):
    """Return rows of tokens without the padding behind them."""
    rows = rows.tolist() if isinstance(rows, torch.Tensor) else rows
    return [row[: max(place for place, token in enumerate(row) if token != PAD) + 1] for row in rows]


def cut(row):
    """Cut a generated row behind its first end token, with which transformers fills up, or where padding begins."""
    end = next((place for place, token in enumerate(row) if token in ENDS), len(row))
    return without_padding([row[: end + 1]])[0]


def decode(model, rows, strategy, side="right", **options):
    """Return `(score, tokens)` of each returned hypothesis of a batch."""
    ids, mask = padded(rows, side)
    options = {"do_sample": False, "max_new_tokens": LIMIT, "return_dict_in_generate": True} | options
    found = model.generate(ids, attention_mask=mask, custom_generate=strategy, **options)
    return list(zip(found.sequences_scores.tolist(), map(cut, found.sequences.tolist()), strict=True))


def assert_same(ours, theirs):
    """Compare `(score, tokens)` of hypotheses."""
    assert [tokens for _, tokens in ours] == [tokens for _, tokens in theirs]
    assert [score for score, _ in ours] == pytest.approx([score for score, _ in theirs], abs=1e-4)


@torch.no_grad()
def ask(model, source, tokens):
    """Return log-probabilities of the next token that repeat none."""
    logits = model(input_ids=source[None], decoder_input_ids=torch.tensor([tokens]), use_cache=False).logits
    return without(logits[0, -1].log_softmax(-1), tokens)


def without(log_probabilities, tokens):
    kept = log_probabilities.clone()
    kept[list(tokens)] = -torch.inf
    return kept


def power(length, alpha):
    return length**alpha


def gnmt(length, alpha):
    return ((5 + length) / 6) ** alpha


@dataclass
class PlainBeamSearch:
    """Beam search; `next_token(tokens)` gives log-probabilities."""

    next_token: Callable
    beams: int
    limit: int
    penalty: Callable = power
    alpha: float = 1.0

    def search(self):
        """Return `(score, tokens)` of all finished hypotheses, best first."""
        running, finished = [(0.0, [START])], []
        for length in range(1, self.limit + 1):
            running = self.advance(self.candidates(running), finished, length) if running else []
        return finished

    def candidates(self, running):
        found = []
        for score, tokens in running:
            for token, value in enumerate(self.next_token(tokens).tolist()):
                found.append((score + value, [*tokens, token]))
        return sorted(found, key=lambda entry: -entry[0])

    def advance(self, candidates, finished, length):
        running = []
        for place, (score, tokens) in enumerate(candidates):
            if tokens[-1] in ENDS or length == self.limit:
                if place < self.beams:
                    finished.append((score / self.penalty(length, self.alpha), tokens))
            elif len(running) < self.beams:
                running.append((score, tokens))
        finished[:] = sorted(finished, key=lambda entry: -entry[0])[: self.beams]
        if len(finished) < self.beams or not running:
            return running
        best = max(score for score, _ in running)
        is_over = self.beams == 1 or best / self.penalty(length, self.alpha) <= finished[-1][0]
        return [] if is_over else running


def contains(tokens, phrase):
    return any(tokens[start : start + len(phrase)] == list(phrase) for start in range(len(tokens)))


def unmet(tokens, words):
    return [phrases for phrases in words if not any(contains(tokens, phrase) for phrase in phrases)]


def begun(tokens, phrase):
    return [n for n in range(len(phrase)) if n == 0 or tokens[-n:] == list(phrase[:n])]


def missing(tokens, words):
    """Count the tokens still needed, if one phrase that is begun may go on."""
    shortest = [min(len(phrase) for phrase in phrases) for phrases in unmet(tokens, words)]
    options = [sum(shortest)]
    for number, phrases in enumerate(unmet(tokens, words)):
        for phrase in phrases:
            rest = sum(shortest[:number] + shortest[number + 1 :])
            options += [rest + len(phrase) - n for n in begun(tokens, phrase)]
    return min(options)


def constrained_search(next_token, words, *, beams, limit, alpha=1.0):
    """Return `(score, tokens)` of finished hypotheses that contain a phrase of each of `words`, best first."""
    running, finished = [(0.0, [START])], []
    for length in range(1, limit + 1):
        ordered = turns_of_banks(banks_of(running, next_token, words, beams), limit - length)
        running = []
        for place, (score, tokens) in enumerate(ordered):
            if tokens[-1] in ENDS or length == limit:
                if place < beams and not missing(tokens[1:], words):
                    finished.append((score / length**alpha, tokens))
            elif len(running) < beams:
                running.append((score, tokens))
        finished = sorted(finished, key=lambda entry: -entry[0])[:beams]
        best = max((score for score, _ in running), default=-torch.inf)
        if not running or (len(finished) == beams and best / length**alpha <= finished[-1][0]):
            break
    return finished


def banks_of(running, next_token, words, beams):
    """Return the candidates by the number of tokens that they lack, best first."""
    pool = {}
    for row, (score, tokens) in enumerate(running):
        for token, value in enumerate((score + next_token(tokens)).tolist()):
            pool[row, token] = value
    best = sorted(pool, key=lambda place: -pool[place])
    kept = set(best[: (1 + len(ENDS)) * beams])
    for row, (_, tokens) in enumerate(running):
        kept.add(next(place for place in best if place[0] == row))
        for phrases in unmet(tokens[1:], words):
            kept |= {(row, phrase[n]) for phrase in phrases for n in begun(tokens[1:], phrase)}
    banks = {}
    for row, token in (place for place in best if place in kept):
        after = [*running[row][1], token]
        lacking = missing(after[1:], words)
        if pool[row, token] > -torch.inf and not (lacking and token in ENDS):
            banks.setdefault(lacking, []).append((pool[row, token], after))
    return banks


def turns_of_banks(banks, room):
    ordered = []
    banks = {lacking: entries for lacking, entries in banks.items() if lacking <= room}
    while any(banks.values()):
        ordered += [banks[lacking].pop(0) for lacking in sorted(banks) if banks[lacking]]
    return ordered
