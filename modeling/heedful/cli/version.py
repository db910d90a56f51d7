"""`heedful version`: versions of what is installed."""


def version() -> None:
    """Print the versions of Heedful and of the packages under it."""
    from importlib.metadata import version as version_of

    for name in ("heedful", "transformers", "torch", "tokenizers", "datasets", "accelerate"):
        print(f"{name} {version_of(name)}")
