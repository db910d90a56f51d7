"""`heedful version`: installed versions."""


def version() -> None:
    """Print the versions of Heedful and the packages it uses."""
    from importlib.metadata import version as version_of

    for name in ("heedful", "transformers", "torch", "tokenizers", "datasets", "accelerate"):
        print(f"{name} {version_of(name)}")
