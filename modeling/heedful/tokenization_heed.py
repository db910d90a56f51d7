"""The source's tokenizer, if the target has another."""

from transformers import PreTrainedTokenizerFast


class HeedSourceTokenizer(PreTrainedTokenizerFast):
    """A tokenizer that refuses `text_target`, for which it would use the source's vocabulary."""

    def _switch_to_target_mode(self) -> None:
        raise ValueError(
            "`text_target` must be given to the target's tokenizer, but this is the source's: `heedful.TokenizerPair` "
            'holds both, and `AutoTokenizer.from_pretrained(folder, subfolder="target_tokenizer")` loads the other.'
        )
