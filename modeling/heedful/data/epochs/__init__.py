"""The rows of each epoch: pairs as token ids, drawn or changed, and divided into batches."""
