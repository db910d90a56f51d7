"""Studies of attention itself: its scores, how they spread over tokens, and what single heads do."""
