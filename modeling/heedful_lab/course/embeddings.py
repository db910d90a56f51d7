"""A word's embedding and its state after each encoder layer, compared with all tokens' embeddings."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.functional import normalize

from heedful.attention.drawing import writable
from heedful.attention.maps import plain_model
from heedful.data.labels import BROKEN_CHARACTER, token_labels
from heedful.data.tokenization import TokenizerPair
from heedful.decoding.engines import evaluation_mode
from heedful.figures import save_figure
from heedful_lab.figures import labelled_points


@dataclass(frozen=True, eq=False)
class WordStates:
    """A word's vectors in the encoder."""

    word: str
    pieces: list[str]  # labels of its tokens; the word's vectors are the means of theirs
    # Float32 (layers + 1, d_model) on the CPU: the embedding without position, then the state after each layer.
    vectors: torch.Tensor


class Neighbour(NamedTuple):
    """A token near a vector."""

    text: str  # without the space before it
    cosine: float  # cosine with the token's embedding
    embedding: torch.Tensor  # the token's embedding at length 1, `(d_model,)`


class Neighbourhood(NamedTuple):
    """The neighbours of one vector."""

    own: float  # cosine with the word's embedding; 1 before the first layer
    tokens: list[Neighbour]  # from the source vocabulary, nearest first


def layer_names(count: int) -> list[str]:
    """Return the names of a word's `count` vectors: the embedding, then the layers from 0."""
    return ["embedding", *(f"layer {number}" for number in range(count - 1))]


def word_states(
    model: Any, tokenizers: TokenizerPair, word: str, sentence: str | None = None, target_language: str | None = None
) -> WordStates:
    """Return a word's vectors in the encoder of a Transformer or `Translator`, by itself or in a sentence.

    `word` may be several words, or a beginning, such as a word without its particle; its tokens may then include
    letters of the rest. The first occurrence counts. A word that is empty or missing, a recurrent or exported model,
    and a tokenizer that is not a fast one are `ValueError`s.
    """
    model = plain_model(model)
    if model.config.model_type == "heed_rnn":
        must = "The model must be a Transformer, whose layers add to its embeddings"
        raise ValueError(f"{must}, but is a recurrent model instead, whose states cannot be compared with them.")
    if not word.strip():
        raise ValueError(f"`word` must be a word, but is {word!r} instead.")
    tokenizers.check_is_fast("the embeddings of words")
    word, sentence = word.strip(), (word if sentence is None else sentence).strip()
    start = rf"(?<!\w){re.escape(word)}"
    found = re.search(rf"{start}(?!\w)", sentence) or re.search(start, sentence)
    if found is None:
        raise ValueError(f"`word` must be in the sentence, but is {word!r} instead, which {sentence!r} lacks.")
    head = tokenizers.head(target_language)
    encoded = tokenizers.source(sentence, return_offsets_mapping=True, verbose=False)
    ids = [*head, *encoded["input_ids"]]
    spans = enumerate(encoded["offset_mapping"], start=len(head))  # empty for control tokens
    places = [place for place, (begin, end) in spans if begin < found.end() and end > found.start()]
    if not places:
        raise ValueError(f"`word` must have a token, but is {word!r} instead, which the tokenizer removes.")
    with evaluation_mode(model), torch.no_grad():
        source = torch.tensor([ids], device=model.device)
        states = model.get_encoder()(input_ids=source, output_hidden_states=True, return_dict=True).hidden_states
        table = model.get_input_embeddings().weight
        vectors = [table[source[0, places]], *(state[0, places] for state in states[1:])]  # each (pieces, d_model)
    pieces = [token_labels(tokenizers.source, ids)[place] for place in places]
    return WordStates(word, pieces, torch.stack([vector.float().mean(dim=0).cpu() for vector in vectors]))


def neighbourhoods(
    model: Any, tokenizers: TokenizerPair, words: Sequence[WordStates], count: int = 5
) -> list[list[Neighbourhood]]:
    """Return the `count` tokens with the largest cosine to each vector of each word.

    Without control tokens, broken characters, the word itself, and repeated texts (the same without a space).
    """
    tokenizer = tokenizers.source
    control = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    known = [id_ for id_ in range(len(tokenizer)) if id_ not in control]
    read = zip(known, map(str.strip, tokenizer.batch_decode([[id_] for id_ in known])), strict=True)
    ids, texts = zip(*((id_, text) for id_, text in read if text and BROKEN_CHARACTER not in text), strict=True)
    table = plain_model(model).get_input_embeddings().weight.detach()[list(ids)].float().cpu()
    table = normalize(table, dim=-1)  # (tokens, d_model)
    found: list[list[Neighbourhood]] = []
    for word in words:
        vectors = normalize(word.vectors, dim=-1)  # (layers + 1, d_model)
        found.append([])
        for vector in vectors:
            cosines = table @ vector
            nearest = (index for index in cosines.argsort(descending=True).tolist() if texts[index] != word.word)
            tokens: dict[str, Neighbour] = {}
            while len(tokens) < count and (index := next(nearest, None)) is not None:
                tokens.setdefault(texts[index], Neighbour(texts[index], float(cosines[index]), table[index]))
            found[-1].append(Neighbourhood(float(vector @ vectors[0]), list(tokens.values())))
    return found


def plane(vectors: torch.Tensor) -> list[tuple[float, float]]:
    """Project vectors (n, width) on two principal components, each with its largest part positive."""
    centred = vectors - vectors.mean(dim=0)
    directions = torch.linalg.svd(centred.double(), full_matrices=False).Vh[:2]  # (2, width)
    signs = directions.gather(1, directions.abs().argmax(dim=1, keepdim=True)).sign()
    return [(x, y) for x, y in (centred.double() @ (directions * signs).T).tolist()]


def draw_neighbourhoods(words: Sequence[WordStates], found: Sequence[Sequence[Neighbourhood]], path: Path) -> None:
    """Draw words and their neighbours in one plane, with a panel for the embedding and for each layer."""
    names = layer_names(len(words[0].vectors))
    shown = {
        (layer, word.word): [
            (word.word, normalize(word.vectors[layer], dim=-1)),
            *((token.text, token.embedding) for token in own.tokens),
        ]
        for word, near in zip(words, found, strict=True)
        for layer, own in enumerate(near)
    }
    texts, vectors = zip(*(each for some in shown.values() for each in some), strict=True)
    (labels,), style = writable(texts)
    xs, ys = zip(*plane(torch.stack(vectors)), strict=True)
    points = zip(xs, ys, labels, strict=True)
    panels: list[dict[str, Any]] = [{} for _ in names]
    for (layer, word), some in shown.items():
        panels[layer][word] = list(islice(points, len(some)))
    # The right margin has room for labels.
    ends = {"xlim": (min(xs) - 0.1, max(xs) + 0.3), "ylim": (min(ys) - 0.1, max(ys) + 0.1)}
    drawn = [labelled_points(one, name, style["family"], **ends) for one, name in zip(panels, names, strict=True)]
    save_figure(drawn, path)
