"""The loop of a run: it feeds updates to the model, validates, monitors and logs."""
