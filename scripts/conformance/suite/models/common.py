"""Shared by the tests of all encoder-decoders: tiny configs, batches, and transformers' mixins."""

from tests import test_fsdp_mixin, test_tensor_parallel_mixin
from tests.generation.test_utils import GenerationTesterMixin
from tests.test_configuration_common import ConfigTester
from tests.test_modeling_common import ModelTesterMixin, ids_tensor
from tests.test_training_mixin import TrainingTesterMixin
from transformers import PreTrainedConfig

# By default these run for a list of transformers' models.
test_tensor_parallel_mixin.TP_DISTRIBUTED_TEST_MODEL_TYPES = None
test_fsdp_mixin.FSDP_DISTRIBUTED_TEST_MODEL_TYPES = None
# There may be more processes than cores.
test_fsdp_mixin._get_available_fsdp_workers = lambda: 4

PAD, BOS, EOS = 0, 1, 2
SIZES = {
    **{"vocab_size": 99, "d_model": 16, "max_position_embeddings": 100},
    **{"encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 32},
    **{"decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 32},
    **{"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS, "decoder_start_token_id": EOS},
}


class TinyEncoderDecoder:
    """The mixins' `model_tester`: sizes, a config, a batch.

    Args:
        config_class: Class of the config.
        settings: Settings of the config.
    """

    batch_size = 5
    seq_length = encoder_seq_length = decoder_seq_length = 7
    hidden_size = 16
    num_hidden_layers = 2
    num_attention_heads = 4
    vocab_size = 99
    is_training = True
    pad_token_id = PAD

    def __init__(self, config_class: type[PreTrainedConfig], settings: dict):
        self.config_class = config_class
        self.settings = settings

    def get_config(self) -> PreTrainedConfig:
        """Return a new tiny config."""
        return self.config_class(**self.settings)

    def prepare_config_and_inputs_for_common(self) -> tuple[PreTrainedConfig, dict]:
        """Return a new config and a batch `(batch, length)` with ends and padding in sources and targets."""
        source = ids_tensor([self.batch_size, self.encoder_seq_length], self.vocab_size).clamp(EOS + 1)
        target = ids_tensor([self.batch_size, self.decoder_seq_length], self.vocab_size).clamp(EOS + 1)
        source[:, -1] = EOS
        source[0, -2:] = target[0, -2:] = PAD
        return self.get_config(), {
            "input_ids": source,
            "attention_mask": source.ne(PAD).long(),
            "decoder_input_ids": target,
            "decoder_attention_mask": target.ne(PAD).long(),
        }


class EncoderDecoderTests(
    ModelTesterMixin,
    GenerationTesterMixin,
    TrainingTesterMixin,
    test_tensor_parallel_mixin.TensorParallelTesterMixin,
    test_fsdp_mixin.FSDPTesterMixin,
):
    """All mixins for an encoder-decoder; a subclass names the tested classes."""

    is_encoder_decoder = True
    # The test requires a loss lower by nine tenths, which so narrow a model needs more than the default 300 steps for.
    training_overfit_steps = 1000
    # Off by default for models before 2023, and for files without a date.
    test_can_init_all_missing_weights_before_2023 = True
    config_class: type[PreTrainedConfig]
    settings = SIZES
    common_properties = ("hidden_size", "num_attention_heads", "num_hidden_layers")
    decodes_its_inputs: type
    continues_a_target: type

    def setUp(self):
        """Make the mixins' testers."""
        self.model_tester = TinyEncoderDecoder(self.config_class, self.settings)
        self.model_tester.causal_lm_class = self.decodes_its_inputs  # for the tensor-parallel tests
        self.config_tester = ConfigTester(
            self, config_class=self.config_class, common_properties=list(self.common_properties), **self.settings
        )

    def test_config(self):
        """Run ConfigTester."""
        self.config_tester.run_common_tests()

    def _get_trainable_model_class(self) -> type:
        return self.continues_a_target


__all__ = ["SIZES", "EncoderDecoderTests"]
