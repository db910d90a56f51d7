"""Studies of attention: its scores, their spread over tokens, and single heads."""
