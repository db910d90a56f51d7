"""`heedful embeddings`: a word on its way through the encoder, its neighbours, and their picture."""

import re
from functools import partial

import pytest
import torch

from guides import assert_named
from heedful.data.labels import token_labels
from heedful_lab.course.embeddings import neighbourhoods, plane, word_states
from helpers import assert_error, tiny_rnn

SENTENCE = "개가 공원에서 달린다."


def states_of(model, ids):
    """Return what a plain pass of the encoder gives, `(layers, tokens, d_model)`."""
    with torch.no_grad():
        encoded = model.get_encoder()(input_ids=torch.tensor([ids]), output_hidden_states=True)
    return torch.stack(encoded.hidden_states[1:])[:, 0]


@pytest.fixture
def follow(model, tokenizers):
    return partial(word_states, model, tokenizers)


def test_a_word_of_several_tokens_is_their_mean(follow, model, tokenizers):
    found = follow("공원에서", SENTENCE)
    (ids,) = tokenizers.encode_source([SENTENCE])
    labels = token_labels(tokenizers.source, ids)
    first, end = (next(place for place, label in enumerate(labels) if letter in label) for letter in "공달")
    places = list(range(first, end - 1))  # a space stands between
    assert found.pieces == labels[first : end - 1]
    assert len(places) > 1
    table = model.get_input_embeddings().weight.detach()
    torch.testing.assert_close(found.vectors[0], table[[ids[place] for place in places]].mean(dim=0))
    torch.testing.assert_close(found.vectors[1:], states_of(model, ids)[:, places].mean(dim=1))


def test_a_whole_word_comes_before_the_beginning_of_another_and_what_is_none_is_named(follow, model, tokenizers):
    sentences = "그녀는 책을 읽는다.", "나는 사과를 먹는다. 나는 책을 먹는다."
    one, other = (follow("책을", sentence).vectors for sentence in sentences)
    assert torch.equal(one[0], other[0])
    assert all((left - right).norm() > 0.05 for left, right in zip(one[1:], other[1:], strict=True))
    found = follow(" a ", "an a")
    (ids,) = tokenizers.encode_source(["an a"])
    assert len(found.pieces) == 1
    torch.testing.assert_close(found.vectors[1:], states_of(model, ids)[:, -2])  # the last before </s>
    assert "".join(follow("고양이", "고양이가 잔다.").pieces).replace("…", "") == "고양이"
    assert_error("must be in the sentence", follow, "양이", "고양이가 잔다.")
    lacking = f"`word` must be in the sentence, but is '개는' instead, which {SENTENCE!r} lacks."
    assert_error(f"^{re.escape(lacking)}$", follow, "개는", SENTENCE)
    assert_error(r"^`word` must be a word, but is ' ' instead\.$", follow, " ", None)
    with pytest.raises(ValueError, match="must be a Transformer, whose layers add to its embeddings, but is a recurr"):
        word_states(tiny_rnn(), tokenizers, "개가")


def test_neighbours_are_the_nearest_texts_and_not_the_word_itself(follow, model, tokenizers):
    word = follow("고양이가", "고양이가 잔다.")
    (found,) = neighbourhoods(model, tokenizers, [word], count=400)
    table = model.get_input_embeddings().weight.detach()
    assert [len(found), found[0].own] == [3, pytest.approx(1)]
    for vector, near in zip(word.vectors, found, strict=True):
        values = [token.cosine for token in near.tokens]
        expected = [float(token.embedding @ vector / vector.norm()) for token in near.tokens]
        assert values == pytest.approx(expected, abs=1e-6)
        assert values == sorted(values, reverse=True)
        best = {token.text: -1.0 for token in near.tokens}
        assert len(near.tokens) == len(best) > 50
        for id_, cosine in enumerate(torch.cosine_similarity(table, vector[None]).tolist()):
            text = tokenizers.source.decode([id_]).strip()
            if text in best:
                best[text] = max(best[text], cosine)
        assert best == pytest.approx({token.text: token.cosine for token in near.tokens}, abs=1e-6)
        assert not {"</s>", "<pad>", "", "고양이가"} & set(best)
        assert not any("\ufffd" in text for text in best)
    own = torch.cosine_similarity(word.vectors[0], word.vectors[1], dim=0).item()
    assert found[1].own == pytest.approx(own, abs=1e-6)
    assert found[1].own < 0.99


def test_the_plane_keeps_what_lies_in_a_plane():
    torch.manual_seed(0)
    flat = torch.randn(7, 2) * torch.tensor([3.0, 1.0])
    directions = torch.linalg.qr(torch.randn(5, 2)).Q.T
    points = torch.tensor(plane(flat @ directions + 4), dtype=torch.float32)
    torch.testing.assert_close(torch.cdist(points, points), torch.cdist(flat, flat), atol=1e-4, rtol=1e-4)
    assert points[:, 0].var() > points[:, 1].var()
    assert points.mean(dim=0).tolist() == pytest.approx([0, 0], abs=1e-5)


def test_the_command_prints_a_line_for_each_layer(printed, folder, follow, model, tokenizers):
    lines = printed("embeddings", folder, "개가", "공원에서", "--sentence", SENTENCE).splitlines()
    words = [follow("개가", SENTENCE), follow("공원에서", SENTENCE)]
    assert lines[0::4] == [f"{word.word} = {' + '.join(word.pieces)}" for word in words]
    found = neighbourhoods(model, tokenizers, words)
    for number, near in enumerate(found):
        for line, name, each in zip(lines[4 * number + 1 :], ("embedding", "layer 0", "layer 1"), near, strict=False):
            assert line.split("itself")[0].strip() == name
            assert f"itself {each.own:5.2f}  {each.tokens[0].text} {each.tokens[0].cosine:.2f}  " in line


def test_the_picture_names_words_and_neighbours(heedful_command, folder, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "words.svg"
    code, output, errors = heedful_command("embeddings", folder, "개가", "--sentence", SENTENCE, "-o", path)
    assert (code, output.splitlines()[-1]) == (0, str(path)), errors
    picture = path.read_text(encoding="utf-8")
    assert all(f">{name}<" in picture for name in ("embedding", "layer 0", "layer 1"))
    assert picture.count(">개가<") == 3
    nearest = output.splitlines()[2].split("  ")[-1].split()[0]
    assert f">{nearest}<" in picture
    wrong = [
        ([""], "`word` must be a word"),
        (["개가", "-o", "a.c"], "`--output` must end in one of .png, .svg, .pdf"),
    ]
    assert_named(partial(heedful_command, "embeddings", folder), wrong)
