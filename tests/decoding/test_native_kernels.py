"""The native decoder's own kernels compute what torch does, and are done without where they cannot be compiled."""

import hashlib
import itertools
import os
import shutil
import stat

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_native_decoder import both, make_batch, make_model

from heedful import prepare_for_inference
from heedful.decoding.native import kernels
from heedful.decoding.native.compiled_network import CompiledNetwork
from heedful.decoding.native.engine import NativeDecoder
from heedful.decoding.native.network import NativeNetwork
from helpers import assert_error

compiled = pytest.mark.skipif(kernels.library() is None, reason="no kernels can be compiled here")
has_bytes = kernels.library() is not None and kernels.has_bytes()
in_bytes = pytest.mark.skipif(not has_bytes, reason="this processor has no products of bytes")


def load():
    """Load the kernels as a new process does."""
    return kernels.library.__wrapped__()


@pytest.fixture(scope="module")
def compiler(tmp_path_factory):
    """A compiler that copies what another one has made: kernels that are not fast, compiled once."""
    place = tmp_path_factory.mktemp("compiler")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "FLAGS", ["-O0", *kernels.FLAGS[1:]])
        patch.setenv("XDG_CACHE_HOME", str(place))
        load()
    (made,) = [*place.glob("heedful/*.so")] or [None]
    (place / "c++").write_text(f'#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\ncp {made} "$2"\n')
    (place / "c++").chmod(0o700)
    return str(place / "c++")


@pytest.fixture
def cache(tmp_path, monkeypatch, compiler):
    """Let kernels be compiled into an empty cache, in no time."""
    monkeypatch.setattr(shutil, "which", lambda name: compiler)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "heedful"


def product_of(rows, features, inputs, is_int8, **options):
    torch.manual_seed(rows + features)
    weight, bias, states = torch.randn(features, inputs) + 1, torch.randn(features), torch.randn(rows, inputs)
    product = kernels.CompiledProduct(weight, bias, is_int8, options.get("is_relu", False))
    return product, states, states @ weight.T + bias


@compiled
@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 20), features=st.integers(1, 150), inputs=st.integers(1, 70), is_relu=st.booleans())
def test_products_are_those_of_torch(rows, features, inputs, is_relu):
    product, states, expected = product_of(rows, features, inputs, False, is_relu=is_relu)
    expected = expected.relu() if is_relu else expected
    torch.testing.assert_close(product(states), expected, rtol=1e-5, atol=1e-4)


@in_bytes
@settings(max_examples=20, deadline=None)
@given(rows=st.integers(2, 20), features=st.integers(1, 150), inputs=st.integers(5, 160))
def test_a_row_in_bytes_is_near_and_knows_nothing_of_the_others(rows, features, inputs):
    product, states, expected = product_of(rows, features, inputs, True)
    states[0] *= 1000
    together = product(states)
    # The error of a sum grows with the root of its terms, also where the terms cancel each other.
    assert (together - expected)[1:].norm() < 0.03 * expected[1:].norm() + 0.05 * inputs**0.5 + 0.1
    for number in range(rows):
        assert torch.equal(product(states[number : number + 1])[0], together[number])


@compiled
def test_long_sources_are_encoded_as_by_the_model():
    model, tokens, mask = make_model({}), torch.randint(4, 90, (2, 150)), torch.ones(2, 150, dtype=torch.long)
    mask[1, 70:] = 0
    with torch.no_grad():
        expected = model.model.encoder(tokens, mask).last_hidden_state
    ours, tokens_of = NativeDecoder(model).encode(tokens, mask), mask.bool()
    torch.testing.assert_close(ours[tokens_of], expected[tokens_of], atol=1e-4, rtol=1e-4)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@compiled
def test_padding_may_stand_anywhere_and_threads_which_share_a_large_product_change_nothing(threads):
    product = kernels.CompiledProduct(torch.randn(300, 256), None, False, False)
    states, found = torch.randn(9, 256), []
    for number in (1, 2, 3):
        threads(number)
        found.append(product(states))
    assert all(torch.equal(found[0], each) for each in found[1:])
    model, batch = make_model({}), make_batch(4)
    batch["attention_mask"][:, 1::3] = 0
    for number, beams in ((1, 3), (2, 1), (2, 3)):
        threads(1)
        expected = model.generate(**batch, num_beams=beams)
        threads(number)
        with prepare_for_inference(model):
            assert torch.equal(model.generate(**batch, num_beams=beams), expected)


OTHERS = [{"position_encoding": "rotary"}, {"activation_function": "gelu"}, {"decoder_neighbourhood": 3}]


def test_without_kernels_it_decodes_too_and_int8_is_float32_with_one_warning(monkeypatch):
    monkeypatch.setattr(kernels, "library", lambda: None)
    model = make_model({"d_model": 64, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128})
    for beams in (1, 4):
        assert torch.equal(*both(model, make_batch(1), num_beams=beams))
    with pytest.warns(UserWarning, match="`precision` is float32 instead of int8, .* could not be compiled"):
        prepared = prepare_for_inference(model, "int8")
    tokens = model.generate(**make_batch(1))
    assert prepared.precision == "float32"
    assert "kernels.cpp" not in prepared.kernel
    prepared.undo()
    assert torch.equal(tokens, model.generate(**make_batch(1)))


@compiled
def test_a_model_like_the_papers_is_compiled_and_one_that_kernels_compute_in_part_alone_is_never_int8(monkeypatch):
    assert type(NativeDecoder(make_model({})).network) is CompiledNetwork
    assert NativeDecoder(make_model({})).kernel == "kernels.cpp"
    for options in OTHERS:
        (name, value), model = *options.items(), make_model(options)
        assert type(NativeDecoder(model).network) is NativeNetwork
        reason = f"`{name}` {value}" if has_bytes else "VNNI"
        with pytest.warns(UserWarning, match=f"instead of int8, which only Heedful's kernels .*{reason}"):
            assert torch.equal(*both(model, make_batch(1), "int8"))
    monkeypatch.setattr(kernels, "has_bytes", lambda: False)
    with pytest.warns(UserWarning, match="instead of int8, .*: the processor lacks AVX-512 VNNI"):
        assert NativeDecoder(make_model({}), "int8").precision == "float32"


@in_bytes
@pytest.mark.parametrize("width", [32, 42])
def test_in_int8_a_sentence_gets_the_same_tokens_alone_and_in_a_batch(width):
    model, lengths = make_model({"encoder_ffn_dim": width, "decoder_ffn_dim": width}), torch.tensor([5, 17, 33, 40])
    mask = (torch.arange(40) < lengths[:, None]).long()
    batch = {"input_ids": torch.randint(4, 90, (4, 40)), "attention_mask": mask}
    decoder = NativeDecoder(model, "int8")
    encoded = decoder.encoded(**batch)
    together = model.generate(**encoded, custom_generate=decoder)
    assert not torch.equal(encoded["encoder_outputs"].last_hidden_state, NativeDecoder(model).encode(**batch))
    for number, row in enumerate(together):
        is_token = batch["attention_mask"][number].bool()
        alone = decoder.encoded(batch["input_ids"][None, number, is_token])
        states = encoded["encoder_outputs"].last_hidden_state[number, is_token]
        assert torch.equal(alone["encoder_outputs"].last_hidden_state[0], states)
        tokens = model.generate(**alone, custom_generate=decoder)[0]
        assert tokens.tolist() == row[: len(tokens)].tolist()


@compiled
def test_what_they_cannot_read_is_refused_before_they_do():
    model = make_model({})
    network, limit = NativeDecoder(model).network, model.config.target_vocab_size
    source, prompt = torch.randn(3, 4, model.config.d_model), torch.full((3, 1), 1)

    def step(tokens, **changes):
        state = network.start(source, None, prompt, 1)
        vars(state).update(changes)
        network.step(tokens, state)

    good, number = torch.tensor([3, 4, 5]), torch.ones(3, dtype=torch.int32)
    step(good)
    for tokens in ([3, limit, 5], [3, 4, -1], [2**62, 4, 5], [-(2**62), 4, 5]):
        assert_error(f"token ids must be at least 0 and below {limit}", step, torch.tensor(tokens))
    assert_error("Each source must have a token", step, good, counts=number * 0)
    for wrong in (good[:2], good.int(), good.double(), good[None]):
        assert_error(r"must be \(3,\) of torch.int64", step, wrong)
    for name, wrong in itertools.product(("starts", "counts"), (number.long(), number[:2], number.repeat(2)[::2])):
        assert_error(r"must be \(3,\) of torch.int32", step, good, **{name: wrong})
    product, states, _ = product_of(2, 5, 7, False)
    for wrong in (states[:, :6], states.double(), states[0], states[None]):
        assert_error(r"must be \(\d, 7\) of torch.float32", product, wrong)
    logits, scores = torch.randn(6, 9), torch.zeros(3, 2)
    network.continuations(logits, scores, 4)
    for wrong in ((logits[:5], scores), (logits, scores.double()), (logits[:, :, None], scores)):
        assert_error("A tensor for the kernels must be", network.continuations, *wrong, 4)
    for wrong in ((torch.randn(5, 7), torch.randn(4)), (torch.randn(5, 7).double(), None)):
        assert_error("must be .* of torch.float32", kernels.CompiledProduct, *wrong, False, False)


@compiled
def test_they_are_compiled_once_into_the_users_cache_which_is_the_users_alone(cache, monkeypatch, tmp_path):
    cache.mkdir(parents=True, mode=0o777)
    assert load() is not None
    assert sorted(each.suffix for each in cache.iterdir()) == [".sha256", ".so"]
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "which", lambda name: None)
        assert load() is not None
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")  # which is relative, and ignored
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert load() is not None
    assert (list((tmp_path / "work").iterdir()), (tmp_path / "home").is_dir()) == ([], True)


def written(file, content, has_checksum=False):
    other = file.with_suffix(".other")  # this process has loaded the file itself
    other.write_bytes(content)
    other.chmod(0o700)
    other.replace(file)
    if has_checksum:
        file.with_suffix(".sha256").write_text(hashlib.sha256(content).hexdigest())


SPOILED = {
    "not of this machine": lambda file: written(file, b"of another machine", has_checksum=True),
    "cut": lambda file: written(file, file.read_bytes()[:999]),
    "other bytes": lambda file: written(file, file.read_bytes()[:-9] + b"123456789"),
    "no checksum": lambda file: file.with_suffix(".sha256").unlink(),
    "open to others": lambda file: file.chmod(0o722),
}
if IS_ROOT := os.name == "posix" and os.getuid() == 0:
    SPOILED["of another user"] = lambda file: os.chown(file, 12345, 12345)


@compiled
def test_a_file_that_is_cut_changed_another_users_or_cannot_be_loaded_is_compiled_again(cache):
    assert load() is not None
    (file,) = cache.glob("*.so")
    for name, spoil in SPOILED.items():
        spoil(file)
        assert load() is not None, name
        assert (stat.S_IMODE(file.stat().st_mode), file.stat().st_uid) == (0o700, os.getuid()), name
        assert hashlib.sha256(file.read_bytes()).hexdigest() == file.with_suffix(".sha256").read_text(), name
    if IS_ROOT:
        os.chown(cache, 12345, 12345)
        with pytest.warns(UserWarning, match=r"so more slowly: .*heedful must belong to the current user, but does"):
            assert load() is None


@compiled
def test_a_link_in_the_place_of_the_cache_is_not_followed_and_one_that_comes_later_loads_nothing(cache, monkeypatch):
    site, other = cache.parent.with_name("site"), cache.with_name("other")
    site.mkdir(mode=0o755)
    cache.parent.mkdir()
    cache.symlink_to(site)
    with pytest.warns(UserWarning, match="more slowly: .*heedful must be a folder, but is a link"):
        assert load() is None
    assert (stat.S_IMODE(site.stat().st_mode), [*site.iterdir()]) == (0o755, [])
    cache.unlink()
    load_at = kernels._library_at

    def swapped(path, flags):  # as another user could, between the look and the load
        cache.rename(other)
        cache.symlink_to(site)
        return load_at(path, flags)

    monkeypatch.setattr(kernels, "_library_at", swapped)
    assert load() is not None
    assert (len([*site.iterdir()]), len([*other.iterdir()])) == (0, 2)


def test_a_missing_or_broken_compiler_is_warned_of_and_another_processor_is_not(cache, monkeypatch, tmp_path, recwarn):
    with monkeypatch.context() as patch:
        patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
        assert load() is None
        assert len(recwarn) == 0
    if kernels.library() is None:
        pytest.skip("no kernels can be compiled here")
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho 'this is not C++' >&2\nexit 1\n")
    broken.chmod(broken.stat().st_mode | stat.S_IXUSR)
    for found, said in ((None, r"no C\+\+ compiler \(c\+\+, g\+\+"), (str(broken), "this is not C")):
        monkeypatch.setattr(shutil, "which", lambda name, found=found: found)
        with pytest.warns(UserWarning, match=f"without its kernels, so more slowly: {said}"):
            assert load() is None
        assert not cache.exists() or list(cache.iterdir()) == []
