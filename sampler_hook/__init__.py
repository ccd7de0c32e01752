"""The plugin inside vLLM."""


def register() -> None:
    """vLLM plugin entry point."""
