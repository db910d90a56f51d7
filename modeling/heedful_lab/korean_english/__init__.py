"""The built-in corpus: Korean-English sentence pairs from a small grammar, without a download."""
