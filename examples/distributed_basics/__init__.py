"""The basics of ``torch.distributed``, one small program each; see README.md."""
