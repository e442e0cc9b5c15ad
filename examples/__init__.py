"""Examples: a character GPT, a classifier of digits, a remote embedding, and the basics of ``torch.distributed``."""
