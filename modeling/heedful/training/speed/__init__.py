"""How fast and how large a training is: what compiles its step, counts its operations, and fits it into memory."""
