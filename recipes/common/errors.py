class InputError(ValueError):
    """What the user gave cannot be used; the message names the value, the reason and the remedy."""
