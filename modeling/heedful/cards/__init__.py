"""Publication: the model card, the learning curve, and the push to the Hub."""
