"""What happens while a run trains: its updates, their learning rates, and what is measured, averaged and logged."""
