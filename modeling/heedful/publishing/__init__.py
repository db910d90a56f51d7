"""What leaves the house: a trained model's card, its way to the Hub, models of other kinds, and files for engines."""
