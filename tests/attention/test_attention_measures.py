"""Rollout, entropy and alignments, against examples that were computed by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest

from heedful import attention_maps
from heedful.attention import measures
from heedful.attention.maps import AttentionMaps
from heedful.attention.measures import attention_entropy, attention_rollout, word_alignment, word_attention
from heedful.data.labels import Words
from helpers import assert_error, assert_refused


def maps_of(source_words=(0, 1), target_words=(0, 1), **weights):
    """Make maps of given arrays (layers, heads, rows, columns)."""
    source, target = [f"s{i}" for i in range(len(source_words))], [f"t{i}" for i in range(len(target_words))]
    found = {kind: np.asarray(array, dtype=np.float32) for kind, array in weights.items()}
    return AttentionMaps(source, target, ["<s>", *target[:-1]], list(source_words), list(target_words), found)


ENCODER = [[[[1, 0], [0.5, 0.5]]], [[[0, 1], [1, 0]]]]


def test_rollout_multiplies_the_layers_each_with_half_its_residual_and_leads_cross_attention_on():
    # Ã_1 = [[1, 0], [0.25, 0.75]], Ã_2 = [[0.5, 0.5], [0.5, 0.5]], Ã_2·Ã_1 = [[0.625, 0.375], [0.625, 0.375]]
    maps = maps_of(encoder=ENCODER)
    np.testing.assert_allclose(attention_rollout(maps, "encoder").weights, [[0.625, 0.375], [0.625, 0.375]])
    np.testing.assert_allclose(attention_rollout(maps, "encoder", layer=0).weights, [[1, 0], [0.25, 0.75]])
    # Their order matters: Ã_1·Ã_2 would be [[0.5, 0.5], [0.5, 0.5]]
    maps = maps_of(encoder=ENCODER[::-1])
    np.testing.assert_allclose(attention_rollout(maps, "encoder").weights, [[0.5, 0.5], [0.5, 0.5]])
    # the mean of the heads, [[0.5, 0.5], [0, 1]], times the rollout above
    cross = [[[[0, 1], [1, 0]], [[0, 1], [1, 0]]], [[[1, 0], [0, 1]], [[0, 1], [0, 1]]]]
    maps = maps_of(encoder=[[[[1, 0], [0.5, 0.5]]]], cross=cross)
    rolled = attention_rollout(maps)
    np.testing.assert_allclose(rolled.weights, [[0.625, 0.375], [0.25, 0.75]])
    np.testing.assert_allclose(attention_rollout(maps, "cross", layer=0).weights, [[0.25, 0.75], [1, 0]])
    assert (rolled.source_tokens, rolled.target_tokens, rolled.kind) == (["s0", "s1"], ["t0", "t1"], "cross")
    weights = [[[[1, 0], [0, 1]]]]
    cases = [
        ((maps_of(cross=weights),), "must have the encoder's self-attention"),
        ((maps_of(cross=weights), "encoder"), "`kind` must be one of cross, but is 'encoder'"),
        ((maps_of(encoder=weights), "encoder", 3), "`layer` must be between -1 and 0, but is 3"),
    ]
    assert_refused(cases, lambda given: attention_rollout(*given))


def test_entropy_is_in_nats_and_as_a_share_of_what_a_row_may_look_at():
    heads = [[[1, 0], [0, 1]], [[0.5, 0.5], [0.5, 0.5]], [[1, 0], [0.5, 0.5]]]
    found = attention_entropy(maps_of(cross=[heads]))
    np.testing.assert_allclose(found.nats, [[0, math.log(2), math.log(2) / 2]], atol=1e-7)
    np.testing.assert_allclose(found.share, [[0, 1, 0.5]], atol=1e-7)
    single = attention_entropy(maps_of(source_words=(0,), target_words=(0,), cross=[[[[1]]]]))
    assert single.nats.tolist() == single.share.tolist() == [[0]]
    assert not np.signbit(single.nats).any()
    half, third = 1 / 2, 1 / 3
    maps = maps_of(target_words=(0, 1, 2), decoder=[[[[1, 0, 0], [half, half, 0], [third, third, third]]]])
    found = attention_entropy(maps, "decoder")
    np.testing.assert_allclose(found.nats, [[(math.log(2) + math.log(3)) / 3]], atol=1e-6)
    np.testing.assert_allclose(found.share, [[1]], atol=1e-6)
    both_ways = maps_of((0, 1, 2), encoder=[[[[half, half, 0], [third, third, third], [0, half, half]]]])
    assert attention_entropy(both_ways, "encoder").share[0, 0] < 0.8
    below = maps_of(target_words=(0, 1, 2), decoder=[[[[1, 0, 0], [half, half, 0], [0, half, half]]]])
    for kind, maps in (("encoder", both_ways), ("decoder", below)):
        restricted = attention_entropy(replace(maps, neighbourhoods={kind: 1}), kind)
        np.testing.assert_allclose(restricted.share, [[1]], atol=1e-6)


def test_pieces_count_for_their_word_and_a_word_without_tokens_keeps_the_others_numbers():
    # Word 1 of the source is two pieces, with 0.3 + 0.3 against 0.4; the last token is </s>.
    weights = [[0.4, 0.3, 0.3, 0.0], [0.1, 0.1, 0.1, 0.7], [0.6, 0.1, 0.1, 0.2], [0, 0, 0, 1]]
    maps = maps_of((0, 1, 1, None), (0, 1, 1, None), cross=[[weights]])
    assert maps.map().weights[0].argmax() == 0
    assert word_alignment(maps) == [(1, 0), (0, 1)]
    assert measures.write_links(word_alignment(maps)) == "0-1 1-0"
    assert word_alignment(maps_of((0, 2), (1, 2), cross=[[[[1, 0], [0, 1]]]])) == [(0, 1), (2, 2)]
    assert word_alignment(maps_of((None,), (0,), cross=[[[[1]]]])) == []
    maps = maps_of(encoder=ENCODER)
    assert_error("needs cross attention, but the map is encoder", word_alignment, maps, maps.map("encoder"))


def test_the_alignment_error_rate_is_that_of_its_formula():
    # A∩S = {0-0}, A∩P = {0-0, 2-1}, |A| = 3, |S| = 2: AER = 1 − (1 + 2) / (3 + 2)
    gold = measures.GoldAlignment(frozenset({(0, 0), (1, 1)}), frozenset({(0, 0), (1, 1), (2, 1)}))
    found = measures.alignment_errors([[(0, 0), (2, 1), (2, 2)]], [gold])
    assert found.error_rate == pytest.approx(0.4)
    assert (found.precision, found.recall, found.links) == (pytest.approx(2 / 3), pytest.approx(1 / 2), 3)
    # Sure links are possible without being given twice.
    gold = measures.GoldAlignment(frozenset({(0, 0)}), frozenset({(1, 1)}))
    assert measures.alignment_errors([[(0, 0), (1, 1)]], [gold]) == (0, 1, 1, 2)
    # Sentences are counted together and not averaged: one link of one is right, and one of three.
    # 1 − (2 + 2) / (4 + 4), where the mean would be (0 + 2/3) / 2.
    right = measures.GoldAlignment(frozenset({(0, 0)}), frozenset({(0, 0)}))
    other = measures.GoldAlignment(frozenset({(0, 0), (1, 1), (2, 2)}), frozenset({(0, 0), (1, 1), (2, 2)}))
    found = measures.alignment_errors([[(0, 0)], [(0, 0), (1, 2), (2, 1)]], [right, other])
    assert found.error_rate == pytest.approx(0.5)


def test_gold_alignments_are_read_with_sure_and_possible_links_and_what_is_none_is_named(tmp_path):
    path = tmp_path / "gold.txt"
    path.write_text("0-0 1?1 2p2\n\n3-4\n", encoding="utf-8")
    pair, short = ("a b c d", "a b c d e"), ("네. 응.", None)
    first, second, third = measures.read_gold_alignments(path, [pair] * 3)
    assert first == (frozenset({(0, 0)}), frozenset({(0, 0), (1, 1), (2, 2)}))
    assert second == (frozenset(), frozenset())
    assert third.sure == {(3, 4)}
    path.write_bytes("\ufeff0-0\r\n1-1\r\n".encode())
    assert [given.sure for given in measures.read_gold_alignments(path, [pair, short])] == [{(0, 0)}, {(1, 1)}]
    path = tmp_path / "gold.txt"
    for word in ("0", "0–1", "a-b", "0-1-2", "-1-0"):
        path.write_text(f"0-0\n1-1 {word}\n", encoding="utf-8")
        assert_error(f"but is '{word}' instead, in line 2", measures.read_gold_alignments, path, [pair] * 2)
    path.write_bytes("0–0".encode("utf-16"))
    files = [(path, r"must be a text file in UTF-8, but .*gold\.txt is not"), (tmp_path, "is a folder")]
    files.append((tmp_path / "nothing", "does not exist"))
    assert_refused(files, lambda path: measures.read_gold_alignments(path, [pair]), (ValueError, FileNotFoundError))
    none = measures.GoldAlignment(frozenset(), frozenset())
    assert_error("neither it nor the alignments have any", measures.alignment_errors, [[]], [none])


WORDS = Words(["고양이가", "잔다.", "</s>"], [0, 0, 1, 2]), Words(["The", "cat", "</s>"], [0, 1, 1, 2])


def test_between_words_columns_are_added_and_rows_averaged_which_sum_to_one(model, tokenizers):
    weights = [[0.1, 0.2, 0.3, 0.4], [0.5, 0.1, 0.4, 0], [0.1, 0.1, 0.2, 0.6], [0, 0, 0, 1]]
    maps = replace(maps_of(range(4), range(4), cross=[[weights]]), source_shown=WORDS[0], target_shown=WORDS[1])
    found = word_attention(maps)
    assert (found.source_tokens, found.target_tokens, found.kind) == (WORDS[0].labels, WORDS[1].labels, "cross")
    np.testing.assert_allclose(found.weights, [[0.3, 0.3, 0.4], [0.4, 0.3, 0.3], [0, 0, 1]], atol=1e-7)
    np.testing.assert_array_equal(maps.map().weights, np.float32(weights))
    # It was fed <s>, The, and the two pieces of cat; each row looks at the last of them alone.
    maps = replace(maps_of(range(4), range(4), decoder=[[np.eye(4)]]), target_shown=WORDS[1])
    found = word_attention(maps, maps.map("decoder"))
    assert (found.source_tokens, found.target_tokens) == (["<s>", "The", "cat"], ["The", "cat", "</s>"])
    np.testing.assert_allclose(found.weights, [[1, 0, 0], [0, 0.5, 0.5], [0, 0, 1]])
    plain = maps_of(encoder=ENCODER)  # what has no words is shown as it is
    rolled = attention_rollout(plain, "encoder")
    assert word_attention(plain, rolled).source_tokens == ["s0", "s1"]
    np.testing.assert_array_equal(word_attention(plain, rolled).weights, rolled.weights)
    source, target = "고양이가 잔다.", "The cat sleeps."
    maps = attention_maps(model, tokenizers, source, target)
    rollouts = {kind: attention_rollout(maps, kind) for kind in maps.kinds}
    for rolled in rollouts.values():
        for each in (rolled, word_attention(maps, rolled)):
            np.testing.assert_allclose(each.weights.sum(axis=1), 1, atol=1e-5)
    assert np.triu(rollouts["decoder"].weights, k=1).max() == 0
    found = word_attention(maps)
    assert (found.source_tokens, found.target_tokens) == ([*source.split(), "</s>"], [*target.split(), "</s>"])
    looked_at = found.weights[:-1, :-1].argmax(axis=1)
    assert [(int(column), row) for row, column in enumerate(looked_at)] == word_alignment(maps)
