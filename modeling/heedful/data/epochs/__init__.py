"""Each epoch's rows: pairs as token ids, drawn or changed, and divided into batches."""
