"""CTranslate2: a Heed model in its terms, and its search with the settings of `generate()`."""
