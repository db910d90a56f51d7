"""The training loop: feeds updates to the model, validates, monitors and logs."""
