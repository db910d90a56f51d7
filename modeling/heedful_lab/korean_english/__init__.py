"""The built-in corpus: Korean-English sentence pairs that a small grammar makes, without a download."""
