"""Publication: model card, learning curve, and push to the Hub."""
