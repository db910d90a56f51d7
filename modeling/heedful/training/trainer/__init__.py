"""HeedSeq2SeqTrainer: transformers' Seq2SeqTrainer with results that do not depend on how the work is split."""
