"""Substitutes for transformers' tests of `generate()`, which its source distribution lacks.

They check the originals' properties for encoder-decoders. If the originals are available, `run.py` uses those.
"""

import copy
import inspect
import itertools
import tempfile
from pathlib import Path

import pytest
import torch
from parameterized import parameterized
from tests.exporters.test_export import ExportGenerateTesterMixin
from transformers import CompileConfig, GenerationConfig, StoppingCriteria, StoppingCriteriaList
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache, StaticCache
from transformers.generation import GenerateBeamEncoderDecoderOutput, GenerateEncoderDecoderOutput
from transformers.generation.streamers import BaseStreamer

from heedful.versions_heed import CACHE, cache_of

NEW_TOKENS = 3
RECORDED = {
    "output_scores": True,
    "output_logits": True,
    "output_hidden_states": True,
    "return_dict_in_generate": True,
}
# Each returns `num_return_sequences` sentences per source, or one.
FORMS = {
    "greedy": {},
    "sample": {"do_sample": True, "num_return_sequences": 2, "top_k": 10, "top_p": 0.7, "temperature": 0.7},
    "beams": {"num_beams": 2, "length_penalty": 2.0},
    "n_best": {"num_beams": 4, "num_return_sequences": 2, "early_stopping": True},
    "beam_sample": {"do_sample": True, "num_beams": 2, "top_k": 10},
}
CERTAIN = ("greedy", "beams", "n_best")
# Checks of each setting on the `(rows, 1 + NEW_TOKENS)` tokens.
PROCESSORS = {
    "forced_bos_token_id": ({"forced_bos_token_id": 44}, lambda tokens: (tokens[:, 1] == 44).all()),
    "forced_eos_token_id": ({"forced_eos_token_id": 45}, lambda tokens: (tokens[:, -1] == 45).all()),
    "suppress_tokens": ({"suppress_tokens": list(range(50))}, lambda tokens: (tokens[:, 1:] >= 50).all()),
    "begin_suppress_tokens": ({"begin_suppress_tokens": list(range(50))}, lambda tokens: (tokens[:, 1] >= 50).all()),
    "bad_words_ids": ({"bad_words_ids": [[n] for n in range(50)]}, lambda tokens: (tokens[:, 1:] >= 50).all()),
    "no_repeat_ngram_size": (
        {"no_repeat_ngram_size": 1},
        lambda tokens: all(len(set(row)) == len(row) for row in tokens[:, 1:].tolist()),
    ),
    "sequence_bias": ({"sequence_bias": [[[46], 1e4]]}, lambda tokens: (tokens[:, 1:] == 46).all()),
    "prefix_allowed_tokens_fn": (
        {"prefix_allowed_tokens_fn": lambda sentence, tokens: [60 + sentence]},
        lambda tokens: (tokens[:, 1:] == torch.tensor([[60], [61]])).all(),
    ),
    "eos_token_id": (
        {"eos_token_id": list(range(3, 99)), "suppress_tokens": [0, 1, 2]},
        lambda tokens: tokens.shape[1] == 2,
    ),
}
# Calls that must end in a `ValueError`, and part of its message.
REFUSED = {
    "prompt": ({"decoder_input_ids": torch.full((2, 5), 7), "max_length": 4}, "max_length"),
    "argument": ({"no_such_argument": 1}, "no_such_argument"),
    "sequences": ({"num_return_sequences": 2}, "num_return_sequences"),
    "beams": ({"num_beams": 2, "num_return_sequences": 3}, "num_return_sequences"),
    "contrastive": ({"penalty_alpha": 0.6, "top_k": 4}, "trust_remote_code"),
    "groups": ({"num_beams": 2, "num_beam_groups": 2, "diversity_penalty": 1.0}, "trust_remote_code"),
    "cache": ({CACHE: ((torch.zeros(1),),)}, "cache|tuple"),
}


def named(cases):
    """Return named cases for `parameterized`."""
    return [(name,) for name in cases]


class StopsBehindTwo(StoppingCriteria):
    """Ends after the second new token."""

    def __call__(self, input_ids, scores, **kwargs):
        """Return `(rows,)`."""
        return torch.full((len(input_ids),), input_ids.shape[1] >= 3)


class Collector(BaseStreamer):
    """Keeps streamed tokens."""

    def __init__(self):
        self.tokens = []

    def put(self, value):
        """Take the prompt, or the newest tokens."""
        self.tokens += value.flatten().tolist()

    def end(self):
        """Do nothing."""


class GenerationTesterMixin(ExportGenerateTesterMixin):
    """Tests of `generate()` for each class in `all_generative_model_classes`."""

    def _drawn(self, model_class, rows=2, **settings):
        """Return a model without end tokens, and a batch without targets."""
        torch.manual_seed(0)
        config, batch = self.model_tester.prepare_config_and_inputs_for_common()
        config.eos_token_id = config.forced_eos_token_id = None
        for name, value in settings.items():
            setattr(config, name, value)
        if self.has_attentions:
            config._attn_implementation = "eager"  # other kernels record no weights
        model = model_class(copy.deepcopy(config)).eval()
        with torch.no_grad():
            for weight in filter(lambda weight: weight.requires_grad, model.parameters()):
                weight.add_(torch.randn_like(weight), alpha=0.2)  # otherwise tokens repeat
        return model, {name: batch[name][:rows] for name in ("input_ids", "attention_mask")}

    def _generate(self, model, batch, **options):
        """Return `NEW_TOKENS` new tokens of each sentence, with all recorded outputs."""
        torch.manual_seed(1)
        settings = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "output_attentions": self.has_attentions}
        return model.generate(**batch, **{**RECORDED, **settings, **options})

    def _assert_same(self, one, other, tolerance=1e-5):
        """Compare tokens and logits of two outputs."""
        assert one.sequences.tolist() == other.sequences.tolist()
        for mine, theirs in zip(one.logits, other.logits, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)

    def _check_outputs(self, found, model, sources, rows, cache_length=None):
        """Check the shapes of all recorded outputs; `rows` run at once, and no cache is kept without its length."""
        config = model.config
        steps = found.sequences.shape[1] - 1
        for recorded in (found.scores, found.logits):
            assert [tuple(step.shape) for step in recorded] == [(rows, config.vocab_size)] * steps
        width, length = config.hidden_size, self.model_tester.encoder_seq_length
        assert {tuple(s.shape) for s in found.encoder_hidden_states} == {(sources, length, width)}
        assert len(found.decoder_hidden_states) == steps
        if self.has_attentions:
            heads = config.num_attention_heads
            assert {tuple(w.shape) for w in found.encoder_attentions} == {(sources, heads, length, length)}
        for step in range(steps):
            read = 1 if cache_length is not None else step + 1
            assert {tuple(s.shape) for s in found.decoder_hidden_states[step]} == {(rows, read, width)}
            if self.has_attentions:
                keys = cache_length if self._is_static(cache_of(found)) else step + 1
                own = {tuple(weights.shape) for weights in found.decoder_attentions[step]}
                assert own == {(rows, heads, read, keys)}
                across = {tuple(weights.shape) for weights in found.cross_attentions[step]}
                assert across == {(rows, heads, read, length)}
        if cache_length is None:
            assert cache_of(found) is None
        else:
            self._check_past_key_values_for_generate(rows, cache_of(found), cache_length, config)

    @staticmethod
    def _is_static(cache):
        return isinstance(getattr(cache, "self_attention_cache", None), StaticCache)

    # Names and arguments are the originals': models with other caches override them.

    def _check_past_key_values_for_generate(self, batch_size, past_key_values, seq_length, config):
        """Check a cache of `seq_length` target tokens, and of the source."""
        assert isinstance(past_key_values, EncoderDecoderCache)
        assert len(past_key_values) == config.num_hidden_layers
        heads = config.num_attention_heads
        lengths = (seq_length, self.model_tester.encoder_seq_length)
        parts = (past_key_values.self_attention_cache, past_key_values.cross_attention_cache)
        for part, length in zip(parts, lengths, strict=True):
            for layer in part.layers:
                assert tuple(layer.keys.shape[:3]) == (batch_size, heads, length)
                assert tuple(layer.values.shape[:3]) == (batch_size, heads, length)

    def _check_caches_are_equal(self, cache1: Cache, cache2: Cache):
        """Compare two caches."""
        parts = itertools.product(("self_attention_cache", "cross_attention_cache"), ("keys", "values"))
        for part, name in parts:
            for one, other in zip(getattr(cache1, part).layers, getattr(cache2, part).layers, strict=True):
                torch.testing.assert_close(getattr(one, name), getattr(other, name))

    def _needs(self, is_given, reason):
        if not is_given:
            self.skipTest(reason)

    @parameterized.expand(
        [(f"{form}_{cache}", form, cache == "cached") for form in FORMS for cache in ("cached", "no_cache")]
    )
    def test_all_that_is_recorded_has_its_shape(self, name, form, use_cache):
        """Scores, weights, states and cache have a row per hypothesis, encoder outputs a row per source."""
        options = FORMS[form]
        for model_class in self.all_generative_model_classes:
            model, batch = self._drawn(model_class)
            found = self._generate(model, batch, **options, use_cache=use_cache)
            beams, wanted = options.get("num_beams", 1), options.get("num_return_sequences", 1)
            kind = GenerateBeamEncoderDecoderOutput if beams > 1 else GenerateEncoderDecoderOutput
            assert isinstance(found, kind)
            assert tuple(found.sequences.shape) == (2 * wanted, 1 + NEW_TOKENS)
            rows = 2 * (beams if beams > 1 else wanted)
            self._check_outputs(found, model, 2, rows, NEW_TOKENS if use_cache else None)
            torch.manual_seed(1)
            bare = model.generate(**batch, **{"do_sample": False, **options}, max_new_tokens=NEW_TOKENS)
            assert bare.tolist() == found.sequences.tolist()

    @parameterized.expand(named(CERTAIN))
    def test_cache_batch_and_padding_change_nothing(self, form):
        """Tokens and logits are equal without a cache, for each sentence by itself, and with more padding."""
        for model_class in self.all_generative_model_classes:
            model, batch = self._drawn(model_class)
            found = self._generate(model, batch, **FORMS[form])
            self._assert_same(found, self._generate(model, batch, **FORMS[form], use_cache=False))
            wanted = FORMS[form].get("num_return_sequences", 1)
            for number in range(2):
                row = {name: values[number : number + 1] for name, values in batch.items()}
                alone = self._generate(model, row, **FORMS[form]).sequences
                assert alone.tolist() == found.sequences[wanted * number : wanted * (number + 1)].tolist()
            longer = {name: torch.nn.functional.pad(values, (0, 3)) for name, values in batch.items()}
            self._assert_same(found, self._generate(model, longer, **FORMS[form]))

    @parameterized.expand(named(CERTAIN))
    def test_scores_add_up(self, form):
        """A beam's scores are those of its tokens."""
        for model_class in self.all_generative_model_classes:
            model, batch = self._drawn(model_class)
            found = self._generate(model, batch, **FORMS[form])
            indices = getattr(found, "beam_indices", None)
            scores = model.compute_transition_scores(found.sequences, found.scores, indices, normalize_logits=False)
            assert tuple(scores.shape) == (len(found.sequences), NEW_TOKENS)
            if indices is not None:
                share = NEW_TOKENS ** FORMS[form].get("length_penalty", 1.0)
                torch.testing.assert_close(scores.sum(1) / share, found.sequences_scores)

    @parameterized.expand(named(("random", "same", "prompt_lookup")))
    def test_assisted_decoding_finds_what_greedy_search_finds(self, assistant):
        """Candidates of another model, the same model, or the source are accepted only if right."""
        for model_class in self.all_generative_model_classes:
            self._needs(not model_class._is_stateful, "Stateful models don't support assisted generation")
            model, batch = self._drawn(model_class, rows=1)
            other = model if assistant == "same" else model_class(model.config).eval()
            other.generation_config.num_assistant_tokens = 2
            other.generation_config.num_assistant_tokens_schedule = "constant"
            given = {"prompt_lookup_num_tokens": 2} if assistant == "prompt_lookup" else {"assistant_model": other}
            found = self._generate(model, batch, **given, max_new_tokens=4)
            self._assert_same(found, self._generate(model, batch, max_new_tokens=4))
            self._check_outputs(found, model, 1, 1, 4)
            drawn = self._generate(model, batch, **given, max_new_tokens=4, do_sample=True)
            self._check_outputs(drawn, model, 1, 1, 4)

    def test_past_key_values_of_forward(self):
        """One pass over the whole target keeps the same cache as `generate()`."""
        for model_class in self.all_generative_model_classes:
            config, batch = self.model_tester.prepare_config_and_inputs_for_common()
            cache = cache_of(model_class(config).eval()(**batch, use_cache=True))
            rows, length = batch["decoder_input_ids"].shape
            assert cache.get_seq_length() == length
            self._check_past_key_values_for_generate(rows, cache, length, config)

    @parameterized.expand([("start", False), ("prompt", True)])
    def test_generation_goes_on_from_a_returned_cache(self, name, has_prompt):
        """Three tokens and one more equal four tokens of one call, with and without a target prompt."""
        for model_class in self.all_generative_model_classes:
            model, batch = self._drawn(model_class)
            if has_prompt:
                batch["decoder_input_ids"] = torch.tensor([[2, 20, 21], [2, 30, 31]])
                batch["decoder_attention_mask"] = torch.ones(2, 3, dtype=torch.long)
            whole = self._generate(model, batch, max_new_tokens=4)
            part = self._generate(model, batch, max_new_tokens=3)
            batch |= {"decoder_input_ids": part.sequences, CACHE: cache_of(part)}
            batch["decoder_attention_mask"] = torch.ones_like(part.sequences)
            rest = self._generate(model, batch, max_new_tokens=1)
            assert rest.sequences.tolist() == whole.sequences.tolist()
            torch.testing.assert_close(rest.logits[-1], whole.logits[-1], rtol=1e-5, atol=1e-5)
            self._check_caches_are_equal(cache_of(whole), cache_of(rest))

    @parameterized.expand(named(CERTAIN))
    def test_a_static_cache_and_one_of_the_users_own(self, form):
        """Both give a dynamic cache's results; a cache of the wrong kind is refused."""
        for model_class in self.all_generative_model_classes:
            is_able = model_class._can_compile_fullgraph and model_class._supports_default_dynamic_cache()
            self._needs(is_able, "This model does not support the static cache format")
            model, batch = self._drawn(model_class)
            plain = self._generate(model, batch, **FORMS[form])
            static = self._generate(model, batch, **FORMS[form], cache_implementation="static")
            self._assert_same(plain, static)
            assert self._is_static(cache_of(static))
            self._check_outputs(static, model, 2, 2 * FORMS[form].get("num_beams", 1), NEW_TOKENS)
            own = EncoderDecoderCache(DynamicCache(config=model.config), DynamicCache(config=model.config))
            self._assert_same(plain, self._generate(model, batch, **FORMS[form], **{CACHE: own}))
            assert own.get_seq_length() == NEW_TOKENS
            fresh = EncoderDecoderCache(DynamicCache(config=model.config), DynamicCache(config=model.config))
            with pytest.raises(ValueError, match="cache_implementation"):
                self._generate(model, batch, **{CACHE: fresh}, cache_implementation="static")
            with pytest.raises(ValueError, match="quantized"):
                self._generate(model, batch, cache_implementation="quantized")

    @parameterized.expand([("recorded", True), ("bare", False)])
    def test_a_compiled_step_gives_the_same_tokens(self, name, records):
        """`generate()` compiles the step as one graph, and a second batch needs no other."""
        for model_class in self.all_generative_model_classes:
            self._needs(model_class._can_compile_fullgraph, "This model does not compile without graph breaks")
            model, batch = self._drawn(model_class, rows=4)
            halves = [{name: values[rows] for name, values in batch.items()} for rows in (slice(0, 2), slice(2, 4))]
            compiling = CompileConfig(backend="eager", fullgraph=True, dynamic=False)
            compiling._compile_all_devices = True
            flags = {} if records else {"output_attentions": False, "output_hidden_states": False}
            plain = [self._generate(model, half, **flags) for half in halves]
            assert not hasattr(model, "_compiled_call")
            torch.compiler.reset()
            for number, half in enumerate(halves):
                with torch._dynamo.config.patch(error_on_recompile=number == 1):
                    found = self._generate(
                        model, half, **flags, cache_implementation="static", compile_config=compiling
                    )
                self._assert_same(plain[number], found)
                if records:
                    self._check_outputs(found, model, 2, 2, NEW_TOKENS)
            assert hasattr(model, "_compiled_call")

    @parameterized.expand(named(CERTAIN))
    def test_states_and_embeddings_stand_for_the_source(self, form):
        """The encoder's output, or embeddings instead of ids, give the same results."""
        for model_class in self.all_generative_model_classes:
            model, batch = self._drawn(model_class)
            plain = self._generate(model, batch, **FORMS[form])
            mask = {"attention_mask": batch["attention_mask"]}
            with torch.no_grad():
                encoded = model.get_encoder()(**batch, return_dict=True)
                embedded = model.get_input_embeddings()(batch["input_ids"])
            given = {**mask, "encoder_outputs": encoded}
            assert (
                self._generate(
                    model, given, **FORMS[form], output_hidden_states=False, output_attentions=False
                ).sequences.tolist()
                == plain.sequences.tolist()
            )
            self._assert_same(plain, self._generate(model, {**mask, "inputs_embeds": embedded}, **FORMS[form]))

    @parameterized.expand([(torch.float32,), (torch.float16,), (torch.bfloat16,)])
    def test_every_attention_implementation_finds_the_same(self, dtype):
        """Greedy search with sdpa gives eager attention's logits, in each precision."""
        for model_class in self.all_generative_model_classes:
            self._needs(model_class._supports_sdpa, "Model architecture does not support attentions")
            model, batch = self._drawn(model_class)
            with tempfile.TemporaryDirectory() as folder:
                model.save_pretrained(folder)
                found = {}
                for name in ("eager", "sdpa"):
                    other = model_class.from_pretrained(folder, dtype=dtype, attn_implementation=name).eval()
                    # Differences in the last bits would change later tokens.
                    found[name] = self._generate(other, batch, output_attentions=False, max_new_tokens=1)
            tolerance = 1e-5 if dtype == torch.float32 else 0.1
            for one, other in zip(found["eager"].logits, found["sdpa"].logits, strict=True):
                torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)

    def test_the_last_logits_are_enough(self):
        """`logits_to_keep` changes no token, and `forward` returns that number of positions."""
        for model_class in self.all_generative_model_classes:
            has_it = "logits_to_keep" in inspect.signature(model_class.forward).parameters
            self._needs(has_it, "This model does not support `logits_to_keep` argument.")
            model, batch = self._drawn(model_class)
            self._assert_same(self._generate(model, batch), self._generate(model, batch, logits_to_keep=0))
            target = torch.tensor([[2, 20, 21]] * 2)
            whole = model(**batch, decoder_input_ids=target).logits
            last = model(**batch, decoder_input_ids=target, logits_to_keep=1).logits
            assert tuple(last.shape) == (2, 1, model.config.vocab_size)
            torch.testing.assert_close(whole[:, -1:], last, rtol=1e-5, atol=1e-5)

    def test_unknown_arguments_reach_forward(self):
        """`prepare_inputs_for_generation` passes on unknown inputs, and names tokens for the decoder."""
        for model_class in self.all_generative_model_classes:
            model, _ = self._drawn(model_class)
            assert "GenerationMixin" in str(model_class.__bases__)
            given = {"output_attentions": True, "output_hidden_states": True, "text": "value", "number": 42}
            ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
            places = torch.arange(3).expand(2, -1)
            made = model.prepare_inputs_for_generation(input_ids=ids, position_ids=places, **given)
            assert "decoder_input_ids" in made
            assert {name: made[name] for name in given} == given

    @parameterized.expand(named(PROCESSORS))
    def test_a_setting_forces_or_forbids_tokens(self, name):
        """Greedy and beam search."""
        options, holds = PROCESSORS[name]
        for model_class, beams in itertools.product(self.all_generative_model_classes, (1, 2)):
            model, batch = self._drawn(model_class)
            options = {"no_repeat_ngram_size": 0, **options}
            assert holds(self._generate(model, batch, **options, num_beams=beams).sequences)

    @parameterized.expand(named(REFUSED))
    def test_an_impossible_call_is_refused(self, name):
        """A `ValueError` names the mistake."""
        options, message = REFUSED[name]
        for model_class in self.all_generative_model_classes:
            model, batch = self._drawn(model_class)
            with pytest.raises(ValueError, match=message):
                model.generate(**batch, do_sample=False, **options)

    def test_bounds_of_the_length(self):
        """`max_new_tokens` overrides `max_length`, which includes the prompt; a user's criterion ends too."""
        for model_class in self.all_generative_model_classes:
            model, batch = self._drawn(model_class)
            assert model.generate(**batch, max_length=6, max_new_tokens=2).shape[1] == 3
            prompt = torch.tensor([[2, 20, 21]] * 2)
            assert model.generate(**batch, decoder_input_ids=prompt, max_length=6).shape[1] == 6
            assert model.generate(**batch, decoder_input_ids=prompt, max_new_tokens=2).shape[1] == 5
            criteria = StoppingCriteriaList([StopsBehindTwo()])
            assert model.generate(**batch, stopping_criteria=criteria, max_new_tokens=9).shape[1] == 3
            with pytest.warns(UserWarning, match="min_length"):
                model.generate(**batch, min_length=8, max_length=6)

    def test_a_saved_generation_config_is_read(self):
        """Its settings are defaults; without a source, generation starts from `bos_token_id`."""
        for model_class in self.all_generative_model_classes:
            model, batch = self._drawn(model_class)
            model.generation_config = GenerationConfig(
                **{
                    "num_beams": 2,
                    "max_new_tokens": 4,
                    "decoder_start_token_id": 2,
                    "pad_token_id": 0,
                    "bos_token_id": 1,
                }
            )
            with tempfile.TemporaryDirectory() as folder:
                model.save_pretrained(Path(folder))
                loaded = model_class.from_pretrained(Path(folder)).eval()
            expected = model.generate(**batch)
            assert expected.shape[1] == 5
            assert loaded.generate(**batch).tolist() == expected.tolist()
            assert loaded.generate(**batch, max_new_tokens=1).shape[1] == 2
            assert loaded.generate().shape == (1, 5)

    def test_streamers_strategies_and_own_processors(self):
        """A streamer gets tokens, a function instead of the search the model, a processor scores."""
        for model_class in self.all_generative_model_classes:
            model, batch = self._drawn(model_class, rows=1)
            collector = Collector()
            found = self._generate(model, batch, streamer=collector)
            assert collector.tokens == found.sequences[0].tolist()

            def strategy(model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
                assert "encoder_outputs" in kwargs
                return input_ids + generation_config.max_new_tokens

            start = torch.tensor([[model.config.decoder_start_token_id]])
            made = model.generate(**batch, custom_generate=strategy, max_new_tokens=2)
            assert made.tolist() == (start + 2).tolist()

            def only(ids, scores):
                return torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor([50]), 0.0)

            assert set(model.generate(**batch, logits_processor=[only], max_new_tokens=2)[0, 1:].tolist()) == {50}
