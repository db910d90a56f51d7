"""A recipe judged before it trains: its pairs, tokens, length, memory and time."""
