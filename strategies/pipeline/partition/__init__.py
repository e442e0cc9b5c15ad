"""What each layer costs, and how many layers each stage gets.

In: an ``nn.Sequential`` and a sample. Out: seconds or bytes per layer, and a balance. May import ``stage`` and
``microbatch``.
"""
