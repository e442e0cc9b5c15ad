"""Worked examples: a character GPT on Python's documentation and a convolutional classifier of digits."""
