"""Substitute for a missing file of transformers' source distribution: settings that each config keeps."""

# Each differs from its default, to notice a config that drops it.
config_common_kwargs = {
    "architectures": ["TinyModel"],
    "chunk_size_feed_forward": 7,
    "dtype": "float16",
    "id2label": {0: "first", 1: "second", 2: "third"},
    "is_encoder_decoder": True,
    "label2id": {"first": 0, "second": 1, "third": 2},
    "name_or_path": "some/name",
    "output_attentions": True,
    "output_hidden_states": True,
    "problem_type": "regression",
    "return_dict": False,
}
